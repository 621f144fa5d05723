"""Cut steps, with recordings and placeholders: any model in as many stages as it has places, and the plain numbers."""

from __future__ import annotations

import gc
import runpy
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.workload.cutting.calls import SeededCalls
from weft.workload.cutting.cut_step import CutStep, Sent
from weft.workload.cutting.placeholder import PlaceholderError
from weft.workload.cutting.recording import Recorded, StepRecording
from weft.workload.cutting.skipped import SkippedCalls
from weft.workload.randomness import seed_unit

MODELS = runpy.run_path(str(Path(__file__).resolve().parents[2] / "any_models.py"))


def seed(number: int) -> None:
    seed_unit(3, 0, 0, number)


def recorded(model: nn.Module, step: Callable[..., Any], batch: Any) -> Recorded:
    return StepRecording(model).run(step, batch, seed)


def stages_of(model: nn.Module, found: Recorded, cuts: list[int]) -> list[tuple[CutStep, list[Any], list[Any]]]:
    bounds, stages = [0, *cuts, len(found.units)], []
    skipped = SkippedCalls(found.returned)
    for first, last in pairwise(bounds):
        own = range(first, last)
        came = [each for each in found.values if each.maker < first and not set(own).isdisjoint(each.readers)]
        sent = [each for each in found.values if each.maker in own and each.readers[-1] >= last]
        step = CutStep(
            model,
            begins=found.units[first] if first else None,
            ends=found.units[last] if last < len(found.units) else None,
            own=frozenset[str]().union(*found.uses[first:last]),
            receives=[each.name for each in came],
            sends=[each.name for each in sent],
            skipped=skipped,
        )
        stages.append((step, came, sent))
    return stages


def run_cut(model: nn.Module, step: Callable[..., Any], batch: Any, found: Recorded, cuts: list[int]) -> Any:
    """What the last stage returns."""
    made: dict[str, torch.Tensor] = {}
    for cut, came, sent in stages_of(model, found, cuts):
        with cut.installed():
            result = cut.run(step, batch, [made[each.name].detach() for each in came], seed)
        if isinstance(result, Sent):
            made.update(zip((each.name for each in sent), result, strict=True))
    return result


def loss_of(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS["NAMES"])
def test_the_finest_cut_of_any_model_gives_its_own_loss(name: str) -> None:
    torch.manual_seed(0)
    model, step, data = MODELS["parts"](name)
    batch = data(3)
    found = recorded(model, step, batch)
    cuts = [unit for unit in range(1, len(found.units)) if unit not in found.problems]
    assert len(cuts) >= 2
    with torch.no_grad():
        model.eval()  # batch norm would go on from what the recording has left
        with SeededCalls(model).installed() as numbers, numbers.running(seed):
            whole = loss_of(step(model, batch))
        found = recorded(model, step, batch)
        assert torch.equal(loss_of(run_cut(model, step, batch, found, cuts)), whole)


class Loose(nn.Module):
    """Its second block gets what was made of the first one's output, and its last one that, too."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))
        self.own = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self, x)


def summed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = model(x).sum()
    return total


def problems_of(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> dict[int, str]:
    model = Loose(forward)
    return recorded(model, summed, torch.randn(2, 4)).problems


def test_a_loose_result_that_is_used_two_stages_later_is_refused_with_the_line_and_the_remedy() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        twice = model.one(x) * 2
        return model.three(model.two(x)) + twice

    problems = problems_of(forward)
    assert problems.keys() == {1, 2}
    assert "the result of mul at" in problems[1]
    assert f"{Path(__file__).name}:" in problems[1]
    assert problems[1].endswith("cut elsewhere, or make it a module")


def test_a_number_that_is_asked_for_is_refused_for_every_later_stage() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        if x.sum().item() > 1e9:
            x = x * 2
        return model.three(model.two(x))

    problems = problems_of(forward)
    assert problems.keys() == {1, 2}
    assert "item at" in problems[1]
    assert "asks for numbers of the result of sum" in problems[1]


def test_shapes_of_what_another_stage_has_may_be_asked_for() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        x = x.reshape(-1, x.shape[-1]) if x.dim() > 1 and x.requires_grad else x
        return model.three(model.two(x[: len(x)]))

    assert problems_of(forward) == {}


def test_what_depends_on_the_batch_alone_does_not_cross() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).to(x.dtype).cumsum(0)
        y = model.one(x) * mask
        y = model.two(y) * mask
        return model.three(y) * mask

    model = Loose(forward)
    found = recorded(model, summed, torch.randn(2, 4))
    assert found.problems == {}
    assert [value.name for value in found.values] == [">two:0", ">three:0"]


def test_a_value_that_jumps_over_a_stage_has_its_maker_and_all_readers() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        return model.three(model.two(x)) + x

    model = Loose(forward)
    found = recorded(model, summed, torch.randn(2, 4))
    assert {value.name: (value.maker, value.readers) for value in found.values} == {
        "one:0": (0, (1, 2)),
        "two:0": (1, (2,)),
    }


def test_a_parameter_that_is_used_loosely_is_in_every_unit_that_reads_it() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.two(model.one(x))
        return torch.nn.functional.linear(x, model.one.weight)

    model = Loose(forward)
    found = recorded(model, summed, torch.randn(2, 4))
    assert [sorted(uses) for uses in found.uses] == [
        ["one.bias", "one.weight"],
        ["one.weight", "two.bias", "two.weight"],
    ]


def test_a_stage_computes_what_it_has_and_nothing_else() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.three(model.two(model.one(x)))

    model, calls = Loose(forward), []
    batch = torch.randn(2, 4)
    found = recorded(model, summed, batch)
    for layer in (model.one, model.two, model.three):
        layer.register_forward_hook(lambda layer, args, output: calls.append(type(output).__name__))
    ((middle, came, _),) = stages_of(model, found, [1, 2])[1:2]
    with middle.installed():
        for _ in range(2):
            middle.run(summed, batch, [came[0].tensor.detach()], seed)
    assert calls == ["Placeholder", "Tensor"] * 2


def test_batches_of_other_shapes_go_through_the_same_stage() -> None:
    model, step, data = MODELS["parts"]("pixels")
    model.eval()
    for count in (3, 1, 3, 2):
        batch = data(count)
        with torch.no_grad():  # torch's encoder layers compute otherwise with gradients
            found = recorded(model, step, batch)
            with SeededCalls(model).installed() as numbers, numbers.running(seed):
                whole = loss_of(step(model, batch))
            assert torch.equal(loss_of(run_cut(model, step, batch, found, [2, 4])), whole)


def test_an_operation_of_a_stage_on_what_it_has_not_is_told_with_its_line() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        if x.sum() > 1e9:
            x = x * 2
        return model.three(model.two(x))

    model = Loose(forward)
    batch = torch.randn(2, 4)
    found = recorded(model, summed, batch)
    with pytest.raises(
        PlaceholderError, match=rf"__bool__ at .*{Path(__file__).name}:\d+ asks for numbers of the result"
    ):
        run_cut(model, summed, batch, found, [1])


def test_a_stage_that_is_installed_for_good_has_its_own_parameters_alone() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.three(model.two(model.one(x)))

    model = Loose(forward)
    batch = torch.randn(2, 4)
    found = recorded(model, summed, batch)
    middle, came, sends = stages_of(model, found, [1, 2])[1]
    given = came[0].tensor.detach()
    gone, own = weakref.ref(model.one.weight), model.two.weight
    del found, came, sends
    middle.install()
    gc.collect()
    assert gone() is None
    assert model.two.weight is own
    with torch.no_grad():
        (sent,) = middle.run(summed, batch, [given], seed)
        assert torch.equal(sent, torch.nn.functional.linear(given, own, model.two.bias))
