"""What a worker is told when it is forked."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from weft.machine.run_file import make_directory
from weft.spec.job_spec import JobSpec
from weft.transport.wire.frames import Message
from weft.workload.compiling.compiler import keep_in


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

    def enter(self, message: Message) -> JobSpec:
        """The job that an order is about: this process's environment and directory are that job's from now on."""
        spec = JobSpec.parse(message["spec"])
        os.environ |= {"WEFT_JOB_ID": message["job"], "WEFT_RUN_DIR": message["run_dir"]}
        with contextlib.suppress(OSError):  # the daemon makes it, too, and says what is wrong with it
            make_directory(Path(message["run_dir"]))
        with contextlib.suppress(OSError):  # load_workload says what is wrong with it
            os.chdir(spec.directory)
        if spec.strategy.compile is True:  # where it is left open, what goes wrong with it is no fault of the job
            keep_in(Path(self.compiled))
        return spec
