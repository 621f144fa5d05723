"""Partition: where the model is cut into stages, so that the slowest is as fast as possible. Pure.

Contiguous units to stages, by dynamic programming over the units' measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from weft.plan.inspection import UnitFacts
from weft.plan.placement import Cuts
from weft.scheduler.planning.working_window import layer_cuts
from weft.spec.strategy import Replica


class PlanError(ValueError):
    """The job cannot be planned as asked. The text names the field and the remedy."""


def cut_for(units: Sequence[UnitFacts], replica: Replica) -> Cuts:
    if replica.working_window is None:
        return partition(units, replica.stages, replica.split)
    split = replica.split if replica.split is not None else layer_cuts(units, _allowed_cuts(units))
    return partition(units, len(split) + 1, split)


def within_layers(window: int | None, layers: Cuts) -> int | None:
    return None if window is None else min(window, len(layers))


def partition(units: Sequence[UnitFacts], num_stages: int, split: Sequence[int] | None = None) -> Cuts:
    """(first, last) of each stage, last exclusive, minimising the slowest stage's forward plus backward time.

    No cut falls after a unit whose output is no single tensor, nor between units that share a parameter. split: the
    user's own cuts instead. Errors: PlanError.
    """
    allowed = _allowed_cuts(units)
    if num_stages > len(allowed) + 1:
        names = ", ".join(unit.name.rstrip(".") or "the whole model" for unit in units[:8])
        raise PlanError(
            f"strategy.stages = {num_stages}, but the model can be cut into at most {len(allowed) + 1} stages "
            f"(units: {names}{', …' if len(units) > 8 else ''}); use fewer stages, or build the model as an "
            "nn.Sequential of more children that pass one tensor on and share no parameter"
        )
    if split is not None:
        if refused := sorted(set(split) - set(allowed)):
            raise PlanError(
                f"strategy.split: the model cannot be cut before unit {refused[0]}{_why_not(units, refused[0])}; "
                f"it can be before {allowed}"
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


def _allowed_cuts(units: Sequence[UnitFacts]) -> list[int]:
    return [cut for cut in range(1, len(units)) if _can_cut(units, cut)]


def _can_cut(units: Sequence[UnitFacts], cut: int) -> bool:
    return units[cut - 1].dtype is not None and not any(
        partner < cut for unit in units[cut:] for partner in unit.tied_to
    )


def _why_not(units: Sequence[UnitFacts], cut: int) -> str:
    if not 0 < cut < len(units):
        return f", of {len(units)}"
    before = units[cut - 1]
    if before.dtype is None:
        kind = f" ({before.kind})" if before.kind else ""
        output = before.output or "no single tensor"
        return f": unit {cut - 1}{kind} passes on {output}, and only a plain tensor goes from stage to stage"
    pair = next((tied, number) for number, unit in enumerate(units) for tied in unit.tied_to if tied < cut <= number)
    return f": units {pair[0]} and {pair[1]} have a buffer in common"
