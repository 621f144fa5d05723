"""The tether of a process to the one that started it: when that one dies, however it does, the kernel kills this one.

It holds to the *thread* that started the process, so that one must live as long as its process does.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def tie_to(parent: int) -> None:
    """Does not return where the parent is dead already: then nobody would be told."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def tying_to(parent: int) -> str:
    """The same as a line of Python, for a program that is to be tied before it imports anything. Whatever it becomes by
    an exec is tied as well."""
    return (
        f"import ctypes, os, signal; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL); "
        f"os.getppid() == {parent} or os._exit(1)"
    )


def untie() -> None:
    """For a process that notices by itself from now on, and has something to tidy up before it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """From now on what this process's children have started is a child of this process once they have ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
