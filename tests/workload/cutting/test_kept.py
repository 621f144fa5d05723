"""What a step keeps from one call to the next outside of buffers, in a stage that has no numbers of it."""

from __future__ import annotations

import itertools
import runpy
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame

from weft.workload.cutting.cut_step import OtherCallsError
from weft.workload.cutting.placeholder import Placeholder, PlaceholderError, placeholder_of
from weft.workload.cutting.tape import Tape, playing

_CUT = runpy.run_path(str(Path(__file__).with_name("test_cut_step.py")))
recorded, stages_of, run_stages, seed, summed = (
    _CUT[name] for name in ("recorded", "stages_of", "run_stages", "seed", "summed")
)
BATCH = torch.randn(2, 4)


class Memory(nn.Module):
    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))
        self.own = forward
        self.kept: Any = torch.zeros(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self, x)


def last_stage(model: Memory) -> Callable[[], Any]:
    """Runs it, from `two` on, as a process that has no other stage."""
    found = recorded(model, summed, BATCH)
    model.kept = torch.zeros(2, 4)
    ((cut, came, _),) = stages_of(model, found, [1])[1:]
    numbers = itertools.count()

    def run() -> Any:
        with cut.installed():
            return cut.run(summed, BATCH, [torch.full((2, 4), float(next(numbers))) for _ in came], seed)

    return run


def before_a_sum(model: Memory, x: torch.Tensor) -> torch.Tensor:
    x, before = model.one(x), model.kept
    model.kept = x.detach()
    return model.three(model.two(x + before))


def as_it_is(model: Memory, x: torch.Tensor) -> torch.Tensor:
    x, before = model.one(x), model.kept
    model.kept = x.detach()
    return model.three(model.two(before)) + x


def through_views(model: Memory, x: torch.Tensor) -> torch.Tensor:
    x, before = model.one(x), model.kept
    model.kept = x.detach()
    x = x * 1
    x[:, :2] += before[:, :2]
    return model.three(model.two(x))


def through_a_module_without_parameters(model: Memory, x: torch.Tensor) -> torch.Tensor:
    x, before = model.one(x), model.kept
    model.kept = x.detach()
    return model.three(model.two(model.relu(before) + x))


@pytest.mark.parametrize("forward", [before_a_sum, as_it_is, through_views, through_a_module_without_parameters])
def test_what_a_step_has_kept_is_not_taken_for_what_comes_in_this_run(
    forward: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    """The memory of a Transformer-XL was the current batch: each run answered with the objects of the one before, and
    what comes over came to the one that was kept, too."""
    model = Memory(forward)
    model.relu = nn.ReLU()
    run = last_stage(model)
    run()
    with pytest.raises(PlaceholderError, match=r"kept from an earlier call.*keep in buffers of the model what lasts"):
        run()


def test_what_is_kept_and_goes_to_other_stages_alone_stands_in_nobodys_way() -> None:
    def forward(model: Memory, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x + 0 * model.kept)
        model.kept = x.detach().tanh()
        return model.three(model.two(x))

    run = last_stage(Memory(forward))
    for _ in range(3):
        run()


def test_all_that_a_step_makes_may_be_kept_if_nobody_computes_with_it() -> None:
    made: list[torch.Tensor] = []

    def forward(model: Memory, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        part = x[:, :2]
        y = x + 1
        y[:, 2:].mul_(2)
        y.add_(1)
        made.extend([x, part, y])
        return model.three(model.two(y) + part.sum())

    model = Memory(forward)
    with torch.no_grad():
        stages = stages_of(model, recorded(model, summed, BATCH), [1, 2])
        for _ in range(4):
            batch = torch.randn(2, 4)
            assert torch.equal(run_stages(stages, summed, batch), summed(model, batch))


def test_a_tensor_of_the_users_that_each_run_writes_anew_is_that_of_this_run() -> None:
    scratch = torch.zeros(2, 4)

    def forward(model: Memory, x: torch.Tensor) -> torch.Tensor:
        scratch.copy_(model.one(x))
        return model.three(model.two(scratch))

    with torch.no_grad():
        run = last_stage(Memory(forward))
        assert len({float(run()) for _ in range(3)}) == 3


@pytest.fixture
def answer() -> Iterator[Callable[[], Placeholder]]:
    """In a run of its own."""
    tape = Tape()

    def ask() -> Placeholder:
        playing.run = object()
        tape.rewind()
        made = tape.answer("asker", ((), {}), lambda: placeholder_of(BATCH, "x", requires_grad=False))
        assert isinstance(made, Placeholder)
        return made

    yield ask
    playing.run = None


@pytest.mark.parametrize("evaluates", [None, False], ids=["Python", "torch's compiler"])
def test_a_placeholder_is_made_for_a_run_only_where_somebody_has_that_of_an_earlier_one(
    answer: Callable[[], Placeholder], evaluates: bool | None
) -> None:
    """Where torch's compiler evaluates frames, as it may behind a compiled model, calls hold their arguments longer."""
    before = set_eval_frame(evaluates)
    try:
        answer()
        spare = weakref.ref(answer())
        assert answer() is spare()
        kept = [answer() for _ in range(3)]
        assert [each.is_kept for each in kept] == [True, True, False]
    finally:
        set_eval_frame(before)


def test_what_another_stage_returns_in_an_object_is_not_taken_for_what_the_step_has_kept() -> None:
    """The object is known by heart, so it is the same in each run, and it is told that nothing in it crosses."""

    class Holding(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return types.SimpleNamespace(x=super().forward(x))

    def forward(model: Memory, x: torch.Tensor) -> torch.Tensor:
        return model.three(model.two(model.one(x).x + 1))

    model = Memory(forward)
    model.one = Holding(4, 4)
    run = last_stage(model)
    for _ in range(3):
        with pytest.raises(OtherCallsError):
            run()
