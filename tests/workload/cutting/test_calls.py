"""Calls: a module that is called again and again under torch.utils.checkpoint draws in backward what it drew before."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.workload.cutting.calls import SeededCalls
from weft.workload.randomness import seed_others, seed_unit
from weft.workload.workload import WorkloadError

Again = Callable[..., Any]
Parts = nn.ModuleDict


class Noisy(nn.Module):
    """Draws from all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = random.random() + float(np.random.random())
        return x + scale * nn.functional.dropout(self.linear(x), 0.5, self.training)


class Quiet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


def in_a_loop(parts: Parts, x: torch.Tensor, again: Again) -> torch.Tensor:
    for _ in range(4):
        x = again(parts["a"], x)
    return x


def several_in_one(parts: Parts, x: torch.Tensor, again: Again) -> torch.Tensor:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return parts["a"](parts["b"](parts["a"](x)))

    return again(layer, again(layer, x))


def some_outside(parts: Parts, x: torch.Tensor, again: Again) -> torch.Tensor:
    x = parts["a"](again(parts["a"], parts["b"](x)))
    return again(parts["b"], nn.functional.dropout(x, 0.3)) + parts["a"](x)


def of_the_same_value(parts: Parts, x: torch.Tensor, again: Again) -> torch.Tensor:
    return again(parts["a"], x) * again(parts["a"], x) + again(parts["b"], x)


def one_in_another(parts: Parts, x: torch.Tensor, again: Again) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return parts["b"](parts["a"](x))

    def outer(x: torch.Tensor) -> torch.Tensor:
        return again(inner, parts["a"](again(inner, x)))

    return again(outer, again(outer, x))


def through_once(step: Callable[..., Any], part: type[nn.Module], again: Again) -> dict[str, torch.Tensor]:
    """Loss and gradients, each call seeded."""
    torch.manual_seed(0)
    parts = nn.ModuleDict({"a": part(), "b": part()}).double()
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4).requires_grad_()
    calls = SeededCalls(parts)

    def seed(number: int) -> None:
        seed_unit(3, 1, 2, number)
        seed_others(number)

    with calls.installed() as numbers:
        with numbers.running(seed):
            loss = step(parts, x, again).square().sum()
        seed_unit(3, 1, 3, 1)  # meanwhile others have run
        with numbers.running_again(seed):
            loss.backward()
    gradients = {name: parameter.grad for name, parameter in parts.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), "x": x.grad, **gradients}  # type: ignore[dict-item]  # backward was


def direct(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """But for the order in which gradients are summed."""
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


STEPS = [in_a_loop, several_in_one, some_outside, of_the_same_value, one_in_another]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("part", [Noisy, Quiet])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant one in another, for a moment
def test_what_runs_again_is_the_call_whose_turn_it_was(step: Any, part: Any, reentrant: bool) -> None:
    again = partial(checkpoint, use_reentrant=reentrant)
    assert_same(through_once(step, part, again), through_once(step, part, direct))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("part", [Noisy, Quiet])
def test_where_no_generator_is_put_back_no_call_is_taken_for_another(step: Any, part: Any) -> None:
    """What draws nothing by itself may have a dropout behind it."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(WorkloadError, match=r"is called \d times .* leave preserve_rng_state as it is"):
        through_once(step, part, again)


class Penalised(nn.Module):
    """Moves by a gradient of its own, inside of a call, which a checkpoint around it computes again there."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy = Noisy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x.detach().requires_grad_()
        moved: torch.Tensor = torch.autograd.grad(self.noisy(start).square().sum(), start, create_graph=True)[0]
        return x + self.noisy(x) + nn.functional.dropout(moved, 0.5, self.training)


def by_a_penalty(parts: Parts, x: torch.Tensor, again: Again) -> torch.Tensor:
    y = again(parts["b"], again(parts["a"], x)) + again(parts["a"], x)
    slope: torch.Tensor = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
    return again(parts["b"], y) + nn.functional.dropout(slope, 0.5)


@pytest.mark.parametrize(("step", "part"), [(by_a_penalty, Noisy), (in_a_loop, Penalised), (some_outside, Penalised)])
def test_what_runs_again_in_a_backward_of_the_steps_own_is_no_other_call(step: Any, part: Any) -> None:
    """It was counted, so it drew other numbers than its forward had, and so did all that came behind it."""
    again = partial(checkpoint, use_reentrant=False)
    assert_same(through_once(step, part, again), through_once(step, part, direct))


class Adjoint(torch.autograd.Function):
    """Euler steps, of which backward computes each anew."""

    @staticmethod
    def forward(ctx: Any, part: nn.Module, x: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.part, found = part, [x]
        with torch.no_grad():
            for _ in range(3):
                found.append(part(found[-1]))
        ctx.save_for_backward(*found)
        return found[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        parameters = list(ctx.part.parameters())
        sums = [torch.zeros_like(each) for each in parameters]
        for saved in reversed(ctx.saved_tensors[:-1]):
            with torch.enable_grad():
                x = saved.detach().requires_grad_()
                gradient, *own = torch.autograd.grad(ctx.part(x), [x, *parameters], gradient)
            sums = [one + other for one, other in zip(sums, own, strict=True)]
        return None, gradient, *sums


def by_adjoint(parts: Parts, x: torch.Tensor, again: Again) -> torch.Tensor:
    found: torch.Tensor = Adjoint.apply(parts["a"], x, *parts["a"].parameters()) if again else in_a_loop_of_3(parts, x)
    return parts["b"](found)


def in_a_loop_of_3(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = parts["a"](x)
    return x


def test_a_function_of_their_own_may_call_modules_in_its_backward_that_do_not_draw() -> None:
    assert_same(through_once(by_adjoint, Quiet, direct), through_once(by_adjoint, Quiet, None))  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match=r"is called 3 times in a step, and again in backward, where it draws"):
        through_once(by_adjoint, Noisy, direct)
