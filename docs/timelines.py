"""Draws the timelines of strategies.md: a made-up model under each strategy, run by the scheduler in virtual time.

python docs/timelines.py            writes docs/timelines/*.svg
python docs/timelines.py --check    exits with 1 and names those that are not current

The plans are real ones and so is the order of what happens; the times are made up so that the pictures are clear. A
batch takes a CPU 6 ms forward and 12 ms backward, all parameters (24 MiB) are updated in 9 ms, and 8 MiB are copied in
1 ms. A device computes as fast as a CPU. Where CPU and device share a batch it is three times as fast, which the shares
follow, and a batch is three times the work.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.metrics.views.timeline import Bar, bar_label, timeline_svg
from weft.plan.division import divide
from weft.plan.graph import Lane, Task
from weft.plan.inspection import Inspection, ParameterFacts, TensorFacts, UnitFacts, ValueFacts
from weft.plan.kinds import KINDS, Kind
from weft.plan.placement import COMPUTE, DOWN, FETCH, LOAD, SYNC, UP
from weft.plan.plan import Plan
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.planning.simulator import Milestones, Simulation, Span, simulate
from weft.spec.job_spec import JobSpec
from weft.spec.presets import PRESETS

FOLDER = Path(__file__).resolve().parent / "timelines"

NUM_UNITS = 6
FORWARD_SECONDS, BACKWARD_SECONDS = 1e-3, 2e-3  # of each unit, for a whole batch
UPDATE_SECONDS = 9e-3  # of all parameters
LOAD_SECONDS = 3e-3  # of a whole batch
UNIT_BYTES = 4 << 20
BUCKET_MIB = 8.0  # two units; the first bucket is one, since planners keep it small
COPY_BYTES_PER_SECOND = (8 << 20) / 1e-3
BATCH_SIZE = 840  # divides evenly by whatever the strategies here divide it by
SAMPLE_FLOATS = 1500
HYBRID_DEVICE_SPEED = 3.0  # in CPUs
HYBRID_WORK = 3.0  # of a batch, in batches of the others

NUM_RUN, FIRST_DRAWN = 20, 8  # iterations: far from the filling of the pipeline and from the end
DRAWN_SECONDS = 42e-3


@dataclass(frozen=True, kw_only=True)
class Picture:
    """strategy: a spec's [strategy] table. device_speed: of its compute, in CPUs. work: of a batch, in usual ones."""

    title: str
    strategy: Mapping[str, Any]
    device_speed: float = 1.0
    work: float = 1.0


def _of_preset(name: str) -> Picture:
    if PRESETS[name].axes.get("share") != "adaptive":
        return Picture(title=name, strategy={"preset": name})
    shares = [HYBRID_DEVICE_SPEED, 1.0]  # where they come to rest
    return Picture(
        title=name,
        strategy={"preset": name, "shares": shares},
        device_speed=HYBRID_DEVICE_SPEED,
        work=HYBRID_WORK,
    )


def _changed(preset: str, title: str, **axes: Any) -> Picture:
    return Picture(title=f"{preset} {title}", strategy={"preset": preset} | axes)


PICTURES: Mapping[str, Picture] = {name: _of_preset(name) for name in PRESETS} | {
    "ddp-coarse": _changed("ddp", "with sync = coarse", sync="coarse"),
    "ddp-accumulated": _changed("ddp", "with microbatches = 2", microbatches=2),
    "ddp-clipped": _changed("ddp", "with clip_norm, whose updates wait for the norm", clip_norm=1.0),
    "1f1b-clipped": _changed("1f1b", "with clip_norm, whose updates are speculative", clip_norm=1.0),
    "zero-offload-clipped": _changed("zero-offload", "with clip_norm, whose updates are speculative", clip_norm=1.0),
    "zero-offload-coarse": _changed("zero-offload", "with sync = coarse", sync="coarse"),
    "zero-offload-delayed": _changed("zero-offload", "with staleness = 1", staleness=1),
    "parameter-server-fresh": _changed("parameter-server", "with staleness = 0", staleness=0),
}


def pictures() -> dict[str, str]:
    """Each file's text by its name."""
    return {f"{name}.svg": svg(picture) for name, picture in PICTURES.items()}


def svg(picture: Picture) -> str:
    spec = JobSpec.parse(
        {
            "job": {"entry": "made_up.py:workload", "batch_size": BATCH_SIZE, "steps": 1},
            "strategy": {"bucket_mib": BUCKET_MIB, **picture.strategy},
            "directory": "/",
        }
    )
    inspection = _inspection(spec, picture.work)
    plan = make_plan(spec, inspection, shared_bytes_free=1 << 40)
    milestones = _milestones(plan, inspection)
    seconds = _seconds(plan, picture.device_speed)
    simulation = simulate(plan, seconds, iterations=NUM_RUN, milestones=milestones)
    posted = _posted(simulation, milestones)
    lanes = {
        name: [
            _bar(plan.graph.tasks[span.task], posted.get((span.task, span.iteration), span))
            for span in simulation.spans[lane]
        ]
        for lane, name in _rows(plan).items()
    }
    title = f"{picture.title}: {simulation.iteration_seconds * 1e3:.1f} ms for an iteration"
    return timeline_svg(lanes, title=title, seconds=_window(plan, simulation))


def _inspection(spec: JobSpec, work: float) -> Inspection:
    strategy = spec.strategy
    parts = divide(BATCH_SIZE, strategy.share_list, strategy.microbatch_counts)
    largest = max(part.size for replica in parts for part in replica)
    of_batch = largest / BATCH_SIZE  # an inspection measures the largest microbatch
    units = [
        UnitFacts(
            name=f"{number}.",
            parameter_bytes=UNIT_BYTES,
            buffer_bytes=0,
            forward_seconds=FORWARD_SECONDS * of_batch * work,
            backward_seconds=BACKWARD_SECONDS * of_batch * work,
        )
        for number in range(NUM_UNITS)
    ]
    values = [
        ValueFacts(
            name=f"{number}",
            maker=number,
            readers=(number + 1,),
            dtype="float32",
            itemsize=4,
            shapes={largest: (largest, 8)},
            differentiable=True,
        )
        for number in range(NUM_UNITS - 1)
    ]
    parameters = [
        ParameterFacts(
            units=(number,), num_elements=UNIT_BYTES // 4, dtype="float32", itemsize=4, trained=True, group=0
        )
        for number in range(NUM_UNITS)
    ]
    return Inspection(
        units=tuple(units),
        values=tuple(values),
        input=TensorFacts(dtype="float32", itemsize=4, shapes={largest: (largest, SAMPLE_FLOATS)}),
        target=TensorFacts(dtype="int64", itemsize=8, shapes={largest: (largest,)}),
        num_train=BATCH_SIZE,
        num_validation=0,
        load_seconds=LOAD_SECONDS * of_batch,
        update_seconds=UPDATE_SECONDS,
        metrics=(),
        parameters=tuple(parameters),
        copy_bytes_per_second=COPY_BYTES_PER_SECOND,
        link_bytes_per_second=COPY_BYTES_PER_SECOND,  # beside what the device computes
    )


def _seconds(plan: Plan, device_speed: float) -> list[float]:
    def speed(task: Task) -> float:
        on_device = plan.workers[task.lane.worker] == "gpu"
        return device_speed if on_device and task.kind in (Kind.FORWARD, Kind.BACKWARD) else 1.0

    return [seconds / speed(task) for seconds, task in zip(plan.task_seconds, plan.graph.tasks, strict=True)]


def _milestones(plan: Plan, inspection: Inspection) -> Milestones:
    """When, in the last backward of a stage, each of its buckets is complete: once backward is through its first unit.

    Backward begins with a stage's last unit, so that is the part of its time that the unit and those behind it take.
    """
    if plan.synchronisation is None:
        return {}
    buckets = {bucket.index: bucket for bucket in plan.synchronisation.buckets}
    units = {(stage.replica, stage.stage): (stage.first, stage.last) for stage in plan.stages}
    last = {(t.replica, t.stage): t.id for t in plan.graph.tasks if t.kind is Kind.BACKWARD}
    milestones: dict[int, dict[int, float]] = {task: {} for task in last.values()}
    for task in plan.graph.tasks:
        if task.kind is Kind.GRAD:
            begin, end = units[task.replica, task.stage]
            unit = min(u for place in buckets[task.bucket].places for u in inspection.parameters[place.parameter].units)
            seconds = [each.backward_seconds for each in inspection.units[begin:end]]
            milestones[last[task.replica, task.stage]][task.id] = sum(seconds[unit - begin :]) / sum(seconds)
    return milestones


def _posted(simulation: Simulation, milestones: Milestones) -> dict[tuple[int, int], Span]:
    """By task and iteration, each milestone where it is posted; its turn in the lane comes later."""
    posted = {}
    for span in (span for spans in simulation.spans.values() for span in spans):
        for milestone, part in milestones.get(span.task, {}).items():
            when = span.start + part * (span.end - span.start)
            posted[milestone, span.iteration] = Span(task=milestone, iteration=span.iteration, start=when, end=when)
    return posted


def _rows(plan: Plan) -> dict[Lane, str]:
    """The lanes' names, as a daemon's workers are named; a worker's own below each other, from compute outwards."""
    order = [COMPUTE, FETCH, DOWN, SYNC, UP, LOAD]
    names = [f"{kind}-{plan.workers[:position].count(kind)}" for position, kind in enumerate(plan.workers)]
    lanes = sorted(plan.graph.programs, key=lambda lane: (lane.worker, order.index(lane.name.split("-")[0]), lane.name))
    return {lane: f"{names[lane.worker]}/{lane.name}" for lane in lanes}


def _bar(task: Task, span: Span) -> Bar:
    return Bar(
        start=span.start,
        end=span.end,
        kind=KINDS[task.kind].mode,
        label=bar_label(task.kind, task.microbatch, task.bucket),
        iteration=span.iteration,
        detail=str(task),
    )


def _window(plan: Plan, simulation: Simulation) -> tuple[float, float]:
    """As long in every picture, so that they can be laid beside each other; from the start of an iteration."""
    start = min(
        span.start
        for spans in simulation.spans.values()
        for span in spans
        if span.iteration == FIRST_DRAWN and plan.graph.tasks[span.task].kind is Kind.FORWARD
    )
    return start, start + DRAWN_SECONDS


def main() -> int:
    stale = {name: text for name, text in pictures().items() if not _is_current(FOLDER / name, text)}
    left = sorted({path.name for path in FOLDER.glob("*.svg")} - {f"{name}.svg" for name in PICTURES})
    if "--check" in sys.argv[1:]:
        if stale or left:
            print(f"not current: {', '.join([*stale, *left])}; run python docs/timelines.py", file=sys.stderr)
        return 1 if stale or left else 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in stale.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    for name in left:
        (FOLDER / name).unlink()
    return 0


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
