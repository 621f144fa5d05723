"""Gradients in buckets by real autograd: where they end, and when each bucket's milestone is posted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from weft.plan.buckets import Bucket
from weft.transport.memory.directory import Directory
from weft.workers.compute.gradients import StageGradients
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workload.workload import WorkloadError

HOLDER = (0, 0)


class Twice(nn.Module):
    """Uses its layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Gated(nn.Module):
    """Uses `other` only for an input whose first number is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.other(x) if x[0, 0] > 0 else self.one(x)


class Stand:
    """A model whose gradients go into buckets, a bucket for each parameter, and the milestones that were posted."""

    def __init__(self, planned: Any, directory: Directory, model: nn.Module, *, on_device: bool = False) -> None:
        self.model = model
        self.memory: BucketMemory = planned.memory(directory)
        self.own = {bucket.index: torch.zeros(bucket.num_elements) for bucket in self.memory.buckets}
        self.posted: list[int] = []
        self.parameters = list(model.parameters())
        self.gradients = StageGradients(
            self.memory,
            HOLDER,
            dict(enumerate(self.parameters)),
            self.own if on_device else None,
            self.posted.append,
        )

    def run(self, step: int, inputs: Sequence[torch.Tensor]) -> None:
        """Forward and backward of one iteration's microbatches, and what is left at its end."""
        self.gradients.begin(step)
        for number, x in enumerate(inputs):
            is_last = number == len(inputs) - 1
            self.gradients.next_backward(is_last=is_last, is_only=len(inputs) == 1)
            before = len(self.posted)
            loss(self.model, x).backward()
            assert is_last or len(self.posted) == before, "more is to come"
        for bucket in self.memory.buckets:
            self.gradients.finish(bucket.index, step)

    def of(self, index: int, step: int = 0) -> torch.Tensor:
        """The gradient of a parameter, from its bucket."""
        bucket, place = place_of(self.memory, index)
        return self.memory.gradient(HOLDER, bucket, step)[place].view_as(self.parameters[index])


def place_of(memory: BucketMemory, index: int) -> tuple[Bucket, slice]:
    """The bucket of a parameter, and which of its elements are the parameter's."""
    ((bucket, place),) = ((b, place) for b in memory.buckets for place in b.places if place.parameter == index)
    return bucket, slice(place.offset, place.offset + place.num_elements)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def expected(model: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """What the plain loop has in p.grad, on a copy of the model."""
    twin = copy.deepcopy(model)
    for x in inputs:
        loss(twin, x).backward()
    return [parameter.grad for parameter in twin.parameters()]


def inputs(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


@pytest.fixture
def stand_of(planned: Any, directory: Directory, workload_of: Any) -> Callable[..., Stand]:
    """In buckets, since the norm is asked for."""

    def build(model: nn.Module | None = None, *, on_device: bool = False, **strategy: Any) -> Stand:
        workload = workload_of(*([] if model is None else [model]))
        plan = planned(workload, **{"clip_norm": 1.0} | strategy)
        return Stand(plan, directory, workload.model, on_device=on_device)

    return build


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_bucket_ends_with_the_bits_of_the_plain_loops_gradient(stand_of: Callable[..., Stand], count: int) -> None:
    stand = stand_of()
    for step in range(3):
        given = inputs(count, seed=step)
        stand.run(step, given)
        for index, gradient in enumerate(expected(stand.model, given)):
            assert gradient is not None
            assert torch.equal(stand.of(index), gradient)
    assert stand.posted == [0, 1, 2, 3] * 3
    assert int(stand.memory.missing.max()) == -1


def test_later_microbatches_are_added_in_the_bucket_itself(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of()
    stand.run(0, inputs(2))
    for index, parameter in enumerate(stand.parameters):
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == stand.of(index).data_ptr()
    stand.run(1, inputs(1))
    assert all(parameter.grad is None for parameter in stand.parameters), "nobody adds to the only one"


def test_only_what_has_something_to_do_in_a_backward_is_called_from_it(stand_of: Callable[..., Stand]) -> None:
    """A call for each parameter and microbatch was a hundredth of a small pipeline's iteration."""
    stand = stand_of(Gated())
    uses, leaves_out = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[-1.0, 0.0, 0.0]])
    calls: list[list[int]] = []
    stand.gradients.begin(0)
    for number, x in enumerate((leaves_out, leaves_out, uses, uses, uses)):
        stand.gradients.next_backward(is_last=number == 4, is_only=False)
        calls.append([len(parameter._post_accumulate_grad_hooks or ()) for parameter in stand.parameters])
        loss(stand.model, x).backward()
    assert calls == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("count", [1, 2])
def test_a_milestone_is_posted_from_inside_the_last_backward(stand_of: Callable[..., Stand], count: int) -> None:
    """The last layer's buckets are complete while the first layer's gradient is not even computed."""
    stand = stand_of()
    seen: list[list[int]] = []
    stand.parameters[0].register_hook(lambda gradient: seen.append(list(stand.posted)))
    stand.run(0, inputs(count))
    assert seen[:-1] == [[]] * (count - 1)
    assert len(seen[-1]) >= 2
    assert {place.parameter for b in seen[-1][:2] for place in stand.memory.buckets[b].places} == {2, 3}


def test_a_parameter_that_is_used_twice_counts_once(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(nn.Sequential(Twice(), nn.Linear(3, 2)))
    for count in (1, 2):
        stand.posted.clear()
        given = inputs(count)
        stand.run(0, given)
        assert sorted(stand.posted) == [0, 1, 2, 3]
        for index, gradient in enumerate(expected(stand.model, given)):
            assert gradient is not None
            assert torch.equal(stand.of(index), gradient)


def test_a_parameter_without_a_gradient_is_zeroed_and_missing_in_that_step(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(nn.Sequential(Gated()))
    with_other, without = torch.full((4, 3), 1.0), torch.full((4, 3), -1.0)
    buckets = {place.parameter: bucket for bucket in stand.memory.buckets for place in bucket.places}

    def missing(step: int) -> list[int]:
        return [index for index in range(4) if index in stand.memory.missing_in(buckets[index], [HOLDER], step)]

    stand.run(0, [with_other])
    assert missing(0) == []
    assert stand.of(2).any()
    stand.posted.clear()
    stand.run(1, [without])
    assert missing(1) == [2, 3]
    assert not stand.of(2).any(), "nothing is left of the iteration before"
    assert sorted(stand.posted) == sorted(buckets[index].index for index in (0, 1)), "the rest is GRAD's to post"
    stand.run(2, [without, with_other])
    assert missing(2) == []


def test_a_gradient_that_only_an_earlier_microbatch_has_is_kept(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(nn.Sequential(Gated()))
    given = [torch.full((4, 3), 1.0), torch.full((4, 3), -1.0)]
    stand.run(0, given)
    for index, gradient in enumerate(expected(stand.model, given)):
        assert gradient is not None
        assert torch.equal(stand.of(index), gradient)
    assert int(stand.memory.missing.max()) == -1
    assert len(stand.posted) == 2, "no hook of the last backward has seen the other two buckets"


def test_a_device_has_gradients_of_its_own(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(on_device=True)
    given = inputs(2)
    stand.run(0, given)
    for index, gradient in enumerate(expected(stand.model, given)):
        bucket, place = place_of(stand.memory, index)
        assert gradient is not None
        assert torch.equal(stand.own[bucket.index][place].view_as(gradient), gradient)
        assert not stand.of(index).any()


def test_a_stale_replicas_gradients_of_consecutive_steps_stand_beside_each_other(
    stand_of: Callable[..., Stand],
) -> None:
    stand = stand_of(staleness=1)
    for step in range(3):
        stand.run(step, inputs(2, seed=step))
    for step in (1, 2):
        for index, gradient in enumerate(expected(stand.model, inputs(2, seed=step))):
            assert gradient is not None
            assert torch.equal(stand.of(index, step), gradient)


def test_memory_of_another_order_takes_gradients_by_place_and_not_by_order(stand_of: Callable[..., Stand]) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight = nn.Parameter(torch.randn(3, 2).t())
    stand = stand_of(model)
    given = inputs(2)
    stand.run(0, given)
    bucket, place = place_of(stand.memory, 0)
    flat = stand.memory.gradient(HOLDER, bucket, 0)[place]
    gradient = expected(model, given)[0]
    assert gradient is not None
    assert torch.equal(flat.view(3, 2).t(), gradient)


def test_a_later_stage_has_no_gradient_of_what_an_earlier_one_uses_too(
    planned: Any, directory: Directory, workload_of: Any
) -> None:
    """Nor counts it: the buckets of its own parameters are complete without."""
    first, last, head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 2, bias=False)
    last.weight = first.weight
    plan = planned(workload_of(nn.Sequential(first, nn.Tanh(), last, head)), stages=2, split=[2])
    memory, posted = plan.memory(directory), list[int]()
    gradients = StageGradients(memory, (0, 1), {0: last.weight, 1: last.bias, 2: head.weight}, None, posted.append)
    gradients.begin(0)
    gradients.next_backward(is_last=True, is_only=True)
    head(last(inputs(1)[0])).sum().backward()
    assert posted == [place_of(memory, index)[0].index for index in (2, 1)]
    assert last.weight.grad is not None, "it is left for whoever hands it on"
    assert last.bias.grad is None


def test_a_sparse_gradient_is_refused_with_a_remedy(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(nn.Linear(3, 2))
    stand.gradients.begin(0)
    stand.gradients.next_backward(is_last=True, is_only=True)
    parameter = stand.parameters[0]
    parameter.grad = torch.sparse_coo_tensor(
        torch.tensor([[0], [0]]), torch.ones(1), parameter.shape, check_invariants=True
    )
    with pytest.raises(WorkloadError, match=r"\(2, 3\) gets a sparse gradient.*sparse=False"):
        stand.gradients._accumulated(parameter, 0, 0)


def test_a_gradient_in_two_parts_is_refused_since_its_bucket_has_been_posted(stand_of: Callable[..., Stand]) -> None:
    """Two reentrant checkpoints of one module are two backwards within one, and each has a part of the gradient."""
    layer, last = nn.Linear(3, 3), nn.Linear(3, 2)
    stand = stand_of(nn.Sequential(layer, last))

    def part(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)

    x = torch.ones(2, 3, requires_grad=True)
    stand.gradients.begin(0)
    stand.gradients.next_backward(is_last=True, is_only=True)
    with pytest.raises(WorkloadError, match=r"in two parts of one backward.*use_reentrant=False"):
        last(part(part(x))).sum().backward()
