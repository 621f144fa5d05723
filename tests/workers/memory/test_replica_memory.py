"""Private copies of the parameters, and what brings them and their gradients to and fro."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.buckets import Bucket
from weft.plan.course import Course
from weft.transport.memory.directory import Directory
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workers.memory.replica_memory import ReplicaMemory

MIXED = [{"device": "cpu"}, {"device": "gpu"}]


class Stand:
    """The memory of each replica's only stage, and each one's own copy of the model, as workers have it."""

    def __init__(self, planned: Any, directory: Directory, model: nn.Module) -> None:
        self.memory: BucketMemory = planned.memory(directory)
        self.course: Course = planned.course
        self.bucket: Bucket = self.memory.buckets[0]
        self.models, self.replicas = [], []
        for r, replica in enumerate(planned.plan.replicas):
            self.models.append(copy.deepcopy(model))
            self.replicas.append(
                ReplicaMemory(
                    self.memory,
                    self.course,
                    (r, 0),
                    list(self.models[r].parameters()),
                    is_private=replica.private,
                    is_device=replica.device == "gpu",
                    writes=r == 0,
                    device=StandIn() if replica.device == "gpu" else HostDevice(),
                )
            )

    def own(self, replica: int) -> torch.Tensor:
        return self.replicas[replica].values[self.bucket.index]


@pytest.fixture
def stand_of(planned: Any, directory: Directory, workload_of: Any) -> Callable[..., Stand]:
    def build(**settings: Any) -> Stand:
        workload = workload_of()
        return Stand(planned(workload, **{"bucket_mib": 1.0} | settings), directory, workload.model)

    return build


def test_replicas_on_the_cpu_compute_on_the_shared_parameters(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(replicas=2)
    before = [parameter.detach().clone() for parameter in stand.models[0].parameters()]
    for model in stand.models:
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    stand.memory.parameters(stand.bucket).add_(1)
    for model in stand.models:
        assert all(torch.equal(p, b + 1) for p, b in zip(model.parameters(), before, strict=True))
    assert all(replica.gradients is None for replica in stand.replicas)


def test_a_device_computes_on_parameters_of_its_own_until_they_are_brought_up(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(replicas=MIXED, update="cpu")
    shared = stand.memory.parameters(stand.bucket)
    first = shared.clone()
    assert torch.equal(stand.own(1), first)
    shared.add_(1)
    assert torch.equal(stand.own(1), first)
    assert torch.equal(stand.own(0), first + 1)
    stand.replicas[1].up(stand.bucket.index, stand.course.iteration(0))
    assert torch.equal(stand.own(1), first + 1)
    parameter = next(stand.models[1].parameters())
    assert torch.equal(parameter.view(-1), stand.own(1)[_place_of(stand, 0)]), "what modules compute with"


def _place_of(stand: Stand, index: int) -> slice:
    (place,) = (place for place in stand.bucket.places if place.parameter == index)
    return slice(place.offset, place.offset + place.num_elements)


def test_a_stale_replica_gets_the_version_that_its_next_step_is_to_use(stand_of: Callable[..., Stand]) -> None:
    """Staleness 2, five steps: versions 0 0 0 1 2, and after the last one what is there stays."""
    stand = stand_of(replicas=2, staleness=[0, 2], steps=5)
    seen = []
    for step in range(5):
        seen.append(float(stand.own(1).mean()))
        stand.memory.version(stand.bucket, step + 1).fill_(100.0 + step + 1)  # what UPDATE of this step leaves
        stand.replicas[1].up(stand.bucket.index, stand.course.iteration(step))
    first = seen[0]
    assert seen == [first, first, first, 101.0, 102.0]
    assert float(stand.own(1).mean()) == 102.0


def test_up_copies_nothing_where_the_version_stays(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(replicas=2, staleness=[0, 2], steps=5)
    stand.own(1).fill_(-1.0)
    stand.memory.version(stand.bucket, 0).fill_(100.0)
    for step in range(2):
        stand.replicas[1].up(stand.bucket.index, stand.course.iteration(step))
    assert stand.own(1).eq(-1).all()


def test_a_devices_gradient_goes_down_where_it_has_a_part_of_the_batch(stand_of: Callable[..., Stand]) -> None:
    for shares, copied in (([1.0, 1.0], True), ([1.0, 0.0], False)):
        stand = stand_of(replicas=MIXED, shares=shares)
        assert stand.replicas[1].gradients is not None
        stand.replicas[1].gradients[stand.bucket.index].fill_(3.0)
        shared = stand.memory.gradient((1, 0), stand.bucket, 0).fill_(0)
        stand.replicas[1].down(stand.bucket.index, stand.course.iteration(0))
        assert bool(shared.eq(3).all()) is copied
        assert bool(shared.any()) is copied


def test_a_device_that_updates_itself_gets_the_sum_in_training(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(replicas=[{"device": "gpu"}] * 2, update="local")
    assert stand.bucket.route == "sum"
    device = stand.replicas[1]
    assert device.gradients is not None
    before = stand.own(1).clone()
    stand.memory.sum(stand.bucket).fill_(4.0)
    device.up(stand.bucket.index, stand.course.iteration(0))
    assert device.gradients[stand.bucket.index].eq(4).all()
    assert torch.equal(stand.own(1), before), "the sum is no parameter"


def test_what_a_device_has_trained_is_published_range_by_range(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of(replicas=[{"device": "gpu"}], update="local", clip_norm=1.0)
    shared = stand.memory.parameters(stand.bucket)
    before = shared.clone()
    stand.own(0).fill_(8.0)
    stand.replicas[0].publish(stand.bucket, (0, 32))
    assert shared[:32].eq(8).all()
    assert torch.equal(shared[32:], before[32:])


def test_a_device_that_keeps_its_gradients_takes_no_shared_memory_for_them(
    planned: Any, directory: Directory, workload_of: Any
) -> None:
    """A GPU page-locks what it opens, so the kernel gives it at once, untouched as it is."""
    plan = planned(workload_of(), replicas=[{"device": "gpu"}], update="local")
    memory = plan.memory(directory)
    before = directory.num_bytes()
    parameters = list(workload_of().model.parameters())
    ReplicaMemory(
        memory, plan.course, (0, 0), parameters, is_private=True, is_device=True, writes=True, device=StandIn()
    )
    assert directory.num_bytes() == before
