"""Savers: snapshots on their way to the disk, each by a process of its own, and one of a job at a time.

A job may end while its last one is written: who waits for the job's end finds that on the disk, unless it is large, and
the memory that has it goes when it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from weft.machine.checkpoint_files import remove_unfinished
from weft.scheduler.core.events import DropArenas
from weft.scheduler.daemon.guard import Guard, Spawn
from weft.scheduler.runs.run import Run
from weft.scheduler.runs.run_writer import RunWriter
from weft.transport.wire.frames import Message

LAST_SECONDS: Final = 1.0  # that a job's end waits for its last checkpoint: one that is cancelled ends within 2
_log = logging.getLogger("weft.savers")

Start = Callable[[str, Mapping[str, Any]], Coroutine[Any, Any, None]]


class Order(NamedTuple):
    run: Run  # of the job, which may have ended meanwhile
    config: Mapping[str, Any]  # of its saver


@dataclass(frozen=True, slots=True)
class Writing:
    """By job."""

    now: dict[str, Order] = field(default_factory=dict)
    next: dict[str, list[Order]] = field(default_factory=dict)  # those that wait
    then: dict[str, DropArenas] = field(default_factory=dict)  # what is done once nothing of the job is written


class Savers:
    """start: of a job's saver, see Pool.start_saver; what it answers comes to `answered`. writer: removes what one that
    was killed has left. saved: told of the checkpoint's path, or of an error."""

    def __init__(
        self,
        start: Start,
        writer: RunWriter,
        spawn: Spawn,
        guard: Guard,
        saved: Callable[[Run, Message], None],
        drop: Callable[[DropArenas], None],
        writing: Writing,
    ) -> None:
        self._start = start
        self._writer = writer
        self._spawn = spawn
        self._guard = guard
        self._saved = saved
        self._drop = drop
        self._writing = writing
        self._idle: dict[str, asyncio.Future[None]] = {}

    @property
    def num_active(self) -> int:
        return len(self._writing.now)

    def save(self, order: Order) -> None:
        job = order.run.job
        if job in self._writing.now:
            self._writing.next.setdefault(job, []).append(order)
            return
        self._writing.now[job] = order
        self.begin(job)

    def begin(self, job: str) -> None:
        """Starts the process that is to write what there is to be written now."""
        self._spawn(self._begin(job, self._writing.now[job].config), f"checkpoint of {job}")

    async def _begin(self, job: str, config: Mapping[str, Any]) -> None:
        what = f"the start of the saver of {job}"
        with self._guard.around(what, lambda bug: self.answered(job, {"error": f"{what}: {bug}"})):
            await self._start(job, config)

    def answered(self, job: str, answer: Message) -> None:
        """Its process has ended."""
        if "error" in answer:
            self._spawn(self._failed(job, answer), f"what is left of a checkpoint of {job}")
        else:
            self._ended(job, answer)

    async def _failed(self, job: str, answer: Message) -> None:
        """The next one is begun behind that: it has the same place."""
        with self._guard.around(f"what is left of a checkpoint of {job}"):
            await self._writer.run(partial(remove_unfinished, self._writing.now[job].run.files.path))
        self._ended(job, answer)

    def _ended(self, job: str, answer: Message) -> None:
        if "error" in answer and self._writing.now[job].run.files.closed:
            _log.warning("%s: no checkpoint: %s", job, answer["error"])
        self._saved(self._writing.now.pop(job).run, answer)
        if waiting := self._writing.next.get(job):
            self.save(waiting.pop(0))
            return
        self._writing.next.pop(job, None)
        if (dropped := self._writing.then.pop(job, None)) is not None:
            self._drop(dropped)
        if (idle := self._idle.pop(job, None)) is not None:
            idle.set_result(None)

    def drop_after(self, command: DropArenas) -> None:
        """Done once nothing of the job is being written, now or later."""
        if command.job in self._writing.now:
            self._writing.then[command.job] = command
        else:
            self._drop(command)

    async def wait(self, job: str) -> None:
        """Until nothing of the job is being written."""
        if job in self._writing.now:
            await asyncio.shield(self._idle.setdefault(job, asyncio.get_running_loop().create_future()))

    async def close_files(self, run: Run) -> None:
        """Of a job that has ended: nothing comes into its log behind what its last checkpoint has come to."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(run.job), LAST_SECONDS)
        run.files.close()

    async def wait_for(self, place: Path) -> None:
        """The same of the job whose run directory this is, or in whose it is."""
        for job, order in list(self._writing.now.items()):
            if order.run.files.path in (place, *place.parents):
                await self.wait(job)
