"""Where parameters and gradients in buckets lie, for every worker alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from weft.transport.memory.directory import Directory
from weft.workers.memory.bucket_memory import NORMS_DEPTH, BucketMemory, shaped_like
from weft.workload.units import Unit, named_state

Memories = Callable[..., tuple[BucketMemory, BucketMemory]]


@pytest.fixture
def memories(planned: Any, directory: Directory, workload_of: Any) -> Memories:
    """As two workers of one job see it."""

    def build(model: nn.Module | None = None, **strategy: Any) -> tuple[BucketMemory, BucketMemory]:
        plan = planned(workload_of(*([] if model is None else [model])), **{"replicas": 2} | strategy)
        return plan.memory(directory), plan.memory(directory)

    return build


def test_what_one_worker_writes_another_reads(memories: Memories) -> None:
    one, other = memories(staleness=[0, 1])
    for bucket, theirs in zip(one.buckets, other.buckets, strict=True):
        for place in ("parameters", "sum"):
            getattr(one, place)(bucket).fill_(1 + bucket.index)
            assert getattr(other, place)(theirs).eq(1 + bucket.index).all()
        one.version(bucket, 3).fill_(7)
        assert other.version(theirs, 3).eq(7).all()
        for holder in bucket.holders:
            one.gradient(holder, bucket, 1).fill_(5)
            assert other.gradient(holder, theirs, 1).eq(5).all()
    one.norms(0)[0, 0] = 9.0
    assert float(other.norms(0)[0, 0]) == 9.0


def test_no_two_places_overlap(memories: Memories) -> None:
    memory, _ = memories(staleness=[0, 2])
    places = [memory.parameters(bucket) for bucket in memory.buckets]
    places += [memory.sum(bucket) for bucket in memory.buckets]
    places += [memory.version(bucket, version) for bucket in memory.buckets for version in range(memory.num_versions)]
    places += [memory.gradient((0, 0), bucket, 0) for bucket in memory.buckets]
    places += [memory.gradient((1, 0), bucket, step) for bucket in memory.buckets for step in range(3)]
    spans = sorted((place.data_ptr(), place.data_ptr() + place.nbytes) for place in places)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_versions_and_gradients_come_again_after_their_depth(memories: Memories) -> None:
    """A replica of staleness 2 is three steps behind at most, and another one needs no more than one slot."""
    memory, _ = memories(staleness=[0, 2])
    bucket = memory.buckets[0]
    assert (memory.num_versions, memory.gradient_depth((0, 0)), memory.gradient_depth((1, 0))) == (3, 1, 3)
    assert memory.version(bucket, 1).data_ptr() == memory.version(bucket, 4).data_ptr()
    assert memory.gradient((1, 0), bucket, 0).data_ptr() == memory.gradient((1, 0), bucket, 3).data_ptr()
    assert memory.gradient((0, 0), bucket, 0).data_ptr() == memory.gradient((0, 0), bucket, 1).data_ptr()


def test_without_staleness_the_sum_takes_the_place_of_the_first_gradient(memories: Memories) -> None:
    memory, _ = memories()
    assert memory.num_versions == 0
    for bucket in memory.buckets:
        assert memory.sum(bucket).data_ptr() == memory.gradient((0, 0), bucket, 0).data_ptr()
        assert memory.sum(bucket).data_ptr() != memory.gradient((1, 0), bucket, 0).data_ptr()


def test_the_squares_of_two_steps_on_their_way_stand_beside_each_other(memories: Memories) -> None:
    memory, _ = memories()
    for step in range(NORMS_DEPTH):
        memory.norms(step).fill_(step + 1)
    assert [float(memory.norms(step).max()) for step in range(NORMS_DEPTH)] == [1.0, 2.0]
    assert memory.norms(0).shape == (len(memory.buckets), memory.num_owners)
    assert memory.norms(0).dtype is torch.float64


def test_a_parameter_is_missing_where_no_holder_has_a_gradient_for_it(memories: Memories) -> None:
    one, other = memories(bucket_mib=1.0)
    (bucket,) = one.buckets
    both = list(bucket.holders)
    one.mark_missing((0, 0), bucket, [1, 2], 6)
    assert other.missing_in(bucket, both, 6) == frozenset(), "the other holder has all"
    other.mark_missing((1, 0), bucket, [2, 3], 6)
    assert one.missing_in(bucket, both, 6) == {2}
    assert one.missing_in(bucket, both[:1], 6) == {1, 2}, "the other replica has no part of the batch"
    one.mark_missing((0, 0), bucket, [2], 7)
    assert one.missing_in(bucket, both, 7) == frozenset()
    assert one.missing_in(bucket, both[:1], 7) == {2}, "nothing of step 6 is in it"
    assert one.missing_in(bucket, both, 6) == {2}, "which an owner may not have come to yet"


def test_a_stage_holds_the_buckets_of_its_own_units(memories: Memories) -> None:
    memory, _ = memories(stages=2, split=[2])
    assert memory.holders == [(0, 0), (0, 1), (1, 0), (1, 1)]
    held = [{place.parameter for bucket in memory.held(holder) for place in bucket.places} for holder in memory.holders]
    assert held == [{0, 1}, {2, 3}, {0, 1}, {2, 3}]


def test_the_names_of_the_state_dict_lead_to_the_shared_parameters(memories: Memories, directory: Directory) -> None:
    first, last = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    last.weight = first.weight
    transposed = nn.Linear(3, 2)
    transposed.weight = nn.Parameter(torch.randn(3, 2).t())
    model = nn.Sequential(first, nn.BatchNorm1d(3), last, transposed)
    memory, _ = memories(model)
    parameters = list(model.parameters())
    for bucket in memory.buckets:
        for index, start in ((place.parameter, place.offset) for place in bucket.places):
            shaped_like(parameters[index], memory.parameters(bucket), start).copy_(parameters[index].data)
    units = [Unit(number, f"{number}.", module) for number, module in enumerate(model)]
    memory.publish_layout(named_state(units), parameters)
    found = directory.find("parameters").items()
    assert found.keys() == {name for name, _ in model.named_parameters(remove_duplicate=False)}, "buffers are elsewhere"
    for name, tensor in found.items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert found["0.weight"].data_ptr() == found["2.weight"].data_ptr()


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 5).t(),
        torch.randn(()),
    ],
    ids=["plain", "channels last", "transposed", "scalar"],
)
def test_a_place_has_the_order_in_memory_that_the_parameter_has(like: torch.Tensor) -> None:
    whole = torch.zeros(1 + like.numel() + 9)
    place = shaped_like(like, whole[1:], 3)
    assert (place.shape, place.stride()) == (like.shape, like.stride())
    place.copy_(like)
    assert torch.equal(whole[4 : 4 + like.numel()], like.as_strided((like.numel(),), (1,)))
    assert not whole[:4].any()
    assert not whole[4 + like.numel() :].any()
