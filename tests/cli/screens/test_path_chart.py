"""The critical path as a picture: each step in its lane's row, where it was in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cli.screens.path_chart import MAX_LANES, path_chart, short_name


def step(task: str, lane: str, start: float, seconds: float, mode: str = "forward") -> dict[str, object]:
    return {"task": task, "lane": lane, "mode": mode, "start_seconds": start, "seconds": seconds}


def test_a_step_stands_in_its_lanes_row_where_it_was_in_time() -> None:
    steps = [
        step("FORWARD(0,0)", "cpu-0/compute", 5.0, 2.0),
        step("FORWARD(1,0)", "cpu-1/compute", 7.0, 4.0),
        step("BACKWARD(0,0)", "cpu-0/compute", 12.0, 3.0, "backward"),
    ]
    rows = path_chart(steps, 40, colour=False)
    assert rows["cpu-0/compute"].plain == "F(0,0)──" + " " * 20 + "B(0,0)──────"
    assert rows["cpu-1/compute"].plain == " " * 8 + "F(1,0)──────────"
    assert [row.cell_len for row in rows.values()] == [40, 24]


def test_tasks_are_known_by_their_first_letter() -> None:
    assert [short_name(task) for task in ("FORWARD(r1,0,3)", "UP(0,b0)", "odd")] == ["F(r1,0,3)", "U(0,b0)", "o"]


@pytest.mark.parametrize(("num_lanes", "num_rows"), [(MAX_LANES, MAX_LANES), (MAX_LANES + 1, 0)])
def test_a_path_through_many_lanes_is_no_picture(num_lanes: int, num_rows: int) -> None:
    steps = [step("SYNC(o0,b0)", f"cpu-{lane}/sync", float(lane), 1.0) for lane in range(num_lanes)]
    assert len(path_chart(steps, 80, colour=False)) == num_rows


def test_nothing_is_drawn_of_nothing() -> None:
    assert path_chart([], 80, colour=True) == {}


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.integers(0, 3)), max_size=30), st.integers(0, 100))
def test_no_row_is_wider_than_it_may_be(gaps: list[tuple[float, float, int]], width: int) -> None:
    steps, at = [], 0.0
    for gap, seconds, lane in gaps:
        steps.append(step("FORWARD(0,0)", f"cpu-{lane}/compute", at + gap, seconds))
        at += gap + seconds
    assert all(row.cell_len <= width for row in path_chart(steps, width, colour=True).values())
