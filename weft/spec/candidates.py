"""Candidates: the strategies among which `preset = "auto"` chooses, for a job on a host. Pure: the worker that inspects
has to know them, too.

    one process          all threads, or the daemon's
    pipeline             k workers, every schedule, growing numbers of microbatches
    replicas             r of them, synchronised bucket by bucket
    both                 r pipelines of s workers
    with GPUs            one, updated there, by the CPU or by both; one that streams its layers; several, as replicas or
                         as a pipeline; one beside a CPU replica

All of them are synchronous: they train what the plain loop trains, to rounding. They differ in how a batch is divided,
and so in the dropout that its samples see. What the user has given each of them has, and a row that cannot be beside it
is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from weft.spec.admission import problem_of_spec
from weft.spec.job_spec import JobSpec
from weft.spec.presets import PRESETS
from weft.spec.schedule_text import DYNAMIC, MEASURED, SCHEDULE_NAMES, STAGES_PER_WORKER
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import Host, threads_of, workers_needed

MICROBATCHES: Final = (2, 4, 8, 16, 32)  # of a pipeline; beyond that a call costs more than a bubble
EACH_COUNT: Final = 4  # numbers of workers that are all tried; above it powers of two, and all there are

_GPU = {"device": "gpu"}
_ONE_GPU: Final = ("zero-offload", "cotrain", "stronghold", "hybrid-fine", "hyscale")
_PIPELINED: Final = tuple(name for name in SCHEDULE_NAMES if name not in ("model-parallel", MEASURED, DYNAMIC))


def candidates(spec: JobSpec, host: Host) -> tuple[JobSpec, ...]:
    """The simplest first; of a spec that gives its strategy that one alone. None where no worker fits any of them."""
    if not spec.strategy.is_auto:
        return (spec,)
    given = spec.strategy.model_dump(exclude_none=True)
    del given["preset"]
    found: list[JobSpec] = []
    for row in _rows(host):
        candidate = _with(spec, row | given)
        if (
            candidate is not None
            and candidate not in found
            and _fits(candidate.strategy, host, is_chosen="threads" not in given)
        ):
            found.append(candidate)
    return tuple(found)


def workers_wanted(spec: JobSpec, host: Host) -> dict[str, int]:
    """By kind, those that a job holds until its plan is made: as many as any of its candidates needs."""
    if not spec.strategy.is_auto:
        return workers_needed(spec.strategy, host)
    needs = [workers_needed(each.strategy, host) for each in candidates(spec, host)]
    most = {kind: max((need.get(kind, 0) for need in needs), default=0) for kind in ("cpu", "gpu", "loader")}
    return {kind: count for kind, count in most.items() if count} or workers_needed(spec.strategy, host)


def all_threads(spec: JobSpec, host: Host) -> int | None:
    """Of the candidates that compute with all threads, where others do not: how many these are."""
    counts = {threads_of(each.strategy, host) for each in candidates(spec, host)}
    return max(counts) if len(counts) > 1 else None


def _with(spec: JobSpec, axes: Mapping[str, Any]) -> JobSpec | None:
    try:
        candidate = spec.model_copy(update={"strategy": Strategy.model_validate(axes)})
    except ValueError:
        return None
    return candidate if problem_of_spec(candidate) is None else None


def _fits(strategy: Strategy, host: Host, *, is_chosen: bool) -> bool:
    """is_chosen: its threads; then what a stage takes has to be known with as many, those of one worker or of all."""
    if is_chosen and strategy.threads == "all" and threads_of(strategy, host) != host.workers * host.threads:
        return False
    needed = workers_needed(strategy, host)
    return needed.get("cpu", 0) <= host.workers and needed.get("gpu", 0) <= host.gpus


def _rows(host: Host) -> Iterator[dict[str, Any]]:
    if host.workers > 1:
        yield {"threads": "all"}
    yield {}
    for count in _counts(host.workers):
        yield {"replicas": count}
        yield from _pipelines(count)
    for replicas in _counts(host.workers // 2):
        for stages in _counts(host.workers // replicas):
            for microbatches in MICROBATCHES:
                yield {"replicas": replicas, "stages": stages, "microbatches": microbatches}
    if host.gpus:
        yield from _on_gpus(host.gpus)


def _counts(most: int) -> list[int]:
    """Of workers, from two on."""
    powers = {1 << exponent for exponent in range(1, most.bit_length())}
    return sorted({count for count in {*range(2, EACH_COUNT + 1), *powers, most} if 2 <= count <= most})


def _pipelines(num_workers: int) -> Iterator[dict[str, Any]]:
    for schedule in _PIPELINED:
        for microbatches in MICROBATCHES:
            stages = num_workers * STAGES_PER_WORKER.get(schedule, 1)
            yield {"stages": stages, "schedule": schedule, "microbatches": microbatches}


def _on_gpus(num_gpus: int) -> Iterator[dict[str, Any]]:
    yield {"replicas": [_GPU]}
    for name in _ONE_GPU:
        yield dict(PRESETS[name].axes)
    for count in _counts(num_gpus):
        yield {"replicas": [_GPU] * count}
        for pipeline in _pipelines(count):
            stages, others = pipeline["stages"], {axis: pipeline[axis] for axis in ("schedule", "microbatches")}
            yield {"replicas": [_GPU | {"stages": stages}], **others}
