"""Which units are compiled, and what stands in the place of their forward."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.workload.compiling.ahead import compile_ahead, note_calls, noted_calls
from weft.workload.compiling.compiled import CompiledForward, compile_units, compiled_modules, uncompiled
from weft.workload.compiling.compiler import Backend, CompileError, compiling


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([Twice(), Twice()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


def workload(model: nn.Module) -> weft.Workload:
    return weft.Workload(model=model, train=None, loss=nn.MSELoss(), optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Sequential(nn.Linear(3, 3), Twice(), nn.Sequential(nn.Linear(3, 3), nn.ReLU())), ["1", "2"]),
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU()), []),
        (nn.Sequential(nn.TransformerEncoderLayer(4, 2, 4), nn.LSTM(4, 4)), ["0"]),
        (Stack(), ["blocks.0", "blocks.1"]),
    ],
    ids=["children", "layers alone", "torch's own", "calls"],
)
def test_units_of_more_than_one_layer_are_compiled(model: nn.Module, names: list[str]) -> None:
    assert [name for name, _ in compiled_modules(workload(model))] == names


@pytest.mark.slow
def test_a_unit_that_its_user_has_compiled_stays_as_it_is() -> None:
    own = Twice()
    own.compile(backend="eager")
    assert compiled_modules(workload(nn.Sequential(own, Twice())))[0][0] == "1"


@pytest.fixture
def forward() -> Callable[..., CompiledForward]:
    def make(module: nn.Module, most: int = 8) -> CompiledForward:
        made = CompiledForward(module.forward, module, "0 (Twice)", Backend(most), takes_over=True)
        module.forward = made
        return made

    return make


@pytest.mark.slow
def test_a_copy_of_a_unit_is_a_unit_of_its_own(forward: Callable[..., CompiledForward]) -> None:
    own = Twice()
    made = forward(own)
    copied: Any = copy.deepcopy(own)
    assert copied.forward is not made
    with torch.no_grad():
        copied.layer.weight.zero_()
        copied.layer.bias.zero_()
    assert uncompiled(copied.forward)(torch.ones(1, 3)).abs().sum() == 0
    assert uncompiled(made)(torch.ones(1, 3)).abs().sum() > 0


@pytest.mark.days(3)
@pytest.mark.slow(seconds=11)
@pytest.mark.filterwarnings("ignore")  # torch's own, where it compiles
def test_shapes_are_compiled_ahead_as_they_were_noted_and_too_many_are_refused(
    forward: Callable[..., CompiledForward], tmp_path: Any
) -> None:
    model = nn.Sequential(Twice(), Twice())
    with compiling(tmp_path / "compiled"):
        compile_units(workload(model))
        note_calls(model)
        model(torch.ones(2, 3)).sum().backward()
        noted = noted_calls(model)
        other = nn.Sequential(Twice(), Twice())
        made = [forward(unit, most=2) for unit in other]
        compile_ahead(other, noted, list(other[1].parameters()), torch.device("cpu"), contextlib.nullcontext)
        assert [each.backend.num_graphs for each in made] == [0, 1]
        other[1](torch.ones(2, 3))
        other[1](torch.ones(4, 3))
        with pytest.raises(CompileError, match="compiles for each shape, and there have been 2; pad batches"):
            other[1](torch.ones(5, 3))
