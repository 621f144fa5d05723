"""Processes that die with the one that started them, whenever that is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

SECONDS = 180.0  # for anything that is awaited

# The parent starts a child and is killed. Who reads the pipe sees its end when neither has it any more.
PARENT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}, str(os.getpid())], pass_fds=[1])
if {waits}:
    signal.pause()
"""
TIED = """
import os, signal, sys
from weft.machine.tether import tie_to, untie
tie_to(int(sys.argv[1]))
print("tied", flush=True)
{then}
signal.pause()
"""


def run_parent(child: str, *, waits: bool) -> subprocess.Popen[str]:
    source = PARENT.format(child=child, waits=waits)
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_process_that_is_tied_dies_with_its_parent() -> None:
    with run_parent(TIED.format(then=""), waits=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "tied\n"
        parent.kill()
        assert parent.stdout.read() == "", "the end of the pipe: nobody holds it"


def test_a_process_whose_parent_died_first_does_not_begin() -> None:
    """The kernel tells of a death only once it has been asked to."""
    started_late = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass\n" + TIED.format(then="")
    with run_parent(started_late, waits=False) as parent:
        assert parent.stdout is not None
        assert parent.stdout.read() == ""


def test_a_process_that_was_untied_goes_on() -> None:
    with run_parent(TIED.format(then="untie(); print(os.getpid(), flush=True)"), waits=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "tied\n"
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        os.kill(child, signal.SIGTERM)  # it is there
        assert parent.stdout.read() == ""


# What the daemon runs for a moment: the parent waits for a program that says which process it is, and never ends.
ASKS_ANOTHER_WEFT = """
import os, sys
from weft.scheduler.daemon.replacing import succession
command = [sys.executable, "-P", "-c", succession._tied_weft(), "daemon", "--tell-shape"]
succession._ask(command, {**os.environ, "PYTHONPATH": sys.argv[1]})
"""
ASKS_A_DEBUGGER = """
import os, sys
from weft.machine import stacks
stacks.NATIVE_SECONDS = 1000.0
stacks._native_of(os.getpid(), os.path.join(sys.argv[1], "eu-stack"))
"""


@pytest.mark.parametrize("asks", [ASKS_ANOTHER_WEFT, ASKS_A_DEBUGGER], ids=["another Weft", "a debugger"])
def test_a_program_that_is_asked_something_ends_with_who_asks(asks: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    package = tmp_path / "weft" / "__main__.py"
    package.parent.mkdir()
    (package.parent / "__init__.py").touch()  # else the installed one is found before it
    package.write_text(f"import os, signal; open({str(told)!r}, 'w').write(str(os.getpid())); signal.pause()\n")
    debugger = tmp_path / "eu-stack"
    debugger.write_text(f"#!{sys.executable}\n{package.read_text()}")
    debugger.chmod(0o700)
    with subprocess.Popen([sys.executable, "-c", asks, str(tmp_path)]) as parent:
        asked = psutil.Process(until(lambda: told.exists() and int(told.read_text() or "0"), "whoever is asked"))
        assert asked.ppid() == parent.pid
        parent.kill()
    until(lambda: not asked.is_running() or asked.status() == psutil.STATUS_ZOMBIE, "its end")


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {SECONDS} s: {what}"
        time.sleep(0.02)
    return value
