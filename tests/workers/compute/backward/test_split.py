"""A backward in two parts has the bits of the whole one, whatever the units are made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft.workers.compute.backward.split import SplitBackward


class Attention(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.up(self.down(x))], 1)


class Tied(nn.Module):
    """Each of two parameters is used twice, one of them under the other's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.between = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(torch.tanh(self.between(self.twice(x)))) @ self.between.weight


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Unused(nn.Module):
    """A parameter of which nothing comes, and one that the input has no part in."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.added = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + torch.exp(self.added)


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (5, 8)),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (2, 5, 16)),
    "convolution": (lambda: nn.Sequential(Residual(), Residual()), (3, 4, 7, 7)),
    "channels last": (lambda: Residual().to(memory_format=torch.channels_last), (3, 4, 7, 7)),
    "skip": (Skip, (3, 4, 8, 8)),
    "tied": (Tied, (5, 8)),
    "checkpointed": (Checkpointed, (2, 5, 16)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (5, 8)),
    "lstm": (lambda: nn.LSTM(8, 8, batch_first=True), (2, 4, 8)),
    "without parameters": (lambda: nn.Sequential(nn.ReLU(), nn.Tanh()), (3, 4)),
    "unused": (Unused, (3, 8)),
}


KERNELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution in 1 dimension": (lambda: nn.Conv1d(8, 8, 3, padding=1), (3, 8, 6)),
    "convolution": (lambda: nn.Conv2d(8, 8, 3, padding=1), (3, 8, 6, 6)),
    "convolution by channels": (lambda: nn.Conv2d(8, 8, 3, groups=8), (3, 8, 6, 6)),
    "convolution with holes": (lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2), (3, 8, 6, 6)),
    "convolution in 3 dimensions": (lambda: nn.Conv3d(8, 8, 3, padding=1), (3, 8, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 8, 3, stride=2), (3, 8, 6, 6)),
    "batch norm": (lambda: nn.BatchNorm2d(8), (3, 8, 6, 6)),
    "batch norm in evaluation": (lambda: nn.BatchNorm2d(8).eval(), (3, 8, 6, 6)),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), (3, 8, 6, 6)),
    "group norm in 1 dimension": (lambda: nn.GroupNorm(4, 8), (3, 8, 6)),
    "group norm": (lambda: nn.GroupNorm(4, 8), (3, 8, 6, 6)),
    "group norm in 3 dimensions": (lambda: nn.GroupNorm(2, 8), (3, 8, 4, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(6), (3, 8, 6, 6)),
    "root mean square norm": (lambda: nn.RMSNorm(6), (3, 8, 6, 6)),
    "linear": (lambda: nn.Linear(6, 5), (3, 8, 6, 6)),
    "leaky": (lambda: nn.PReLU(8), (3, 8, 6, 6)),
    "gru": (lambda: nn.GRU(6, 5, batch_first=True), (3, 8, 6)),
}
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "expanded": lambda x: x[..., :1].expand(x.shape),
}


def out(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = module(torch.ops.aten.alias(x))
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_both_parts_have_the_bits_and_strides_of_a_whole_backward(name: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(3)
    whole = make().to(dtype)
    split, counts = copy.deepcopy(whole), []
    for parameter in split.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: counts.append(id(p)))
    later = []
    for _ in range(3):
        x = torch.randn(shape, dtype=dtype)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        came: list[torch.Tensor] = []
        a.register_hook(came.append)
        y, z = out(whole, a), out(split, b)
        gradient = torch.randn_like(y)
        torch.autograd.backward([y], [gradient])
        later.append(SplitBackward([z], [gradient], {7: b}))
        assert torch.equal(later[-1].received[7], came[0])
        assert later[-1].received[7].stride() == came[0].stride()
    assert not counts, "no parameter has any gradient before the second parts"
    for each in later:
        each.finish()
    for wanted, parameter in zip(whole.parameters(), split.parameters(), strict=True):
        assert (wanted.grad is None) == (parameter.grad is None)
        if wanted.grad is not None:
            assert torch.equal(wanted.grad, parameter.grad)
            assert wanted.grad.stride() == parameter.grad.stride()
            assert counts.count(id(parameter)) == 3


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_so_they_have_for_each_kernel_and_memory_format(name: str, form: str) -> None:
    """That of group norms ended the process in channels-last, where the input's gradient is not wanted (torch 2.13)."""
    make, shape = KERNELS[name]
    torch.manual_seed(3)
    whole = make()
    split = copy.deepcopy(whole)
    x = FORMS[form](torch.randn(shape))
    a, b = x.detach().requires_grad_(), x.detach().requires_grad_()
    y, z = out(whole, a), out(split, b)
    gradient = FORMS[form](torch.randn_like(y))
    torch.autograd.backward([y], [gradient])
    parts = SplitBackward([z], [gradient], {7: b})
    assert a.grad is not None
    assert torch.equal(parts.received[7], a.grad)
    parts.finish()
    for wanted, parameter in zip(whole.parameters(), split.parameters(), strict=True):
        assert torch.equal(wanted.grad, parameter.grad)


class Noted(torch.autograd.Function):
    """The same values; backward notes that it has run."""

    ran: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        Noted.ran.append(ctx.name)
        return gradients[0], None


def test_what_a_function_of_the_users_makes_of_a_vector_waits_for_the_second_part() -> None:
    """As if it were the sum that a norm makes of what passes, it had the first part wait, whatever it took."""
    scale, x = nn.Parameter(torch.ones(4)), torch.randn(2, 4, requires_grad=True)
    Noted.ran.clear()
    y = Noted.apply(x, "received") * Noted.apply(scale, "parameter")
    split = SplitBackward([y], [torch.ones_like(y)], {0: x})
    assert Noted.ran == ["received"]
    split.finish()
    assert Noted.ran == ["received", "parameter"]
    assert torch.equal(scale.grad, x.detach().sum(0))  # type: ignore[arg-type]


def test_where_nothing_was_received_the_second_part_is_the_whole_backward() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    split = SplitBackward([model(x)], [torch.ones(3, 4)], {})
    assert (split.received, model.weight.grad) == ({}, None)
    split.finish()
    found = model.weight.grad
    model.weight.grad = None
    model(x).sum().backward()
    assert torch.equal(found, model.weight.grad)


def test_a_hook_of_the_users_changes_the_gradient_of_a_shared_parameter_once() -> None:
    model, x = Tied(), torch.randn(5, 8, requires_grad=True)
    model.twice.weight.register_hook(lambda gradient: 3 * gradient)
    model(x).sum().backward()
    wanted, model.twice.weight.grad = model.twice.weight.grad, None
    y = model(x)
    SplitBackward([y], [torch.ones_like(y)], {0: x}).finish()
    assert torch.equal(wanted, model.twice.weight.grad)


def test_what_a_later_stage_has_made_of_a_shared_parameter_begins_its_sum() -> None:
    model, x = Tied(), torch.randn(5, 8, requires_grad=True)
    root, from_there = model.twice.weight, torch.randn(8, 8)
    y = model(x)
    torch.autograd.backward([y, root], [torch.ones_like(y), from_there], retain_graph=True)
    wanted, root.grad = root.grad, None
    SplitBackward([y, root], [torch.ones_like(y), from_there], {0: x}).finish()
    assert torch.equal(wanted, root.grad)


def test_what_is_handed_on_is_there_after_the_first_part_and_only_once() -> None:
    model, x = Tied(), torch.randn(5, 8, requires_grad=True)
    model(x).sum().backward()
    wanted, model.between.weight.grad = model.between.weight.grad, None
    y = model(x)
    split = SplitBackward([y], [torch.ones_like(y)], {0: x}, [model.between.weight])
    assert torch.equal(wanted, model.between.weight.grad)
    split.finish()
    assert torch.equal(wanted, model.between.weight.grad)
