"""A lane's bar is as wide as it is told, in the proportions of its time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cli.screens.display import MODES
from weft.cli.screens.lane_bar import apportion, lane_bar

COMPUTE = {"stall_gradient": 2.0, "forward": 4.0, "backward": 4.0}


def test_without_colour_each_part_begins_with_a_line_and_its_name() -> None:
    assert lane_bar("cpu-0/compute", COMPUTE, 30, colour=False).plain == "│forward────│backward───│gradi"


def test_work_stands_left_of_waits_whatever_the_order() -> None:
    bar = lane_bar("cpu-0/compute", COMPUTE, 100, colour=False).plain
    assert bar.index("forward") == 1
    assert bar.index("backward") == 41
    assert bar.index("gradient") == 81


def test_a_part_without_room_for_its_name_has_none() -> None:
    bar = lane_bar("cpu-0/compute", {"forward": 96.0, "update": 4.0}, 100, colour=False).plain
    assert bar.endswith("─│───")


def test_waits_are_red_in_a_compute_lane_alone() -> None:
    for lane, style in (("cpu-0/compute", "white on red"), ("cpu-0/sync", "white on bright_black")):
        (span,) = lane_bar(lane, {"stall_sync": 1.0}, 20, colour=True).spans
        assert span.style == style


def test_a_lane_that_did_nothing_is_blank() -> None:
    assert lane_bar("cpu-0/compute", {}, 10, colour=True).plain == " " * 10


@pytest.mark.parametrize("colour", [True, False])
@given(seconds=st.dictionaries(st.sampled_from(MODES), st.floats(0, 1e9)), width=st.integers(0, 200))
def test_a_bar_has_its_width_in_any_case(seconds: dict[str, float], width: int, colour: bool) -> None:
    assert lane_bar("cpu-0/compute", seconds, width, colour=colour).cell_len == width


@given(st.lists(st.floats(0, 1e12), max_size=20), st.integers(0, 300))
def test_whole_parts_add_up_and_differ_by_less_than_one(amounts: list[float], total: int) -> None:
    parts = apportion(amounts, total)
    if sum(amounts) == 0:
        assert sum(parts) == 0
        return
    assert sum(parts) == total
    for amount, part in zip(amounts, parts, strict=True):
        assert abs(part - total * amount / sum(amounts)) < 1 + 1e-6
