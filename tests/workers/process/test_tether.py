"""Processes that die with the one that started them, whenever that is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

# The parent starts a child and is killed. Who reads the pipe sees its end when neither has it any more.
PARENT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}, str(os.getpid())], pass_fds=[1])
if {waits}:
    signal.pause()
"""
TIED = """
import os, signal, sys
from weft.workers.process.tether import tie_to, untie
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
