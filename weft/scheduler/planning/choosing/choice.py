"""Choice: of a job's candidates the one that is predicted to be fastest. Pure.

    candidates ─▶ what each takes at least ─▶ the most promising first: plan, simulate ─▶ the fastest, or a simpler one
                                              those that cannot be faster are left out    that is as good

A prediction has what the inspection measured of each unit, alone, with the candidate's threads; and what passes between
tasks. Lanes that compute at the same time share caches and memory, which no measurement of one of them shows: so what
is as good within AS_GOOD is decided for the simpler candidate, one process first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from weft.plan.inspection import Inspection
from weft.plan.plan import Plan
from weft.quantities import duration, size
from weft.quantities import number as in_digits
from weft.scheduler.planning.choosing.bounds import least_seconds
from weft.scheduler.planning.choosing.resting import comes_to_rest, rested
from weft.scheduler.planning.choosing.titles import title_of
from weft.scheduler.planning.costs import PlannedJob, largest_microbatch
from weft.scheduler.planning.measured_costs import MeasuredCosts
from weft.scheduler.planning.outlook import Outlook, gradient_milestones, outlook_of
from weft.scheduler.planning.partition import NoRoom, PlanError
from weft.scheduler.planning.plan_notes import told_of_loss
from weft.scheduler.planning.resized import was_looked_at, why_refused
from weft.scheduler.planning.simulator import Simulation, SimulationError, simulate
from weft.spec.candidates import candidates, given_by, is_undecided, on_one_worker, parted, recomputing
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import threads_of

AS_GOOD: Final = 1.02  # times the shortest prediction: closer is beyond what the measured times are good for
WORTH_IT: Final = 1.1  # in its place where nobody has asked for a choice: half of all predictions are 5 % off or less
TAKEN: Final = 3.0  # times; arbitrary: on two free cores 0.9 to 1.1 were measured, with others there 16 to 250
WAKE_SECONDS: Final = 25e-6  # from a post to the start of who waits for it; half of a round trip, see Board
LOST_SECONDS: Final = 5e-6  # of a lane for each task, to reports and dispatches; found on one machine
MAX_TOLD: Final = 3  # runners-up, in a sentence

_BY_DEFAULT: Final = "no [strategy]"
_NONE_FITS: Final = (
    "strategy.preset = 'auto': no candidate has the axes that are given and fits this daemon's workers; give fewer "
    "axes, or start the daemon with more --workers"
)

MakePlan = Callable[..., Plan]  # make_plan, with this machine's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """A candidate."""

    spec: JobSpec
    title: str
    least_seconds: float  # of an iteration
    seconds: float | None = None  # predicted; None where it cannot be faster, or cannot be
    memory_bytes: int | None = None  # of the worker that needs most; None as above
    why_not: str | None = None  # it cannot be planned
    lacks_room: bool = False  # for that


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    spec: JobSpec
    inspection: Inspection  # by which it was chosen
    plan: Plan
    outlook: Outlook
    simulation: Simulation
    considered: tuple[Considered, ...]  # the fastest first, then those that were not simulated
    lines: tuple[str, ...]  # why it is this one; none where there was nothing to choose


def choose(spec: JobSpec, inspection: Inspection, make: MakePlan) -> Choice:
    """Errors: PlanError, that of the first candidate where none can be."""
    if not spec.strategy.is_auto:
        only = Considered(spec=spec, title=title_of(spec.strategy, inspection.host), least_seconds=0.0)
        return _chosen(only, inspection, make, [only], chooses=False)
    if not is_undecided(spec):
        return _best(spec, inspection, make, AS_GOOD)
    return _choose_by_default(spec, inspection, make)


def _choose_by_default(spec: JobSpec, inspection: Inspection, make: MakePlan) -> Choice:
    """Nobody has asked for it, so it does not refuse what one worker could do."""
    why, free, lines = inspection.unchosen, inspection.host, list[str]()
    if why is None and free.gpus and inspection.without_gpus:
        free = dataclasses.replace(free, gpus=0)
        lines.append(f"{_BY_DEFAULT}: GPUs are left alone, since {inspection.without_gpus}")
    taken = None if why else _why_cores_are_taken(inspection)
    if taken is not None and free.gpus:
        free = dataclasses.replace(free, workers=1)
        lines.append(f"{_BY_DEFAULT}: no more than one CPU worker, since {taken}")
    else:
        why = why or taken
    if why is None:
        try:
            best = _best(spec, dataclasses.replace(inspection, host=free), make, WORTH_IT)
            return _telling(dataclasses.replace(best, inspection=inspection), lines)
        except PlanError as error:
            why = str(error)
    lines.insert(0, f"{_BY_DEFAULT}: one worker, since {why}")
    return _telling(choose(on_one_worker(spec), inspection, make), lines)


def _telling(choice: Choice, lines: Sequence[str]) -> Choice:
    plan = dataclasses.replace(choice.plan, notes=(*lines, *choice.plan.notes))
    return dataclasses.replace(choice, plan=plan, lines=(*choice.lines, *lines))


def _best(spec: JobSpec, inspection: Inspection, make: MakePlan, as_good: float) -> Choice:
    for_memory = spec.plan_for == "memory"
    considered = consider(spec, inspection, make, prunes=not for_memory)
    best = least_memory_of(considered) if for_memory else best_of(considered, as_good)
    if best is None:
        raise PlanError(next((each.why_not for each in considered if each.why_not), _NONE_FITS))
    return _chosen(best, inspection, make, considered, chooses=True)


def _why_cores_are_taken(inspection: Inspection) -> str | None:
    """As a reason; None where they seem to be the job's own. Threads wait for each other at the end of each operation,
    and one of them for whoever else is on its core; so would replicas, which no prediction knows."""
    known = inspection.threaded
    own = sum(unit.forward_seconds + unit.backward_seconds for unit in inspection.units)
    together = 0.0 if known is None else sum(forward + backward for forward, backward, *_ in known.seconds)
    if known is None or together <= TAKEN * own:
        return None
    return (
        f"other programs seem to have some of its cores: a batch takes {duration(together)} with {known.threads} "
        f"threads and {duration(own)} with one worker's"
    )


def consider(spec: JobSpec, inspection: Inspection, make: MakePlan, *, prunes: bool = True) -> list[Considered]:
    """All candidates that train alike, the simplest first, which is simulated first: it is what others are compared
    with. Behind what there is no room for comes what keeps less. prunes: False to simulate those as well that cannot be
    faster, and what keeps less than any."""
    alike = [each for each in candidates(spec, inspection.host) if trains_alike(each, spec, inspection)]
    found = [_bounded(each, inspection) for each in alike]
    shortest, num_simulated = math.inf, 0
    for number in sorted(range(len(found)), key=lambda number: (number > 0, found[number].least_seconds)):
        each = found[number]
        can_be_it = each.least_seconds <= AS_GOOD * shortest or num_simulated <= MAX_TOLD
        if each.why_not is None and (can_be_it or not prunes):
            found[number] = each = simulated(each, inspection, make)
            shortest, num_simulated = min(shortest, each.seconds or shortest), num_simulated + 1
    return [
        one
        for each in found
        for one in (each, *(_with_less(each, spec, inspection, make) if each.lacks_room or not prunes else ()))
    ]


def _with_less(each: Considered, spec: JobSpec, inspection: Inspection, make: MakePlan) -> Iterator[Considered]:
    """What keeps less than a candidate: with recompute; in as many parts as there is room for, or in each number where
    the candidate itself can be."""
    again = recomputing(each.spec)
    if (
        again is not None
        and "recompute" not in given_by(spec)
        and (bounded := _bounded(again, inspection)).why_not is None
    ):
        yield simulated(bounded, inspection, make)
    for in_parts in parted(each.spec, spec):
        if not was_looked_at(inspection, in_parts) or not trains_alike(in_parts, spec, inspection):
            continue
        bounded = _bounded(in_parts, inspection)
        found = bounded if bounded.why_not is not None else simulated(bounded, inspection, make)
        if found.why_not is None:
            yield found
            if each.lacks_room:
                return


def best_of(considered: Sequence[Considered], as_good: float = AS_GOOD) -> Considered | None:
    """The first of those that are as good as the fastest."""
    shortest = min((each.seconds for each in considered if each.seconds is not None), default=0.0)
    return next((each for each in considered if each.seconds is not None and each.seconds <= as_good * shortest), None)


def least_memory_of(considered: Sequence[Considered]) -> Considered | None:
    """The one whose largest worker needs least; of those that need as much the fastest."""
    known = [(each.memory_bytes, each.seconds, each) for each in considered if each.memory_bytes is not None]
    return min(known, key=lambda about: about[:2], default=(0, 0.0, None))[2]


def predicted_seconds(spec: JobSpec, plan: Plan, inspection: Inspection) -> tuple[float, ...]:
    """Of each task. inspection: as it came, for many strategies or for this one."""
    known = inspection.with_threads(threads_of(spec.strategy, inspection.host))
    return MeasuredCosts(PlannedJob(spec, plan), known, {}).of(PlannedJob(spec, plan))


def iteration_seconds(spec: JobSpec, plan: Plan, inspection: Inspection) -> float:
    """Predicted. inspection: as above. Errors: SimulationError."""
    seconds = [LOST_SECONDS + own for own in predicted_seconds(spec, plan, inspection)]
    milestones = gradient_milestones(plan, inspection)
    return simulate(plan, seconds, milestones=milestones, wake_seconds=WAKE_SECONDS).iteration_seconds


def trains_alike(candidate: JobSpec, spec: JobSpec, inspection: Inspection) -> bool:
    """Where what a sample gives depends on the others of its microbatch, or may once `on_epoch` has set something, the
    batch is divided as the user has it; and where `on_epoch` reads what steps keep, of which a replica has its part, or
    what the forward of a layer does, which a stage has."""
    keepers = inspection.lost_beside.get("on_epoch_units", ())
    if any(keepers) and _num_stages(candidate) > _num_stages(spec):
        return False
    keeps = any(unit.carries_state for unit in inspection.units)
    changes = any(each.changed_as is not None for each in inspection.parameters)
    mixes = inspection.undivided or inspection.batch_modules or inspection.loss_in_parts
    sets = inspection.lost_beside.get("on_epoch_sets")
    depends = mixes or sets or inspection.keeps_elsewhere or keeps or changes or keepers
    return not depends or candidate.strategy.division == spec.strategy.division


def _num_stages(spec: JobSpec) -> int:
    return max(replica.num_stages for replica in spec.strategy.replica_list)


def _bounded(candidate: JobSpec, inspection: Inspection) -> Considered:
    title = title_of(candidate.strategy, inspection.host)
    if inspection.crowded is not None and largest_microbatch(candidate, inspection.num_train) > inspection.most_samples:
        return Considered(spec=candidate, title=title, least_seconds=0.0, why_not=inspection.crowded, lacks_room=True)
    if (refused := why_refused(inspection, candidate)) is not None:
        return Considered(spec=candidate, title=title, least_seconds=0.0, why_not=refused)
    try:
        return Considered(spec=candidate, title=title, least_seconds=least_seconds(candidate, inspection))
    except ValueError as error:
        return Considered(spec=candidate, title=title, least_seconds=0.0, why_not=str(error))


def simulated(each: Considered, inspection: Inspection, make: MakePlan) -> Considered:
    """With its prediction, or why it cannot be; where shares have to be found, with those of the shortest one."""
    if not comes_to_rest(each.spec):
        return _simulated(each, inspection, make)

    def of(spec: JobSpec) -> Considered:
        titled = dataclasses.replace(each, spec=spec, title=title_of(spec.strategy, inspection.host))
        return _simulated(titled, inspection, make)

    def seconds_with(spec: JobSpec) -> float:
        found = of(spec).seconds
        return math.inf if found is None else found

    try:
        return of(rested(each.spec, inspection, seconds_with))
    except PlanError as error:
        return dataclasses.replace(each, why_not=str(error), lacks_room=isinstance(error, NoRoom))


def _simulated(each: Considered, inspection: Inspection, make: MakePlan) -> Considered:
    try:
        plan = make(each.spec, inspection, checked=False)
        plan.graph.check()
        seconds = iteration_seconds(each.spec, plan, inspection)
    except (PlanError, SimulationError, ValueError) as error:
        return dataclasses.replace(each, why_not=str(error), lacks_room=isinstance(error, NoRoom))
    return dataclasses.replace(each, seconds=seconds, memory_bytes=max(plan.worker_bytes().values()))


def _chosen(
    best: Considered, inspection: Inspection, make: MakePlan, considered: Sequence[Considered], *, chooses: bool
) -> Choice:
    plan = make(best.spec, inspection)
    outlook, simulation = outlook_of(
        plan,
        inspection,
        predicted_seconds(best.spec, plan, inspection),
        names_of(plan),
        lost=[LOST_SECONDS] * len(plan.graph.tasks),
        wake_seconds=WAKE_SECONDS,
    )
    seconds = outlook.iteration_seconds
    own = dataclasses.replace(best, seconds=seconds, memory_bytes=max(plan.worker_bytes().values()))
    ranked = ranked_behind(own, (each for each in considered if each is not best))
    lines = tuple(lines_of(ranked, inspection)) if chooses else ()
    plan = dataclasses.replace(plan, predicted_iteration_seconds=seconds, notes=(*lines, *plan.notes))
    if outlook.limit_seconds is not None and outlook.critical_cycle is not None:
        plan = dataclasses.replace(plan, limit_seconds=outlook.limit_seconds, limit_cycle=outlook.critical_cycle)
    return Choice(
        spec=best.spec,
        inspection=inspection,
        plan=plan,
        outlook=outlook,
        simulation=simulation,
        considered=ranked,
        lines=lines,
    )


def ranked_behind(best: Considered, others: Iterable[Considered]) -> tuple[Considered, ...]:
    """As they are fast; last those that were not simulated."""
    return (best, *sorted(others, key=lambda each: (each.seconds is None, each.seconds or 0.0)))


def _problem_of(refusal: str) -> str:
    """Without its remedy: of a candidate nobody has asked for."""
    return refusal.partition("; ")[0]


def lines_of(ranked: Sequence[Considered], inspection: Inspection) -> Iterator[str]:
    """ranked: the chosen one first, then as they are fast."""
    best, *others = ranked
    assert best.seconds is not None
    assert best.memory_bytes is not None
    begins = f"{_BY_DEFAULT}: auto chose" if best.spec.by_default else "auto:"
    yield (
        f"{begins} {best.title}, {duration(best.seconds)} an iteration predicted, "
        f"{in_digits(min(best.spec.job.batch_size, inspection.num_train) / best.seconds)} samples/s"
        + (f", {size(best.memory_bytes)} in its fullest worker" if best.spec.plan_for == "memory" else "")
    )
    simulated = [(each.title, each.seconds) for each in others if each.seconds is not None]
    told = [
        f"{title} {duration(seconds)} ({100 * (seconds / best.seconds - 1):+.0f} %)"
        for title, seconds in simulated[:MAX_TOLD]
    ]
    yield f"auto: next are {'; '.join(told)}" if told else "auto: there is no other that can be"
    failed = [each.why_not for each in others if each.why_not is not None]
    slower = len(others) - len(simulated) - len(failed)
    yield (
        f"auto: of {len(ranked)} candidates {1 + len(simulated)} were simulated, and {slower} take longer at the least"
        + (f"; {len(failed)} cannot be, the first since {_problem_of(failed[0])}" if failed else "")
    )
    if kept := inspection.lost_beside.get("on_epoch"):
        yield f"auto: a batch is divided as you have it, since on_epoch reads {kept[0]}, which steps keep"
    elif sets := inspection.lost_beside.get("on_epoch_sets"):
        yield f"auto: a batch is divided as you have it, since on_epoch may set {sets[0]}, by which the loss goes"
    if inspection.undivided:
        yield f"auto: batches stay whole, since {inspection.undivided}"
    elif inspection.loss_in_parts:
        yield f"auto: a batch is divided as you have it, since its loss is {told_of_loss(inspection)}"
    if refused := inspection.refused_sizes:
        sizes = ", ".join(map(str, sorted(refused)))
        yield f"auto: no microbatch may be of size {sizes}, for which the job's code raises {refused[min(refused)]}"


def names_of(plan: Plan) -> tuple[str, ...]:
    """As the daemon's workers are called, those of each kind from 0."""
    return tuple(f"{kind}-{plan.workers[:position].count(kind)}" for position, kind in enumerate(plan.workers))
