"""Whatever goes from unit to unit, and wherever the model is cut: the plain loop's result to the bit, or a sentence."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.reference import loop as reference
from weft.scheduler.planning.partition import PlanError
from weft.workload.workload import WorkloadError

_ATTEMPT = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "test_attempt.py"))
Turns, planned_workload = _ATTEMPT["Turns"], _ATTEMPT["planned_workload"]

HEADER = """
import dataclasses
from collections import namedtuple

import torch
from torch import nn

import weft


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=dtype)


def workload_of(model, inputs=None, loss=nn.functional.mse_loss, optimizer=None):
    inputs = numbers(20, 6) if inputs is None else inputs
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.05)
    return weft.Workload(model=model, loss=loss, train=(inputs, numbers(20, 1)), optimizer=optimizer or adam,
                         validation=(inputs[:7], numbers(7, 1)))


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


Pair = namedtuple("Pair", "one other")


@dataclasses.dataclass(frozen=True)
class Both:
    one: torch.Tensor
    other: dict


class Own:
    __slots__ = ("one", "other")

    def __init__(self, one, other):
        self.one, self.other = one, other


class Momentum(nn.Module):
    # a mean of what it has seen is its scale; kept: how the buffer changes
    def __init__(self, kept):
        super().__init__()
        self.kept = kept
        self.register_buffer("mean", torch.ones(8), persistent=kept != "hidden")

    def forward(self, x):
        now = 0.7 * self.mean + 0.3 * x.detach().abs().mean(0)
        if self.kept == "hidden":
            self.mean = self.mean.clone()
            self.mean.copy_(now)
        else:
            self.mean = now
        return x * self.mean


class Weight(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight
"""


def between(make: str, take: str) -> str:
    """A model whose third unit makes something of two tensors, which the fifth takes apart again."""
    return f"""
def make(x):
    return {make}

def take(value):
    one, other = {take}
    return one * other

def workload():
    return workload_of(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Call(make), Call(lambda value: value), Call(take),
                                     nn.Linear(8, 1)))
"""


def of(layers: str, given: str = "") -> str:
    return f"""
def workload():
    return workload_of(nn.Sequential({layers}), {given})
"""


STRUCTURES = {
    "a dict": between('{"one": x.sin(), "other": [x]}', '(value["one"], value["other"][0])'),
    "a named tuple": between("Pair(x.sin(), x)", "value"),
    "a list": between("[x.sin(), x]", "value"),
    "a dataclass": between('Both(x.sin(), {"deep": x})', '(value.one, value.other["deep"])'),
    "an object of the user's": between("Own(x.sin(), x)", "(value.one, value.other)"),
}
ONE_TENSOR = {
    "complex activations": of(
        "nn.Linear(6, 8), Call(torch.fft.fft), Call(lambda x: torch.fft.ifft(x * (1 + 2j)).conj()),"
        "Call(lambda x: x.real + x.imag), nn.Linear(8, 1)"
    ),
    "gradients with gaps, and of one number": of(
        "nn.Linear(6, 8), Call(torch.fft.fft), Call(lambda x: torch.fft.ifft(x).real), Call(lambda x: x[:, ::2]),"
        "nn.Tanh(), Call(lambda x: x.sum()), Call(lambda x: x.reshape(1, 1)), nn.Linear(1, 1),"
        "Call(lambda x: x * torch.ones(3, 1))",
        "loss=lambda output, target: (output.mean() - target.mean()) ** 2",
    ),
    "complex parameters": of(
        "nn.Linear(6, 8), Call(lambda x: torch.complex(x, x.sin())), nn.Linear(8, 8, dtype=torch.complex64),"
        "Call(torch.abs), nn.Linear(8, 1)"
    ),
    "complex data": of("Call(torch.fft.fft), Call(torch.abs), nn.Linear(6, 1)", "numbers(20, 6) * (1 + 1j)"),
    "spectral norms": of(
        "nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),"
        "nn.Linear(8, 1)"
    ),
    "statistics that forward reads": of(
        "nn.Linear(6, 8), Momentum('saved'), nn.Tanh(), Momentum('hidden'), nn.Linear(8, 1)"
    ),
    "a parameter that is not contiguous": of(
        "nn.Linear(6, 8), nn.Tanh(), Weight(numbers(8, 8).t()), nn.Tanh(), Weight(numbers(8, 4)[:, 1:2])"
    ),
    "a parameter of low precision": of(
        "nn.Linear(6, 8), Call(torch.Tensor.bfloat16), nn.Linear(8, 8).bfloat16(), Call(torch.Tensor.float),"
        "nn.Linear(8, 1)"
    ),
    "activations in channels-last order": of(
        "nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8),"
        "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)",
        "numbers(20, 3, 9, 9).contiguous(memory_format=torch.channels_last)",
    ),
    "transposed activations": of(
        "nn.Unflatten(1, (2, 3)), nn.Linear(3, 13), Call(lambda x: x.transpose(1, 2)), nn.LayerNorm(2),"
        "nn.Linear(2, 7), Call(lambda x: x.mean((1, 2)).unsqueeze(1)), nn.Linear(1, 1)",
    ),
}
DATA_DEPENDENT = of(
    "nn.Linear(6, 8), nn.Tanh(), Call(lambda x: x[:, : 1 + int((x[0, 0] * 1000).abs()) % 8]),"
    "Call(lambda x: x.sum(1, keepdim=True)), nn.Linear(1, 1)"
)


class Cases:
    """Jobs of one source, in one directory."""

    def __init__(self, planned: Any, directory: Path) -> None:
        self._planned, self._directory = planned, directory
        self._number = 0

    def turns(self, source: str, **strategy: Any) -> tuple[Any, Any]:
        (self._directory / "job.py").write_text(HEADER + source)
        probe = planned_workload(self._directory)
        plan = self._planned(probe, steps=5, directory=str(self._directory), batch_size=8, **strategy)
        return Turns(plan, plan.new_directory()), plan.spec

    def trains_as_the_plain_loop(self, source: str, *, exactly: bool = True, **strategy: Any) -> None:
        turns, spec = self.turns(source, **strategy)
        expected = reference.train(spec)
        turns.run(min)
        means, facts = turns.measured()
        state = turns.state()
        assert state.keys() == expected.state.keys()
        for name, tensor in expected.state.items():
            if exactly:
                assert torch.equal(state[name], tensor), (name, strategy)
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-6)
        losses = [means[index]["loss"] for index, values in sorted(facts.items()) if "lr" in values]
        assert losses == (expected.losses if exactly else pytest.approx(expected.losses, rel=1e-5))


@pytest.fixture
def cases(planned: Any, tmp_path: Path) -> Cases:
    return Cases(planned, tmp_path)


HOW: dict[str, tuple[Any, ...]] = {"schedule": ("1f1b", "gpipe"), "recompute": (False, True)}


def cut_at(*cuts: int) -> dict[str, Any]:
    """The settings of that split. A cut before the first unit is none, nor is another one at the same place."""
    split = sorted({*cuts} - {0})
    return {"microbatches": 3, "stages": len(split) + 1} | ({"split": split} if split else {})


def num_units(source: str, directory: Path) -> int:
    (directory / "job.py").write_text(HEADER + source)
    return len(planned_workload(directory).model)


@pytest.mark.pairs(kind=ONE_TENSOR, cut=range(8), again=(0, 3), **HOW)
def test_one_tensor_of_any_kind_trains_to_the_bit_wherever_the_model_is_cut(
    cases: Cases, tmp_path: Path, kind: str, cut: int, again: int, schedule: str, recompute: bool
) -> None:
    num = num_units(ONE_TENSOR[kind], tmp_path)
    split = cut_at(cut % num, again % num)
    cases.trains_as_the_plain_loop(ONE_TENSOR[kind], **split, schedule=schedule, recompute=recompute)


@pytest.mark.pairs(cut=(0, 1, 2, 3), again=(0, 2), **HOW)
def test_a_structure_may_be_what_the_loss_takes(
    cases: Cases, cut: int, again: int, schedule: str, recompute: bool
) -> None:
    source = """
def workload():
    last = Call(lambda x: {"all": [x, x.sin()]})
    return workload_of(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), last),
                       loss=lambda y, target: sum((each - target).square().mean() for each in y["all"]))
"""
    cases.trains_as_the_plain_loop(source, **cut_at(cut, again), schedule=schedule, recompute=recompute)


@pytest.mark.pairs(kind=STRUCTURES, cut=(0, 1, 2, 5), again=(0, 1, 5), **HOW)
def test_a_structure_between_units_trains_to_the_bit(
    cases: Cases, kind: str, cut: int, again: int, schedule: str, recompute: bool
) -> None:
    """Every job of such a model failed in the inspection: "backward through the graph a second time"."""
    split = cut_at(cut, again)
    cases.trains_as_the_plain_loop(STRUCTURES[kind], **split, schedule=schedule, recompute=recompute)


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_structure_between_units_is_never_cut(cases: Cases, kind: str) -> None:
    for cut in (3, 4):
        with pytest.raises(PlanError, match=rf"before unit {cut}: unit {cut - 1} \(Call\) passes on a \w+, and only"):
            cases.turns(STRUCTURES[kind], stages=2, split=[cut])


@pytest.mark.pairs(cut=(0, 1, 2, 4), again=(0, 2), **HOW)
def test_shapes_that_depend_on_the_data_train_within_a_stage(
    cases: Cases, cut: int, again: int, schedule: str, recompute: bool
) -> None:
    cases.trains_as_the_plain_loop(DATA_DEPENDENT, **cut_at(cut, again), schedule=schedule, recompute=recompute)


def test_shapes_that_depend_on_the_data_are_refused_between_two_stages(cases: Cases) -> None:
    """(1, 4) was broadcast into a slot of (4, 4), and the job completed with another loss."""
    text = r"unit 2 \(Call\) passes on, for a microbatch of \d samples, \(\d, \d\) float32, where .* was planned;"
    for recompute in (False, True):
        turns, _ = cases.turns(DATA_DEPENDENT, stages=2, split=[3], microbatches=3, recompute=recompute)
        with pytest.raises(WorkloadError, match=text):
            turns.run(min)


IN_PLACE = """
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x):
        self.mean.mul_(0.7).add_(0.3 * x.detach().abs().mean(0))
        return x * self.mean
""" + of("nn.Linear(6, 8), Scale(), nn.Tanh(), nn.Linear(8, 1)")


def test_what_later_forwards_change_in_place_trains_to_the_bit_or_is_refused_with_a_remedy(cases: Cases) -> None:
    for way in (
        {"stages": 1, "split": None},
        {"recompute": True},
        {"recompute": True, "schedule": "gpipe"},
        {"split": [1]},
    ):
        cases.trains_as_the_plain_loop(IN_PLACE, **{"stages": 2, "split": [2], "microbatches": 3} | way)
    turns, _ = cases.turns(IN_PLACE, stages=2, split=[2], microbatches=3)
    text = r"between unit 0 \(Linear\) and unit 1 \(Scale\) a forward changes in place .* strategy\.recompute = true"
    with pytest.raises(WorkloadError, match=text):
        turns.run(min)


BUCKETS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_norm": 0.1, "microbatches": 2},
    "stages clipped": {"stages": 2, "split": [2], "clip_norm": 0.1, "microbatches": 2},
    "a layer at a time": {
        "replicas": [{"device": "gpu", "working_window": 2}],
        "microbatches": 2,
        "update": "cpu",
        "recompute": True,
    },
    "skipping": {"skip_nonfinite": True, "microbatches": 2},
    "a device": {"replicas": [{"device": "gpu"}], "microbatches": 2, "update": "local", "clip_norm": 0.1},
}


@pytest.mark.parametrize("how", BUCKETS)
@pytest.mark.parametrize(
    "kind",
    [
        *("complex parameters", "spectral norms", "statistics that forward reads"),
        "a parameter that is not contiguous",
    ],
)
def test_what_goes_through_buckets_trains_what_the_plain_loop_does(cases: Cases, kind: str, how: str) -> None:
    """To the bit, where no step is clipped: then the squares are summed in another order."""
    exactly = "clip_norm" not in BUCKETS[how]
    cases.trains_as_the_plain_loop(ONE_TENSOR[kind], exactly=exactly, **BUCKETS[how])
