"""Stacks: what every thread of a process is doing, had from outside, also while it is stuck in a user's code.

    the process   answer_with_stacks ──▶ a memory file of its own, and a signal at which CPython's C code writes there
    another       stacks_of ──signal──▶ waits for it ──▶ reads the file through /proc/PID/fd

The signal's handler needs neither the main thread nor the interpreter's lock, so it answers from a function that never
returns and from C code that holds the lock. A process that is stopped answers nothing until it goes on. What each
thread waits for in the kernel is in it, too, and where a debugger is installed, that one's account of native frames.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from weft.machine.proc import STOPPED, state_of, threads_of
from weft.machine.tether import tying_to

SIGNAL: Final = signal.SIGRTMIN + 10  # arbitrary: glibc has the first two, and users' programs mostly SIGUSR1
ANSWER_SECONDS: Final = 1.0  # to begin with it; far above what it takes
SETTLED_SECONDS: Final = 0.05  # without another byte: it is whole
MAX_BYTES: Final = 1 << 20  # faulthandler writes 100 threads of 100 frames at most
NATIVE_SECONDS: Final = 10.0  # for a debugger, which reads the symbols of all libraries: two or so, with torch's
# In order of speed; without a question to a server for symbols, which may not answer.
TOOLS: Final = {"eu-stack": ("-p",), "gdb": ("-nx", "-batch", "-ex", "thread apply all bt 64", "-p")}
_NO_SERVER: Final = {"DEBUGINFOD_URLS": ""}
_NAME: Final = "weft-stacks"
_LINK: Final = f"/memfd:{_NAME} (deleted)"


def answer_with_stacks() -> None:
    """Once, at the process's start; its children by fork share the file, those by exec have neither."""
    file = os.memfd_create(_NAME)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def stacks_of(pids: Mapping[str, int], native: Collection[str]) -> dict[str, str]:
    """For people, by the processes' names. native: those of which native frames are wanted. Whatever is missing is said
    there. Takes ANSWER_SECONDS and NATIVE_SECONDS at most, whatever their number: not for an event loop."""
    asked = {name: _ask(pid) for name, pid in pids.items()}
    files = {name: file for name, file in asked.items() if isinstance(file, Path)}
    _wait_until_whole(list(files.values()))
    told = {name: _read(files[name]) if name in files else str(asked[name]) for name in pids}
    threads = {name: "\n".join(threads_of(pid)) or "it has ended" for name, pid in pids.items()}
    frames = _native_stacks({name: pids[name] for name in native})
    parts = {name: (f"process {pid}\n{threads[name]}", told[name], frames.get(name, "")) for name, pid in pids.items()}
    return {name: "\n\n".join(filter(None, each)) + "\n" for name, each in parts.items()}


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


def _native_stacks(pids: Mapping[str, int]) -> dict[str, str]:
    """By whichever debugger there is, at the same time for all. It holds them while it reads."""
    tool = next((path for name in TOOLS if (path := shutil.which(name)) is not None), None)
    if tool is None:
        return dict.fromkeys(pids, f"no native stacks: install {' or '.join(TOOLS)}, which would tell them")
    with ThreadPoolExecutor(max_workers=max(1, len(pids))) as threads:
        told = threads.map(lambda pid: _native_of(pid, tool), pids.values())
        return dict(zip(pids, told, strict=True))


def _native_of(pid: int, tool: str) -> str:
    if state_of(pid) == STOPPED:  # and a debugger might make it go on
        return "no native stacks: it is stopped"
    name, late = Path(tool).name, ""
    tied = f"{tying_to(os.getpid())}; import sys; os.execv(sys.argv[1], sys.argv[1:])"  # who is killed leaves nothing
    command = [sys.executable, "-ISc", tied, tool, *TOOLS[name], str(pid)]
    try:
        text = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_NO_SERVER},
            timeout=NATIVE_SECONDS,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as error:
        text, late = error.stdout or b"", f", which did not come to its end within {NATIVE_SECONDS:g} s"
        _let_go(pid)
    except OSError as error:
        return f"no native stacks: {error}"
    return f"native stacks, by {name}{late}:\n{text[:MAX_BYTES].decode('utf-8', 'replace').strip()}"


def _let_go(pid: int) -> None:
    """What a debugger held goes on with its end, unless that came at a bad moment."""
    if state_of(pid) == STOPPED:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
