"""Proc: what the kernel tells of another process at this moment. One that has ended has nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

STOPPED, TRACED = "T", "t"  # states as of proc(5): by a signal, by a debugger
_CPU_TIMES: Final = slice(11, 13)  # of the fields of `stat` behind the name: its own, in user and in kernel mode


def state_of(pid: int) -> str:
    """Its letter; "" where it has ended."""
    return next(iter(_stat(pid)), "")


def used_by(pid: int) -> tuple[str, ...]:
    """Time of a processor and bytes read and written, so far: what stays the same while nothing goes on in it."""
    return *_stat(pid)[_CPU_TIMES], text_of(Path(f"/proc/{pid}/io"))


def _stat(pid: int) -> list[str]:
    return text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def text_of(path: Path) -> str:
    """Without the space around it; "" of what is not there."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
