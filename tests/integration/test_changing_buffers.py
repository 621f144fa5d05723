"""Buffers that come to be, or grow: those that no state dict has go on so, others are refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

SOURCE = """
import torch, weft

class Recalling(torch.nn.Linear):
    def __init__(self, persistent):
        super().__init__(4, 4)
        self.register_buffer("mean", None, persistent=persistent)
        self.register_buffer("means", torch.zeros(1), persistent=False)

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            now = y.detach().mean(0)
            self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
            self.means = torch.cat([self.means, now[:1]])
        return y if self.mean is None else y + self.mean + self.means.sum()

class Own(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)

def workload(own_forward=False, persistent=False):
    layers = torch.nn.Sequential(Recalling(persistent), torch.nn.Tanh(), Recalling(persistent))
    data = torch.randn(16, 4), torch.randn(16, 4)
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    model = Own(layers) if own_forward else layers
    return weft.Workload(model, data, loss=torch.nn.functional.mse_loss, validation=data, optimizer=optimizer)
"""


def of(daemon: Any, stages: int, steps: int, **args: bool) -> Any:
    return daemon.spec(SOURCE, strategy={"stages": stages}, batch_size=8, steps=steps, args=args)


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("own_forward", "stages", "then"), [(True, 1, 1), (True, 1, 2), (True, 2, 1), (False, 1, 2), (False, 2, 1)]
)
def test_those_that_no_state_dict_has_go_on_as_they_have_become(
    daemon: Any, own_forward: bool, stages: int, then: int
) -> None:
    half, whole = of(daemon, stages, 6, own_forward=own_forward), of(daemon, then, 11, own_forward=own_forward)
    first = daemon.run(type(half).parse(half.to_wire() | {"checkpoint": {"every": "2 steps"}}))
    assert first["state"] == "completed", first["error"]
    whole = whole.to_wire()
    whole["job"]["resume_from"] = first["run_dir"]
    on = daemon.run(type(half).parse(whole))
    assert on["state"] == "completed", on["error"]
    plain, ours = train(of(daemon, 1, 11, own_forward=own_forward)).state, load_file(Path(on["model"]))
    assert plain.keys() == ours.keys()
    assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []


@pytest.mark.parametrize(("own_forward", "name"), [(True, "layers.0.mean"), (False, "0.mean")])
def test_a_none_in_the_state_that_becomes_a_tensor_is_refused(daemon: Any, own_forward: bool, name: str) -> None:
    result = daemon.run(of(daemon, 1, 6, own_forward=own_forward, persistent=True))
    assert result["state"] == "failed"
    assert f"the buffer '{name}' of Workload.model, which was built as None, becomes a tensor" in result["error"]
    assert "register it with persistent=False" in result["error"]
