"""The fork server as the daemon starts it: a real process, with another program in Python's place."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from weft.scheduler.daemon.fork_server import start_fork_server


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
