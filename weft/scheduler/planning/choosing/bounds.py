"""Bounds: what an iteration of a candidate takes at least, before anybody has made a plan of it. Pure.

No lane is faster than its own work; and where nothing is stale, no iteration of a pipeline is faster than one of its
stages, the way of a microbatch to it and the way back:

    stage 0   F . . . . . . B      to stage 1: the forward of 0
    stage 1   . F F F B B B .      stage 1's own work
                                   back: the backward of 0

The lines are those of the prediction (`measured_costs.py`), so what is found is below it, whatever the schedule. A
candidate that takes longer at least than another one is predicted to take need not be simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.plan.division import divide
from weft.plan.inspection import Inspection
from weft.plan.kinds import KINDS, Kind
from weft.plan.placement import Cuts
from weft.plan.schedules.schedule import Schedule
from weft.scheduler.planning.measured_costs import TASK_SECONDS, Line, lines_of_units
from weft.scheduler.planning.partition import cut_for
from weft.scheduler.planning.placing import scheduled
from weft.scheduler.planning.resized import fitted
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import threads_of


def least_seconds(spec: JobSpec, inspection: Inspection) -> float:
    """Of an iteration. inspection: for many strategies. 0 where shares are measured. Errors: PlanError, where the model
    cannot be cut so."""
    strategy = spec.strategy
    if strategy.share != "fixed":
        return 0.0
    parts = divide(min(spec.job.batch_size, inspection.num_train), *strategy.division)
    least = [0.0]
    for (schedule, stages), staleness, own in zip(
        _replicas(spec, inspection), strategy.staleness_list, parts, strict=True
    ):
        sizes = [part.size for part in own if part.size]
        least += stages.work(schedule, sizes)
        if spec.job.mode == "train" and schedule is not None and not staleness and sizes:
            least += stages.ways(schedule, sizes)
    return max(least)


def replica_seconds(spec: JobSpec, inspection: Inspection) -> list[float]:
    """Of each replica the work of its busiest lane, were the whole batch its own. inspection, errors: as above."""
    count = min(spec.job.batch_size, inspection.num_train)
    found = []
    for (schedule, stages), microbatches in zip(
        _replicas(spec, inspection), spec.strategy.microbatch_counts, strict=True
    ):
        sizes = [part.size for part in divide(count, [1.0], [microbatches])[0]]
        found.append(max(stages.work(schedule, sizes)))
    return found


def _replicas(spec: JobSpec, inspection: Inspection) -> Iterator[tuple[Schedule | None, _Stages]]:
    strategy = spec.strategy
    sized, known = fitted(inspection, spec), inspection.with_threads(threads_of(strategy, inspection.host))
    lines = lines_of_units(spec, known)
    least = {device: min((1.0, *known.slowness.get(device, ()))) for device in ("cpu", "gpu")}
    for r, replica in enumerate(strategy.replica_list):
        schedule = scheduled(strategy, replica)
        cuts = cut_for(spec, sized, r, schedule)
        yield schedule, _Stages(spec, replica.device, cuts, lines, least[replica.device])


@dataclass(frozen=True, slots=True)
class _Stages:
    spec: JobSpec
    device: str
    cuts: Cuts
    lines: Mapping[tuple[str, Kind], Sequence[Line]]
    slowness: float  # of the fastest worker, at most 1

    def work(self, schedule: Schedule | None, sizes: Sequence[int]) -> list[float]:
        """Of each lane: of a CPU worker, of a stage on a GPU, or of a working window's layers together."""
        lanes: dict[int, float] = {}
        for stage in range(len(self.cuts)):
            lane = 0 if schedule is None else schedule.worker_of[stage] if self.device == "cpu" else stage
            lanes[lane] = lanes.get(lane, 0.0) + self._own(stage, sizes)
        return list(lanes.values())

    def ways(self, schedule: Schedule, sizes: Sequence[int]) -> list[float]:
        """To each stage and back, with its own work between; nothing of it in the parts of backwards that wait."""
        is_split = any(each.kind is Kind.INPUT for program in schedule.programs for each in program)
        back = Kind.INPUT if is_split else Kind.BACKWARD
        there, least = 0.0, min(sizes)
        found = []
        for stage in range(len(self.cuts)):
            own = (Kind.FORWARD, back)
            found.append(there + sum(self._seconds(kind, stage, size) for kind in own for size in sizes))
            there += self._seconds(Kind.FORWARD, stage, least) + self._seconds(back, stage, least)
        return found

    def _own(self, stage: int, sizes: Sequence[int]) -> float:
        kinds = (Kind.FORWARD, Kind.BACKWARD) if self.spec.job.mode == "train" else (Kind.FORWARD,)
        return sum(self._seconds(kind, stage, size) for kind in kinds for size in sizes)

    def _seconds(self, kind: Kind, stage: int, size: int) -> float:
        first, last = self.cuts[stage]
        again = KINDS[kind].hands_back and self.spec.strategy.recompute
        return TASK_SECONDS[kind] + self.slowness * sum(
            self.lines[self.device, each][unit].at(size)
            for each in ((Kind.FORWARD, kind) if again else (kind,))
            for unit in range(first, last)
        )
