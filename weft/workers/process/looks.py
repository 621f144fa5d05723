"""Looks: a job is inspected with the threads that it may come to have; and where it leaves open whether its units are
compiled, once eager and once compiled.

    eager      with its own threads ─▶ with all
    compiled   the same, where kernels may be worth what it takes to make them; and what it takes to have them ready

To make kernels takes from seconds to minutes, and they may turn out to be slower. So nobody begins to for a short job,
and it ends at a part of what the training takes. Whatever goes wrong with them, the job goes on without.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from weft.plan.itinerary import Itinerary
from weft.quantities import duration
from weft.spec.admission import problem_of_spec, without_remedy
from weft.spec.candidates import looked_at, with_units
from weft.spec.job_spec import JobSpec
from weft.spec.presets import AUTO
from weft.spec.workers_needed import Host
from weft.workers.compute.stage import computing_in
from weft.workers.devices.device import Device
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.inspection import inspect_job, inspect_threaded
from weft.workers.inspection.known import Known
from weft.workload.compiling.ahead import compile_ahead
from weft.workload.compiling.compiled import compiled_modules, give_up_at
from weft.workload.compiling.compiler import CompileError, forget, import_seconds
from weft.workload.workload import Workload

LEAST_SECONDS: Final = 60.0  # of training; the first kernel alone takes some five
MOST_PART: Final = 0.1  # of the training, for kernels to be made; arbitrary: they save from nothing to a half


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    load: Callable[[JobSpec], Workload]  # anew
    device: Device
    host: Host
    known: Known
    use_own: Callable[[], None]  # from now on, the threads and cores of the job's first worker
    use_all: Callable[[], None] | None  # those of all its workers; None where no strategy that it may have does
    keep_kernels: Callable[[], None]  # from now on, where other workers find them

    def of(self, spec: JobSpec) -> dict[str, Any]:
        """The wire form of weft.plan.inspection.Inspection. Errors: as of `inspect_job`."""
        if spec.strategy.compile != AUTO:
            return self._look(spec, partial(self.load, spec))
        plain = with_units(spec, compiled=False)
        eager = self._look(plain, partial(self.load, plain))
        gc.collect()  # models are full of cycles, and the next ones want the memory
        return eager | self._compiled(with_units(spec, compiled=True), training_seconds(spec, eager), eager["crowded"])

    def _look(self, spec: JobSpec, load: Callable[[], Workload]) -> dict[str, Any]:
        self.use_own()
        facts = inspect_job(load, spec, self.device, self.host, self.known)
        if self.use_all is not None and "timed_size" in facts:
            self.use_all()
            facts["threaded"] = inspect_threaded(load, spec, self.host, facts, self.known)
        return facts

    def _compiled(self, spec: JobSpec, eager_seconds: float, crowded: str | None) -> dict[str, Any]:
        """What comes to the eager facts. eager_seconds: of training. crowded: of the eager look, as a reason."""
        if (problem := problem_of_spec(spec)) is not None:
            return {"uncompiled": without_remedy(problem)}
        if crowded is not None:  # what compiled units keep nobody can tell before they run
            return {"uncompiled": crowded}
        if eager_seconds < LEAST_SECONDS:
            few = f"some {duration(eager_seconds)} of training are too few to make kernels for"
            return {"uncompiled": f"{few} (from {LEAST_SECONDS:g} s on)"}
        try:
            self.keep_kernels()
            importing = import_seconds()
            until = time.monotonic() + MOST_PART * eager_seconds
            facts = self._look(spec, partial(self._load_compiled, spec, until))
            ready = importing + self._ready_seconds(spec, facts["compiled_calls"])
        except CompileError as error:
            return {"uncompiled": without_remedy(str(error))}
        except Exception as error:  # of which the eager look had nothing
            told = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            return {"uncompiled": f"a look at compiled units raised {told}"}
        return {"compiled_too": facts | {"ready_seconds": ready}}

    def _load_compiled(self, spec: JobSpec, until: float) -> Workload:
        workload = self.load(spec)
        if not compiled_modules(workload):
            raise CompileError("each is a single layer of torch's own, which is one kernel already")
        give_up_at(workload, until)
        return workload

    def _ready_seconds(self, spec: JobSpec, calls: str) -> float:
        """What a worker takes that holds all stages, with the kernels kept: what it has made itself it forgets."""
        self.use_own()
        forget()
        specs = looked_at(spec, self.host)
        on_host = any(replica.device == "cpu" for each in specs for replica in each.strategy.replica_list)
        device = HostDevice() if on_host else self.device
        model, precision = self.load(spec).model, partial(computing_in, spec.strategy.precision, device)
        began = time.perf_counter()
        compile_ahead(model, calls, list(model.parameters()), device.torch, precision)
        return time.perf_counter() - began


def training_seconds(spec: JobSpec, facts: Mapping[str, Any]) -> float:
    """Of all steps, on one worker, or until the job's time is up."""
    kinds = ("forward_seconds", "backward_seconds") if spec.job.mode == "train" else ("forward_seconds",)
    steps = Itinerary.of_job(spec.job, facts["num_train"], facts["num_validation"]).steps
    batch_size = min(spec.job.batch_size, facts["num_train"])
    batches = batch_size / max(size for size, _ in facts["input"]["shapes"])  # times what was timed
    passes = batches * sum(unit[kind] for unit in facts["units"] for kind in kinds)
    most = math.inf if spec.stop is None else spec.stop.max_seconds
    return float(min(steps * (passes + facts["update_seconds"]), most))
