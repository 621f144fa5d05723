"""Lines between modules that run in some batches alone, where a stage begins behind them."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from weft.workload.cutting.cut_step import Sent
from weft.workload.cutting.loose import LooseNames, LooseResults
from weft.workload.cutting.placeholder import PlaceholderError

_CUT = runpy.run_path(str(Path(__file__).with_name("test_cut_step.py")))
recorded, stages_of, summed, seed = (_CUT[name] for name in ("recorded", "stages_of", "summed", "seed"))
Forward = Callable[[Any, torch.Tensor], torch.Tensor]
FULL, RAGGED = torch.randn(4, 4), torch.randn(2, 4)


class Last(nn.Linear):
    """With a second argument, which may be of another width than the first."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        made = super().forward(functional.pad(x, (0, 4 - x.shape[1])))
        return made if y is None else made * y.mean()


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(4, 4), nn.Linear(4, 4), Last(4, 4)
        self.act, self.scale, self.own = nn.Tanh(), nn.Parameter(torch.full((4,), 1.5)), forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self, x)


def scaled(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) < 4:
        y = y * 0.5
    return model.last(y)


def in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) < 4:
        y *= 0.5
    return model.last(y)


def a_new_one_in_place(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) < 4:
        y = y * x
        y += x
        y[:, 0] = 2.0
    return model.last(y.contiguous())


def narrowed(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) < 4:
        y = y[:, :2]
    return model.last(y)


def with_a_module_of_torchs(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) < 4:
        y = model.act(y) + 1
    return model.last(y)


def of_two_arguments(model: Any, x: torch.Tensor) -> torch.Tensor:
    first = model.one(x)
    y = model.two(first)
    if len(x) < 4:
        first, y = torch.split(torch.cat([first, y]) / 3, len(x))
    return model.last(y, first)


def of_one_argument_for_two(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    other = y
    if len(x) < 4:
        other = y * x
    return model.last(y, other) + y


def by_numbers_of_the_batch(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if x.sum() == RAGGED.sum():
        with torch.no_grad():
            factor = y.abs().max()
        y = y / factor
    return model.last(y)


def computed_again(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) < 4:
        y = y.sin()
    return checkpoint(model.last, y, use_reentrant=False)


def of_a_list_that_grows(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    parts = [y]
    if len(x) < 4:
        y = torch.stack(parts).sum(0).square()
        parts.append(x)
    return model.last(y)


def not_in_the_last(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) == 4:
        y = y * 0.5
    return model.last(y)


FORWARDS = [
    scaled,
    in_place,
    a_new_one_in_place,
    narrowed,
    with_a_module_of_torchs,
    of_two_arguments,
    of_one_argument_for_two,
    by_numbers_of_the_batch,
    computed_again,
    of_a_list_that_grows,
    not_in_the_last,
]


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def trained(stages: list[Any], model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of a cut step, whose stages have differentiated their parts."""
    made: dict[str, torch.Tensor | None] = {}
    runs = []
    for cut, came, sent in stages:
        leaves = [None if made[each.name] is None else made[each.name].detach() for each in came]  # type: ignore[union-attr]
        given = [None if leaf is None else leaf.requires_grad_() for leaf in leaves]
        with cut.installed():
            result = cut.run(summed, batch.clone(), given, seed)
        runs.append((cut, came, given, result if isinstance(result, Sent) else [result], sent, cut.bound))
        if isinstance(result, Sent):
            made.update(zip((each.name for each in sent), result, strict=True))
    loss: torch.Tensor = runs[-1][3][0]
    gradients: dict[str, list[torch.Tensor]] = {}
    for cut, came, given, results, sent, bound in reversed(runs):
        names = [each.name for each in sent] if cut is not runs[-1][0] else []
        roots = [(tensor, gradients[name]) for name, tensor in zip(names, results, strict=False) if name in gradients]
        tensors, weights = [tensor for tensor, _ in roots], [sum(parts[1:], parts[0]) for _, parts in roots]
        cut.rebind(bound)
        with cut.installed(), cut.numbers.running_again(seed):
            torch.autograd.backward(tensors or [loss], weights or None)
        for value, leaf in zip(came, given, strict=True):
            if leaf is not None and leaf.grad is not None:
                gradients.setdefault(value.name, []).append(leaf.grad)
    return loss


@pytest.mark.parametrize("cuts", [[1], [2], [1, 2]], ids=str)
@pytest.mark.parametrize("forward", FORWARDS)
def test_a_line_that_no_trial_has_run_is_run_by_the_stage_that_begins_behind_it(
    forward: Forward, cuts: list[int]
) -> None:
    """The job ended with its first batch that has it: what the stage was called with had no numbers."""
    torch.manual_seed(0)
    model = Net(forward)
    stages = stages_of(model, recorded(model, summed, FULL), cuts)
    for batch in (FULL, RAGGED, FULL, RAGGED):  # the second time by heart
        whole = summed(model, batch.clone())
        whole.backward()
        usual = gradients_of(model)
        loss = trained(stages, model, batch)
        assert torch.equal(loss, whole)
        for mine, theirs in zip(gradients_of(model), usual, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or torch.equal(mine, theirs)


def of_what_does_not_come(model: Any, x: torch.Tensor) -> torch.Tensor:
    first = model.one(x)
    y = model.two(first)
    return model.last(y if len(x) == 4 else y - first)


def of_what_is_drawn(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    return model.last(y if len(x) == 4 else functional.dropout(y))


def of_a_parameter(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x * model.scale))
    return model.last(y if len(x) == 4 else y * model.scale)


def of_what_is_written_to_behind_it(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) == 4:
        return model.last(y)
    other = y + 1
    y += 1
    return model.last(other)


def of_a_batch_that_is_written_to_behind_it(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) < 4:
        y = y * x
        x += 1
    return model.last(y)


def through_a_view(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) < 4:
        y = y * 2
        part = y[:, :2]
        part += 1
    return model.last(y)


def under_another_autocast(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model.two(model.one(x))
    if len(x) < 4:
        with torch.autocast("cpu", torch.bfloat16):
            y = y @ y.T @ y
    return model.last(y)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (of_what_does_not_come, "the output of one (Linear) does not come to it"),
        (of_what_is_drawn, " is drawn at random"),
        (of_a_parameter, "scale does not come to it"),
        (of_what_is_written_to_behind_it, " is made of is written to behind that"),
        (of_a_batch_that_is_written_to_behind_it, " is made of is written to behind that"),
        (through_a_view, " is written to through another tensor"),
        (under_another_autocast, " is computed under another autocast"),
    ],
)
def test_where_it_cannot_be_run_there_it_is_told_with_its_place_and_a_way_out(forward: Forward, why: str) -> None:
    """It was told that other modules had been called, which was not so."""
    model = Net(forward)
    stages = stages_of(model, recorded(model, summed, FULL), [2])
    for _ in range(2):  # the second time by heart
        with torch.no_grad(), pytest.raises(PlaceholderError) as caught:
            _CUT["run_stages"](stages, summed, RAGGED.clone())
        told = str(caught.value)
        assert told.startswith("last, with which a stage begins, is called with the result of ")
        assert f" at tests/workload/cutting/{Path(__file__).name}:" in told
        assert why in told
        assert told.endswith("which is called for every batch, or cut elsewhere (strategy.split)")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_module_of_torchs_does_not_notice_that_somebody_looks() -> None:
    """With nobody looking it leaves out what is padding, and has zeros there."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 3, 4), torch.tensor([[False, False, True], [False, False, False]])
    asked, names = torch.overrides.has_torch_function, list[str]()
    with torch.no_grad():
        plain = encoder(x, src_key_padding_mask=padding)
        with LooseResults(LooseNames(), lambda name, tensor: names.append(name)):
            seen = encoder(x, src_key_padding_mask=padding)
    assert names
    assert torch.equal(seen, plain)
    assert torch.overrides.has_torch_function is asked
