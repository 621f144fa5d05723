"""Stacks: what every thread of a process is doing, had from outside, also while it is stuck in a user's code.

    the process   answer_with_stacks ──▶ a memory file of its own, and a signal at which CPython's C code writes there
    another       stacks_of ──signal──▶ waits for it ──▶ reads the file through /proc/PID/fd

The signal's handler needs neither the main thread nor the interpreter's lock, so it answers from a function that never
returns and from C code that holds the lock. A process that is stopped answers nothing until it goes on. Native frames
are not in it: they would take a debugger; what each thread waits for in the kernel is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from weft.machine.proc import STOPPED, state_of, text_of

SIGNAL: Final = signal.SIGRTMIN + 10  # arbitrary: glibc has the first two, and users' programs mostly SIGUSR1
ANSWER_SECONDS: Final = 1.0  # to begin with it; far above what it takes
SETTLED_SECONDS: Final = 0.05  # without another byte: it is whole
MAX_BYTES: Final = 1 << 20  # faulthandler writes 100 threads of 100 frames at most
_NAME: Final = "weft-stacks"
_LINK: Final = f"/memfd:{_NAME} (deleted)"


def answer_with_stacks() -> None:
    """Once, at the process's start; its children by fork share the file, those by exec have neither."""
    file = os.memfd_create(_NAME)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def stacks_of(pids: Mapping[str, int]) -> dict[str, str]:
    """For people, by the processes' names. Whatever is missing is said there. Takes a second at most, whatever their
    number: not for an event loop."""
    asked = {name: _ask(pid) for name, pid in pids.items()}
    files = {name: file for name, file in asked.items() if isinstance(file, Path)}
    _wait_until_whole(list(files.values()))
    told = {name: _read(files[name]) if name in files else str(asked[name]) for name in pids}
    return {name: f"process {pid}\n{_threads(pid)}\n\n{told[name]}\n" for name, pid in pids.items()}


def _threads(pid: int) -> str:
    """A line for each: its number, name, state, and where in the kernel it is."""
    try:
        threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda each: int(each.name))
    except OSError:
        return "it has ended"
    return "\n".join(
        f"thread {of.name} ({text_of(of / 'comm')}): {_stat(of)} {text_of(of / 'wchan')}" for of in threads
    )


def _ask(pid: int) -> Path | str:
    """The file to which it now writes them, or why it does not."""
    if state_of(pid) == STOPPED:
        return "it is stopped (state T of proc), so it tells no stack"
    try:
        file = _file_of(pid)
        if file is None:
            return "no stacks: the job's code has closed the file that they go to"
        os.truncate(file, 0)
        os.kill(pid, SIGNAL)
    except OSError as error:
        return f"no stacks: {error}"
    return file


def _file_of(pid: int) -> Path | None:
    """A process that is without may have no handler either, and the signal would end it."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(path) == _LINK:
                return path
    return None


def _wait_until_whole(files: Sequence[Path]) -> None:
    until = time.monotonic() + ANSWER_SECONDS
    before: list[int] = []
    while files and time.monotonic() < until:
        time.sleep(SETTLED_SECONDS)
        sizes = [_size(file) for file in files]
        if all(sizes) and sizes == before:
            return
        before = sizes


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return f"no stacks: {error}"
    return text or f"no stacks: it did not write them within {ANSWER_SECONDS:g} s"


def _stat(path: Path) -> str:
    return next(iter(text_of(path / "stat").rpartition(")")[2].split()), "")
