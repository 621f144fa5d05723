"""The shares that stalls have of a job's iterations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from weft.metrics.recording.recording import Recording
from weft.metrics.recording.stall_shares import stall_shares
from weft.plan.kinds import FIRST_STALL, MODES
from weft.plan.plan import Plan
from weft.plan.rows import packed_rows

FORWARD, STALL = MODES.index("forward"), MODES.index("stall_data")


@pytest.fixture(scope="module")
def recording(pipeline_of: Callable[..., Plan], recording_of: Callable[..., Recording]) -> Recording:
    return recording_of(pipeline_of(stages=2, microbatches=4))


def test_the_shares_of_an_iteration_are_its_stalls_over_the_time_of_all_compute_lanes(recording: Recording) -> None:
    whole = stall_shares(recording)
    assert [each.iteration for each in whole] == list(recording.iteration_ends)
    lanes = [lane for lane in recording.programs if lane.endswith("/compute")]
    stalled: dict[str, int] = {}
    first = min(row[4] for rows in recording.rows.values() for row in rows if row[0] < FIRST_STALL)
    last = max(recording.iteration_ends.values())
    for lane in lanes:
        for mode, _, _, _, start, end in recording.rows[lane]:
            if mode >= FIRST_STALL:
                cause = MODES[mode].removeprefix("stall_")
                stalled[cause] = stalled.get(cause, 0) + min(end, last) - max(start, first)
    for cause, ns in stalled.items():
        shares = sum(each.shares.get(cause, 0.0) * each.seconds for each in whole) * len(lanes)
        assert shares == pytest.approx(ns / 1e9, rel=1e-9), cause


def test_a_stall_that_spans_the_end_of_an_iteration_is_divided_there(recording: Recording) -> None:
    rows = [
        (FORWARD, 0, 0, -1, 0, 100),
        (STALL, 0, 1, -1, 100, 160),
        (FORWARD, 0, 1, -1, 160, 200),
        (STALL, 0, 2, -1, 200, 450),
        (FORWARD, 0, 2, -1, 450, 500),
    ]
    other = [(FORWARD, 1, 0, -1, 0, 100), (FORWARD, 1, 1, -1, 100, 300), (FORWARD, 1, 2, -1, 300, 500)]
    packed = {"cpu-0/compute": packed_rows(rows), "cpu-1/compute": packed_rows(other)}
    programs = {"cpu-0/compute": (0,), "cpu-1/compute": (1,)}
    shares = stall_shares(replace(recording, packed=packed, programs=programs))
    # iteration 1 lasts from 100 to 300, iteration 2 to 500; the second stall is 100 in the one and 150 in the other
    assert [each.shares for each in shares] == [{}, {"data": 160 / 400}, {"data": 150 / 400}]
