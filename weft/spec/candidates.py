"""Candidates: the strategies among which `preset = "auto"` chooses, for a job on a host. Pure: the worker that inspects
has to know them, too.

    one process          all threads, or the daemon's
    pipeline             k workers, every schedule, growing numbers of microbatches
    replicas             r of them, synchronised bucket by bucket
    both                 r pipelines of s workers
    fewer, of several    replicas, or a pipeline by 1f1b, that have all cores between them
    cores each
    with GPUs            one, updated there, by the CPU or by both; one that streams its layers; several, as replicas or
                         as a pipeline; all, or one, beside a CPU replica

Of a job that nobody has given a strategy (`weft run`, without [strategy]) there are few, whose workers each have the
whole model: what shows only after hours in a pipeline cannot go wrong.

    one worker           as without a choice; so it goes on where another one fails that could not
    one process          all threads
    replicas             r of them, where a batch may be divided
    with GPUs            one, updated there, by the CPU or by both; one that streams its layers; several, as replicas

No GPU has several streams that compute in a candidate: a prediction takes each to be as fast as a GPU of its own. The
several stages of an interleaved schedule have one stream.

Where there is no room for one, it is a candidate with recompute, too, and with its batch in parts.

All of them are synchronous: they train what the plain loop trains, to rounding. They differ in how a batch is divided,
and so in the dropout that its samples see. What the user has given each of them has, and a row that cannot be beside it
is none. Compiled units take a compiler's time for each size of microbatch, so there a batch has few numbers of parts.

Of a job on devices it is asked, too, what the host would bring beside them (`beside_devices`); that is told, and nobody
chooses by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from weft.spec.admission import problem_of_spec
from weft.spec.job_spec import JobSpec
from weft.spec.presets import AUTO, PRESETS
from weft.spec.replica import Replica
from weft.spec.schedule_text import DYNAMIC, MEASURED, SCHEDULE_NAMES, STAGES_PER_WORKER
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import Host, threads_of, workers_needed

MOST_ORDERED: Final = 64  # forwards of a pipeline whose order is made, in a choice: some tenths of a second; arbitrary
MICROBATCHES: Final = (2, 4, 8, 16, 32)  # of a pipeline; beyond that a call costs more than a bubble
COMPILED_PARTS: Final = (1, 2, 4)  # of a batch, where units are compiled; and as many as there are workers
EACH_COUNT: Final = 4  # numbers of workers that are all tried; above it powers of two, and all there are

_GPU, _CPU = {"device": "gpu"}, {"device": "cpu"}
_ONE_GPU: Final = ("zero-offload", "cotrain", "stronghold")
_UPDATERS: Final[tuple[dict[str, Any], ...]] = (
    {"update": "cpu"},
    {"update": "cpu", "sync": "coarse"},
    {"update": "balanced"},
)
_OF_PASSES: Final = frozenset({"schedule", "stages_per_worker", "threads"})
_OF_ROLES: Final = frozenset(
    {"preset", "replicas", "microbatches", "share", "shares", "staleness", "staleness_warmup", "update"}
)
_PIPELINED: Final = tuple(name for name in SCHEDULE_NAMES if name not in ("model-parallel", MEASURED, DYNAMIC))


def candidates(spec: JobSpec, host: Host) -> tuple[JobSpec, ...]:
    """The simplest first; of a spec that gives its strategy that one alone. None where no worker fits any of them."""
    if not spec.strategy.is_auto:
        return (spec,)
    given = given_by(spec)
    found: list[JobSpec] = []
    for row in _rows_by_default(host) if is_undecided(spec) else _rows(host):
        candidate = _with(spec, row | given)
        if (
            candidate is not None
            and candidate not in found
            and _fits(candidate.strategy, host, is_chosen="threads" not in given)
            and ("microbatches" in given or _has_few_sizes(candidate.strategy, host))
        ):
            found.append(candidate)
    return tuple(found)


def given_by(spec: JobSpec) -> dict[str, Any]:
    """The axes that are the user's, beside auto."""
    return {axis: value for axis, value in spec.strategy.model_dump(exclude_none=True).items() if axis != "preset"}


def recomputing(candidate: JobSpec) -> JobSpec | None:
    """A candidate that keeps less; None where it does already, or cannot."""
    return None if candidate.strategy.recompute else _with(candidate, given_by(candidate) | {"recompute": True})


def parted(candidate: JobSpec, spec: JobSpec) -> list[JobSpec]:
    """A candidate of the spec with its batch in parts, the fewest first: each keeps less. None of a pipeline, which has
    them anyway; nor of compiled units, of which a compiler would have to make others for each size."""
    strategy = candidate.strategy
    is_whole = all(count == 1 for count in strategy.microbatch_counts)
    is_pipeline = any(replica.num_stages > 1 for replica in strategy.replica_list)
    if "microbatches" in given_by(spec) or not is_whole or is_pipeline or strategy.compile is True:
        return []
    found = (_with(candidate, given_by(candidate) | {"microbatches": count}) for count in MICROBATCHES)
    return [each for each in found if each is not None and each.strategy.division != strategy.division]


def with_parts(spec: JobSpec, host: Host) -> list[JobSpec]:
    """The candidates, and what is looked at besides since a batch may turn out to have no room."""
    own = candidates(spec, host)
    return [*own, *(each for simplest in own[:1] for each in parted(simplest, spec))]


def with_units(spec: JobSpec, *, compiled: bool) -> JobSpec:
    """Where `compile = "auto"` leaves that open."""
    return spec.model_copy(update={"strategy": spec.strategy.model_copy(update={"compile": compiled})})


def or_auto(spec: JobSpec) -> JobSpec:
    """With the strategy that it gives, be it an empty table; with one that is to be chosen, where it gives none."""
    if "strategy" in spec.model_fields_set:
        return spec
    return spec.model_copy(update={"strategy": Strategy(preset=AUTO), "by_default": True})


def is_undecided(spec: JobSpec) -> bool:
    """Whether a strategy is to be chosen that nobody has asked for."""
    return bool(spec.by_default) and spec.strategy.is_auto


def on_one_worker(spec: JobSpec) -> JobSpec:
    """As it is where no strategy is given, and none is chosen."""
    return spec.model_copy(update={"strategy": Strategy(), "by_default": None})


def instead_of(spec: JobSpec, host: Host) -> dict[str, int] | None:
    """By kind, the workers of a job on one, where it has another strategy, or is to have one, that nobody gave it."""
    alone = on_one_worker(spec)
    return workers_wanted(alone, host) if spec.by_default and spec.strategy != alone.strategy else None


def looked_at(spec: JobSpec, host: Host) -> tuple[JobSpec, ...]:
    """What an inspection finds out the times and shapes of: the candidates; and where a job on devices is planned only,
    what tells what the host would bring beside them."""
    own = candidates(spec, host)
    if spec.plan_for is None or spec.strategy.is_auto or not _devices(spec.strategy):
        return own
    beside = beside_devices(spec, host, all_threads=host.workers > 1)
    return own if beside is None else (*own, *beside.different)


def workers_wanted(spec: JobSpec, host: Host) -> dict[str, int]:
    """By kind, those that a job holds until its plan is made: as many as any needs that is looked at."""
    needs = [workers_needed(each.strategy, host) for each in looked_at(spec, host)]
    most = {kind: max((need.get(kind, 0) for need in needs), default=0) for kind in ("cpu", "gpu", "loader")}
    return {kind: count for kind, count in most.items() if count} or workers_needed(spec.strategy, host)


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideDevices:
    """Strategies of a job on devices, by what the host does in them."""

    alone: JobSpec  # it loads, and launches
    replica: tuple[JobSpec, ...]  # it computes a part of each batch
    updater: tuple[JobSpec, ...]  # it updates parameters
    loader: tuple[JobSpec, ...]  # it loads with more processes than the job has
    second_job: tuple[JobSpec, ...]  # without devices: what another job like this one would have

    @property
    def different(self) -> tuple[JobSpec, ...]:
        """Those of which an inspection has to find out something: more loaders take as long as one."""
        return (self.alone, *self.replica, *self.updater, *self.second_job)


def beside_devices(spec: JobSpec, host: Host, *, all_threads: bool) -> BesideDevices | None:
    """Its devices, or one, where it has none. None without any, or where layers stream through one: the host updates
    these in any case. spec: its strategy is not auto. all_threads: the host's times with all threads are known. Stages
    that share a GPU count as one, as in candidates."""
    strategy = spec.strategy
    devices = [_alone(replica) for replica in _devices(strategy)] or [_GPU] * min(1, host.gpus)
    if not devices or any(replica.working_window for replica in strategy.replica_list):
        return None
    given = {axis: value for axis, value in strategy.model_dump(exclude_none=True).items() if axis not in _OF_ROLES}
    alone = _with(spec, given | {"replicas": devices})
    if alone is None:
        return None

    def each_of(*rows: dict[str, Any]) -> tuple[JobSpec, ...]:
        return tuple(found for row in rows if (found := _with(spec, given | row)) is not None)

    loaders = [count for count in _counts(host.workers + host.gpus) if count > strategy.loaders]
    whole = {axis: value for axis, value in given.items() if axis not in _OF_PASSES}
    return BesideDevices(
        alone=alone,
        replica=each_of(*_beside(devices, all_threads=all_threads)),
        updater=each_of(*({"replicas": devices} | row for row in _UPDATERS)),
        loader=each_of(*({"replicas": devices, "loaders": count} for count in loaders)),
        second_job=tuple(
            found
            for row in _rows(replace(host, gpus=0))
            if row.keys() <= ({"threads", "replicas"} if all_threads else {"replicas"})
            and (found := _with(spec, whole | row)) is not None
        ),
    )


def all_threads(spec: JobSpec, host: Host) -> int | None:
    """Of those that compute with all threads, where others that are looked at do not: how many these are."""
    counts = {threads_of(each.strategy, host) for each in looked_at(spec, host)}
    return max(counts) if len(counts) > 1 else None


def _with(spec: JobSpec, axes: Mapping[str, Any]) -> JobSpec | None:
    try:
        candidate = spec.model_copy(update={"strategy": Strategy.model_validate(axes)})
    except ValueError:
        return None
    return candidate if problem_of_spec(candidate) is None else None


def _fits(strategy: Strategy, host: Host, *, is_chosen: bool) -> bool:
    """is_chosen: its threads; then stages on the CPU have all cores between them, and more than one each."""
    if is_chosen and strategy.threads == "all":
        num_computing = sum(replica.num_stages for replica in strategy.replica_list if replica.device == "cpu")
        threads = threads_of(strategy, host)
        if threads == host.threads or num_computing * threads != host.workers * host.threads:
            return False
    needed = workers_needed(strategy, host)
    return needed.get("cpu", 0) <= host.workers and needed.get("gpu", 0) <= host.gpus


def _has_few_sizes(strategy: Strategy, host: Host) -> bool:
    """Of microbatches, together with the others: kernels are made for each."""
    return strategy.compile is not True or sum(strategy.division[1]) in (*COMPILED_PARTS, host.workers)


def _rows_by_default(host: Host) -> Iterator[dict[str, Any]]:
    yield {}
    if host.workers > 1:
        yield {"threads": "all"}
    yield from ({"replicas": count} for count in _counts(host.workers))
    if host.gpus:
        yield from _whole_on_gpus(host)


def _rows(host: Host) -> Iterator[dict[str, Any]]:
    if host.workers > 1:
        yield {"threads": "all"}
    yield {}
    for count in _counts(host.workers):
        yield {"replicas": count}
        yield from _pipelines(count)
    for count in _counts(host.workers // 2):
        yield {"replicas": count, "threads": "all"}
        for microbatches in MICROBATCHES:
            yield {"stages": count, "microbatches": microbatches, "threads": "all"}
    for replicas in _counts(host.workers // 2):
        for stages in _counts(host.workers // replicas):
            for microbatches in MICROBATCHES:
                yield {"replicas": replicas, "stages": stages, "microbatches": microbatches}
    if host.gpus:
        yield from _on_gpus(host)


def _beside(devices: Sequence[dict[str, Any]], *, all_threads: bool) -> Iterator[dict[str, Any]]:
    """Replicas on devices and one on the CPU, with either way to sum."""
    for threads in ({"threads": "all"}, {}) if all_threads else ({},):
        for sync in ("fine", "coarse"):
            yield {"replicas": [*devices, _CPU], "share": "adaptive", "sync": sync} | threads


def _devices(strategy: Strategy) -> list[Replica]:
    return [replica for replica in strategy.replica_list if replica.device == "gpu"]


def _alone(replica: Replica) -> dict[str, Any]:
    """A replica whose GPUs have a stage each."""
    own = replica.model_dump(exclude_none=True)
    if replica.gpus is None or replica.gpus == replica.num_stages:
        return own
    return _GPU | {"stages": replica.gpus, "microbatches": replica.microbatches if replica.gpus > 1 else 1}


def _counts(most: int) -> list[int]:
    """Of workers, from two on."""
    powers = {1 << exponent for exponent in range(1, most.bit_length())}
    return sorted({count for count in {*range(2, EACH_COUNT + 1), *powers, most} if 2 <= count <= most})


def _pipelines(num_workers: int) -> Iterator[dict[str, Any]]:
    for schedule in (*_PIPELINED, MEASURED):
        for microbatches in MICROBATCHES:
            if schedule == MEASURED and num_workers * microbatches > MOST_ORDERED:
                continue
            stages = num_workers * STAGES_PER_WORKER.get(schedule, 1)
            yield {"stages": stages, "schedule": schedule, "microbatches": microbatches}


def _whole_on_gpus(host: Host) -> Iterator[dict[str, Any]]:
    """Each has the whole model."""
    yield {"replicas": [_GPU]}
    for name in _ONE_GPU:
        yield dict(PRESETS[name].axes)
    yield from ({"replicas": [_GPU] * count} for count in _counts(host.gpus))


def _on_gpus(host: Host) -> Iterator[dict[str, Any]]:
    yield from _whole_on_gpus(host)
    for count in dict.fromkeys((1, host.gpus)):
        yield from _beside([_GPU] * count, all_threads=host.workers > 1)
    for count in _counts(host.gpus):
        for pipeline in _pipelines(count):
            stages, others = pipeline["stages"], {axis: pipeline[axis] for axis in ("schedule", "microbatches")}
            yield {"replicas": [_GPU | {"stages": stages}], **others}
