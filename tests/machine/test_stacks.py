"""Stacks of another process: one whose main thread is stuck, one that is stopped, one that has no handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from weft.machine.proc import STOPPED, state_of
from weft.machine.stacks import stacks_of

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


def test_a_process_tells_the_stacks_of_all_threads_while_its_code_holds_the_interpreter() -> None:
    with running(HOLDS_THE_LOCK) as pid:
        for _ in range(2):  # the second time nothing of the first is in it
            (text,) = stacks_of({"it": pid}).values()
            assert text.count("in never_returns") == 1
            assert "threading.py" in text
            assert f"thread {pid} " in text


def test_one_that_is_stopped_is_told_and_so_is_one_without_a_file_and_neither_is_harmed() -> None:
    with running(HOLDS_THE_LOCK) as stopped, running(HAS_NO_FILE) as without:
        os.kill(stopped, signal.SIGSTOP)
        os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT)
        assert state_of(stopped) == STOPPED
        told = stacks_of({"stopped": stopped, "without": without})
        assert "it is stopped" in told["stopped"]
        assert "closed the file" in told["without"]
        assert state_of(without) in "RS", "it goes on"


def test_one_that_has_ended_has_none() -> None:
    with running(HAS_NO_FILE) as pid:
        pass
    assert state_of(pid) == ""
    assert "it has ended" in stacks_of({"it": pid})["it"]
