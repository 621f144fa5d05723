"""Savers: snapshots on their way to the disk, each by a process of its own, and one of a job at a time.

A job may end while its last one is written: the memory that has it goes when that is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from weft.scheduler.daemon.guard import Guard, Spawn
from weft.transport.wire.frames import Message

Start = Callable[[str, Mapping[str, Any]], Coroutine[Any, Any, None]]


class Savers:
    """start: of a job's saver, see Pool.start_saver; what it answers comes to `answered`."""

    def __init__(self, start: Start, spawn: Spawn, guard: Guard) -> None:
        self._start = start
        self._spawn = spawn
        self._guard = guard
        self._done: dict[str, Callable[[Message], None]] = {}  # by job, for those that are being written
        self._next: dict[str, list[tuple[Mapping[str, Any], Callable[[Message], None]]]] = {}  # those that wait
        self._after: dict[str, Callable[[], None]] = {}
        self._idle: dict[str, asyncio.Future[None]] = {}

    @property
    def num_active(self) -> int:
        return len(self._done)

    def save(self, job: str, config: Mapping[str, Any], done: Callable[[Message], None]) -> None:
        """done: told of the checkpoint's path, or of an error."""
        if job in self._done:
            self._next.setdefault(job, []).append((config, done))
            return
        self._done[job] = done
        self._spawn(self._begin(job, config), f"checkpoint of {job}")

    async def _begin(self, job: str, config: Mapping[str, Any]) -> None:
        what = f"the start of the saver of {job}"
        with self._guard.around(what, lambda bug: self.answered(job, {"error": f"{what}: {bug}"})):
            await self._start(job, config)

    def answered(self, job: str, answer: Message) -> None:
        """Its process has ended."""
        self._done.pop(job)(answer)
        if waiting := self._next.get(job):
            self.save(job, *waiting.pop(0))
            return
        self._next.pop(job, None)
        if (after := self._after.pop(job, None)) is not None:
            after()
        if (idle := self._idle.pop(job, None)) is not None:
            idle.set_result(None)

    def after(self, job: str, act: Callable[[], None]) -> None:
        """Done once nothing of the job is being written, now or later."""
        if job in self._done:
            self._after[job] = act
        else:
            act()

    async def wait(self, job: str) -> None:
        """Until nothing of the job is being written."""
        if job in self._done:
            await asyncio.shield(self._idle.setdefault(job, asyncio.get_running_loop().create_future()))
