"""Partition: where the model is cut into stages, so that the slowest is as fast as possible. Pure.

Contiguous units to stages, by dynamic programming over the units' measured times; or where the user says, by the units'
numbers or by names of modules. On GPUs no stage takes more than there is memory for, where any cut allows it: its
parameters, and activations of as many microbatches as the schedule has in flight there. Where workers have several
stages, cuts are then moved for the busiest worker's sake. Of unequal workers each has its own speed and memory. A unit
has the name of the module with which it begins, and may be called by that of any module that contains it and none
before it: "layer2" begins with the unit "layer2.0".
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.placement import Cuts
from weft.plan.schedules.schedule import Schedule
from weft.scheduler.planning.costs import part_of_largest
from weft.scheduler.planning.crossing import Handovers
from weft.scheduler.planning.working_window import MEMORY_SHARE, layer_cuts
from weft.spec.job_spec import JobSpec
from weft.spec.replica import shown_replicas
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import numbers_by_stage

KERNELS_SHARE = 0.9  # of a GPU's memory for what is counted; arbitrary: the rest is what kernels need beside
Fewer = Callable[[int], str]  # of a number of stages: how it is written
MAX_TOLD_UNITS = 8  # in a sentence that lists them
MAX_TOLD_PROBLEMS = 3  # a sentence each: whoever mends these asks again


class PlanError(ValueError):
    """The job cannot be planned as asked. The text names the field and the remedy."""


class NoRoom(PlanError):
    """What the job needs of some memory is more than there is. The text has the sum and the remedy."""


@dataclass(frozen=True, slots=True)
class Room:
    """In bytes: what there is, and what units take of it."""

    most: Sequence[float]  # of each stage
    own: Sequence[float]  # of each unit, in any case
    kept: Sequence[float] = ()  # of each unit, for each microbatch in flight; none where nobody knows
    in_flight: Sequence[int] = ()  # of each stage, the most microbatches of which autograd keeps anything

    def between(self, bounds: Sequence[int]) -> Callable[[int, int, int], float]:
        """What a stage takes, by its number, between two of the bounds, as a part of what there is for it."""
        most, own = [max(each, 1.0) for each in self.most], [0.0, *accumulate(self.own)]
        if not self.kept:
            return lambda stage, a, b: (own[bounds[b]] - own[bounds[a]]) / most[stage]
        kept, in_flight = [0.0, *accumulate(self.kept)], self.in_flight

        def part(stage: int, a: int, b: int) -> float:
            first, last = bounds[a], bounds[b]
            return (own[last] - own[first] + in_flight[stage] * (kept[last] - kept[first])) / most[stage]

        return part


def cut_for(spec: JobSpec, inspection: Inspection, r: int, schedule: Schedule | None) -> Cuts:
    """Of a replica. inspection: with the job's own sizes. schedule: None of a working window. Errors: PlanError."""
    replica = spec.strategy.replica_list[r]
    units, problems = inspection.units_on(replica.device), inspection.cut_problems
    if schedule is not None:
        numbers = numbers_by_stage(spec.strategy, r, schedule.worker_of)
        room, handovers = _room(spec, inspection, r, schedule), _handovers(spec, inspection, r, schedule)
        slowness = [inspection.slowness_of(replica.device, numbers[stage]) for stage in range(replica.num_stages)]
        fewer = _fewer_in_list(spec.strategy, r)
        cuts = partition(units, replica.num_stages, replica.split, problems, room, handovers, slowness, fewer)
        is_free = replica.split is None and len(set(numbers.values())) < schedule.num_stages
        return even_workers(units, cuts, numbers, problems, room, handovers, slowness) if is_free else cuts
    split = replica.split if replica.split is not None else layer_cuts(units, _allowed_cuts(units, problems))
    return partition(units, len(split) + 1, split, problems)


def _fewer_in_list(strategy: Strategy, r: int) -> Fewer | None:
    """Of a replica that stands in a list, the user's own or a preset's: stages cannot stand beside it."""
    listed = strategy.replicas
    if not isinstance(listed, list):
        return None

    def fewer(most: int) -> str:
        changed = listed[r].model_copy(update={"stages": most, "split": None, "gpus": None})
        return f"fewer in the list: strategy.replicas = {shown_replicas([*listed[:r], changed, *listed[r + 1 :]])}"

    return fewer


def _room(spec: JobSpec, inspection: Inspection, r: int, schedule: Schedule) -> Room | None:
    """On GPUs, of which each of one's stages has as much. Where nobody has looked at what forwards keep, half of it is
    left for that."""
    replica, learns = spec.strategy.replica_list[r], spec.job.mode == "train"
    if replica.device != "gpu" or inspection.device_bytes is None:
        return None
    units, stages = inspection.units_on("gpu"), range(replica.num_stages)
    numbers = numbers_by_stage(spec.strategy, r, schedule.worker_of)
    sharing = Counter(numbers.values())
    each = [(inspection.bytes_of_gpu(numbers[stage]) or 0) / sharing[numbers[stage]] for stage in stages]
    own = [float((1 + learns) * unit.parameter_bytes) for unit in units]
    if not learns or not any(unit.kept_bytes for unit in units):
        return Room([MEMORY_SHARE * most for most in each], own)
    for parameter in inspection.parameters if spec.strategy.update != "cpu" else ():
        if parameter.trained:
            own[parameter.units[0]] += parameter.state_bytes
    part = part_of_largest(spec, inspection, r)
    ones, recomputes = [1 for _ in stages], spec.strategy.recompute
    graphs = [schedule.most_kept(schedule.passes(stage), ones, recomputes=recomputes) for stage in stages]
    kept = [part * unit.kept_bytes for unit in units]
    return Room([KERNELS_SHARE * most for most in each], own, kept, graphs)


def _handovers(spec: JobSpec, inspection: Inspection, r: int, schedule: Schedule) -> Handovers:
    """Cores copy what they send, and read in place. A device's goes through the host's memory, but to itself; a peer
    reads what another has made."""
    replica, learns = spec.strategy.replica_list[r], spec.job.mode == "train"
    values, stages = inspection.values_on(replica.device), range(replica.num_stages)
    if replica.device != "gpu":
        return Handovers(values, inspection.copy_seconds(1), 0.0, [True for _ in stages], learns)
    numbers = numbers_by_stage(spec.strategy, r, schedule.worker_of)
    gpu_of = [numbers[stage] for stage in stages]
    apart, link = [one != other for one, other in pairwise([*gpu_of, -1])], inspection.link_seconds(1)
    return Handovers(values, 0.0 if inspection.peer_access else link, link, apart, learns)


def within_layers(window: int | None, layers: Cuts) -> int | None:
    return None if window is None else min(window, len(layers))


def partition(
    units: Sequence[UnitFacts],
    num_stages: int,
    split: Sequence[int] | Sequence[str] | None = None,
    problems: Mapping[int, str] = MappingProxyType({}),
    room: Room | None = None,
    handovers: Handovers | None = None,
    slowness: Sequence[float] = (),
    fewer: Fewer | None = None,
) -> Cuts:
    """(first, last) of each stage, last exclusive, minimising the slowest stage's forward plus backward time, with what
    it takes to pass values on.

    No cut falls before a unit that has a problem with it, nor between units that share a buffer. split: the user's own
    cuts instead, numbers or names. problems: as in Inspection.cut_problems. room: where every cut has a stage that
    takes more than there is for it, the largest part that one takes is as small as can be. slowness: of each stage's
    worker, what a unit takes it as a multiple of its own seconds; of equal ones none. fewer: how fewer are written,
    where not by `stages`. Errors: PlanError.
    """
    allowed = _allowed_cuts(units, problems)
    if num_stages > len(allowed) + 1:
        raise PlanError(_too_many(units, num_stages, allowed, problems, fewer))
    if split is not None:
        return _given_cuts(units, split, allowed, problems)
    bounds = [0, *allowed, len(units)]
    seconds, last = _seconds_between(units, bounds, handovers, slowness), len(bounds) - 1
    cost = seconds
    if room is not None:
        part = room.between(bounds)
        most = max(1.0, _minimax(last, num_stages, part)[0])

        def cost(stage: int, a: int, b: int) -> float:
            return math.inf if part(stage, a, b) > most else seconds(stage, a, b)

    _, path = _minimax(last, num_stages, cost)
    return tuple((bounds[a], bounds[b]) for a, b in pairwise(path))


def _minimax(last: int, num_stages: int, cost: Callable[[int, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """The least that the costliest stage can cost, and the numbers of the bounds, from 0 to the last, where that is so.
    cost: of a stage, by its number, between two of them."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}  # by the bound where they end, the stages so far
    for stage in range(num_stages):
        behind = num_stages - 1 - stage
        best = {
            b: min((max(costliest, cost(stage, a, b)), (*path, b)) for a, (costliest, path) in best.items() if a < b)
            for b in range(min(best) + 1, last + 1 - behind)  # a cut is left for each of those
        }
    return best[last]


def _seconds_between(
    units: Sequence[UnitFacts], bounds: Sequence[int], handovers: Handovers | None, slowness: Sequence[float]
) -> Callable[[int, int, int], float]:
    """Of a stage, by its number, between two of the bounds."""
    before = [0.0, *accumulate(unit.forward_seconds + unit.backward_seconds for unit in units)]
    handing = None if handovers is None else handovers.between(bounds)

    def seconds(stage: int, a: int, b: int) -> float:
        alone = before[bounds[b]] - before[bounds[a]]
        computing = alone * slowness[stage] if slowness else alone
        return computing if handing is None else computing + handing(stage, a, b)

    return seconds


def even_workers(
    units: Sequence[UnitFacts],
    cuts: Cuts,
    worker_of: Mapping[int, int],
    problems: Mapping[int, str] = MappingProxyType({}),
    room: Room | None = None,
    handovers: Handovers | None = None,
    slowness: Sequence[float] = (),
) -> Cuts:
    """Moves one cut after another to its neighbour, as long as that makes the busiest worker faster, or the slowest
    stage where it makes none slower: the best of such moves each time. So it ends in what no one move betters.
    room, handovers, slowness: as of `partition`."""
    bounds = [0, *_allowed_cuts(units, problems), len(units)]
    between = _seconds_between(units, bounds, handovers, slowness)
    part = (room or Room([math.inf] * len(cuts), [0.0] * len(units))).between(bounds)

    def slowest(path: Sequence[int]) -> tuple[float, float]:
        stages = [between(stage, a, b) for stage, (a, b) in enumerate(pairwise(path))]
        workers = [0.0] * (1 + max(worker_of.values()))
        for stage, seconds in enumerate(stages):
            workers[worker_of[stage]] += seconds
        return max(workers), max(stages)

    def moved(path: Sequence[int]) -> Iterator[Sequence[int]]:
        for place in range(1, len(path) - 1):
            for other in (path[place] - 1, path[place] + 1):
                before, behind = path[place - 1], path[place + 1]
                is_cut = before < other < behind
                if is_cut and max(part(place - 1, before, other), part(place, other, behind)) <= most:
                    yield [*path[:place], other, *path[place + 1 :]]

    path: Sequence[int] = [bounds.index(first) for first, _ in cuts] + [len(bounds) - 1]
    most = max(1.0, *(part(n, *pair) for n, pair in enumerate(pairwise(path))))
    while slowest(better := min(moved(path), key=slowest, default=path)) < slowest(path):
        path = better
    return tuple((bounds[a], bounds[b]) for a, b in pairwise(path))


def _allowed_cuts(units: Sequence[UnitFacts], problems: Mapping[int, str]) -> list[int]:
    return [cut for cut in range(1, len(units)) if cut not in problems and _tied_across(units, cut) is None]


def _tied_across(units: Sequence[UnitFacts], cut: int) -> tuple[int, int] | None:
    """Two units on either side of a cut that share a buffer."""
    ties = ((tied, number) for number, unit in enumerate(units) for tied in unit.tied_to)
    return next(((tied, number) for tied, number in ties if tied < cut <= number), None)


def _too_many(
    units: Sequence[UnitFacts],
    num_stages: int,
    allowed: Sequence[int],
    problems: Mapping[int, str],
    fewer: Fewer | None,
) -> str:
    """With what stands in the way at some of the places where the model cannot be cut, since that can be changed."""
    names = _names(units)
    told: dict[str, str] = {}  # by problem, the first unit that has it
    for cut in sorted(set(range(1, len(units))) - set(allowed)):
        told.setdefault(_problem(units, cut, problems), names[cut])
    reasons = [f"before {name!r:.80}: {problem}" for problem, name in list(told.items())[:MAX_TOLD_PROBLEMS]]
    reasons += _of_repeated(units)
    change = ", or change what stands in the way of more: " + "; ".join(reasons) if reasons else ""
    field = "strategy.stages" if fewer is None else "strategy.replicas: stages"
    most = f"{len(allowed) + 1} stage{'s' if allowed else ''}"
    return (
        f"{field} = {num_stages}, but the model can be cut into at most {most} (units: "
        f"{_listed(name or 'the whole model' for name in names)}); use "
        f"{'fewer stages' if fewer is None else fewer(len(allowed) + 1)}{change}"
    )


def _of_repeated(units: Sequence[UnitFacts]) -> list[str]:
    repeated = [name for unit in units for name in unit.repeated]
    if not repeated:
        return []
    return [f"no stage begins with a module that the step calls several times ({_listed(repeated)}): call it once"]


def _given_cuts(
    units: Sequence[UnitFacts],
    split: Sequence[int] | Sequence[str],
    allowed: Sequence[int],
    problems: Mapping[int, str],
) -> Cuts:
    numbers = _unit_numbers(units, split)
    if refused := sorted(set(numbers) - set(allowed)):
        cut, called = refused[0], dict(zip(numbers, split, strict=True))
        why = f": {_problem(units, cut, problems)}" if 0 < cut < len(units) else f", of {len(units)}"
        where: object = allowed
        if isinstance(called[cut], str):
            near = sorted(sorted(allowed, key=lambda other: abs(other - cut))[:MAX_TOLD_UNITS])
            where = json.dumps([_names(units)[other] for other in near])
        raise PlanError(
            f"strategy.split: the model cannot be cut before unit {called[cut]!r:.80}{why}; it can be before {where}"
        )
    return tuple(pairwise([0, *numbers, len(units)]))


def _problem(units: Sequence[UnitFacts], cut: int, problems: Mapping[int, str]) -> str:
    if cut in problems:
        return problems[cut]
    pair = _tied_across(units, cut)
    assert pair is not None
    names, (tied, number) = [name or "the whole model" for name in _names(units)], pair
    by = dict(zip(units[number].tied_to, units[number].tied_by, strict=False)).get(tied)
    what = f"keep {by!r:.80} between them" if by else "have a buffer in common"
    return (
        f"{names[tied]!r:.80} and {names[number]!r:.80} {what}, which forward may change, and each stage would have a "
        "copy; give each of them its own, make it a plain attribute if it never changes, or cut elsewhere "
        "(strategy.split)"
    )


# --- units by name


def _names(units: Iterable[UnitFacts]) -> list[str]:
    """As the user has them: the child of an nn.Sequential is known by the prefix of its names in the state dict."""
    return [unit.name.removesuffix(".") for unit in units]


def _unit_numbers(units: Sequence[UnitFacts], split: Sequence[int] | Sequence[str]) -> list[int]:
    names = _names(units)
    repeated = {name for unit in units for name in unit.repeated}
    if several := [unit for unit in split if unit in repeated]:
        raise PlanError(
            f"strategy.split: {several[0]!r:.80} is called several times in a step, and a stage begins with a module "
            f"that is called once; give some of {_listed(names[1:])}"
        )
    numbers = [_number_of(names, unit) if isinstance(unit, str) else unit for unit in split]
    for (first, number), (second, next_number) in pairwise(zip(split, numbers, strict=True)):
        if number == next_number:
            raise PlanError(
                f"strategy.split: {first!r:.80} and {second!r:.80} both begin with the unit {names[number]!r:.80}; "
                "give one of them"
            )
        if number > next_number:
            ordered = json.dumps([unit for _, unit in sorted(zip(numbers, split, strict=True))])
            raise PlanError(
                f"strategy.split: {second!r:.80} runs before {first!r:.80}; give them in the order in which they run: "
                f"{ordered}"
            )
    return numbers


def _number_of(names: Sequence[str], wanted: str) -> int:
    numbers = _numbers_by_name(names)
    number = numbers.get(wanted)
    if number is None:
        raise PlanError(f"strategy.split: {_unknown(names, wanted)}")
    if number == 0:
        raise PlanError(
            f"strategy.split: {wanted!r:.80} begins with the model's first unit, and nothing is before it to be cut "
            f"off; give units after it, for example {json.dumps(names[1:2])}"
        )
    return number


def _numbers_by_name(names: Sequence[str]) -> dict[str, int]:
    """Of every unit, and of every module that contains units: that of the first."""
    own = {name: number for number, name in enumerate(names)}
    around = {
        ".".join(parts[:length]): number
        for number, parts in reversed([(number, name.split(".")) for number, name in enumerate(names)])
        for length in range(1, len(parts))
    }
    return around | own


def _unknown(names: Sequence[str], wanted: str) -> str:
    inside = next((number for number, name in enumerate(names) if name and wanted.startswith(f"{name}.")), None)
    if inside is not None:
        return (
            f"{wanted!r:.80} would be inside the unit {names[inside]!r:.80}, which is not cut; give a whole unit, for "
            f"example {json.dumps(names[max(inside, 1)])}"
        )
    if near := _near(names, wanted):
        return f"no unit is called {wanted!r:.80}; did you mean {' or '.join(map(repr, near))}?"
    return f"no unit is called {wanted!r:.80}; give some of {_listed(names[1:])}"


def _near(names: Sequence[str], wanted: str) -> list[str]:
    """Names that a stage may be called by: first those that lack a part at the front, or have one more."""
    known = [name for name, number in _numbers_by_name(names).items() if number > 0]
    parts = [name for name in known if f".{name}".endswith(f".{wanted}") or f".{wanted}".endswith(f".{name}")]
    return (parts or difflib.get_close_matches(wanted, known))[:3]


def _listed(names: Iterable[str]) -> str:
    first = [f"{name:.80}" for name in names]
    return ", ".join([*first[:MAX_TOLD_UNITS], *(["…"] if len(first) > MAX_TOLD_UNITS else [])])
