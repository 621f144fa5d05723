"""Every nanosecond of a lane is in one mode or in the residual; rows that cannot be are refused with their story."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.metrics.accounts.accounting import NANOSECONDS, AccountingError, JobAccount
from weft.plan import rows
from weft.plan.kinds import MODE_INDEX, MODES
from weft.plan.rows import Row

FORWARD, IDLE, STALL = (MODE_INDEX[mode] for mode in ("forward", "idle", "stall_gradient"))
DURATIONS = st.lists(st.tuples(st.sampled_from(MODES), st.integers(0, 10**12)), min_size=1, max_size=60)
GAPS = st.lists(st.tuples(st.sampled_from(MODES), st.integers(0, 10**12), st.integers(0, 10**9)), min_size=1)


def rows_of(durations: list[tuple[str, int]] | list[tuple[str, int, int]], start: int = 5_000) -> list[Row]:
    """Rows that follow one another; a third number is the gap before the row, in ns."""
    rows: list[Row] = []
    for mode, duration, *gap in durations:
        start += sum(gap)
        rows.append((MODE_INDEX[mode], len(rows), 0, -1, start, start + duration))
        start += duration
    return rows


@given(DURATIONS, st.integers(0, 60))
def test_contiguous_rows_sum_to_the_wall_time_however_they_are_batched(
    durations: list[tuple[str, int]], cut: int
) -> None:
    rows = rows_of(durations)
    account = JobAccount()
    account.add("0/compute", rows[:cut])
    account.add("0/compute", rows[cut:])
    total_ns = sum(duration for _, duration in durations)
    assert account.wall_seconds("0/compute") == total_ns / NANOSECONDS
    assert account.residual_seconds("0/compute") == 0
    for mode, seconds in account.lane_seconds()["0/compute"].items():
        assert seconds == sum(duration for name, duration in durations if name == mode) / NANOSECONDS


@given(GAPS)
def test_the_residual_is_the_gaps_between_rows(durations: list[tuple[str, int, int]]) -> None:
    account = JobAccount()
    account.add("0/compute", rows_of(durations))
    gaps_ns = sum(gap for _, _, gap in durations[1:])
    assert account.residual_seconds("0/compute") == gaps_ns / NANOSECONDS


@given(DURATIONS, st.integers(0, 60))
def test_what_was_taken_adds_up_to_the_total(durations: list[tuple[str, int]], cut: int) -> None:
    rows = rows_of(durations)
    account = JobAccount()
    taken = dict.fromkeys(MODES, 0.0)
    for part in (rows[:cut], rows[cut:], []):
        account.add("3/load", part)
        for mode, seconds in account.take_seconds().get("3/load", {}).items():
            assert seconds > 0
            taken[mode] += seconds
    assert {mode: seconds for mode, seconds in taken.items() if seconds} == pytest.approx(
        account.lane_seconds()["3/load"]
    )
    assert account.take_seconds() == {}


def test_rows_are_taken_as_a_report_carries_them() -> None:
    report = rows.pack([0, 7, 3, -1, 100, 200, MODE_INDEX["stall_gradient"], -1, 3, 9, 200, 260])
    account = JobAccount()
    account.add("1/compute", rows.unpack(report))
    assert account.lane_seconds() == {"1/compute": {"forward": 1e-7, "stall_gradient": 6e-8}}


def test_lanes_are_accounted_for_apart() -> None:
    account = JobAccount()
    account.add("0/compute", rows_of([("forward", 10)]))
    account.add("1/compute", rows_of([("backward", 20)], start=0))
    assert account.lane_seconds() == {"0/compute": {"forward": 1e-8}, "1/compute": {"backward": 2e-8}}


def test_an_interval_tells_the_stalled_share_of_the_compute_lanes_only() -> None:
    account = JobAccount()
    account.add("0/compute", rows_of([("forward", 60), ("stall_data", 30), ("stall_gradient", 10)]))
    account.add("1/compute", rows_of([("backward", 100)]))
    account.add("0/load", rows_of([("idle", 1000)]))
    assert account.take_interval() == {"stall_percent": 20.0, "data_percent": 15.0}


def test_an_interval_begins_where_the_last_was_taken_and_counters_do_not_end_it() -> None:
    account = JobAccount()
    assert account.take_interval() is None
    account.add("0/compute", rows_of([("idle", 100)]))
    assert account.take_interval() == {"stall_percent": 100.0, "data_percent": 0.0}
    account.add("0/compute", rows_of([("forward", 50), ("idle", 50)], start=6_000))
    account.take_seconds()
    assert account.take_interval() == {"stall_percent": 50.0, "data_percent": 0.0}
    assert account.take_interval() is None


def test_a_row_that_overlaps_the_one_before_is_refused_with_both_told() -> None:
    account = JobAccount()
    account.add("0/compute", [(FORWARD, 3, 5, -1, 100, 200)])
    with pytest.raises(AccountingError) as refused:
        account.add("0/compute", [(IDLE, -1, 5, -1, 200, 210), (STALL, 4, 5, 9, 190, 300)])
    assert str(refused.value) == (
        "lane 0/compute: stall_gradient of task 4 in iteration 5 (waited for task 9) from 190 to 300 ns starts 20 ns "
        "before idle of task -1 in iteration 5 from 200 to 210 ns ended; a lane's rows are in order and don't overlap"
    )
    assert account.lane_seconds()["0/compute"] == {"forward": 1e-7, "idle": 1e-8}
    account.add("0/compute", [(IDLE, -1, 5, -1, 210, 220)])
    assert account.residual_seconds("0/compute") == 0


@pytest.mark.parametrize("earlier", [[], [(FORWARD, 0, 0, -1, 0, 10)]])
@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ((FORWARD, 0, 0, -1, 50, 20), "ends 30 ns before it starts"),
        ((99, 0, 0, -1, 20, 50), "99 of task 0 .* none of forward, backward"),
        ((len(MODES), 0, 0, -1, 20, 50), "none of forward"),
        ((-1, 0, 0, -1, 20, 50), "none of forward"),
    ],
)
def test_a_row_that_is_wrong_in_itself_is_refused(earlier: list[Row], row: Row, problem: str) -> None:
    account = JobAccount()
    account.add("0/compute", earlier)
    with pytest.raises(AccountingError, match=problem):
        account.add("0/compute", [row])


def test_a_lane_without_rows_has_no_wall_time() -> None:
    account = JobAccount()
    account.add("0/compute", [])
    with pytest.raises(KeyError, match="0/compute"):
        account.wall_seconds("0/compute")
