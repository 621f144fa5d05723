"""The fork server as the daemon starts it: a real process, with another program in Python's place."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from weft.scheduler.daemon import fork_server
from weft.scheduler.daemon.fork_server import bound, last_line, start_fork_server


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=1:glibc.malloc.hugetlb=0"),
    ],
)
def test_its_heap_has_huge_pages_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str
) -> None:
    """Of two values of a name glibc takes the last."""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    telling = tmp_path / "python"
    telling.write_text('#!/bin/sh\nprintf "%s" "$GLIBC_TUNABLES"\n')
    telling.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(telling))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start_fork_server(theirs, environment | given, tmp_path / "log").wait()
    assert (tmp_path / "log").read_text() == expected


@pytest.mark.slow(seconds=3)
def test_what_stands_where_the_daemon_was_started_is_not_taken_for_weft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone of Weft in the working directory was, and no job ran there."""
    (tmp_path / "weft").mkdir()
    (tmp_path / "weft" / "__init__.py").write_text("raise RuntimeError('another weft')")
    monkeypatch.chdir(tmp_path)
    ours, theirs = socket.socketpair()
    with theirs:
        server = start_fork_server(theirs, os.environ, tmp_path / "log")
    ours.close()
    assert server.wait(60) == 0, (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (b"", "(nothing)"),
        (b"\n \n", "(nothing)"),
        (b"Traceback\n  File\nTypeError: no path\n\n", "'TypeError: no path'"),
        (b"\x1b[2J\xff", r"'\x1b[2J\ufffd'"),
    ],
)
def test_the_last_that_it_has_said_is_told_in_one_line(tmp_path: Path, written: bytes, told: str) -> None:
    (tmp_path / "log").write_bytes(written)
    assert last_line(tmp_path / "log") == told.replace(r"\ufffd", "\ufffd")


def test_a_log_that_cannot_be_read_is_told_in_its_place(tmp_path: Path) -> None:
    assert last_line(tmp_path) == "(Is a directory)"
    assert last_line(tmp_path / "none") == "(No such file or directory)"


def test_a_log_that_grows_too_large_begins_anew_and_who_writes_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What programs of jobs printed filled the disk of the ledger."""
    monkeypatch.setattr(fork_server, "MAX_LOG_BYTES", 100)
    log = tmp_path / "log"
    bound(log)  # none is there
    with log.open("ab", buffering=0) as output:
        output.write(b"x" * 100)
        bound(log)
        assert log.read_bytes() == b"x" * 100
        output.write(b"y")
        bound(log)
        output.write(b"later\n")
    assert log.read_text() == "this log had 101 bytes, and begins anew\nlater\n"
