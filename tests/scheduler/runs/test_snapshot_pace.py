"""When the next snapshot is due: seldom enough to cost little, and not before the one before it is whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.scheduler.runs.snapshot_pace import COST_SHARE, LEAST_SECONDS, REPLAY_SHARE, ReplayPace, SnapshotPace

SECOND = 1_000_000_000
seconds = st.floats(0.0, 1000.0)


def test_the_first_is_due_as_soon_as_beginning_again_would_cost_more() -> None:
    pace = SnapshotPace(100.0)
    assert not pace.take_due(100.0 + LEAST_SECONDS / 2)
    assert pace.take_due(100.0 + LEAST_SECONDS)


def test_it_is_asked_for_again_after_a_while_until_it_is_made() -> None:
    pace = SnapshotPace(0.0)
    assert pace.take_due(1.0)
    assert not pace.take_due(1.0 + 0.9 * LEAST_SECONDS)
    assert pace.take_due(1.0 + LEAST_SECONDS)
    pace.made(0, 5.0)
    assert not pace.take_due(5.0)
    assert pace.take_due(5.0 + LEAST_SECONDS)


def test_what_it_took_the_busiest_lane_says_when_the_next_is_due() -> None:
    """copied_ns is of all of the attempt's so far: 2 s, then 1 s more, then nothing that could be measured."""
    pace = SnapshotPace(0.0)
    now = 10.0
    for copied, waits in ((2 * SECOND, 2 / COST_SHARE), (3 * SECOND, 1 / COST_SHARE), (3 * SECOND, LEAST_SECONDS)):
        pace.made(copied, now)
        assert not pace.take_due(now + waits * 0.999)
        assert pace.take_due(now + waits * 1.001)
        now += waits


def test_what_was_copied_beside_the_lanes_counts_as_well_and_once() -> None:
    """Another core has copied, and memory has been as busy as by a lane."""
    pace = SnapshotPace(0.0)
    for seconds in (1.0, 3.0, 2.0):  # of three workers
        pace.copied_beside(seconds)
    pace.made(SECOND, 10.0)
    assert pace.newest_seconds == 3.0
    assert not pace.take_due(10.0 + 3 / COST_SHARE * 0.999)
    assert pace.take_due(10.0 + 3 / COST_SHARE * 1.001)
    pace.made(3 * SECOND, 1000.0)
    assert pace.newest_seconds == 2.0


@given(took=st.lists(seconds, min_size=1, max_size=20))
def test_copying_takes_no_more_than_its_share_of_any_time(took: list[float]) -> None:
    pace, now, copied = SnapshotPace(0.0), 0.0, 0
    for each in took:
        copied += round(each * SECOND)
        pace.made(copied, now)
        least = max(each / COST_SHARE, LEAST_SECONDS)
        assert not pace.take_due(now + least * 0.99)
        now += least * 1.01
        assert pace.take_due(now)


@given(took=st.lists(seconds, min_size=1, max_size=20))
def test_replays_take_no_more_than_their_share_and_the_first_comes_soon(took: list[float]) -> None:
    pace, now = ReplayPace(0.0), LEAST_SECONDS
    for each in took:
        assert pace.take_due(now)
        assert not pace.take_due(now + 0.9 * LEAST_SECONDS), "it is under way, or nothing came of it"
        now += each
        pace.over(each, now)
        least = max(each / REPLAY_SHARE, LEAST_SECONDS)
        assert not pace.take_due(now + least * 0.99)
        now += least * 1.01
