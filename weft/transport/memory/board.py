"""The board: one shared int32 word per task, the last iteration that the task finished; and how lanes wait on it.

    word 0: epoch, ABORTED once the attempt is aborted, anything else while it runs
    word 1 + t: the last finished iteration of task t; at first the one before the attempt's first, so -1 mostly

Posting is a store and, where a lane of another process may wait, a futex wake. Waiting is a bounded spin, then a futex
wait on the word itself. Words only grow, so a wait is for "at least", and a missed change is impossible: the kernel
compares the word before it sleeps. Every sleep is bounded too, since an abort changes word 0 and not the word slept on.

The stores rely on x86-64's order (a store is seen after the stores before it); `futex` is a full barrier besides.
Errors: Aborted from `wait` once the attempt is aborted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from collections.abc import Sequence

import torch

FUTEX_WAIT, FUTEX_WAKE = 0, 1
_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_FUTEX_WAITV_SYSCALL, _OF_32_BITS = 449, 2  # the same on both machines
_WAKE_ALL = 2**31 - 1
_SPINS_PER_CLOCK = 32  # reading the clock costs as much as a read of the word
SLEEP_SECONDS = 0.05  # the longest sleep before the epoch word is looked at again
BLIND_SECONDS = 0.001  # the longest sleep on one word of several that are waited for
PREEMPTED_NS = 500_000  # a look takes 2 µs, a hypervisor's interruption some 10, a scheduler's slice 1 ms or more
WAITS_WITHOUT_SPIN = 32  # arbitrary: about an iteration of a small pipeline
EPOCH, ABORTED = 0, -2

_libc_sleeping = ctypes.CDLL(None, use_errno=True)  # releases the GIL: for waits
_libc_quick = ctypes.PyDLL(None)  # keeps it: a wake is shorter than giving the GIL away


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Waiter(ctypes.Structure):
    _fields_ = [
        ("expected", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class Aborted(BaseException):
    """The attempt was aborted while a lane waited. No Exception: a lane may wait inside of the user's step, and no
    `except Exception` there is to stop it."""


def futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleeps until woken, for at most `seconds`, or not at all if the word is no longer `expected`."""
    timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _libc_sleeping.syscall(
        _FUTEX_SYSCALL, ctypes.c_void_p(address), FUTEX_WAIT, expected, ctypes.byref(timeout), None, 0
    )


def futex_wait_any(addresses: Sequence[int], expected: Sequence[int], seconds: float) -> None:
    """As `futex_wait`, of several words; before Linux 5.16, which cannot, of the first, for BLIND_SECONDS."""
    words = (word & 0xFFFFFFFF for word in expected)
    each = [_Waiter(word, address, _OF_32_BITS, 0) for word, address in zip(words, addresses, strict=True)]
    waiters = (_Waiter * len(each))(*each)
    end = time.monotonic() + seconds
    timeout = _Timespec(int(end), int(end % 1 * 1e9))
    result = _libc_sleeping.syscall(
        _FUTEX_WAITV_SYSCALL, waiters, len(addresses), 0, ctypes.byref(timeout), time.CLOCK_MONOTONIC
    )
    if result == -1 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
        futex_wait(addresses[0], expected[0], min(seconds, BLIND_SECONDS))


def futex_wake(address: int) -> None:
    _libc_quick.syscall(_FUTEX_SYSCALL, ctypes.c_void_p(address), FUTEX_WAKE, _WAKE_ALL, None, None, 0)


def num_words(num_tasks: int) -> int:
    return 1 + num_tasks


def _first_there(seen: Sequence[int], needed: Sequence[tuple[int, int]]) -> int | None:
    return next((number for number, (_, iteration) in enumerate(needed) if seen[number] >= iteration), None)


class _Nowhere:
    """A board's words in a process that is no worker, though it runs a worker's code."""

    def __getitem__(self, word: int) -> int:
        os._exit(0)

    def __setitem__(self, word: int, value: int) -> None:
        os._exit(0)


class Board:
    """words: int32, shape (1 + num_tasks,), in shared memory. spin_seconds: 0 where waiters outnumber cores.

    shares_core: other lanes of this process want the core and the GIL, so each look gives both away first.
    """

    def __init__(self, words: torch.Tensor, spin_seconds: float = 0.0, *, shares_core: bool = False) -> None:
        assert words.dtype is torch.int32
        self._tensor = words  # keeps the mapping
        self.words = memoryview(words.numpy())  # type: ignore[arg-type]  # an ndarray is a buffer
        self._address = words.data_ptr()
        self._spin_ns = int(spin_seconds * 1e9)
        self._waits_without_spin = 0
        self._shares_core = shares_core

    def rewind(self, begins: int) -> None:
        """To before an attempt's first iteration. While no lane of any worker runs."""
        self._tensor.fill_(begins - 1)
        self._waits_without_spin = 0

    def post(self, task: int, iteration: int) -> None:
        """Marks the task finished for the iteration and wakes whoever waits for it."""
        self.words[1 + task] = iteration
        futex_wake(self._address + 4 * (1 + task))

    def post_quietly(self, task: int, iteration: int) -> None:
        """As `post`, for a task that no other lane waits for."""
        self.words[1 + task] = iteration

    def wait(self, task: int, iteration: int, *, spins: bool = True) -> None:
        """Returns once the task has finished the iteration. spins: False where who is waited for wants a core. Errors:
        Aborted."""
        words, word = self.words, 1 + task
        if spins and self._spin(word, iteration):
            return
        while (seen := words[word]) < iteration:
            if words[EPOCH] == ABORTED:
                raise Aborted
            futex_wait(self._address + 4 * word, seen, SLEEP_SECONDS)

    def wait_any(self, needed: Sequence[tuple[int, int]]) -> int | None:
        """The number of the first (task, iteration) that is there; None after a while in which none has come. Errors:
        Aborted."""
        words, until = self.words, time.monotonic_ns() + (0 if self._waits_without_spin else self._spin_ns)
        seen = [words[1 + task] for task, _ in needed]
        while (came := _first_there(seen, needed)) is None and time.monotonic_ns() < until:
            if words[EPOCH] == ABORTED:
                break
            if self._shares_core:
                _libc_sleeping.sched_yield()
            seen = [words[1 + task] for task, _ in needed]
        if came is None:
            self._waits_without_spin = max(0, self._waits_without_spin - 1)
            if words[EPOCH] == ABORTED:
                raise Aborted
            futex_wait_any([self._address + 4 * (1 + task) for task, _ in needed], seen, SLEEP_SECONDS)
            came = _first_there([words[1 + task] for task, _ in needed], needed)
        return came

    def _spin(self, word: int, iteration: int) -> bool:
        """Looks at the word for a while without sleeping; True once it is there.

        A gap between two looks says that another process had the core: spinning would take it from that one, which
        may be the very one that is waited for. So the next waits sleep at once.
        """
        if self._waits_without_spin:
            self._waits_without_spin -= 1
            return False
        words = self.words
        now = time.monotonic_ns()
        until = now + self._spin_ns
        if self._shares_core:
            return self._look_and_yield(word, iteration, until)
        while now < until:
            for _ in range(_SPINS_PER_CLOCK):
                if words[word] >= iteration:
                    return True
            looked, now = now, time.monotonic_ns()
            if now - looked > PREEMPTED_NS:
                self._waits_without_spin = WAITS_WITHOUT_SPIN
        return False

    def _look_and_yield(self, word: int, iteration: int, until: int) -> bool:
        words = self.words
        while time.monotonic_ns() < until:
            if words[word] >= iteration:
                return True
            _libc_sleeping.sched_yield()
        return False

    def strand(self) -> None:
        """In a child that the job's code has forked: where that comes back to a lane, it ends."""
        self.words = _Nowhere()  # type: ignore[assignment]

    @property
    def stranded(self) -> bool:
        return isinstance(self.words, _Nowhere)

    def abort(self) -> None:
        """Ends every wait on this board, now and later, with Aborted."""
        self.words[EPOCH] = ABORTED
        for word in range(len(self.words)):
            futex_wake(self._address + 4 * word)

    @property
    def aborted(self) -> bool:
        return self.words[EPOCH] == ABORTED
