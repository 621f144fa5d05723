"""SYNC of one owner: whose gradients it sums, in which order, and what it says of the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft.plan.course import Course
from weft.transport.memory.directory import Directory
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workers.updates.owner import Owner, contributors, missing_parameters


class Stand:
    """Three replicas on the CPU if not told otherwise, one bucket, an owner in each."""

    def __init__(self, planned: Any, directory: Directory, *, squares: bool) -> None:
        self.memory: BucketMemory = planned.memory(directory)
        self.course: Course = planned.course
        self.bucket = self.memory.buckets[0]
        self.owners = [
            Owner(number, self.memory, self.course, {}, None, squares=squares, device=HostDevice())
            for number in range(self.memory.num_owners)
        ]

    def gradient(self, replica: int, step: int = 0) -> torch.Tensor:
        return self.memory.gradient((replica, 0), self.bucket, step)

    def sync(self, step: int = 0) -> torch.Tensor:
        """The sum, once every owner has summed its range."""
        for owner in self.owners:
            owner.sync(self.bucket.index, self.course.iteration(step))
        return self.memory.sum(self.bucket)


@pytest.fixture
def stand_of(planned: Any, directory: Directory, workload_of: Any) -> Callable[..., Stand]:
    def build(*, squares: bool = True, **settings: Any) -> Stand:
        plan = planned(workload_of(), **{"replicas": 3, "bucket_mib": 1.0, "clip_norm": 1.0} | settings)
        return Stand(plan, directory, squares=squares)

    return build


def test_gradients_are_summed_in_the_order_of_the_replicas_whoever_owns_the_range(
    stand_of: Callable[..., Stand],
) -> None:
    """1e8 + 1 is 1e8 in float32, so another order would have another sum."""
    stand = stand_of()
    assert len(stand.bucket.ranges) == 3
    for replica, value in enumerate((1.0, 1e8, -1e8)):
        stand.gradient(replica).fill_(value)
    assert not stand.sync().any()
    for replica, value in enumerate((1e8, -1e8, 1.0)):
        stand.gradient(replica).fill_(value)
    assert stand.sync().eq(1.0).all()


def test_an_owner_writes_its_own_range_and_no_other(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of()
    for replica in range(3):
        stand.gradient(replica).fill_(1.0)
    stand.owners[1].sync(0, stand.course.iteration(0))
    start, stop = stand.bucket.range_of(1)
    total = stand.memory.sum(stand.bucket)
    assert total[start:stop].eq(3).all()
    assert total[:start].eq(1).all()
    assert total[stop:].eq(1).all()
    assert stand.gradient(1).eq(1).all()


@pytest.mark.parametrize("shares", [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
def test_a_replica_without_a_share_is_left_out(stand_of: Callable[..., Stand], shares: list[float]) -> None:
    """What stands in its place is of an older step, or nothing at all."""
    stand = stand_of(shares=shares)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(stand.bucket.num_elements, generator=generator) for _ in range(3)]
    for replica, values in enumerate(given):
        stand.gradient(replica).copy_(values if shares[replica] else torch.full_like(values, torch.nan))
    first, second = (values for share, values in zip(shares, given, strict=True) if share)
    assert torch.equal(stand.sync(), first + second)


def test_replicas_that_a_ragged_batch_does_not_reach_are_left_out_of_it_alone(stand_of: Callable[..., Stand]) -> None:
    """Twelve samples in batches of 11: the second batch has one sample, which is the first replica's."""
    stand = stand_of(batch_size=11, steps=3)
    iterations = [stand.course.iteration(index) for index in range(3)]
    assert [len(contributors(stand.course, stand.bucket, iteration)) for iteration in iterations] == [3, 1, 3]
    for step, total in enumerate((3.0, 1.0, 3.0)):
        for replica in range(3):
            stand.gradient(replica).fill_(1.0)
        assert stand.sync(step).eq(total).all()


def test_the_squares_of_all_ranges_are_the_square_of_the_norm(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of()
    generator = torch.Generator().manual_seed(0)
    for step in (3, 4):  # one slot each
        for replica in range(3):
            stand.gradient(replica).copy_(torch.randn(stand.bucket.num_elements, generator=generator))
        total = stand.sync(step % 3).double().square().sum()
        assert float(stand.memory.norms(step % 3).sum()) == pytest.approx(float(total), rel=1e-6)
    assert float(stand.memory.norms(0).sum()) != float(stand.memory.norms(1).sum())


def test_where_nobody_asks_for_the_norm_none_is_taken(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(squares=False)
    for replica in range(3):
        stand.gradient(replica).fill_(1.0)
    assert stand.sync().eq(3).all()
    assert not stand.memory.norms(0).any()


def test_stale_replicas_are_summed_from_the_slot_of_the_step(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(replicas=2, staleness=[0, 1])
    for step in range(3):
        stand.gradient(0, step).fill_(10.0)
        stand.gradient(1, step).fill_(float(step))
        stand.gradient(1, step + 1).fill_(torch.nan)
        assert stand.sync(step).eq(10 + step).all()
        assert stand.gradient(0, step).eq(10).all(), "the sum stands elsewhere: a late owner reads the gradient yet"


def test_a_device_that_is_alone_with_a_bucket_sums_nothing(
    planned: Any, directory: Directory, workload_of: Any
) -> None:
    plan = planned(workload_of(), replicas=[{"device": "gpu"}], update="local", clip_norm=1.0, bucket_mib=1.0)
    memory = plan.memory(directory)
    (bucket,) = memory.buckets
    assert bucket.route == "device"
    gradient = torch.full((bucket.num_elements,), 2.0)
    owner = Owner(0, memory, plan.course, {0: gradient}, None, squares=True, device=StandIn())
    owner.sync(0, plan.course.iteration(0))
    assert gradient.eq(2).all()
    assert float(memory.norms(0).sum()) == 4.0 * bucket.num_elements


def test_a_replica_without_a_share_has_no_say_in_what_is_missing(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(shares=[1.0, 1.0, 0.0])
    missing = missing_parameters(stand.memory, stand.course)
    for replica, absent in enumerate(([1, 2], [2, 3])):
        stand.memory.mark_missing((replica, 0), stand.bucket, absent, 0)
    assert missing(stand.bucket, stand.course.iteration(0)) == {2}
    assert missing(stand.bucket, stand.course.iteration(1)) == frozenset()
