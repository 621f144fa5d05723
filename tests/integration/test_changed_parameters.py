"""A teacher that follows its student in the step: wherever it is, the job ends with the plain loop's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

SOURCE = """
import copy
import torch
from torch import nn
import weft

class Taught(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

def step(model, batch):
    if model.training:
        with torch.no_grad():
            for own, its in zip(model.teacher.parameters(), model.student.parameters()):
                own.lerp_(its, 0.1)
    with torch.no_grad():
        wanted = model.teacher(batch[0])
    return nn.functional.mse_loss(model.student(batch[0]), wanted + batch[1])

def workload():
    data = torch.randn(16, 4), torch.randn(16, 4)
    optimizer = lambda parameters: torch.optim.Adam([each for each in parameters if each.requires_grad], lr=0.05)
    return weft.Workload(Taught(), data, step=step, validation=data, optimizer=optimizer)
"""


@pytest.mark.days(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [{"preset": "zero-offload"}, {"stages": 2, "microbatches": 2}], ids=["device", "pipeline"]
)
def test_a_teacher_is_saved_and_goes_on_as_in_the_plain_loop(machine: Any, strategy: dict[str, Any]) -> None:
    """A device's was never saved but as it began, and a snapshot of a later one had the first one's."""
    spec = machine.spec(SOURCE, strategy=strategy, batch_size=8, steps=6)
    half = type(spec).parse(spec.to_wire() | {"checkpoint": {"every": "2 steps"}})
    first = machine.run(half)
    assert first["state"] == "completed", first["error"]
    on = machine.run(machine.spec(SOURCE, strategy=strategy, batch_size=8, steps=9, resume_from=first["run_dir"]))
    assert on["state"] == "completed", on["error"]
    for result, steps in ((first, 6), (on, 9)):
        plain = train(machine.spec(SOURCE, strategy=strategy, batch_size=8, steps=steps)).state
        ours = load_file(Path(result["model"]))
        assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []
