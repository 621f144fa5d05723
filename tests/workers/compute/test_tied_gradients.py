"""Gradients of a parameter that three stages use: from the last one to the first, with the bits of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.inspection import Inspection, ParameterFacts, UnitFacts
from weft.plan.plan import Plan
from weft.transport.memory.directory import Directory
from weft.workers.compute.backward.tied_gradients import TiedGradients
from weft.workers.devices.device import Device
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.memory.parcels import ParcelRing
from weft.workload.workload import WorkloadError

MICROBATCHES, STAGES, WIDTH = 4, 3, 37
Part = Callable[[nn.Parameter, int], torch.Tensor | None]


def part_of(stage: int) -> Part:
    """What a stage adds to the loss. Of microbatch 1 the middle stage has no part, of 2 the first one, of 3 none; the
    last one's is three uses, of sizes that are rounded."""
    generator = torch.Generator().manual_seed(stage)
    inputs = torch.randn(MICROBATCHES, 8, WIDTH, generator=generator) * 10.0 ** torch.arange(WIDTH).remainder(5)

    def part(weight: nn.Parameter, microbatch: int) -> torch.Tensor | None:
        if microbatch == 3 or (stage, microbatch) in [(1, 1), (0, 2)]:
            return None
        x = inputs[microbatch]
        for _ in range(1 + stage):
            x = torch.tanh(x @ weight)
        return x.sum()

    return part


class Stages:
    """One after the other, each with a copy of the parameter as in a worker of its own."""

    def __init__(self, plan: Plan, directory: Directory, device: Device, make: Callable[[], nn.Parameter]) -> None:
        rings = [(ring, ParcelRing(directory, ring, MICROBATCHES, device)) for ring in plan.rings if ring.crosses]
        self.weights = [make() for _ in range(STAGES)]
        self.tied = [TiedGradients(rings, stage, [own]) for stage, own in enumerate(self.weights)]

    def backward(self, iteration: int, microbatch: int) -> None:
        for stage in reversed(range(STAGES)):
            tied, loss = self.tied[stage], part_of(stage)(self.weights[stage], microbatch)
            roots: list[tuple[torch.Tensor, torch.Tensor | None]] = [*tied.roots(iteration, microbatch)]
            if loss is not None:
                roots.append((loss, None))
            if roots:
                torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
            tied.hand_back(iteration, microbatch)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)) / 6)


def whole_backward(whole: nn.Parameter, microbatch: int) -> None:
    parts = [part_of(stage)(whole, microbatch) for stage in range(STAGES)]
    losses = [part for part in parts if part is not None]
    if losses:
        torch.stack(losses).sum().backward()


@pytest.fixture
def stages_of(
    plan_of: Callable[..., Plan],
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    parameter_of: Callable[..., ParameterFacts],
    directory: Directory,
) -> Callable[..., Stages]:
    parameter = parameter_of(0, 1, 2, num_elements=WIDTH * WIDTH)
    inspection = inspection_of([unit_of(number) for number in range(STAGES)], parameters=(parameter,))

    def build(device: Device, make: Callable[[], nn.Parameter] = weight) -> Stages:
        settings: dict[str, Any] = {"device": "gpu"} if isinstance(device, StandIn) else {}
        plan = plan_of(inspection, replicas=[settings | {"stages": STAGES}], microbatches=MICROBATCHES)
        return Stages(plan, directory, device, make)

    return build


@pytest.mark.parametrize("device", [HostDevice, StandIn])
def test_the_first_stage_has_the_bits_of_the_whole_models_gradient_and_the_others_none(
    stages_of: Callable[..., Stages], device: Callable[[], Device]
) -> None:
    whole, stages = weight(), stages_of(device())
    for iteration in range(2):
        for microbatch in range(MICROBATCHES):
            whole_backward(whole, microbatch)
            stages.backward(iteration, microbatch)
            assert whole.grad is not None
            assert stages.weights[0].grad is not None
            assert torch.equal(stages.weights[0].grad, whole.grad), microbatch
            assert [own.grad for own in stages.weights[1:]] == [None, None]


def test_that_is_no_matter_of_course(stages_of: Callable[..., Stages]) -> None:
    """Each stage's own sum over the microbatches, added up in the end, has other bits."""
    whole, alone = weight(), [weight() for _ in range(STAGES)]
    for microbatch in range(MICROBATCHES):
        whole_backward(whole, microbatch)
        for stage, own in enumerate(alone):
            if (loss := part_of(stage)(own, microbatch)) is not None:
                loss.backward()
    assert whole.grad is not None
    gradients = [own.grad for own in alone if own.grad is not None]
    torch.testing.assert_close(sum(gradients), whole.grad, rtol=1e-3, atol=1e-3)
    assert not torch.equal(torch.stack(gradients).sum(0), whole.grad)


def test_a_microbatch_of_which_nobody_has_a_gradient_leaves_none(stages_of: Callable[..., Stages]) -> None:
    stages = stages_of(HostDevice())
    stages.backward(0, 3)
    assert [own.grad for own in stages.weights] == [None, None, None]
    stages.backward(1, 0)
    stages.backward(1, 3)
    whole = weight()
    whole_backward(whole, 0)
    assert stages.weights[0].grad is not None
    assert torch.equal(stages.weights[0].grad, whole.grad), "nothing of an earlier microbatch comes once more"


def test_the_users_hooks_run_once_on_the_whole_gradient(stages_of: Callable[..., Stages]) -> None:
    def halved() -> nn.Parameter:
        made = weight()
        made.register_hook(lambda gradient: gradient * 0.5)
        return made

    stages, whole = stages_of(HostDevice(), halved), halved()
    for microbatch in range(MICROBATCHES):
        whole_backward(whole, microbatch)
        stages.backward(0, microbatch)
    assert stages.weights[0].grad is not None
    assert torch.equal(stages.weights[0].grad, whole.grad)


def test_a_sparse_gradient_is_refused_with_a_remedy(stages_of: Callable[..., Stages]) -> None:
    stages = stages_of(HostDevice())
    last = stages.weights[2]
    last.grad = torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.ones(1), last.shape, check_invariants=True)
    with pytest.raises(WorkloadError, match=r"\(37, 37\) gets a sparse gradient.*sparse=False"):
        stages.tied[2].hand_back(0, 0)
