"""Steps that call their model inside of a transform of torch.func: trained uncut, and told where they cannot be cut.

A trial of cuts raised for tensors that such a call keeps to itself, and a recording for their missing memory and for
parameters that stand in a module for one call: jobs of one stage failed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import func, nn
from torch.nn.functional import mse_loss

from weft.spec.job_spec import JobSpec
from weft.workers.devices.host import HostDevice
from weft.workers.inspection import inspection
from weft.workload.workload import Workload

Batch = Mapping[str, torch.Tensor]


def per_sample(model: nn.Module, batch: Batch) -> torch.Tensor:
    return mse_loss(torch.vmap(model)(batch["x"]), batch["y"])


def gradients_of_inputs(model: nn.Module, batch: Batch) -> torch.Tensor:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(model(x), y)

    gradients = func.vmap(func.grad(loss))(batch["x"], batch["y"])
    return mse_loss(model(batch["x"] + gradients.detach().sign()), batch["y"])


def jacobian(model: nn.Module, batch: Batch) -> torch.Tensor:
    return mse_loss(model(batch["x"]), batch["y"]) + func.vmap(func.jacrev(model))(batch["x"]).square().mean()


def direction(model: nn.Module, batch: Batch) -> torch.Tensor:
    output, change = func.jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))
    return mse_loss(output, batch["y"]) + change.square().mean()


def inner_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """As MAML learns to learn."""
    parameters = dict(model.named_parameters())
    loss = mse_loss(func.functional_call(model, parameters, (batch["x"],)), batch["y"])
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    fast = {name: each - 0.1 * g for (name, each), g in zip(parameters.items(), gradients, strict=True)}
    return mse_loss(func.functional_call(model, fast, (batch["x"],)), batch["y"])


TRANSFORM = "the stage begins inside of a call of torch.vmap, or of another transform of torch.func"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # func.jvp's own use
@pytest.mark.parametrize(
    ("step", "told"),
    [
        (per_sample, TRANSFORM),
        (gradients_of_inputs, TRANSFORM),
        (jacobian, TRANSFORM),
        (direction, TRANSFORM),
        (inner_step, "is needed by a later stage, and the stage before that has no numbers of it"),
    ],
)
def test_a_step_with_a_transform_is_inspected_whole_and_its_cuts_are_told(
    step: Callable[[nn.Module, Batch], torch.Tensor], told: str
) -> None:
    workload = Workload(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        {"x": torch.randn(4, 3), "y": torch.randn(4, 2)},
        step=step,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    job = {"entry": "job.py:workload", "batch_size": 4, "epochs": 1}
    found = inspection.inspect(workload, JobSpec.parse({"job": job, "directory": "/jobs"}), HostDevice())
    problems = [problem for _, problem in found["cut_problems"]]
    assert problems
    assert all(told in problem for problem in problems), problems
