"""A file of a run directory is read and written as a regular file of ours, or not at all: whatever stands there."""

from __future__ import annotations

import os
import runpy
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.machine.run_file import (
    FileFull,
    ForeignFile,
    RunFileError,
    append,
    check_room,
    load,
    make_directory,
    read,
    replace,
    replace_by,
    size,
)

_HOSTILE = runpy.run_path(str(Path(__file__).parents[1] / "hostile_files.py"))
KINDS, FOREIGN, SECRET, put = (_HOSTILE[name] for name in ("KINDS", "FOREIGN", "SECRET", "put"))
BOUND = 1 << 20

READS: dict[str, Callable[[Path], object]] = {
    "read": lambda path: read(path, BOUND, owner=os.geteuid()),
    "read far behind the end": lambda path: read(path, BOUND, offset=2**63 - 1, owner=os.geteuid()),
    "load": lambda path: load(path, BOUND, owner=os.geteuid()),
    "size": lambda path: size(path, owner=os.geteuid()),
}
WRITES: dict[str, Callable[[Path], object]] = {
    "append": lambda path: append(path, b"line\n", max_bytes=BOUND),
    "append anew": lambda path: append(path, b"line\n", max_bytes=BOUND, anew=True),
    "replace": lambda path: replace(path, b"line\n"),
    "replace by": lambda path: replace_by(path, lambda partial: Path(partial).write_bytes(b"line\n") and None),
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """In a run directory. Afterwards nothing outside was changed, and no descriptor is open."""
    before = os.listdir("/proc/self/fd")
    (tmp_path / "secret").write_text(SECRET)
    path = tmp_path / "runs" / "digits-1" / "file"
    make_directory(path.parent)
    yield path
    assert (tmp_path / "secret").read_text() == SECRET
    assert {each.name for each in tmp_path.iterdir()} == {"secret", "runs"}
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", READS)
def test_what_is_no_file_of_ours_is_not_read(place: Path, kind: str, what: str) -> None:
    put(kind, place, place.parents[2] / "secret")
    if kind in FOREIGN:
        with pytest.raises(ForeignFile, match=f"^{place} (is|belongs to)") as told:
            READS[what](place)
        assert str(told.value).endswith("remove it")
        assert not told.value.is_shortage
    elif kind == "gone":
        with pytest.raises(FileNotFoundError):
            READS[what](place)
    elif (kind, what) == ("sparse", "load"):
        with pytest.raises(FileFull, match="larger than 1 MiB"):
            load(place, BOUND)
    elif os.geteuid() == 0 or kind != "no permission":
        found = READS[what](place)
        assert not isinstance(found, bytes) or len(found) <= BOUND


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", WRITES)
def test_what_is_no_file_of_ours_is_not_written_to(place: Path, kind: str, what: str) -> None:
    """A whole file takes the place of anything that a rename can take the place of."""
    put(kind, place, place.parents[2] / "secret")
    appends = what.startswith("append")
    if kind in FOREIGN and (appends or kind == "directory"):
        with pytest.raises(ForeignFile, match=f"^{place} (is|belongs to)"):
            WRITES[what](place)
    elif (kind, what) == ("sparse", "append"):
        with pytest.raises(FileFull):
            WRITES[what](place)
    elif os.geteuid() == 0 or kind != "no permission":
        WRITES[what](place)
        assert place.read_bytes().endswith(b"line\n")
        assert stat.S_ISREG(place.lstat().st_mode)


@pytest.mark.parametrize("kind", [*FOREIGN - {"directory"}, "garbage", "gone"])
@pytest.mark.parametrize("what", [*READS, *WRITES])
def test_a_directory_that_is_none_is_not_gone_into(place: Path, kind: str, what: str) -> None:
    """Gone, it is made again for who writes."""
    os.rmdir(place.parent)
    if kind == "link":  # to a directory that has such a file
        put(kind, place.parent, place.parents[2])
        place = place.with_name("secret")
    else:
        put(kind, place.parent, place.parents[2] / "secret")
    if kind == "gone" and what in READS:
        with pytest.raises(FileNotFoundError):
            READS[what](place)
    elif kind == "gone":
        WRITES[what](place)
        assert place.read_bytes() == b"line\n"
    else:
        with pytest.raises(RunFileError, match=f"^{place.parent} (is|belongs to)"):
            {**READS, **WRITES}[what](place)


def test_a_file_with_another_name_elsewhere_is_not_written_to(place: Path) -> None:
    os.link(place.parents[2] / "secret", place)
    with pytest.raises(ForeignFile, match="hard link"):
        append(place, b"line\n", max_bytes=BOUND, anew=True)


@pytest.mark.parametrize("what", ["replace", "replace by"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_where_a_whole_file_is_prepared_is_removed_or_named(place: Path, kind: str, what: str) -> None:
    partial = place.with_name(".file.partial")
    put(kind, partial, place.parents[2] / "secret")
    if kind == "directory":
        with pytest.raises(ForeignFile, match=f"^{partial} is a directory"):
            WRITES[what](place)
        assert not place.exists()
    else:
        WRITES[what](place)
        assert place.read_bytes() == b"line\n"
        assert not partial.exists()


def test_lines_go_up_to_the_bound_and_a_notice_says_so_once(place: Path) -> None:
    assert append(place, b"first\n", max_bytes=10, notice=b"full\n") == 6
    for _ in range(3):
        with pytest.raises(FileFull):
            append(place, b"a\nsecond\n", max_bytes=10, notice=b"full\n")
    assert place.read_bytes() == b"first\na\nfull\n"


@pytest.mark.parametrize("kind", ["directory", "fifo", "loop", "garbage", "gone"])
def test_room_is_looked_for_where_runs_are_made_and_nothing_is_left_of_it(tmp_path: Path, kind: str) -> None:
    runs = tmp_path / "runs"
    put(kind, runs, tmp_path / "secret")
    if kind in ("directory", "gone"):
        check_room(runs)
        assert [each.name for each in runs.iterdir()] == (["inside"] if kind == "directory" else [])
    else:
        with pytest.raises(RunFileError, match=str(runs)) as told:
            check_room(runs)
        assert not told.value.is_shortage
