"""Working window: into which layers a streamed model is cut, and how many of them a GPU should hold at once. Pure.

A layer is the shortest run of units with parameters after which the model can be cut. A window of one waits for every
layer; with each more the link runs further ahead of the computation, until nothing waits for it, or until it never
rests. The smallest window of those that are as good as the largest is the one to have: memory is for activations.
STRONGHOLD (Sun et al., SC 2022) finds it by a model of the times; here plans are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.plan import Plan
from weft.spec.replica import MAX_STAGES

AS_GOOD = 1.01  # times the shortest iteration: closer is beyond what the measured times are good for
MEMORY_SHARE = 0.5  # of a GPU's memory for the window's parameters and gradients; arbitrary: the rest is activations'


def layer_cuts(units: Sequence[UnitFacts], allowed: Sequence[int]) -> list[int]:
    """The first unit of each layer but the first. allowed: before which units the model can be cut."""
    cuts: list[int] = []
    for cut in allowed:
        before, after = units[cuts[-1] if cuts else 0 : cut], units[cut:]
        if len(cuts) + 1 < MAX_STAGES and _has_parameters(before) and _has_parameters(after):
            cuts.append(cut)
    return cuts


def smallest_as_good(plan_with: Callable[[int], Plan], most: int) -> Plan:
    """The plan with the smallest window whose iteration is about as short as with `most` layers, by bisection."""
    best = plan_with(most)
    enough = AS_GOOD * best.predicted_iteration_seconds
    too_small, good = 0, most
    while good - too_small > 1:
        middle = (too_small + good) // 2
        plan = plan_with(middle)
        if plan.predicted_iteration_seconds <= enough:
            best, good = plan, middle
        else:
            too_small = middle
    return best


def largest_that_fits(inspection: Inspection, layers: Sequence[tuple[int, int]]) -> int:
    """Layers whose parameters and gradients fit into a GPU beside activations; all, where nobody told its memory."""
    if inspection.device_bytes is None:
        return len(layers)
    layer_bytes = max(sum(unit.parameter_bytes for unit in inspection.units[first:last]) for first, last in layers)
    fitting = int(MEMORY_SHARE * inspection.device_bytes) // max(1, 2 * layer_bytes)
    return max(1, min(fitting, len(layers)))


def _has_parameters(units: Sequence[UnitFacts]) -> bool:
    return any(unit.parameter_bytes for unit in units)
