"""What a worker is told when it is forked."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    worker: str
    lane: str  # that runs in the main thread
    device: str  # "cpu", "stand-in", or the uuid of a GPU
    threads: int
    unlike: bool  # the crew has GPUs of other models
    cores: tuple[int, ...]  # to run on; empty for any
    spin_seconds: float  # see Board
    stamps: bool  # see Account
    directory: str
    authkey: bytes
    compiled: str  # the directory of what is compiled
    inspections: str | None = None  # the directory of what was found out about jobs; None where that is not kept

    def take_cores(self) -> None:
        """This process, before it starts threads."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)

    def take_turns(self, *, is_ahead: bool) -> None:
        """This thread, with those that want the same cores. is_ahead: nobody waits for what a loader loads."""
        if self.lane == "load":
            with contextlib.suppress(OSError):  # it takes no core from a lane that computes
                os.sched_setscheduler(0, os.SCHED_BATCH if is_ahead else os.SCHED_OTHER, os.sched_param(0))
