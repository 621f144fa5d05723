"""Beside: a copy that goes on while its lane computes, and is over before anything of it changes.

    lane     SNAPSHOT(i) │ forward(i+1) │ backward(i+1) │ ░ wait ░ │ UPDATE(i+1)
    beside               │ tensor 0, 1, 2, ...                     │

On cores that the lane leaves alone, for as long as it computes, and behind everything else that runs there; on any core
once the lane waits. Where all cores are busy it is made in that wait, and costs what it would cost in the lane.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]  # to, from

LEAST_BYTES = 1 << 20  # less is copied in a lane before a thread has begun; arbitrary
_GROUP_BYTES = 1 << 25  # copied at a time: a job that ends waits for no more
_LAST_OF_ALL = 19  # of nice values


@dataclass(slots=True)
class CopyBeside:
    """Errors: RuntimeError of a system that has no thread more; then nothing is copied."""

    pairs: Pairs
    seconds: float = 0.0  # of a core, that it has taken
    _thread: threading.Thread = field(init=False)
    _is_left: bool = False
    _thread_id: int | None = None  # once it has begun

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it is over, in the place of whoever calls."""
        if (thread_id := self._thread_id) is not None and self._thread.is_alive():
            run_anywhere(thread_id)
        self._thread.join()

    def leave(self) -> None:
        """Nobody wants it any more."""
        self._is_left = True
        self._thread.join()

    def _run(self) -> None:
        step_aside()
        self._thread_id = threading.get_native_id()
        with torch.no_grad():
            for targets, sources in _groups(self.pairs):
                if self._is_left:
                    return
                torch._foreach_copy_(targets, sources)  # one call, in which other threads of Python go on
        self.seconds = time.thread_time()


def _groups(pairs: Pairs) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Those that make up some bytes together."""
    left = iter(pairs)
    while group := list(islice(left, 1)):
        num_bytes = group[0][1].nbytes
        while num_bytes < _GROUP_BYTES and (another := list(islice(left, 1))):
            group += another
            num_bytes += another[0][1].nbytes
        yield [target for target, _ in group], [source for _, source in group]


def step_aside() -> None:
    """Of the calling thread: to other cores than its process has, where there are any, and behind all that runs there;
    the lane's core is the lane's."""
    with contextlib.suppress(OSError):  # the parent has died, and so will this process
        machine, own = os.sched_getaffinity(os.getppid()), os.sched_getaffinity(0)
        os.sched_setaffinity(0, machine - own or own)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST_OF_ALL)


def run_anywhere(thread_id: int) -> None:
    """A thread of this process that has stepped aside: on its own cores, too, which have nothing to do but wait."""
    with contextlib.suppress(OSError):  # it is over
        os.sched_setaffinity(thread_id, os.sched_getaffinity(os.getppid()))
