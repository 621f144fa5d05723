"""A file is written whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.cli.recordings.whole_file import write_whole


def fails_midway() -> Iterator[bytes]:
    yield b"half of"
    raise RuntimeError("the rest is missing")


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert write_whole(path, [b"one ", b"two"]) == 7
    assert path.read_bytes() == b"one two"
    assert write_whole(path, [b"three"]) == 5
    assert path.read_bytes() == b"three"
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def test_what_was_there_stands_where_the_new_one_is_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"before")
    with pytest.raises(RuntimeError, match="missing"):
        write_whole(path, fails_midway())
    assert path.read_bytes() == b"before"
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_bytes(b"before")
    (tmp_path / "link.json").symlink_to("real.json")
    write_whole(tmp_path / "link.json", [b"after"])
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_bytes() == b"after"


@pytest.mark.parametrize(("name", "why"), [("missing/trace.json", "No such file or directory"), (".", "a directory")])
def test_a_place_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path, name: str, why: str) -> None:
    path = tmp_path / name
    with pytest.raises(OSError, match=why) as refusal:
        write_whole(path, [b"text"])
    assert str(refusal.value).startswith(f"{path} cannot be written")
    assert str(refusal.value).endswith("give a path in a directory that you can write to")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    assert write_whole(path, [b"one ", b"two"]) == 7
    reader.join(timeout=180.0)
    assert read == [b"one two"]
    assert path.is_fifo()
