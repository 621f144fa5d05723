"""The cut against HiGHS, a solver that knows nothing of stages in a row: what it finds shortest no cut is shorter than.

x_c     1 where the model is cut before unit c; there are stages - 1 of them
T       no less than what any run of units takes in which no cut falls; and where cuts are at both of its ends, with
        what it passes on
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.inspection import UnitFacts, ValueFacts, slot_bytes
from weft.scheduler.planning.crossing import Handovers
from weft.scheduler.planning.partition import PlanError, Room, partition

optimize = pytest.importorskip("scipy.optimize", reason="scipy, which brings HiGHS, is not installed")

UnitOf = Callable[..., UnitFacts]
ValueOf = Callable[..., ValueFacts]
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


def solved(
    costs: Sequence[int],
    cuts: Sequence[int],
    num_cuts: int,
    within: Mapping[tuple[int, int], bool],
    handed: Mapping[tuple[int, int], float] | None = None,
) -> float:
    """The least that the costliest stage can cost; infinite where nothing can be. within: which runs may be whole.
    handed: what a run costs besides where it is a stage."""
    size = 1 + len(cuts)
    number_of = {cut: number for number, cut in enumerate(cuts, start=1)}
    rows, least = [], []
    for first, last in itertools.combinations(range(len(costs) + 1), 2):
        inside = [number for number, cut in enumerate(cuts, start=1) if first < cut < last]
        whole = sum(costs[first:last])
        rows.append([1.0, *(float(whole) if number in inside else 0.0 for number in range(1, size))])
        least.append(float(whole))
        if not within[first, last]:
            rows.append([0.0, *(1.0 if number in inside else 0.0 for number in range(1, size))])
            least.append(1.0)
        ends = [number_of.get(end) for end in (first, last) if 0 < end < len(costs)]
        if handed is None or None in ends:
            continue
        more = whole + handed[first, last]
        rows.append([1.0, *(more * ((n in inside) - (n in ends)) for n in range(1, size))])
        least.append(more * (1 - len(ends)))
    rows.append([0.0] + [1.0] * len(cuts))
    least.append(float(num_cuts))
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
    room = None if most_bytes is None else Room([most_bytes] * num_stages, num_bytes)
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


def handed_by(run: tuple[int, int], values: Sequence[ValueFacts], learns: bool) -> float:
    """What a stage of these units copies: what it has made and others read; gradients of what it has got, where there
    are any."""
    first, last = run
    sent = [each for each in values if first <= each.maker < last <= max(each.readers)]
    came = [each for each in values if each.maker < first and any(first <= reader < last for reader in each.readers)]
    return float(sum(slot_bytes(each.shapes, 1) for each in [*sent, *(came if learns else ())]))


@settings(max_examples=20)
@given(data=st.data(), model=models(), num_stages=st.integers(1, 4), learns=st.booleans())
def test_nor_with_what_stages_pass_on(
    unit_of: UnitOf, value_of: ValueOf, data: st.DataObject, model: dict[str, Any], num_stages: int, learns: bool
) -> None:
    """Each unit hands something to the next one, and one of them to others, too."""
    count = len(model["seconds"])
    seconds = [64 * own for own in model["seconds"]]
    units = [unit_of(number, own / 4, 3 * own / 4) for number, own in enumerate(seconds)]
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=count - 1, max_size=count - 1))
    values = [value_of(n, shapes={1: (64 * size,)}, itemsize=1) for n, size in enumerate(sizes)]
    maker = data.draw(st.integers(0, count - 2))
    readers = data.draw(st.sets(st.integers(maker + 1, count - 1), min_size=1))
    values.append(value_of(maker, *sorted(readers), shapes={1: (640,)}, itemsize=1))
    allowed = [cut for cut in range(1, count) if cut not in model["problems"]]
    if num_stages > len(allowed) + 1:
        return
    runs = list(itertools.combinations(range(count + 1), 2))
    handed = {run: handed_by(run, values, learns) for run in runs}
    best = solved(seconds, allowed, num_stages - 1, dict.fromkeys(runs, True), handed)
    handovers = Handovers(values, 1.0, 0.0, [True] * num_stages, learns)
    cuts = partition(units, num_stages, None, model["problems"], None, handovers)
    assert max(sum(seconds[slice(*run)]) + handed[run] for run in cuts) == pytest.approx(best, abs=1e-3)


def solved_unequal(
    costs: Sequence[int],
    sizes: Sequence[int],
    forbidden: Collection[int],
    slowness: Sequence[float],
    room: Sequence[float] | None,
) -> float:
    """The least that the costliest stage can cost, where each has a speed and a room of its own. Another formulation:

    z_us    1 where unit u is in stage s; the numbers of the stages grow by one at most from unit to unit
    T       no less than what any stage takes
    """
    count, stages = len(costs), len(slowness)
    size = 1 + count * stages
    rows, least, most = [], [], []

    def row(of: Mapping[int, float], low: float, high: float) -> None:
        rows.append([of.get(number, 0.0) for number in range(size)])
        least.append(low)
        most.append(high)

    def z(unit: int, stage: int) -> int:
        return 1 + unit * stages + stage

    for unit in range(count):
        row({z(unit, stage): 1.0 for stage in range(stages)}, 1.0, 1.0)
    for unit in range(1, count):
        grows = {z(unit, stage): float(stage) for stage in range(stages)}
        grows |= {z(unit - 1, stage): -float(stage) for stage in range(stages)}
        row(grows, 0.0, 0.0 if unit in forbidden else 1.0)
    for stage in range(stages):
        row({z(unit, stage): 1.0 for unit in range(count)}, 1.0, math.inf)
        row({0: 1.0} | {z(unit, stage): -costs[unit] * slowness[stage] for unit in range(count)}, 0.0, math.inf)
        if room is not None:
            row({z(unit, stage): float(sizes[unit]) for unit in range(count)}, 0.0, room[stage])
    found = optimize.milp(
        [1.0] + [0.0] * (size - 1),
        constraints=optimize.LinearConstraint(rows, least, most),
        integrality=[0] + [1] * (size - 1),
        bounds=optimize.Bounds([0.0] * size, [math.inf] + [1.0] * (size - 1)),
    )
    return math.inf if found.x is None else float(found.x[0])


@settings(max_examples=20)
@given(data=st.data(), model=models(), num_stages=st.integers(1, 4), limited=st.booleans())
def test_nor_on_unequal_workers(
    unit_of: UnitOf, data: st.DataObject, model: dict[str, Any], num_stages: int, limited: bool
) -> None:
    """Each with a speed of its own, and where they are GPUs a memory, too."""
    seconds, num_bytes = model["seconds"], model["bytes"]
    if num_stages > len(seconds) - len(model["problems"]):
        return
    numbers = st.integers(1, 8).map(lambda number: number / 4)
    slowness = data.draw(st.lists(numbers, min_size=num_stages, max_size=num_stages))
    room = data.draw(st.lists(st.integers(20, 200), min_size=num_stages, max_size=num_stages)) if limited else None
    units = [unit_of(number, own / 4, 3 * own / 4) for number, own in enumerate(seconds)]
    best = solved_unequal(seconds, num_bytes, model["problems"], slowness, room)
    own_room = None if room is None else Room(room, num_bytes)
    cuts = partition(units, num_stages, None, model["problems"], own_room, None, slowness)
    needed = [sum(num_bytes[first:last]) for first, last in cuts]
    if best == math.inf:
        assert room is not None
        assert any(own > most for own, most in zip(needed, room, strict=True))
        return
    assert room is None or all(own <= most for own, most in zip(needed, room, strict=True))
    took = max(slow * sum(seconds[first:last]) for slow, (first, last) in zip(slowness, cuts, strict=True))
    assert took == pytest.approx(best, abs=1e-6)
