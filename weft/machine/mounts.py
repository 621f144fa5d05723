"""The mount table of this process: what is mounted where, as /proc/self/mountinfo says (proc_pid_mountinfo(5))."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    point: str
    root: str  # the part of the file system that is mounted
    kind: str  # such as `tmpfs`, `cgroup2`
    options: frozenset[str]  # of the file system


def read_mounts(root: Path) -> list[Mount]:
    """In the order of mounting, so the last one at a point is the one that is seen. Empty where /proc is not there."""
    try:
        text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return list(_mounts_of(text))


@functools.lru_cache(maxsize=1)
def _mounts_of(text: str) -> tuple[Mount, ...]:
    """Which seldom changes, and takes ten times as long to parse as to read."""
    return tuple(mount for line in text.splitlines() if (mount := _parse(line)) is not None)


def _parse(line: str) -> Mount | None:
    before, separator, behind = line.partition(" - ")
    fields, more = before.split(), behind.split()
    if not separator or len(fields) < 5 or len(more) < 3:
        return None
    return Mount(
        point=_unescape(fields[4]), root=_unescape(fields[3]), kind=more[0], options=frozenset(more[2].split(","))
    )


def _unescape(path: str) -> str:
    """Blanks and backslashes stand there in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
