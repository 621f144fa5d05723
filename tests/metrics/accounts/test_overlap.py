"""Hidden and exposed time, against a count of every nanosecond; whatever the order in which lanes report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.metrics.accounts import overlap
from weft.metrics.accounts.accounting import NANOSECONDS, JobAccount
from weft.metrics.accounts.overlap import KINDS, MAX_INTERVALS, SETTLE_ABOVE, OverlapAccount, Row, WorkerOverlap
from weft.plan.kinds import MODE_INDEX, MODES

LANES = {
    "cpu-0/compute": {"forward", "backward", "update"},
    "cpu-0/sync": {"sync", "update"},
    "cpu-0/h2d": {"transfer"},
    "cpu-1/compute": {"forward", "backward", "transfer"},
    "gpu-0/compute": {"forward", "backward", "update"},  # two stages on one device
    "gpu-0/compute-1": {"forward", "backward", "update"},
    "gpu-0/h2d": {"transfer"},
    "host-0/sync": {"sync", "update"},
    "loader-0/load": {"load"},
}
COMPUTE_LANES = [lane for lane, modes in LANES.items() if "forward" in modes]
COMPUTING = {
    worker: [lane for lane in COMPUTE_LANES if lane.startswith(worker)] or COMPUTE_LANES
    for worker in ("cpu-0", "cpu-1", "gpu-0", "host-0")
}
Histories = Mapping[str, Sequence[Row]]
Counts = dict[tuple[str, str], tuple[int, int]]


def row(mode: str, start: int, end: int) -> Row:
    return (MODE_INDEX[mode], 0, 0, -1, start, end)


@st.composite
def histories(draw: st.DrawFn) -> dict[str, list[Row]]:
    """A history for each lane: busy with what its tasks are, stalled, or in a gap that no row covers."""
    rows: dict[str, list[Row]] = {}
    for lane, modes in LANES.items():
        times = draw(st.lists(st.integers(0, 60), max_size=24).map(sorted))
        kinds = st.sampled_from([*sorted(modes), "idle", None])
        pieces = [(draw(kinds), start, end) for start, end in pairwise(times)]
        rows[lane] = [row(mode, start, end) for mode, start, end in pieces if mode is not None]
    return rows


@st.composite
def reports(draw: st.DrawFn) -> tuple[dict[str, list[Row]], list[tuple[str, list[Row]]]]:
    """Histories, and the reports in which they arrive: each lane's in order, lanes in any order."""
    rows = draw(histories())
    turns = draw(st.permutations([lane for lane in LANES for _ in range(4)]))
    left = {lane: list(part) for lane, part in rows.items()}
    arriving = []
    for number, lane in enumerate(turns):
        count = len(left[lane]) if lane not in turns[number + 1 :] else draw(st.integers(0, len(left[lane])))
        arriving.append((lane, left[lane][:count]))
        del left[lane][:count]
    return rows, arriving


def counted(rows: Histories) -> Counts:
    """(hidden, exposed) by worker and kind, nanosecond by nanosecond."""
    computed = {
        lane: {time for mode, *_, start, end in part for time in range(start, end) if MODES[mode] in _COMPUTE}
        for lane, part in rows.items()
    }
    sums: Counts = {}
    for lane, part in rows.items():
        worker = lane.partition("/")[0]
        covers = set[int]().union(*(computed[other] for other in COMPUTING.get(worker, ()) if other != lane))
        for mode, *_, start, end in part:
            if (kind := MODES[mode]) in KINDS and start < end:
                hidden = sum(time in covers for time in range(start, end)) if lane not in COMPUTE_LANES else 0
                before = sums.get((worker, kind), (0, 0))
                sums[worker, kind] = (before[0] + hidden, before[1] + end - start - hidden)
    return sums


_COMPUTE = ("forward", "backward")


def accounts() -> tuple[JobAccount, OverlapAccount]:
    account = JobAccount()
    return account, OverlapAccount(account, LANES)


def told(seconds: overlap.OverlapSeconds) -> Counts:
    return {
        (worker, kind): (round(parts["hidden"] * NANOSECONDS), round(parts["exposed"] * NANOSECONDS))
        for worker, kinds in seconds.items()
        for kind, parts in kinds.items()
    }


def added(sums: Counts, grown: Counts) -> Counts:
    both = {key: (sums.get(key, (0, 0)), grown.get(key, (0, 0))) for key in sums | grown}
    return {key: (a[0] + b[0], a[1] + b[1]) for key, (a, b) in both.items()}


@given(reports(), st.sets(st.integers(0, 23)))
def test_hidden_and_exposed_are_those_of_a_count_however_the_rows_arrive(
    case: tuple[dict[str, list[Row]], list[tuple[str, list[Row]]]], reads: set[int]
) -> None:
    rows, arriving = case
    account, overlaps = accounts()
    taken: Counts = {}
    for number, (lane, part) in enumerate(arriving):
        account.add(lane, part)
        overlaps.add(lane, part)
        if number in reads:
            taken = added(taken, told(overlaps.take_seconds()))
            assert taken == told(overlaps.seconds())
    overlaps.flush()
    assert told(overlaps.seconds()) == counted(rows)
    assert added(taken, told(overlaps.take_seconds())) == counted(rows)
    assert overlaps.take_seconds() == {}


@given(reports(), st.integers(0, 5))
def test_past_its_bound_the_account_still_adds_up_and_hides_no_more_than_there_was(
    case: tuple[dict[str, list[Row]], list[tuple[str, list[Row]]]], bound: int
) -> None:
    rows, arriving = case
    account, overlaps = accounts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "SETTLE_ABOVE", bound)
        patch.setattr(overlap, "MAX_INTERVALS", bound)
        for lane, part in arriving:
            account.add(lane, part)
            overlaps.add(lane, part)
    overlaps.flush()
    found, true = told(overlaps.seconds()), counted(rows)
    assert found.keys() == true.keys()
    for key, (hidden, exposed) in found.items():
        assert hidden + exposed == sum(true[key])
        assert 0 <= hidden <= true[key][0]


def test_a_lane_that_lags_is_waited_for_and_then_nothing_is_lost() -> None:
    account, overlaps = accounts()
    overlaps.add("cpu-0/sync", [row("sync", 10, 30)])
    assert overlaps.seconds() == {}
    compute = [row("forward", 0, 20), row("stall_sync", 20, 40)]
    account.add("cpu-0/compute", compute)
    overlaps.add("cpu-0/compute", compute)
    assert told(overlaps.seconds()) == {("cpu-0", "sync"): (10, 10)}


def test_a_host_is_hidden_while_any_worker_computes_and_no_nanosecond_counts_twice() -> None:
    _, overlaps = accounts()
    overlaps.add("cpu-0/compute", [row("forward", 0, 20), row("idle", 20, 100)])
    overlaps.add("host-0/sync", [row("update", 10, 50)])
    overlaps.add("cpu-1/compute", [row("backward", 15, 40), row("idle", 40, 100)])
    assert told(overlaps.seconds()) == {}, "two others have told nothing yet"
    for lane in ("gpu-0/compute", "gpu-0/compute-1"):
        overlaps.add(lane, [row("idle", 0, 100)])
    assert told(overlaps.seconds()) == {("host-0", "update"): (30, 10)}


def test_what_a_compute_lane_does_itself_is_exposed() -> None:
    account, overlaps = accounts()
    rows = [row("forward", 0, 10), row("backward", 10, 30), row("update", 30, 37)]
    account.add("cpu-0/compute", rows)
    overlaps.add("cpu-0/compute", rows)
    assert told(overlaps.seconds()) == {("cpu-0", "update"): (0, 7)}


def test_the_percent_is_that_of_the_interval_and_there_is_none_of_nothing() -> None:
    _, overlaps = accounts()
    assert overlaps.take_percent() is None
    overlaps.add("cpu-0/sync", [row("sync", 0, 40), row("idle", 40, 60), row("update", 60, 70)])
    overlaps.add("cpu-0/compute", [row("backward", 0, 30), row("idle", 30, 50)])
    assert overlaps.take_percent() == 75.0
    assert overlaps.take_percent() is None
    overlaps.add("cpu-0/compute", [row("forward", 60, 100)])
    assert overlaps.take_percent() == 100.0


def test_a_job_without_lanes_beside_compute_keeps_no_intervals() -> None:
    account = JobAccount()
    overlaps = OverlapAccount(account, {"cpu-0/compute": {"forward", "backward", "update"}, "loader-0/load": {"load"}})
    account.add("cpu-0/compute", [row("update", 0, 5)])
    overlaps.add("cpu-0/compute", [row("update", 0, 5)])
    overlaps.add("loader-0/load", [row("load", 0, 5)])
    assert told(overlaps.seconds()) == {("cpu-0", "update"): (0, 5)}


def test_a_long_run_keeps_few_intervals() -> None:
    """What all lanes have reached is let go; only what a lane might still ask for is kept."""
    worker = WorkerOverlap(["cpu-0/compute"], ["cpu-0/sync", "cpu-0/h2d"])
    most = 0
    for start in range(0, 300_000, 100):
        worker.add_computed("cpu-0/compute", [(start, start + 60, MODE_INDEX["forward"])], start + 100)
        worker.add_beside("cpu-0/sync", [row("sync", start + 50, start + 70)])
        worker.add_beside("cpu-0/h2d", [row("transfer", start + 70, start + 80)])
        most = max(most, worker.num_intervals())
    assert most <= SETTLE_ABOVE + 1
    worker.flush()
    assert worker.num_intervals() == 0
    assert (worker.busy_ns[MODE_INDEX["sync"]], worker.hidden_ns[MODE_INDEX["sync"]]) == (60_000, 30_000)
    assert (worker.busy_ns[MODE_INDEX["transfer"]], worker.hidden_ns[MODE_INDEX["transfer"]]) == (30_000, 0)


def test_a_lane_that_never_reports_does_not_make_the_account_grow_without_bound() -> None:
    worker = WorkerOverlap(["cpu-0/compute", "cpu-1/compute"], ["host-0/sync"])
    for start in range(0, 100 * (MAX_INTERVALS + 10), 100):
        worker.add_computed("cpu-0/compute", [(start, start + 60, MODE_INDEX["forward"])], start + 100)
        assert worker.num_intervals() <= MAX_INTERVALS
