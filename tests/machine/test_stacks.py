"""Stacks of another process: one whose main thread is stuck, one that is stopped, one that has no handler; native ones,
by whichever debugger there is."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft.machine import stacks
from weft.machine.proc import STOPPED, state_of, threads_of
from weft.machine.stacks import TOOLS, stacks_of

SECONDS = 180.0  # for anything that is awaited
ANSWERS = "from weft.machine.stacks import answer_with_stacks; answer_with_stacks()"
# C code that keeps the interpreter's lock, as a PyDLL does: no Python thread of the process runs any more.
HOLDS_THE_LOCK = f"""
import ctypes, threading
{ANSWERS}
threading.Thread(target=threading.Event().wait, daemon=True).start()
def never_returns():
    print("here", flush=True)
    while True:
        ctypes.PyDLL(None).pause()  # a signal ends it
never_returns()
"""
HAS_NO_FILE = f"""
import os, time
{ANSWERS}
os.closerange(3, 100)
print("here", flush=True)
time.sleep(1000)
"""


# One thread waits for a lock that nobody gives back, the main one for a pipe into which nobody writes.
WAITS = f"""
import os, threading
{ANSWERS}
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lock.acquire, daemon=True).start()
print("here", flush=True)
os.read(os.pipe()[0], 1)
"""


@contextmanager
def running(source: str) -> Iterator[int]:
    """The pid of a process that has said it is there."""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            yield process.pid
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for debuggers, of which there is none unless a test makes it."""
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name) if (tmp_path / name).exists() else None)
    return tmp_path


def make(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_of_each_thread_the_call_in_which_it_waits_is_told() -> None:
    with running(WAITS) as pid:
        both = re.compile(rf"thread {pid} \(.+\): S in read\b.*\nthread \d+ \(.+\): S in futex\b")
        deadline = time.monotonic() + SECONDS
        while not both.match("\n".join(told := threads_of(pid))):
            assert time.monotonic() < deadline, told
            time.sleep(0.01)
        assert told[0] in stacks_of({"it": pid}, ["it"])["it"].splitlines()


def test_without_a_debugger_the_text_says_which_would_tell_native_stacks() -> None:
    with running(WAITS) as pid:
        assert (
            "no native stacks: install eu-stack or gdb, which would tell them" in stacks_of({"it": pid}, ["it"])["it"]
        )


def test_native_stacks_are_the_quicker_debuggers_for_every_process(tools: Path) -> None:
    make(tools / "gdb", "echo slow")
    make(tools / "eu-stack", 'echo "frames of $2"')
    with running(WAITS) as one, running(WAITS) as other:
        told = stacks_of({"one": one, "other": other}, ["one", "other"])
        assert told["one"].endswith(f"native stacks, by eu-stack:\nframes of {one}\n")
        assert f"frames of {other}" in told["other"]


def test_a_debugger_that_does_not_come_to_its_end_is_ended_and_what_it_held_goes_on(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "NATIVE_SECONDS", 0.5)
    make(tools / "gdb", 'for pid; do :; done; kill -STOP "$pid"; echo half a frame; exec sleep 1000')
    with running(WAITS) as pid:
        (text,) = stacks_of({"it": pid}, ["it"]).values()
        assert "native stacks, by gdb, which did not come to its end within 0.5 s:\n" in text
        assert state_of(pid) != STOPPED


@pytest.mark.skipif(not any(map(shutil.which, TOOLS)), reason="there is no debugger")
def test_a_real_debugger_tells_in_what_native_code_a_process_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with running(HOLDS_THE_LOCK) as pid:
        (text,) = stacks_of({"it": pid}, ["it"]).values()
        assert "pause" in text.partition("native stacks, by ")[2], text
        assert state_of(pid) in "RS", "it is let go"


def test_a_process_tells_the_stacks_of_all_threads_while_its_code_holds_the_interpreter() -> None:
    with running(HOLDS_THE_LOCK) as pid:
        for _ in range(2):  # the second time nothing of the first is in it
            (text,) = stacks_of({"it": pid}, ["it"]).values()
            assert text.count("in never_returns") == 1
            assert "threading.py" in text
            assert f"thread {pid} " in text


def test_one_that_is_stopped_is_told_and_so_is_one_without_a_file_and_neither_is_harmed() -> None:
    with running(HOLDS_THE_LOCK) as stopped, running(HAS_NO_FILE) as without:
        os.kill(stopped, signal.SIGSTOP)
        os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
        assert state_of(stopped) == STOPPED
        told = stacks_of({"stopped": stopped, "without": without}, ["stopped"])
        assert "it is stopped" in told["stopped"]
        assert "native" not in told["without"]
        assert "closed the file" in told["without"]
        assert state_of(without) in "RS", "it goes on"


def test_one_that_has_ended_has_none() -> None:
    with running(HAS_NO_FILE) as pid:
        pass
    assert state_of(pid) == ""
    assert "it has ended" in stacks_of({"it": pid}, ["it"])["it"]
