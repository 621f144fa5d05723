"""Partition: where the model is cut into stages, so that the slowest is as fast as possible. Pure.

Contiguous units to stages, by dynamic programming over the units' measured times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.placement import Cuts
from weft.scheduler.planning.working_window import layer_cuts
from weft.spec.strategy import Replica

MAX_TOLD_UNITS = 8  # in a sentence that lists them
MAX_TOLD_PROBLEMS = 3  # a sentence each: whoever mends these asks again


class PlanError(ValueError):
    """The job cannot be planned as asked. The text names the field and the remedy."""


def cut_for(inspection: Inspection, replica: Replica) -> Cuts:
    units, problems = inspection.units_on(replica.device), inspection.cut_problems
    if replica.working_window is None:
        return partition(units, replica.stages, replica.split, problems)
    split = replica.split if replica.split is not None else layer_cuts(units, _allowed_cuts(units, problems))
    return partition(units, len(split) + 1, split, problems)


def within_layers(window: int | None, layers: Cuts) -> int | None:
    return None if window is None else min(window, len(layers))


def partition(
    units: Sequence[UnitFacts],
    num_stages: int,
    split: Sequence[int] | None = None,
    problems: Mapping[int, str] = MappingProxyType({}),
) -> Cuts:
    """(first, last) of each stage, last exclusive, minimising the slowest stage's forward plus backward time.

    No cut falls before a unit that has a problem with it, nor between units that share a buffer. split: the user's own
    cuts instead. problems: as in Inspection.cut_problems. Errors: PlanError.
    """
    allowed = _allowed_cuts(units, problems)
    if num_stages > len(allowed) + 1:
        raise PlanError(_too_many(units, num_stages, allowed, problems))
    if split is not None:
        if refused := sorted(set(split) - set(allowed)):
            why = f": {_problem(units, refused[0], problems)}" if refused[0] < len(units) else f", of {len(units)}"
            raise PlanError(
                f"strategy.split: the model cannot be cut before unit {refused[0]}{why}; it can be before {allowed}"
            )
        return tuple(pairwise([0, *split, len(units)]))
    bounds = [0, *allowed, len(units)]
    before = [0.0, *accumulate(unit.forward_seconds + unit.backward_seconds for unit in units)]
    # best[b] = (slowest stage, cut indices) over the units before bounds[b]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(num_stages):
        best = {
            b: min(
                (max(slowest, before[bounds[b]] - before[bounds[a]]), (*path, b))
                for a, (slowest, path) in best.items()
                if a < b
            )
            for b in range(1, len(bounds))
            if any(a < b for a in best)
        }
    path = best[len(bounds) - 1][1]
    return tuple((bounds[a], bounds[b]) for a, b in pairwise(path))


def _allowed_cuts(units: Sequence[UnitFacts], problems: Mapping[int, str]) -> list[int]:
    return [cut for cut in range(1, len(units)) if cut not in problems and _tied_across(units, cut) is None]


def _tied_across(units: Sequence[UnitFacts], cut: int) -> tuple[int, int] | None:
    """Two units on either side of a cut that share a buffer."""
    ties = ((tied, number) for number, unit in enumerate(units) for tied in unit.tied_to)
    return next(((tied, number) for tied, number in ties if tied < cut <= number), None)


def _too_many(units: Sequence[UnitFacts], num_stages: int, allowed: Sequence[int], problems: Mapping[int, str]) -> str:
    """With what stands in the way at some of the places where the model cannot be cut, since that can be changed."""
    names = _names(units)
    told: dict[str, str] = {}  # by problem, the first unit that has it
    for cut in sorted(set(range(1, len(units))) - set(allowed)):
        told.setdefault(_problem(units, cut, problems), names[cut])
    reasons = [f"before {name!r:.80}: {problem}" for problem, name in list(told.items())[:MAX_TOLD_PROBLEMS]]
    change = ", or change what stands in the way of more: " + "; ".join(reasons) if reasons else ""
    return (
        f"strategy.stages = {num_stages}, but the model can be cut into at most {len(allowed) + 1} stages (units: "
        f"{_listed(name or 'the whole model' for name in names)}); use fewer stages{change}"
    )


def _problem(units: Sequence[UnitFacts], cut: int, problems: Mapping[int, str]) -> str:
    if cut in problems:
        return problems[cut]
    pair = _tied_across(units, cut)
    assert pair is not None
    return f"units {pair[0]} and {pair[1]} have a buffer in common"


def _names(units: Iterable[UnitFacts]) -> list[str]:
    """As the user has them: the child of an nn.Sequential is known by the prefix of its names in the state dict."""
    return [unit.name.removesuffix(".") for unit in units]


def _listed(names: Iterable[str]) -> str:
    first = [f"{name:.80}" for name in names]
    return ", ".join([*first[:MAX_TOLD_UNITS], *(["…"] if len(first) > MAX_TOLD_UNITS else [])])
