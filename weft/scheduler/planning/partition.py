"""Partition: where the model is cut into stages, so that the slowest is as fast as possible. Pure.

Contiguous units to stages, by dynamic programming over the units' measured times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.placement import Cuts
from weft.scheduler.planning.working_window import layer_cuts
from weft.spec.strategy import Replica


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
        names = ", ".join(unit.name.rstrip(".") or "the whole model" for unit in units[:8])
        raise PlanError(
            f"strategy.stages = {num_stages}, but the model can be cut into at most {len(allowed) + 1} stages "
            f"(units: {names}{', …' if len(units) > 8 else ''}); use fewer stages, or build the model as an "
            "nn.Sequential of more children that pass one tensor on and share no parameter"
        )
    if split is not None:
        if refused := sorted(set(split) - set(allowed)):
            why = _why_not(units, refused[0], problems)
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


def _why_not(units: Sequence[UnitFacts], cut: int, problems: Mapping[int, str]) -> str:
    if not 0 < cut < len(units):
        return f", of {len(units)}"
    if cut in problems:
        return f": {problems[cut]}"
    pair = _tied_across(units, cut)
    assert pair is not None
    return f": units {pair[0]} and {pair[1]} have a buffer in common"
