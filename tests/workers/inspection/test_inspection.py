"""What one worker finds out about a workload for the planner."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import msgpack
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host
from weft.workers.devices.host import HostDevice
from weft.workers.inspection import inspection
from weft.workload.units import units
from weft.workload.workload import Workload, WorkloadError


def spec_of(batch_size: int = 4, microbatches: int = 1, steps: int | None = None, replicas: int = 1) -> JobSpec:
    length = {"steps": steps} if steps else {"epochs": 1}
    return JobSpec.parse(
        {
            "job": {"entry": "job.py:workload", "batch_size": batch_size, **length},
            "strategy": {"microbatches": microbatches, "replicas": replicas},
            "directory": "/jobs",
        }
    )


def workload_of(model: nn.Module, **changes: Any) -> Workload:
    parts: dict[str, Any] = {
        "model": model,
        "loss": nn.MSELoss(),
        "train": (torch.randn(10, 3), torch.randn(10, 2)),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    return Workload(**parts | changes)


def inspect(workload: Workload, spec: JobSpec) -> Any:
    """On the host."""
    return inspection.inspect(workload, spec, HostDevice())


class Counted(nn.Module):
    """Its `train()` alone changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))

    def train(self, mode: bool = True) -> Self:
        self.epoch += mode
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


class Pair(nn.Module):
    """Passes on two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x + 1


class Own(torch.Tensor):
    """A class of the user's."""


def forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        return x * torch.rand(3)


class Join(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]


def test_sizes_shapes_and_bytes_of_each_unit_are_found() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    told = inspect(workload_of(model, validation=(torch.randn(7, 3), torch.randn(7, 2))), spec_of(8, 1))
    assert [unit["name"] for unit in told["units"]] == ["0.", "1.", "2.", "3."]
    assert [unit["parameter_bytes"] for unit in told["units"]] == [80, 40, 0, 48]
    assert [unit["buffer_bytes"] for unit in told["units"]] == [0, 48, 0, 0]
    assert [(value["name"], value["maker"], value["readers"]) for value in told["values"]] == [
        ("0", 0, [1]),
        ("1", 1, [2]),
        ("2", 2, [3]),
    ]
    assert {(value["dtype"], value["itemsize"], value["differentiable"]) for value in told["values"]} == {
        ("float32", 4, True)
    }
    assert told["cut_problems"] == []
    sizes = [2, 7, 8]  # a batch, the last one of training, the one of validation
    assert sorted(told["values"][0]["shapes"]) == [[size, [size, 5]] for size in sizes]
    assert sorted(told["input"]["shapes"]) == [[size, [size, 3]] for size in sizes]
    assert (told["input"]["dtype"], told["target"]["dtype"]) == ("float32", "float32")
    assert (told["num_train"], told["num_validation"], told["metrics"]) == (10, 7, [])
    assert all(unit["forward_seconds"] > 0 for unit in told["units"])
    assert told["units"][0]["backward_seconds"] > 0
    assert told["load_seconds"] > 0
    assert told["update_seconds"] > 0
    assert msgpack.unpackb(msgpack.packb(told)) == told, "plain data"


def test_behind_a_unit_that_passes_on_no_single_tensor_the_model_is_not_cut() -> None:
    told = inspect(workload_of(nn.Sequential(nn.Linear(3, 2), Pair(), Join())), spec_of())
    assert [value["name"] for value in told["values"]] == ["0"]
    (problem,) = told["cut_problems"]
    assert problem == [2, "unit 1 (Pair) passes on a tuple, and only a plain tensor goes from stage to stage"]


def test_what_the_last_unit_makes_is_no_problem() -> None:
    class Both(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
            return (pair[0] + pair[1] - target).square().mean()

    told = inspect(workload_of(nn.Sequential(nn.Linear(3, 2), Pair()), loss=Both()), spec_of())
    assert told["cut_problems"] == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "output"),
    [
        (lambda x: x.to_sparse(), "a Tensor of its own kind (sparse_coo)"),
        (lambda x: torch.nested.as_nested_tensor(list(x.unbind())), "a Tensor of its own kind (nested)"),
        (lambda x: x.as_subclass(Own), "a Own of its own kind (strided)"),
        (lambda x: x if len(x) == 4 else x.double(), "a tensor whose dtype depends on the microbatch"),
        (lambda x: {"x": x}, "a dict"),
    ],
)
def test_what_no_slot_can_hold_is_told(make: Any, output: str) -> None:
    class Make(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return make(x)

    class Take(nn.Module):
        def forward(self, given: Any) -> torch.Tensor:
            x = given["x"] if isinstance(given, dict) else given
            x = x.to_padded_tensor(0.0) if x.is_nested else x.to_dense() if x.layout is torch.sparse_coo else x
            return x.as_subclass(torch.Tensor).float()

    told = inspect(workload_of(nn.Sequential(nn.Linear(3, 2), Make(), Take())), spec_of())
    assert [(value["name"], value["dtype"]) for value in told["values"]] == [("0", "float32")]
    why = f"unit 1 (Make) passes on {output}, and only a plain tensor goes from stage to stage"
    assert told["cut_problems"] == [[2, why]]
    assert told["units"][2]["backward_seconds"] > 0


def test_units_that_share_a_buffer_are_tied_and_those_that_share_a_parameter_are_told() -> None:
    """Two copies of a running mean would drift apart; the gradients of a parameter in two stages are summed."""
    first, last, norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)
    last.weight = first.weight
    model = nn.Sequential(first, norm, nn.ReLU(), norm, last)
    told = inspect(workload_of(model, train=(torch.randn(10, 3), torch.randn(10, 3))), spec_of())
    assert [unit["tied_to"] for unit in told["units"]] == [[], [], [], [1], []]
    assert [parameter["units"] for parameter in told["parameters"]] == [[0, 4], [0], [4]]


def test_each_parameter_is_told_with_its_group_and_whether_it_is_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).double(), nn.Linear(2, 2))
    model[2].weight.requires_grad_(False)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        a, b, c, d, frozen, _ = parameters  # the last one is in no group
        return torch.optim.Adam([{"params": [a, c, frozen]}, {"params": [b, d], "weight_decay": 0.1}])

    class ToDouble(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double()

    class ToFloat(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float()

    whole = nn.Sequential(model[0], ToDouble(), model[1], ToFloat(), model[2])
    told = inspect(workload_of(whole, optimizer=optimizer), spec_of())["parameters"]
    assert [facts["num_elements"] for facts in told] == [15, 5, 10, 2, 4, 2]
    assert [facts["trained"] for facts in told] == [True, True, True, True, False, False]
    assert [facts["group"] for facts in told] == [0, 1, 0, 1, 0, 0]
    assert [(facts["dtype"], facts["itemsize"]) for facts in told[1:4]] == [
        ("float32", 4),
        ("float64", 8),
        ("float64", 8),
    ]


@pytest.mark.parametrize(("kind", "elementwise"), [(torch.optim.Adam, True), (torch.optim.Adafactor, False)])
def test_it_is_told_whether_the_optimizer_may_be_cut_and_the_batch_is_weighed(
    kind: type[torch.optim.Optimizer], elementwise: bool
) -> None:
    told = inspect(workload_of(nn.Sequential(nn.Linear(3, 2)), optimizer=kind), spec_of())
    assert (told["elementwise"], told["weighted"]) == (elementwise, False)
    assert told["copy_bytes_per_second"] > 0
    told = inspect(workload_of(nn.Sequential(nn.Linear(3, 2)), weight=lambda target: target.sum()), spec_of())
    assert told["weighted"]


def test_a_module_that_stands_twice_in_a_model_is_two_units() -> None:
    """`named_children` tells each module once, so the second use of an nn.ReLU was left out of training."""
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 2), relu, nn.Linear(2, 2), relu)
    assert [name for name, _ in units(model)] == ["0.", "1.", "2.", "3."]
    x = torch.randn(4, 3)
    y = x
    for _, module in units(model):
        y = module(y)
    assert torch.equal(y, model(x))
    assert len(inspect(workload_of(model), spec_of())["units"]) == 4


def test_units_that_work_in_place_are_inspected_like_any_other() -> None:
    """Each unit is timed alone, from a leaf, and autograd forbids to change a leaf: nn.ReLU(inplace=True) failed."""
    told = inspect(workload_of(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2), nn.ReLU(inplace=True))), spec_of())
    assert [unit["in_place"] for unit in told["units"]] == [True, False, True]


@pytest.mark.parametrize("has_step", [False, True])
def test_a_sparse_gradient_needs_a_batch_of_its_own(has_step: bool) -> None:
    """Its indices are those that the loader has put into the slot; an update that came late took the next batch's."""
    model = nn.Sequential(nn.EmbeddingBag(9, 3, sparse=True), nn.Linear(3, 2))
    data = torch.randint(9, (10, 4)), torch.randn(10, 2)
    how: dict[str, Any] = {"train": data, "loss": nn.MSELoss()}
    if has_step:
        how |= {"loss": None, "step": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])}
    how["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=False)
    assert [unit["in_place"] for unit in inspect(workload_of(model, **how), spec_of())["units"]] == [True, True]


class Keeping(nn.Module):
    """What it was given is there in its next call, in a buffer whose size is the microbatch's, or anywhere else."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.before = where, deque[dict[str, torch.Tensor]](maxlen=2)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("last", torch.zeros(4, 3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale + self.last.mean(0)
        match self.where:
            case "buffer":
                self.last = x.detach()[::2]
            case "data":
                self.last.data = x.data
            case "attribute":
                self.kept = x
            case "containers":
                self.before.append({"x": x.detach()})
            case "nowhere":
                self.last = x.detach().clone()
        return y


@pytest.mark.parametrize("has_step", [False, True])
@pytest.mark.parametrize("where", ["buffer", "data", "attribute", "containers", "nowhere"])
def test_a_module_that_keeps_what_it_was_given_gets_one_of_its_own(where: str, has_step: bool) -> None:
    """It was a slot, where the next microbatch came to stand: the job trained to other weights, and said nothing. And
    a buffer that had come to have another shape could not be put back as it was."""
    keeps = where != "nowhere"
    for number, first, then in ((1, nn.Linear(3, 3), Keeping(where)), (0, Keeping(where), nn.Linear(3, 3))):
        model = nn.Sequential(first, then, nn.Linear(3, 2))
        how: dict[str, Any] = {}
        if has_step:
            how |= {"loss": None, "step": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])}
        in_place = [unit["in_place"] for unit in inspect(workload_of(model, **how), spec_of())["units"]]
        all_of_them = keeps and has_step and number == 0  # any stage runs the lines that see the batch
        assert in_place == [all_of_them or (keeps and unit == number) for unit in range(3)], number
        if has_step:
            assert model[number].last.shape == (4, 3)


def test_units_of_a_model_that_is_no_sequential_are_the_calls_of_its_forward() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(3, 2), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x))

    class OwnSequential(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    for model, names in ((Own(), ["inner", "outer"]), (OwnSequential(nn.Linear(3, 2)), ["0"])):
        assert [unit["name"] for unit in inspect(workload_of(model), spec_of())["units"]] == names


class RoundedGradient(torch.autograd.Function):
    """Up or down at random."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient * 64 + torch.rand_like(gradient)).floor() / 64


@pytest.mark.parametrize(
    ("between", "draws"),
    [
        (nn.functional.relu, False),
        (lambda x: nn.functional.dropout(x, 0.5, training=False), False),
        (nn.functional.dropout, True),
        (lambda x: x * torch.rand(3), True),
        (forked, True),
        (RoundedGradient.apply, True),
        (functools.partial(checkpoint, torch.tanh, use_reentrant=False), False),
    ],
)
def test_it_is_told_whether_a_step_draws(between: Callable[[torch.Tensor], torch.Tensor], draws: bool) -> None:
    """A step that leaves torch's generator as it was may have drawn all the same. And one whose backward alone draws
    was told to draw nothing, and ran without seeds. A checkpoint puts the generator back in backward, and draws none.
    """

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(3, 2), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(between(self.inner(x)))

    assert inspect(workload_of(Own()), spec_of())["draws"] is draws


def test_a_model_may_be_cut_between_units_that_each_use_a_parameter_several_times() -> None:
    """Its gradient is summed use by use across stages, so the proof of the cut finds the bits of the whole model's."""

    class Recurrent(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(x @ self.weight)
            return x

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.randn(37, 37, generator=torch.Generator().manual_seed(1)) / 6)
            self.first, self.last = nn.Linear(3, 37), nn.Linear(37, 2)
            self.blocks = nn.ModuleList(Recurrent(weight) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    told = inspect(workload_of(Tied()), spec_of())
    assert told["cut_problems"] == []


def test_a_cut_is_tried_twice_since_the_second_time_calls_are_skipped_by_heart() -> None:
    """A block that put something into a list which it was given did so the first time alone where it was skipped."""

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            seen.append(x)
            return super().forward(x)

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Block(3, 4), Block(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen: list[torch.Tensor] = []
            return self.last(self.first(x, seen), seen) / len(seen)

    ((unit, problem),) = inspect(workload_of(Counting()), spec_of())["cut_problems"]
    assert unit == 1
    assert problem.startswith("cut there, the loss (")


def test_a_cut_is_tried_in_validation_too() -> None:
    """Nobody had looked there: in one stage out of three a model's validation had other bits than in the plain loop."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            kept = x[:, :2] * 2  # which crosses as a loose result, so somebody looks at this function in the last stage
            x = self.last(self.middle(x)) + kept
            return x if self.training or not torch._C._len_torch_function_stack() else x * 2

    workload = workload_of(Looking())
    problems = inspect(dataclasses.replace(workload, validation=workload.train), spec_of())["cut_problems"]
    assert [unit for unit, _ in problems] == [1, 2]
    assert all(problem.startswith("cut there, in validation the loss (") for _, problem in problems)
    assert inspect(workload_of(Looking()), spec_of())["cut_problems"] == []


@pytest.mark.parametrize("is_flag", [False, True])
def test_what_a_models_mode_sets_is_set_in_a_cut_that_is_tried_in_validation(is_flag: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
            self.scale, self.calls, self.mode = 1.0, 0, "training"

        def train(self, mode: bool = True) -> Self:
            self.mode = "training" if mode else "validation"
            return super().train(mode)

        def eval(self) -> Self:
            self.scale = 1.0 if is_flag else 0.5
            return super().eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = self.last(self.first(x)) * self.scale + self.calls
            return x * 2 if is_flag and self.mode == "validation" else x

    workload = workload_of(Scaled())
    facts = inspect(dataclasses.replace(workload, validation=workload.train), spec_of())
    assert facts["cut_problems"] == []
    assert len(facts["units"]) == 2


def test_a_model_that_has_nothing_to_train_is_refused() -> None:
    frozen = nn.Linear(3, 2).requires_grad_(False)
    for model in (nn.Sequential(nn.ReLU()), frozen):
        with pytest.raises(WorkloadError, match="no parameter that requires a gradient"):
            inspect(workload_of(model), spec_of())


@pytest.mark.parametrize("auto", [False, True])
def test_layers_that_are_not_the_models_are_told_where_it_has_nothing_to_train(auto: bool) -> None:
    """Under `auto` a look at sizes of microbatches told of what it came to itself, a `train()` that raises."""

    class Listed(nn.Module):
        def __init__(self, layers: Any) -> None:
            super().__init__()
            self.layers = layers

        def train(self, mode: bool = True) -> Self:
            raise RuntimeError("no mode")

    strategy: dict[str, Any] = {"preset": "auto"} if auto else {}
    job = {"entry": "job.py:workload", "batch_size": 4, "epochs": 1}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"})
    given: dict[str, Any] = {
        "list .* nn.ModuleList": [nn.Linear(3, 2)],
        "dict .* nn.ModuleDict": {"a": nn.Linear(3, 2)},
    }
    for text, layers in given.items():
        load = functools.partial(workload_of, Listed(layers))
        with pytest.raises(WorkloadError, match=f"requires a gradient; .*'layers' is a {text}"):
            inspection.inspect_job(load, spec, HostDevice(), Host(workers=2))


def test_a_microbatch_of_validation_may_be_larger_than_all_of_training() -> None:
    train, validation = (torch.randn(3, 3), torch.randn(3, 2)), (torch.randn(9, 3), torch.randn(9, 2))
    told = inspect(workload_of(nn.Sequential(nn.Linear(3, 2)), train=train, validation=validation), spec_of(8))
    assert sorted(told["input"]["shapes"]) == [[1, [1, 3]], [3, [3, 3]], [8, [8, 3]]]


def test_inputs_that_are_no_floats_go_through() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 2))
    told = inspect(workload_of(model, train=(torch.randint(7, (10, 2)), torch.randn(10, 2))), spec_of())
    assert told["input"]["dtype"] == "int64"
    assert told["values"][0]["shapes"][0] == [2, [2, 2, 3]]


@pytest.mark.parametrize(
    ("changes", "spec", "text"),
    [
        (
            {"validation": (torch.zeros(0, 3), torch.zeros(0, 2))},
            spec_of(),
            r"Workload\.validation has length 0; give at least one sample, or leave it out",
        ),
        ({"train": (torch.zeros(0, 3), torch.zeros(0, 2))}, spec_of(), r"Workload\.train has length 0; give at least"),
        (
            {"loss": nn.MSELoss(reduction="none")},
            spec_of(),
            r"Workload\.loss returned a tensor of shape \(4, 2\); it must return a scalar tensor",
        ),
        ({"loss": lambda y, target: 1.0}, spec_of(), r"Workload\.loss returned float; it must return a scalar tensor"),
        ({"loss": lambda y, target: y.sum() * 1j}, spec_of(), r"Workload\.loss returned a complex number; .* \.abs"),
        (
            {"validation": (torch.randn(7, 4), torch.randn(7, 2))},
            spec_of(),
            r"Workload\.validation: 4 inputs are \(4, 4\) float32, and of Workload\.train \(4, 3\) float32; both must",
        ),
        ({"optimizer": lambda parameters: "adam"}, spec_of(), r"Workload\.optimizer returned str"),
    ],
)
def test_a_workload_that_cannot_be_trained_is_refused_with_a_remedy(
    changes: dict[str, Any], spec: JobSpec, text: str
) -> None:
    with pytest.raises(WorkloadError, match=text):
        inspect(workload_of(nn.Sequential(nn.Linear(3, 2)), **changes), spec)


HELD_OUT = torch.full((7, 3), 2.0), torch.full((7, 2), 3.0)


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), nn.Linear(3, 2)])
def test_what_is_measured_of_validation_is_tried_before_training(model: nn.Module) -> None:
    """As it will be: of validation's data and without dropout. It was called for the first time behind an epoch."""
    seen = []

    def error(output: torch.Tensor, target: torch.Tensor) -> float:
        seen.append((target.tolist(), output.requires_grad, len({tuple(row) for row in output.tolist()})))
        return (output - target).abs().mean().item()

    given = workload_of(model, validation=HELD_OUT, metrics={"error": error})
    assert inspect(given, spec_of(8, microbatches=2))["metrics"] == ["error"]
    assert seen
    assert all(each == ([[3.0, 3.0]] * 4, False, 1) for each in seen)


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(3, 2)), nn.Linear(3, 2)])
def test_so_a_metric_that_cannot_be_measured_is_refused_where_there_is_validation(model: nn.Module) -> None:
    def top(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.topk(5).values.mean()

    for metric, kind, text in [(top, RuntimeError, "selected index k out of range"), (len, TypeError, "len")]:
        metrics = {"top": metric}
        assert inspect(workload_of(model, metrics=metrics), spec_of())
        with pytest.raises(kind, match=text) as caught:
            inspect(workload_of(model, validation=HELD_OUT, metrics=metrics), spec_of())
        assert any("in Workload.metrics['top']" in place for place in caught.value.__notes__)
    with pytest.raises(WorkloadError, match=r"returned a tensor of shape \(4, 2\)"):
        inspect(workload_of(model, validation=HELD_OUT, metrics={"top": torch.sub}), spec_of())


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(3, 2)), nn.Linear(3, 2)])
def test_a_hook_around_the_optimizers_step_is_told_and_what_it_changes(model: nn.Module) -> None:
    weight = next(model.parameters())
    model.register_parameter("mean", nn.Parameter(torch.zeros_like(weight), requires_grad=False))

    def hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: model.get_parameter("mean").lerp_(weight.detach(), 0.1))
        return optimizer

    assert inspect(workload_of(model), spec_of())["step_hook"] is None
    told = inspect(workload_of(model, optimizer=hooked), spec_of())
    assert told["step_hook"].startswith("register_step_post_hook(")
    assert [each["changed_as"] for each in told["parameters"]] == [
        name if name == "mean" else None for name, _ in model.named_parameters()
    ]


@pytest.mark.parametrize(("rate", "told"), [(0.5, "param_groups[0]['lr']"), (0.1, None)])
def test_an_option_of_the_optimizer_that_the_step_sets_is_told(rate: float, told: str | None) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = rate
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    workload = workload_of(model, optimizer=lambda parameters: optimizer, step=step, loss=None)
    assert inspect(workload, spec_of())["set_by_step"] == told


def step_with(act: Callable[[nn.Module], object]) -> dict[str, Any]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        act(model)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return {"loss": None, "step": step}


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_], ids=lambda clip: clip.__name__)
def test_a_step_that_clips_what_is_no_gradient_yet_is_refused(clip: Any) -> None:
    """Its gradients come behind it: nothing was clipped, or with several microbatches what those before have left."""
    helpers = dict(vars(clip_grad))
    given = workload_of(nn.Linear(3, 2), **step_with(lambda model: clip(model.parameters(), 0.1)))
    with pytest.raises(WorkloadError, match=f"the step calls {clip.__name__} at .*strategy.clip_norm bounds the norm"):
        inspect(given, spec_of())
    assert vars(clip_grad) == helpers


def test_a_step_that_scales_its_loss_is_refused_since_nothing_scales_its_gradients_back() -> None:
    before = torch.amp.GradScaler.scale
    scaler = torch.amp.GradScaler("cpu")
    scaled = step_with(lambda model: scaler.scale(model(torch.ones(1, 3)).sum()))
    with pytest.raises(WorkloadError, match=r"the step scales by a GradScaler at .*; leave it out, as backward\(\): "):
        inspect(workload_of(nn.Linear(3, 2), **scaled), spec_of())
    assert torch.amp.GradScaler.scale is before
    off = torch.amp.GradScaler("cpu", enabled=False)
    unscaled = step_with(lambda model: off.scale(model(torch.ones(1, 3)).sum()))
    assert inspect(workload_of(nn.Linear(3, 2), **unscaled), spec_of())


def test_a_step_may_ask_for_the_norm_of_the_weights() -> None:
    norm = step_with(lambda model: nn.utils.get_total_norm(list(model.parameters())))
    assert inspect(workload_of(nn.Linear(3, 2), **norm), spec_of())


def test_what_the_users_code_raises_passes_unchanged() -> None:
    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("theirs")

    with pytest.raises(ZeroDivisionError, match="theirs"):
        inspect(workload_of(nn.Linear(3, 2), loss=loss), spec_of())


class Raises(torch.autograd.Function):
    """From a call on, in a forward or in a backward."""

    left = 0

    @staticmethod
    def count() -> None:
        Raises.left -= 1
        if Raises.left < 0:
            raise RuntimeError("boom")

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_forward: bool) -> torch.Tensor:
        if is_forward:
            Raises.count()
        ctx.is_forward = is_forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        if not ctx.is_forward:
            Raises.count()
        return gradient, None


@pytest.mark.parametrize("is_forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("calls", [0, 2])  # without: in the run that is looked at, or in those that are timed
def test_what_a_model_raises_that_is_cut_by_its_own_forward_is_told_with_its_place(
    calls: int, is_forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in backward had none, where a plain nn.Sequential tells the unit."""

    class Whole(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = Raises.apply(super().forward(x), is_forward)
            return made

    monkeypatch.setattr(Raises, "left", calls)
    with pytest.raises(RuntimeError, match="boom") as caught:
        inspect(workload_of(Whole(nn.Linear(3, 2))), spec_of())
    where = "in the step" if is_forward else "in backward of the step"
    assert caught.value.__notes__ == [f"weft: {where}, tried before training"]


@pytest.mark.parametrize("steps", [None, 1])
def test_every_size_that_occurs_is_looked_at_and_a_quarter_of_the_largest(steps: int | None) -> None:
    seen: set[int] = set()

    class Watching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add(len(x))
            return super().forward(x)

    inspect(workload_of(Watching(3, 2)), spec_of(7, 2, steps))
    assert seen == ({1, 3, 4} if steps else {1, 2, 3, 4}), "the ragged last batch of 3 comes at the end of an epoch"


def test_units_are_timed_with_a_smaller_microbatch_too_and_the_loss_knows_nothing_of_it() -> None:
    seen = set()

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.add(len(y))
        return nn.functional.mse_loss(y, target)

    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    told = inspect(workload_of(model, loss=loss), spec_of(8, steps=1))
    assert told["small_size"] == 2
    assert min(unit["small_forward_seconds"] for unit in told["units"]) > 0
    assert min(unit["small_backward_seconds"] for unit in told["units"]) > 0
    assert seen == {8}
    assert told["input"]["shapes"] == [[8, [8, 3]]]


def test_a_model_that_takes_no_smaller_microbatch_is_timed_with_one_size() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    data = torch.randn(8, 3), torch.randn(8, 2)
    told = inspect(workload_of(model, train=data), spec_of(4))
    assert told["small_size"] == 0
    assert {unit["small_forward_seconds"] for unit in told["units"]} == {0.0}


def whole_alone(items: list[Any]) -> torch.Tensor:
    assert len(items) == 8, "no other batches"
    return torch.stack(items)


@pytest.mark.parametrize("is_ready", [False, True])
def test_data_that_makes_no_smaller_microbatch_is_timed_with_one_size(is_ready: bool) -> None:
    """Nobody asks for one but to time it: a ready batch that cannot be divided is trained whole."""
    ready = [[torch.randn(8, 3), torch.randn(5)] for _ in range(2)]
    given: dict[str, Any] = {"train": DataLoader(cast("Any", ready), batch_size=None)}
    samples: dict[str, Any] = {"train": list(torch.randn(16, 3)), "collate": whole_alone}
    workload = Workload(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        step=lambda model, batch: model(batch[0] if is_ready else batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **given if is_ready else samples,
    )
    told = inspect(workload, spec_of(8, 1))
    assert told["small_size"] == 0


def test_a_size_that_only_validation_has_is_looked_at_in_its_mode() -> None:
    """Batch norm refuses to train on one sample: a validation set of 5 in batches of 4 failed the whole job."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.ReLU())
    data = torch.randn(5, 3), torch.randn(5, 2)
    told = inspect(workload_of(model, train=(torch.randn(8, 3), torch.randn(8, 2)), validation=data), spec_of(4))
    assert [size for size, _ in told["values"][1]["shapes"]] == [1, 4]
    assert model.training
    with pytest.raises(ValueError, match="more than 1 value per channel when training"):
        inspect(workload_of(model, train=data), spec_of(4))


class Scaled(nn.Module):
    """Divides by the largest number that it has ever seen."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.largest >= 1
        self.largest = torch.maximum(self.largest * 1.5, x.detach().abs().max())
        return x / self.largest


@pytest.mark.parametrize("replicas", [1, 2])
def test_units_that_compute_with_what_their_forward_left_are_told_where_replicas_would_differ(replicas: int) -> None:
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 5)),
        nn.BatchNorm1d(5),  # it changes buffers, and in training reads none of them
        nn.Dropout(0.5),
        Scaled(),
        nn.Linear(5, 2),
    )
    told = inspect(workload_of(model, train=(torch.randn(8, 3), torch.randn(8, 2))), spec_of(4, replicas=replicas))
    carrying = [unit["name"] for unit in told["units"] if unit["carries_state"]]
    assert carrying == (["0.", "3."] if replicas == 2 else [])


class Either(nn.Module):
    """One of two, at random, of which the second keeps something."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.scaled = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), Scaled()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.many(x) if torch.rand(()) < 0.5 else self.scaled(x))


@pytest.mark.parametrize("seed", range(4))  # some of which leave it out at first
def test_what_is_left_out_of_the_run_that_is_looked_at_is_told_of_the_unit_that_has_it(seed: int) -> None:
    spec = spec_of(4, replicas=2)
    spec = spec.model_copy(update={"job": spec.job.model_copy(update={"seed": seed})})
    told = inspect(workload_of(Either(), train=(torch.randn(8, 3), torch.randn(8, 2))), spec)
    assert "scaled.largest" in told["units"][0]["state"]
    assert told["units"][0]["carries_state"]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("draw", [None, random.random, np.random.random])
def test_generators_are_seeded_where_a_unit_draws_from_them_however_many_replicas_there_are(
    replicas: int, seed: int, draw: Callable[[], float] | None
) -> None:
    class Scaling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1.0 if draw is None else 1 + 0.1 * draw())

    spec = spec_of(replicas=replicas)
    spec = spec.model_copy(update={"job": spec.job.model_copy(update={"seed": seed})})
    told = inspect(workload_of(nn.Sequential(nn.Linear(3, 3), Scaling(), nn.Linear(3, 2))), spec)
    assert told["seeds_others"] == (draw is not None)


def test_modules_that_depend_on_the_batch_are_told_by_name_and_kind() -> None:
    class Own(nn.BatchNorm1d):
        pass

    inner = nn.Sequential(Own(5, track_running_stats=False), nn.LayerNorm(5))
    instances = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten())
    model = nn.Sequential(nn.Linear(3, 5), inner, nn.BatchNorm1d(5), instances, nn.Linear(5, 2))
    told = inspect(workload_of(model, train=(torch.randn(8, 3), torch.randn(8, 2))), spec_of(4))
    assert told["batch_modules"] == ["1.0 (Own)", "2 (BatchNorm1d)"]
    assert inspect(workload_of(nn.Sequential(nn.Linear(3, 2))), spec_of())["batch_modules"] == []


class Taught(nn.Module):
    """By a teacher that stays in eval()."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2))

    def train(self, mode: bool = True) -> Taught:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.student(x) + self.teacher(x))


def test_a_norm_that_stays_in_eval_does_not_depend_on_the_batch() -> None:
    data = torch.randn(8, 3), torch.randn(8, 2)
    assert inspect(workload_of(Taught(), train=data), spec_of(4))["batch_modules"] == ["student.1 (BatchNorm1d)"]


class Ticking(HostDevice):
    """Whose clock is what the model has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        before = self.ticks
        result = work()
        return self.ticks - before, result


def test_where_lengths_differ_a_unit_takes_what_a_batch_between_the_shortest_and_the_longest_would() -> None:
    """The longest of a few was timed alone, and the job was faster than it was said to be able to be."""
    device = Ticking()

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            device.ticks += x.shape[1]
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Layer(3, 3), Layer(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).tanh())

    def collate(items: list[int]) -> dict[str, torch.Tensor]:
        lengths.append(10 * max(items) + 10)
        return {"x": torch.ones(len(items), lengths[-1], 3)}

    lengths: list[int] = []
    workload = Workload(
        Model(),
        range(12),
        step=lambda model, batch: model(batch["x"]).square().mean(),
        collate=collate,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    told = inspection.inspect(workload, spec_of(4, steps=3), device)
    tried = list(dict.fromkeys(lengths))[:3]
    assert len(set(tried)) == 3, "lengths of 12 samples in a mixed order, four in a batch"
    assert [unit["forward_seconds"] for unit in told["units"]] == pytest.approx([sum(tried) / 3] * 2, rel=0.01)
    assert told["varying_shapes"] != []


# --- what could not be put back after a lost worker


class Counting(torch.optim.SGD):
    """Counts its steps where no checkpoint of torch's has them."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, lr=0.1)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


class CountingInItsGroup(Counting):
    def __init__(self, given: Any) -> None:
        super().__init__(given)
        del self.count
        self.param_groups[0]["count"] = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] += 1
        return torch.optim.SGD.step(self, closure)


class CountingInItsState(Counting):
    """Beside what it keeps of parameters."""

    def __init__(self, given: Any, *, as_entry: bool) -> None:
        super().__init__(given)
        del self.count
        self.as_entry = as_entry

    def step(self, closure: Any = None) -> Any:
        key: Any = "global"
        self.state[key] = {"count": 1} if self.as_entry else 1
        return torch.optim.SGD.step(self, closure)


class Seeing(torch.optim.SGD):
    """Keeps of a parameter what is no plain data."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = frozenset({1})
        return super().step(closure)


class Secretive(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self) -> Any:
        raise NotImplementedError("not me")


def unsaved_of(**changes: Any) -> str | None:
    told: str | None = inspect(workload_of(nn.Linear(3, 2), **changes), spec_of())["unsaved"]
    return told


@pytest.mark.parametrize(
    ("draw", "draws"),
    [
        (None, False),
        (lambda: torch.randn(3), True),
        (random.random, True),
        (np.random.rand, True),
        (lambda: torch.randn(3, generator=torch.Generator().manual_seed(1)), False),
    ],
)
def test_an_optimizer_that_draws_is_told_apart(draw: Any, draws: bool) -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if draw is not None:
                draw()
            return super().step(closure)

    told = inspect(workload_of(nn.Linear(3, 2), optimizer=lambda given: Noisy(given, lr=0.1)), spec_of())
    assert told["optimizer_draws"] is draws


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.NAdam])
def test_torchs_optimizers_can_be_put_back(cls: Any) -> None:
    assert unsaved_of(optimizer=lambda given: cls(given, lr=0.1)) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda each: torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=10, cycle_momentum=False),
        lambda each: torch.optim.lr_scheduler.MultiStepLR(each, [3, 5]),
        lambda each: torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.9**step),
        torch.optim.lr_scheduler.ReduceLROnPlateau,
        lambda each: torch.optim.lr_scheduler.LambdaLR(each, lambda step: np.cos(step)),
        lambda each: torch.optim.lr_scheduler.SequentialLR(
            each,
            [torch.optim.lr_scheduler.ConstantLR(each), torch.optim.lr_scheduler.ExponentialLR(each, 0.9)],
            milestones=[2],
        ),
    ],
    ids=["OneCycleLR", "MultiStepLR", "LambdaLR", "ReduceLROnPlateau", "LambdaLR by numpy", "SequentialLR"],
)
def test_torchs_schedulers_can_be_put_back(make: Any) -> None:
    assert unsaved_of(scheduler=make) is None


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (Counting, "Counting keeps more than its state and its groups' options"),
        (CountingInItsGroup, None),
        (
            functools.partial(CountingInItsState, as_entry=True),
            "CountingInItsState keeps state that is of no parameter",
        ),
        (
            functools.partial(CountingInItsState, as_entry=False),
            "CountingInItsState keeps state that is of no parameter",
        ),
        (
            functools.partial(Seeing, lr=0.1),
            "the state of Seeing cannot be put back "
            "(ValueError: Unsupported global: GLOBAL frozenset was not an allowed global)",
        ),
    ],
    ids=["in itself", "in its group", "an entry of its state", "a number in its state", "no plain data"],
)
def test_an_optimizer_that_keeps_what_could_not_be_put_back_is_named(optimizer: Any, reason: str | None) -> None:
    """One that had a number among its state ended the inspection; an entry of no parameter's was lost."""
    assert unsaved_of(optimizer=optimizer) == reason


def test_a_scheduler_that_does_not_tell_its_state_is_named() -> None:
    """It never had to, and ended the inspection."""
    reason = "the state of Secretive cannot be put back (NotImplementedError: not me)"
    assert unsaved_of(scheduler=lambda each: Secretive(each, lambda step: 1.0)) == reason


def test_nothing_to_train_has_nothing_to_put_back() -> None:
    assert unsaved_of(optimizer=lambda given: torch.optim.SGD(given, lr=0.1)) is None


class Joint(torch.optim.Optimizer):
    """how: "norm", all gradients are scaled by their norm, from the second step on; "own norm", each by its own."""

    def __init__(self, given: Any, how: str) -> None:
        super().__init__(given, {"lr": 0.1})
        self.how = how
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        updated = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        whole = torch.stack([each.grad.norm() for each in updated]).norm()
        self.steps += 1
        for each in updated:
            gradient = each.grad
            if self.how == "own norm":
                gradient = gradient / (gradient.norm() + 1e-8)
            elif self.how == "norm" and self.steps > 1:
                gradient = gradient / (whole + 1e-8)
            each.sub_(gradient, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("optimizer", "is_joint"),
    [
        (lambda given: Joint(given, "norm"), True),
        (lambda given: Joint(given, "own norm"), False),
        (lambda given: torch.optim.Adafactor(given), False),
        (lambda given: Joint([{"params": [each], "lr": 0.1} for each in given], "norm"), True),
    ],
)
def test_an_optimizer_that_goes_by_all_parameters_together_is_told(optimizer: Any, is_joint: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []

    def kept(given: Any) -> torch.optim.Optimizer:
        seen.append([torch.equal(value, before[name]) for name, value in model.state_dict().items()])
        return optimizer(given)  # type: ignore[no-any-return]

    workload = workload_of(model, optimizer=kept)
    assert inspect(workload, spec_of())["joint_optimizer"] is is_joint
    assert all(map(all, seen)), "each is made with the values that the model begins with"


def test_nothing_is_said_of_an_optimizer_that_was_made_before() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    made = Joint(list(model.parameters()), "norm")
    assert inspect(workload_of(model, optimizer=lambda given: made), spec_of())["joint_optimizer"] is False


def test_a_buffer_that_no_call_uses_counts_as_the_first_units(tmp_path: Path) -> None:
    """Replicas read each other's buffers, and wait for that where units have any: nobody waited for such a one."""
    workload = Workload(
        Counted(),
        (torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    job = {"entry": "job.py:workload", "batch_size": 4, "steps": 1}
    told = inspect(workload, JobSpec.parse({"job": job, "strategy": {"replicas": 2}, "directory": str(tmp_path)}))
    assert [unit["buffer_bytes"] for unit in told["units"]] == [8, 0]
