"""What an optimizer keeps of a bucket, from one side's parts to the other's."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.buckets import Bucket, OwnedRange, Place, Route
from weft.plan.inspection import StateFacts
from weft.transport.memory.directory import Directory
from weft.workers.inspection.state_facts import optimizer_memory, state_facts
from weft.workers.updates.moving_state import MovingState
from weft.workers.updates.sharded_optimizer import ShardedOptimizer
from weft.workers.updates.updates import make_shard
from weft.workload.optimizer import make_optimizer
from weft.workload.workload import WorkloadError

ADAM = (
    StateFacts("step", "tensor", "float32", 4),
    StateFacts("exp_avg", "elements", "float32", 4),
    StateFacts("exp_avg_sq", "elements", "float32", 4),
)
ELEMENTS = 96  # of a bucket with a parameter of 64 and one of 32


def bucket_of(*cuts: int) -> Bucket:
    """Two parameters, of several owners."""
    bounds = [0, *cuts, ELEMENTS]
    return Bucket(
        index=0,
        dtype="float32",
        itemsize=4,
        offset=0,
        num_elements=ELEMENTS,
        places=(Place(parameter=0, offset=0, num_elements=64), Place(parameter=1, offset=64, num_elements=32)),
        holders=((0, 0),),
        route=Route.EITHER,
        ranges=tuple(OwnedRange(owner=n, start=a, stop=b) for n, (a, b) in enumerate(itertools.pairwise(bounds))),
        device_ranges=(OwnedRange(owner=9, start=0, stop=ELEMENTS),),
        state=(ADAM, ADAM),
    )


class Side:
    """One owner's optimizer, over the elements `bounds` of flat values that all sides share."""

    def __init__(self, bucket: Bucket, bounds: tuple[int, int], values: torch.Tensor, gradient: torch.Tensor) -> None:
        parameters = [nn.Parameter(torch.zeros(size)) for size in (64, 32)]
        template = make_optimizer(lambda given: torch.optim.Adam(given, lr=0.1), parameters)
        assert template is not None
        shard = make_shard(bucket, bounds, values, gradient, {0: 0, 1: 0})
        self.optimizer = ShardedOptimizer(template, {0: shard}, parameters=parameters, speculative=False)

    def gives(self, moving: MovingState) -> None:
        for segment, state in self.optimizer.take_state(0, keeps=False):
            moving.write(segment, state)

    def takes(self, moving: MovingState) -> None:
        self.optimizer.give_state(0, moving.read)


def test_state_that_several_owners_part_comes_together_and_is_parted_again(directory: Directory) -> None:
    """A parameter without a gradient in some steps has counted fewer of them than its neighbour."""
    bucket = bucket_of(32)
    moving = MovingState(directory, bucket)
    values, gradient = torch.ones(ELEMENTS), torch.linspace(-1, 1, ELEMENTS)
    hosts = [Side(bucket, bucket.range_of(owned.owner), values, gradient) for owned in bucket.ranges]
    device = Side(bucket, (0, ELEMENTS), values, gradient)
    expected = torch.ones(ELEMENTS)
    plain = Side(bucket, (0, ELEMENTS), expected, gradient)
    for step in range(6):
        touched = (lambda parameter: parameter == 1) if step in (1, 3) else None
        if step == 2:
            for host in hosts:
                host.gives(moving)
            device.takes(moving)
        if step == 4:
            device.gives(moving)
            for host in hosts:
                host.takes(moving)
        for side in (device,) if step in (2, 3) else hosts:
            side.optimizer.step(0, touched=touched)
        plain.optimizer.step(0, touched=touched)
    assert torch.equal(values, expected)


def test_a_side_that_has_made_no_step_hands_over_nothing(directory: Directory) -> None:
    bucket = bucket_of()
    moving = MovingState(directory, bucket)
    one, other = (Side(bucket, (0, ELEMENTS), torch.ones(ELEMENTS), torch.ones(ELEMENTS)) for _ in range(2))
    other.optimizer.step(0)
    other.gives(moving)
    one.gives(moving)
    other.takes(moving)
    assert [state for _, state in other.optimizer.take_state(0, keeps=True)] == [{}, {}]


def test_state_of_which_the_inspection_has_seen_nothing_is_refused(directory: Directory) -> None:
    bucket = bucket_of()
    side = Side(bucket, (0, ELEMENTS), torch.ones(ELEMENTS), torch.ones(ELEMENTS))
    side.optimizer.step(0)
    moving = MovingState(directory, dataclasses.replace(bucket, state=(ADAM[:1], ADAM)))
    with pytest.raises(WorkloadError, match="keeps 'exp_avg' of a parameter, which it did not in its first steps"):
        side.gives(moving)


# --- what the inspection sees


def stepped(build: Any, *shapes: tuple[int, ...]) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """An optimizer after two steps in which its last parameter has no gradient."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = build(parameters)
    for parameter in parameters[:-1]:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step()
    return optimizer, parameters


def test_a_parameter_without_state_or_of_one_element_is_like_the_others_of_its_group() -> None:
    optimizer, parameters = stepped(lambda given: torch.optim.Adam(given), (2, 3), (), (3,))
    expected = [
        ("step", "tensor", "float32", 4),
        ("exp_avg", "elements", "float32", 4),
        ("exp_avg_sq", "elements", "float32", 4),
    ]
    assert [state_facts(optimizer, parameter) for parameter in parameters] == [expected] * 3


def test_an_optimizer_that_keeps_nothing_moves_nothing() -> None:
    optimizer, parameters = stepped(lambda given: torch.optim.SGD(given, lr=0.1), (2, 3), (3,))
    assert [state_facts(optimizer, parameter) for parameter in parameters] == [[], []]


def test_sums_over_rows_and_columns_do_not_move() -> None:
    optimizer, parameters = stepped(lambda given: torch.optim.Adafactor(given), (2, 3), (3,))
    assert state_facts(optimizer, parameters[0]) is None


def test_what_an_optimizer_remembers_beside_its_state_is_seen() -> None:
    optimizer, _ = stepped(lambda given: torch.optim.Adam(given), (2, 3), (3,))
    before = optimizer_memory(optimizer)
    optimizer.step()
    assert optimizer_memory(optimizer) == before
    optimizer.param_groups[0]["steps"] = 1
    assert optimizer_memory(optimizer) != before
    before = optimizer_memory(optimizer)
    vars(optimizer)["inner"] = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert optimizer_memory(optimizer) != before
    assert optimizer_memory(optimizer) != optimizer_memory(optimizer), "nobody knows whether that has changed"


def test_state_under_a_key_that_is_no_text_does_not_move() -> None:
    """An optimizer of the user's may keep it under any; no message to the daemon has such a name."""
    optimizer, parameters = stepped(lambda given: torch.optim.Adam(given), (2, 3), (3,))
    optimizer.state[parameters[0]][0] = torch.ones(2, 3)
    assert state_facts(optimizer, parameters[0]) is None
