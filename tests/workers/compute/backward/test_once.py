"""What may not run twice runs once in a backward of two parts: a job trained with wrong numbers where it did."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.workers.compute.backward.split import SplitBackward

WIDTH = 6


class _Scaled(torch.autograd.Function):
    """Makes gradients in forward, and scales them in place, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.gradients = weight.sum(0).expand_as(x).clone(), x.sum(0).expand_as(weight).clone()
        return (x @ weight.T).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.mul_(gradient) for each in ctx.gradients)


class _Freed(torch.autograd.Function):
    """Lets go of what it has kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.kept = x, weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x, weight), ctx.kept = ctx.kept, None
        return gradient @ weight, gradient.T @ x


class _Pair(torch.autograd.Function):
    """Two weights of two parameters, which it lets go of."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.kept = one, other
        return one * other, one + other

    @staticmethod
    def backward(ctx: Any, of_product: torch.Tensor, of_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (one, other), ctx.kept = ctx.kept, None
        return of_product * other + of_sum, of_product * one + of_sum


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.retained: torch.Tensor | None = None


class FusedLoss(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(self.first(x), self.last.weight) * 3


class Frees(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(_Freed.apply(x, self.first.weight))


class FreesBehind(Layers):
    """One of its parameters has its gradient in the first part in any case: two borders lead to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product, _ = _Pair.apply(self.first.weight, self.last.weight)
        return (x @ product) @ self.first.weight


class HookInPlace(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y.register_hook(lambda gradient: gradient.mul_(2))
        return self.last(y)


class HookThatCounts(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y.register_hook(self._count)
        return self.last(y)

    def _count(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient * self.calls


class HookOfAnotherRoot(Layers):
    """It is returned, and what was received has no part in it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_weight = self.last.weight @ self.last.weight.exp()
        of_weight.register_hook(lambda gradient: gradient * 2)
        return self.first(x), of_weight


class Retaining(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.retained = self.first(x)
        self.retained.retain_grad()
        return self.last(self.retained)


class Checkpointed(Layers):
    """Its running mean changes once more in each call of autograd."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.last(self.norm(self.first(x))), x, use_reentrant=False)


class CheckpointedBehind(Layers):
    """Beside the path: weights of two borders, of one part that is made again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = checkpoint(self._weights, self.first.weight, self.last.weight, use_reentrant=False)
        return (x @ one).tanh() @ other

    def _weights(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return one.sin(), other.sin()


class Popping(Layers):
    """What is saved is there once, as where it is kept in a file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> int:
            kept[len(kept)] = tensor
            return len(kept) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, kept.pop):
            return self.last(self.first(x))


MODELS = (
    FusedLoss,
    Frees,
    FreesBehind,
    HookInPlace,
    HookThatCounts,
    HookOfAnotherRoot,
    Retaining,
    Checkpointed,
    CheckpointedBehind,
    Popping,
)


def _ran(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(torch.ops.aten.alias(x))
    return list(y) if isinstance(y, tuple) else [y]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("receives", [True, False], ids=["has received", "has not"])
@pytest.mark.parametrize("hands_on", [True, False], ids=["hands on", "keeps"])
def test_it_does_once_what_the_whole_backward_does_once(make: type[Layers], receives: bool, hands_on: bool) -> None:
    torch.manual_seed(3)
    whole = make()
    split = copy.deepcopy(whole)
    x = torch.randn(4, WIDTH)
    a, b = x.clone().requires_grad_(receives), x.clone().requires_grad_(receives)
    roots, others = _ran(whole, a), _ran(split, b)
    gradients = [torch.randn_like(each) for each in roots]
    torch.autograd.backward(roots, [each.clone() for each in gradients])
    handed_on = [split.last.weight] if hands_on else []
    parts = SplitBackward(others, gradients, {7: b} if receives else {}, handed_on)
    parts.finish()
    assert not receives or torch.equal(parts.received[7], a.grad)
    for wanted, parameter in zip(whole.parameters(), split.parameters(), strict=True):
        assert (wanted.grad is None) == (parameter.grad is None)
        assert wanted.grad is None or torch.equal(wanted.grad, parameter.grad)
    for expected, buffer in zip(whole.buffers(), split.buffers(), strict=True):
        assert torch.equal(expected, buffer)
    if whole.retained is not None:
        assert torch.equal(whole.retained.grad, split.retained.grad)


def test_other_nodes_beside_it_are_split_as_ever() -> None:
    model, x = FusedLoss(), torch.randn(4, WIDTH, requires_grad=True)
    (loss,) = _ran(model, x)
    parts = SplitBackward([loss], [torch.ones_like(loss)], {0: x})
    assert (model.first.weight.grad, model.last.weight.grad) == (None, None), "before the second part"
    later = {id(parameter) for border in parts._borders for parameter in border.parameters}
    assert later == {id(parameter) for parameter in model.first.parameters()}
    parts.finish()
    assert all(parameter.grad is not None for parameter in (model.first.weight, model.first.bias, model.last.weight))
