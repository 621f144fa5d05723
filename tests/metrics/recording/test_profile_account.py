"""The account of the profiler's view against the account of our rows, on values whose difference is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.metrics.accounts.accounting import JobAccount
from weft.metrics.accounts.overlap import OverlapAccount
from weft.metrics.recording.profile_account import NO_MODE, Pair, compare, spans_of_rows, spans_of_track
from weft.metrics.recording.recording import Recording
from weft.plan.kinds import MODES
from weft.plan.rows import Row, packed_rows
from weft.plan.worker_profile import KINDS, Track, WorkerProfile, packed_track

FORWARD, BACKWARD, SYNC, UPDATE, TRANSFER = (
    MODES.index(mode) for mode in ("forward", "backward", "sync", "update", "transfer")
)
DISPATCH = MODES.index("stall_dispatch")
WINDOW = (0, 1_000)


def row(mode: int, start: int, end: int) -> Row:
    return mode, 0, 0, -1, start, end


def track(lane: str, *spans: tuple[int, int]) -> Track:
    kernel = KINDS.index("kernel")
    return Track(lane=lane, source="stream 7", packed=packed_track([(0, kernel, *span) for span in spans]))


def profile(worker: str, *tracks: Track, window: tuple[int, int] = WINDOW) -> WorkerProfile:
    return WorkerProfile(
        job="job-1",
        attempt=1,
        worker=worker,
        first=0,
        last=0,
        start_ns=window[0],
        end_ns=window[1],
        clock_error_ns=0,
        dropped=0,
        names=("gemm",),
        tracks=tracks,
    )


def recording(rows: Mapping[str, Sequence[Row]]) -> Recording:
    return Recording(
        job="job-1",
        attempt=1,
        clock_ns=0,
        tasks=(),
        edges=(),
        programs=dict.fromkeys(rows, ()),
        packed={lane: packed_rows(own) for lane, own in rows.items()},
        finished=1,
        planned=(),
        task_seconds=(),
        spec={},
        inspection={},
    )


def test_what_ran_in_one_task_is_one_span_and_the_next_task_another() -> None:
    rows = [row(FORWARD, 0, 100), row(BACKWARD, 100, 200), row(DISPATCH, 200, 300)]
    spans = spans_of_track(track("compute", (5, 20), (30, 90), (110, 150), (160, 195)), rows)
    assert spans == [(5, 90, FORWARD), (110, 195, BACKWARD)]


def test_what_ran_in_a_stall_or_in_no_row_stands_for_itself() -> None:
    rows = [row(FORWARD, 100, 200), row(DISPATCH, 200, 300)]
    spans = spans_of_track(track("compute", (10, 20), (30, 40), (120, 130), (210, 220), (230, 240)), rows)
    assert spans == [
        (10, 20, NO_MODE),
        (30, 40, NO_MODE),
        (120, 130, FORWARD),
        (210, 220, NO_MODE),
        (230, 240, NO_MODE),
    ]


def test_a_lane_without_a_track_ran_nothing() -> None:
    assert spans_of_track(None, [row(SYNC, 0, 10)]) == []


def test_busy_stall_and_gaps_of_a_lane_by_both() -> None:
    rows = {"gpu-0/compute": [row(FORWARD, 100, 300), row(DISPATCH, 300, 500), row(BACKWARD, 500, 900)]}
    kernels = track("compute", (110, 200), (220, 290), (510, 890))
    compared = compare(recording(rows), [profile("gpu-0", kernels)])
    assert compared.wall_ns == 1_000
    assert compared.busy["gpu-0/compute"] == Pair(ours=600, theirs=560)
    assert compared.stall(["gpu-0/compute"]) == Pair(ours=400, theirs=440)
    assert compared.gaps_ns["gpu-0/compute"] == 20


def test_what_is_hidden_by_both() -> None:
    rows = {
        "gpu-0/compute": [row(FORWARD, 100, 300), row(BACKWARD, 500, 900)],
        "gpu-0/d2h": [row(TRANSFER, 250, 350), row(TRANSFER, 800, 1_000)],
    }
    tracks = track("compute", (100, 290), (500, 900)), track("d2h", (250, 340), (810, 990))
    compared = compare(recording(rows), [profile("gpu-0", *tracks)])
    assert compared.hidden == {("gpu-0", "transfer"): Pair(ours=150, theirs=130)}
    assert compared.all_of == {("gpu-0", "transfer"): Pair(ours=300, theirs=270)}
    assert compared.overlap() == Pair(ours=150, theirs=130)
    assert compared.overlap(["sync"]) == Pair(ours=0, theirs=0)


def test_only_the_time_that_all_profiles_cover_and_only_their_workers_count() -> None:
    rows = {lane: [row(FORWARD, 0, 1_000)] for lane in ("gpu-0/compute", "gpu-1/compute", "cpu-0/compute")}
    both = [
        profile(worker, track("compute", (0, 1_000)), window=window)
        for worker, window in (("gpu-0", (100, 700)), ("gpu-1", (200, 900)))
    ]
    compared = compare(recording(rows), both)
    assert compared.wall_ns == 500
    assert compared.busy == dict.fromkeys(("gpu-0/compute", "gpu-1/compute"), Pair(ours=500, theirs=500))


def test_profiles_that_have_no_time_in_common_are_refused() -> None:
    apart = [profile("gpu-0", window=(0, 100)), profile("gpu-1", window=(200, 300))]
    for profiles in (apart, []):
        with pytest.raises(ValueError, match="no time in common"):
            compare(recording({"gpu-0/compute": []}), profiles)


def test_a_difference_is_a_part_of_the_greater_or_of_what_is_asked_for_at_least() -> None:
    assert Pair(ours=95, theirs=100).apart() == pytest.approx(0.05)
    assert Pair(ours=100, theirs=95).apart() == pytest.approx(0.05)
    assert Pair(ours=1, theirs=2).apart(at_least=100) == pytest.approx(0.01)
    assert Pair(ours=0, theirs=0).apart() == 0.0


def rows_drawn(modes: Sequence[int]) -> st.SearchStrategy[list[Row]]:
    """In order and apart, from 0 on."""
    steps = st.lists(st.tuples(st.sampled_from(modes), st.integers(0, 30), st.integers(1, 40)), max_size=8)

    def placed(drawn: list[tuple[int, int, int]]) -> list[Row]:
        rows, now = [], 0
        for mode, gap, length in drawn:
            rows.append(row(mode, now + gap, now + gap + length))
            now += gap + length
        return rows

    return steps.map(placed)


LANES: dict[str, Any] = {
    "gpu-0/compute": rows_drawn([FORWARD, BACKWARD, DISPATCH]),
    "gpu-0/d2h": rows_drawn([TRANSFER]),
    "gpu-0/sync": rows_drawn([SYNC, UPDATE]),
    "cpu-0/sync": rows_drawn([SYNC, UPDATE]),
}


@given(st.fixed_dictionaries(LANES))
def test_of_our_own_rows_it_makes_the_accounts_of_accounting_and_overlap(rows: dict[str, list[Row]]) -> None:
    compared = compare(recording(rows), [profile("gpu-0", window=(0, 10_000)), profile("cpu-0", window=(0, 10_000))])
    account = JobAccount()
    modes = {"compute": ["forward", "backward"], "d2h": ["transfer"], "sync": ["sync", "update"]}
    overlap = OverlapAccount(account, {lane: modes[lane.partition("/")[2]] for lane in rows})
    for lane, own in rows.items():
        if own:
            account.add(lane, own)
            overlap.add(lane, own)
    overlap.flush()
    for lane in rows:
        assert compared.busy[lane].ours == sum(account.mode_ns(lane)[:7])
    told = {
        (worker, kind): (round(each["hidden"] * 1e9), round((each["hidden"] + each["exposed"]) * 1e9))
        for worker, kinds in overlap.seconds().items()
        for kind, each in kinds.items()
    }
    assert {key: (pair.ours, compared.all_of[key].ours) for key, pair in compared.hidden.items()} == told


@given(st.fixed_dictionaries(LANES))
def test_a_profile_of_exactly_what_our_rows_say_differs_in_nothing(rows: dict[str, list[Row]]) -> None:
    profiles = [
        profile(
            worker,
            *(
                track(lane.partition("/")[2], *((start, end) for start, end, _ in spans_of_rows(own)))
                for lane, own in rows.items()
                if lane.startswith(worker)
            ),
            window=(0, 10_000),
        )
        for worker in ("gpu-0", "cpu-0")
    ]
    compared = compare(recording(rows), profiles)
    for pair in (*compared.busy.values(), *compared.hidden.values(), *compared.all_of.values()):
        assert pair.apart() == 0
    assert set(compared.gaps_ns.values()) == {0}
