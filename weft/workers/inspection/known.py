"""Known: a job that was inspected before, and has not changed since, is not run once more to be found out about.

    load ─▶ fingerprint of the workload, its first batch, the spec, the machine and the versions ─▶ kept? ── take that
                                                                                                     └─ inspect, keep it

What a forward reads when it runs, and the workload does not have, such as a file, does not show in a fingerprint; so a
job that fails is inspected anew when it comes again. Times are only kept that were measured while the cores were ours.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import weft
from weft.machine.facts import core_speeds
from weft.spec.job_spec import JobSpec
from weft.workers.devices.device import Device
from weft.workers.inspection.kept_inspections import KeptInspections
from weft.workers.inspection.ran import first_batch
from weft.workload.code.fingerprint import fingerprint
from weft.workload.data.batches import Batches
from weft.workload.entry import files_of_job
from weft.workload.units import is_cut_by_calls
from weft.workload.workload import Workload

MAX_WAITED: Final = 0.05  # of the time, for a core that somebody else has: arbitrary
_OF_TRAINING: Final = {"entry", "args", "epochs", "steps", "batch_size", "seed", "mode"}  # fields of [job]


@dataclass(frozen=True, slots=True)
class Known:
    """What was found out of jobs, as a worker comes by it."""

    directory: Path | None = None  # None where nothing is kept
    modules: Collection[str] = ()  # names of those that were there before the job's
    tell: Callable[[str], None] = lambda text: None  # what people should know
    unchanged: Callable[[JobSpec, Workload, dict[str, Any]], None] = lambda *of_job: None  # with what is known of it

    def quiet(self) -> Known:
        """For what is found out beside something else."""
        return dataclasses.replace(self, tell=lambda text: None, unchanged=lambda *of_job: None)

    def facts(
        self,
        workload: Workload,
        batches: Batches,
        spec: JobSpec,
        specs: Sequence[JobSpec],
        sizes: Sequence[int],
        digests: object,
        device: Device,
        inspect: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """What `inspect` returns, now or before. specs: that are looked at, with microbatches of these sizes. digests:
        of parameters. Errors: those of inspect."""
        if self.directory is None or spec.strategy.compile or batches.streams:  # which are not drawn from for a look
            return inspect()
        known = KeptInspections(self.directory)
        strategies = [each.strategy.model_dump_json() for each in (spec, *specs)]
        key = fingerprint(
            _versions(),
            _machine(),
            (_name_of(device), torch.get_num_threads(), *_cores()),
            (spec.directory, spec.job.model_dump(include=_OF_TRAINING), strategies),
            (workload, sizes, digests),
            _first_batch(workload, batches, max(sizes)),
        )
        if key is None:
            return inspect()
        found: dict[str, Any] | None = known.find(spec.entry_file, key)
        if found is not None:
            self.tell("the job has not changed since it was inspected; what was found out then stands")
            self.unchanged(spec, workload, found)
            return found
        began, waited = time.perf_counter(), _waited_seconds()
        found = inspect()
        alone = _waited_seconds() - waited <= MAX_WAITED * (time.perf_counter() - began)
        if alone and found.get("crowded") is None:  # another time there may be more memory
            files = (file.resolve() for file in files_of_job(spec, self.modules))
            known.keep(spec.entry_file, key, found, files)
        return found


NOTHING: Final = Known()


def _name_of(device: Device) -> str:
    is_gpu = device.torch.type == "cuda"
    return torch.cuda.get_device_name(device.torch) if is_gpu else type(device).__name__


def _cores() -> tuple[int, float]:
    """How many this process may use, and the speed of the slowest."""
    usable = os.sched_getaffinity(0)
    return len(usable), min(_speeds().get(core, 1.0) for core in usable)


@functools.cache
def _speeds() -> dict[int, float]:
    return core_speeds(range(os.cpu_count() or 1))


def _first_batch(workload: Workload, batches: Batches, size: int) -> object:
    first = first_batch(min(size, batches.num_train), training=True)
    return batches.batch(*first) if is_cut_by_calls(workload) else batches.load(*first)


def _waited_seconds() -> float:
    """That this thread could have run for, and did not."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    except OSError:  # a kernel that does not say
        return 0.0


@functools.cache
def _versions() -> tuple[object, ...]:
    folder = Path(weft.__file__).parent
    ours = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        status = path.stat()
        ours.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return sys.version, torch.__version__, weft.__version__, ours.hexdigest()


@functools.cache
def _machine() -> tuple[object, ...]:
    try:
        models = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")}
    except OSError:
        models = set()
    return platform.node(), platform.machine(), os.cpu_count(), sorted(models)
