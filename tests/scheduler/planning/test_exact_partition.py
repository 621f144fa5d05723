"""The cut against HiGHS, a solver that knows nothing of stages in a row: what it finds shortest no cut is shorter than.

x_c     1 where the model is cut before unit c; there are stages - 1 of them
T       no less than what any run of units takes in which no cut falls
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.inspection import UnitFacts
from weft.scheduler.planning.partition import PlanError, Room, partition

optimize = pytest.importorskip("scipy.optimize", reason="scipy, which brings HiGHS, is not installed")

UnitOf = Callable[..., UnitFacts]
MOST_UNITS = 14


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Of each unit its seconds and bytes; before which no cut is; earlier units that some are tied to."""
    count = draw(st.integers(2, MOST_UNITS))
    numbers = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    places = st.integers(1, count - 1)
    ties = draw(st.dictionaries(places, st.integers(0, count - 2), max_size=2))
    return {
        "seconds": draw(numbers),
        "bytes": draw(numbers),
        "problems": dict.fromkeys(draw(st.sets(places, max_size=3)), "no tensor"),
        "ties": {unit: tied for unit, tied in ties.items() if tied < unit},
    }


def solved(costs: Sequence[int], cuts: Sequence[int], num_cuts: int, within: Mapping[tuple[int, int], bool]) -> float:
    """The least that the costliest stage can cost; infinite where nothing can be. within: which runs may be whole."""
    size = 1 + len(cuts)
    rows, least = [], []
    for first, last in itertools.combinations(range(len(costs) + 1), 2):
        inside = [number for number, cut in enumerate(cuts, start=1) if first < cut < last]
        whole = sum(costs[first:last])
        rows.append([1.0, *(float(whole) if number in inside else 0.0 for number in range(1, size))])
        least.append(whole)
        if not within[first, last]:
            rows.append([0.0, *(1.0 if number in inside else 0.0 for number in range(1, size))])
            least.append(1)
    rows.append([0.0] + [1.0] * len(cuts))
    least.append(num_cuts)
    most = [math.inf] * (len(rows) - 1) + [num_cuts]
    found = optimize.milp(
        [1.0] + [0.0] * len(cuts),
        constraints=optimize.LinearConstraint(rows, least, most),
        integrality=[0] + [1] * len(cuts),
        bounds=optimize.Bounds([0.0] * size, [math.inf] + [1.0] * len(cuts)),
    )
    return math.inf if found.x is None else float(found.x[0])


@settings(max_examples=20)
@given(model=models(), num_stages=st.integers(1, 5), most_bytes=st.none() | st.integers(20, 200))
def test_no_cut_that_the_solver_knows_is_better(
    unit_of: UnitOf, model: dict[str, Any], num_stages: int, most_bytes: int | None
) -> None:
    seconds, num_bytes, ties = model["seconds"], model["bytes"], model["ties"]
    units = [
        unit_of(number, own / 4, 3 * own / 4, parameter_bytes=size, tied_to=(ties[number],) if number in ties else ())
        for number, (own, size) in enumerate(zip(seconds, num_bytes, strict=True))
    ]
    allowed = [
        cut
        for cut in range(1, len(units))
        if cut not in model["problems"] and not any(tied < cut <= unit for unit, tied in ties.items())
    ]
    runs = list(itertools.combinations(range(len(units) + 1), 2))
    least_bytes = solved(num_bytes, allowed, num_stages - 1, dict.fromkeys(runs, True))
    limit = math.inf if most_bytes is None else most_bytes
    room = None if most_bytes is None else Room(most_bytes, num_bytes)
    if least_bytes == math.inf:
        with pytest.raises(PlanError):
            partition(units, num_stages, None, model["problems"], room)
        return
    most = max(limit, round(least_bytes))
    best = solved(seconds, allowed, num_stages - 1, {run: sum(num_bytes[slice(*run)]) <= most for run in runs})
    cuts = partition(units, num_stages, None, model["problems"], room)
    assert {first for first, _ in cuts[1:]} <= set(allowed)
    assert max(sum(num_bytes[first:last]) for first, last in cuts) <= most
    assert max(sum(seconds[first:last]) for first, last in cuts) == pytest.approx(best, abs=1e-6)
