"""What a loader loads, and what a device that has the data takes of them itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.buckets import Holder
from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.plan.plan import ReplicaPlan, Role
from weft.workers.lanes.loaded import LoadedPairs
from weft.workload.data.batches import Batches
from weft.workload.data.resident import ResidentData, can_be_resident
from weft.workload.data.source import source_of
from weft.workload.workload import Workload

PART = Part(1, 2, 3)
X, Y = torch.arange(40.0).reshape(10, 4), torch.arange(10)


def workload(**changes: Any) -> Workload:
    parts: dict[str, Any] = {"loss": nn.MSELoss(), "train": (X, Y), "validation": (X[:4] + 0.5, Y[:4])}
    return Workload(nn.Linear(4, 1), **{**parts, **changes}, optimizer=lambda params: torch.optim.SGD(params))


def iteration(epoch: int = 0, *, training: bool = True) -> Iteration:
    return Iteration(index=0, training=training, epoch=epoch, step=0, start=0, size=8)


class Slots:
    """Of one slot."""

    by_number = False

    def __init__(self, like: torch.Tensor) -> None:
        self.tensor = torch.full_like(like[: PART.size], -1)

    def slot(self, iteration: int, microbatch: int, size: int) -> torch.Tensor:
        return self.tensor[:size]


class Weighs:
    def __init__(self, weighs: bool) -> None:
        self.weighs = weighs
        self.weighed: list[float] = []

    def set(self, iteration: Iteration, part: Part, weight: float, samples: int) -> None:
        self.weighed.append(weight)
        assert samples == part.size


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("weighs", [False, True])
def test_nobody_loads_what_the_devices_have_but_to_weigh_it(resident: bool, weighs: bool) -> None:
    made = {
        (role, memory): Slots(like)
        for role, like in ((Role.INPUT, X), (Role.TARGET, Y))
        for memory in ("shared", "device")
    }
    rings: Any = [
        (SimpleNamespace(role=role, memory=memory, replica=0, by_number=False), slots)
        for (role, memory), slots in made.items()
    ]
    batches = Batches(workload(weight=lambda target: target.sum()), seed=3, batch_size=8, steps=4)
    course: Any = SimpleNamespace(loaded_part=lambda *_: PART, part=lambda *_: PART)
    replicas = [ReplicaPlan(device="gpu", num_stages=1, microbatches=2, resident=resident)]
    device: Any = SimpleNamespace(copy=lambda target, source: target.copy_(source))
    put: list[int] = []

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        put.append(tensor.nbytes)
        return tensor.clone()

    loaded = LoadedPairs(rings, course, replicas, device, ResidentData(batches, to_device))
    weights: Any = Weighs(weighs)
    loaded.load(batches, weights, iteration(), 0, 1)
    is_loaded = weighs or not resident
    assert bool((made[Role.INPUT, "shared"].tensor >= 0).all()) is is_loaded
    assert weights.weighed == ([float(Y[batches.order(iteration())[2:5]].sum())] if weighs else [])
    loaded.fetch(Holder(0, 0), iteration(), 1)
    inputs, targets = batches.load(iteration(), PART)
    assert torch.equal(made[Role.INPUT, "device"].tensor, inputs)
    assert torch.equal(made[Role.TARGET, "device"].tensor, targets)
    assert sorted(put) == ([Y.nbytes, Y.nbytes, X.nbytes] if resident else []), "inputs, targets, the order"


def test_a_device_has_each_tensor_once_and_each_epochs_own_order() -> None:
    batches = Batches(workload(), seed=3, batch_size=8, steps=9)
    put: list[tuple[int, ...]] = []

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        put.append(tuple(tensor.shape))
        return tensor.clone()

    data = ResidentData(batches, to_device)
    for epoch in (0, 0, 1):
        for training in (True, False):
            part, slot = Part(0, 0, 4), torch.zeros(4, 4)
            data.fill(0, slot, iteration(epoch, training=training), part)
            assert torch.equal(slot, batches.load(iteration(epoch, training=training), part)[0])
    assert sorted(put) == [(4,), (4,), (4, 4), (10,), (10,), (10, 4)]


class Items(torch.utils.data.TensorDataset):
    """Whose items may be others."""


@pytest.mark.parametrize(
    ("changes", "num_tensors", "resident"),
    [
        ({}, 2, True),
        ({"train": torch.utils.data.TensorDataset(X, X)}, 2, True),
        ({"loss": None, "step": max, "train": {"x": X, "again": X, "y": Y}}, 2, True),
        ({"collate": torch.stack}, None, False),
        (
            {"train": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), sampler=[3, 1])},
            2,
            False,
        ),
        ({"train": Items(X, Y)}, None, False),
        ({"train": [(X[0], Y[0])]}, None, False),
    ],
)
def test_what_is_rows_of_tensors_may_lie_on_a_device(
    changes: dict[str, Any], num_tensors: int | None, resident: bool
) -> None:
    source = source_of(workload(**changes), "train")
    assert (None if source.whole is None else len(source.whole[0])) == num_tensors
    assert can_be_resident(source) is resident
