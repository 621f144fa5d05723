"""The time in which a worker's process was stopped is cut out of its lanes' rows, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weft.metrics.accounts.stops import IDLE, Row, Stops
from weft.plan.kinds import BUSY_MODES, MODES

FORWARD, BACKWARD = BUSY_MODES.index("forward"), BUSY_MODES.index("backward")


def stops_of(*spans: tuple[int, int], worker: str = "cpu-0") -> Stops:
    stops = Stops()
    for start, end in spans:
        stops.stop(worker, start)
        stops.resume(worker, end)
    return stops


def overlap(start: int, end: int, spans: list[tuple[int, int]]) -> int:
    return sum(max(0, min(end, last) - max(start, first)) for first, last in spans)


@st.composite
def lanes(draw: st.DrawFn) -> list[Row]:
    """Rows of one lane, contiguous or with gaps, from time 100 on."""
    rows: list[Row] = []
    now = 100
    for number, (gap, length) in enumerate(
        draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), min_size=1))
    ):
        mode = draw(st.integers(0, len(MODES) - 1))
        rows.append((mode, number, number // 3, -1, now + gap, now + gap + length))
        now += gap + length
    return rows


@st.composite
def spans(draw: st.DrawFn) -> list[tuple[int, int]]:
    edges = sorted(draw(st.sets(st.integers(0, 2000), max_size=8)))
    return list(zip(edges[::2], edges[1::2], strict=False))


@given(rows=lanes(), stopped=spans())
def test_no_time_is_lost_and_the_stopped_part_of_it_is_idle(rows: list[Row], stopped: list[tuple[int, int]]) -> None:
    parts = stops_of(*stopped).cut("cpu-0", rows)
    assert sum(row[5] - row[4] for row in parts) == sum(row[5] - row[4] for row in rows)
    for mode in range(len(MODES)):
        whole = sum(row[5] - row[4] for row in rows if row[0] == mode and mode != IDLE)
        within = sum(overlap(row[4], row[5], stopped) for row in rows if row[0] == mode and mode != IDLE)
        assert sum(row[5] - row[4] for row in parts if row[0] == mode != IDLE) == whole - within
    assert all(one[5] <= other[4] for one, other in pairwise(parts))
    assert all(row[5] >= row[4] for row in parts)


def test_a_task_around_a_stop_is_two_rows_of_the_same_run() -> None:
    parts = stops_of((30, 70)).cut("cpu-0", [(BACKWARD, 4, 2, -1, 10, 100)])
    assert parts == [(BACKWARD, 4, 2, -1, 10, 30), (IDLE, 4, 2, -1, 30, 70), (BACKWARD, 4, 2, -1, 70, 100)]


def test_a_stop_that_still_lasts_reaches_to_the_end_of_the_rows() -> None:
    stops = Stops()
    stops.stop("cpu-0", 50)
    assert stops.cut("cpu-0", [(FORWARD, 0, 0, -1, 0, 80)]) == [(FORWARD, 0, 0, -1, 0, 50), (IDLE, 0, 0, -1, 50, 80)]


def test_another_workers_rows_are_left_alone() -> None:
    rows = [(FORWARD, 0, 0, -1, 0, 80)]
    assert stops_of((10, 20)).cut("cpu-1", rows) is rows


def test_a_second_stop_signal_and_a_lone_continue_change_nothing() -> None:
    stops = Stops()
    stops.resume("cpu-0", 5)
    stops.stop("cpu-0", 10)
    stops.stop("cpu-0", 15)
    stops.resume("cpu-0", 20)
    stops.resume("cpu-0", 30)
    assert stops.cut("cpu-0", [(FORWARD, 0, 0, -1, 0, 40)]) == [
        (FORWARD, 0, 0, -1, 0, 10),
        (IDLE, 0, 0, -1, 10, 20),
        (FORWARD, 0, 0, -1, 20, 40),
    ]
