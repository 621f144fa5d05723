"""The policies that divide a batch by measured speed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.division import replica_sizes
from weft.scheduler.adapting.policy import Verdict
from weft.scheduler.adapting.replica_pace import ReplicaMeasurement
from weft.scheduler.adapting.shares import MARGIN, MAX_STEP, STRIKES, Shares, adapt

speeds = st.lists(st.floats(1e-5, 1e-2), min_size=2, max_size=5)


def measure(
    shares: Shares, seconds: Sequence[float], batch_size: int, fixed: float = 0.0, least: int = 1
) -> ReplicaMeasurement:
    """What replicas of these seconds for a sample do with their shares."""
    sizes = replica_sizes(batch_size, shares.weights, least)
    return ReplicaMeasurement(
        unit_seconds=tuple(s if size else None for s, size in zip(seconds, sizes, strict=True)),
        iteration_seconds=max(s * size for s, size in zip(seconds, sizes, strict=True)) + fixed,
        fixed_seconds=fixed,
    )


def settle(
    seconds: Sequence[float], batch_size: int, *, start: Sequence[float] = (), overhead: float = 0.0, least: int = 1
) -> tuple[Shares, list[Verdict]]:
    """After many measurements. overhead: what more than one replica adds to an iteration."""
    shares, verdicts = Shares.starting(start or [1.0] * len(seconds)), []
    for _ in range(60):
        measured = measure(shares, seconds, batch_size, least=least)
        if sum(weight > 0 for weight in shares.weights) > 1:
            measured = ReplicaMeasurement(
                unit_seconds=measured.unit_seconds,
                iteration_seconds=measured.iteration_seconds + overhead,
                fixed_seconds=0.0,
            )
        shares, verdict = adapt(shares, measured, batch_size, least)
        verdicts += [verdict] if verdict else []
    return shares, verdicts


def test_a_measurement_moves_shares_half_of_the_way_to_the_measured_throughput() -> None:
    shares = Shares.starting([1, 1])
    shares, verdict = adapt(shares, measure(shares, [1e-3, 4e-3], 100), 100)
    assert verdict is None
    assert shares.weights == pytest.approx((0.65, 0.35))


def test_one_measurement_moves_no_share_by_more_than_a_bound() -> None:
    shares = Shares.starting([1, 9])
    shares, _ = adapt(shares, measure(shares, [1e-3, 99e-3], 100), 100)
    assert shares.weights == pytest.approx((0.1 + MAX_STEP, 0.9 - MAX_STEP))


def test_shares_come_to_rest_at_the_measured_throughput() -> None:
    shares, verdicts = settle([1e-3, 4e-3], 1000)
    assert shares.weights == pytest.approx((0.8, 0.2))
    assert verdicts == []


def test_nothing_changes_before_every_replica_with_a_share_was_measured() -> None:
    before = Shares.starting([1, 1])
    measured = ReplicaMeasurement(unit_seconds=(1e-3, None), iteration_seconds=1.0, fixed_seconds=0.0)
    after, verdict = adapt(before, measured, 10)
    assert (after.weights, verdict) == (before.weights, None)


def test_a_replica_that_the_user_gives_nothing_gets_nothing() -> None:
    shares, _ = settle([1e-3, 1e-3, 1e-3], 90, start=[1, 1, 0])
    assert shares.weights == pytest.approx((0.5, 0.5, 0.0))


def test_a_replica_that_costs_more_than_it_takes_off_the_others_is_left_out_with_the_numbers() -> None:
    """It would take 20 ms of 100 off, and to have two replicas costs 40."""
    shares, verdicts = settle([1e-3, 4e-3], 100, overhead=0.04)
    assert shares.weights == (1.0, 0.0)
    assert shares.off == {1}
    assert len(verdicts) == 1
    assert verdicts[0].replica == 1
    assert verdicts[0].with_seconds == pytest.approx(0.12, rel=0.05)
    assert verdicts[0].without_seconds == pytest.approx(0.1)


def test_a_replica_is_not_judged_by_shares_that_are_far_from_right() -> None:
    """With halves of a batch the slow one makes an iteration longer than without it, and yet it pays."""
    shares, verdicts = settle([1e-3, 20e-3], 400)
    assert verdicts == []
    assert shares.weights == pytest.approx((20 / 21, 1 / 21))


def test_one_bad_measurement_leaves_no_replica_out() -> None:
    shares, _ = settle([1e-3, 4e-3], 100)
    bad = ReplicaMeasurement(unit_seconds=(1e-3, 4e-3), iteration_seconds=MARGIN * 1.0, fixed_seconds=0.0)
    for _ in range(STRIKES - 1):
        shares, verdict = adapt(shares, bad, 100)
        assert verdict is None
    shares, verdict = adapt(shares, measure(shares, [1e-3, 4e-3], 100), 100)
    assert (shares.strikes, verdict) == ((0, 0), None)


def test_a_replica_that_has_two_samples_instead_of_one_is_judged_by_both() -> None:
    """The fast one takes 20 ms alone and 19 beside one sample of the slow one; two of them take 18, or 24."""
    shares, verdicts = settle([1e-3, 9e-3], 20, least=2)
    assert (replica_sizes(20, shares.weights, least=2), verdicts) == ([18, 2], [])
    shares, verdicts = settle([1e-3, 12e-3], 20, least=2)
    assert (shares.weights, [verdict.replica for verdict in verdicts]) == ((1.0, 0.0), [1])


def test_a_replica_whose_share_is_less_than_a_sample_is_left_out() -> None:
    shares, verdicts = settle([1e-3, 1.0], 8)
    assert shares.weights == (1.0, 0.0)
    assert [verdict.replica for verdict in verdicts] == [1]
    assert verdicts[0].with_seconds > verdicts[0].without_seconds


@given(seconds=speeds, batch_size=st.integers(8, 4096), overhead=st.floats(0, 1))
def test_shares_always_add_up_and_somebody_always_works(seconds: list[float], batch_size: int, overhead: float) -> None:
    shares, verdicts = settle(seconds, batch_size, overhead=overhead)
    assert sum(shares.weights) == pytest.approx(1)
    assert min(shares.weights) >= 0
    assert shares.off == {verdict.replica for verdict in verdicts} == {r for r, w in enumerate(shares.weights) if not w}
    assert len(verdicts) < len(seconds)


def test_a_verdict_is_a_sentence_with_its_numbers() -> None:
    assert Verdict(replica=1, with_seconds=0.0123, without_seconds=0.011).told("step 241") == (
        "replica 1 does not pay: 12.3 ms an iteration with it, 11.0 ms without; its share is 0 from step 241 on"
    )
