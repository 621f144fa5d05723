"""What may be trained: what requires gradients as the model is built, and all, where code may change that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.workload.code.freezing import trainable
from weft.workload.workload import Workload


def set_trained(module: nn.Module, trained: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad = trained


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


class ByTrain(Plain):
    def train(self, mode: bool = True) -> Any:
        self.body.requires_grad_(mode)
        return super().train(mode)


class ByHelper(Plain):
    @torch.no_grad()
    def thaw(self) -> None:
        set_trained(self.body, True)


class ByStatic(Plain):
    @staticmethod
    def thaw(module: nn.Module) -> None:
        module.requires_grad_(True)


class KeepsNorms(Plain):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.body.eval()
        return self


class Quantized(ByTrain):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)


def thawing(model: Any, batch: Any) -> Any:
    set_trained(model.body, True)
    return model(batch).mean()


def plain(model: Any, batch: Any) -> Any:
    return model(batch).mean()


@pytest.mark.parametrize(
    ("kind", "step", "count"),
    [
        (Plain, plain, 2),
        (KeepsNorms, plain, 2),
        (Plain, thawing, 4),
        (ByTrain, plain, 4),
        (ByHelper, plain, 4),
        (ByStatic, plain, 4),
    ],
)
def test_all_may_be_trained_where_a_function_says_later_what_is(
    kind: Callable[[], nn.Module], step: Callable[..., Any], count: int
) -> None:
    model = kind()
    workload = Workload(model, [torch.zeros(2)], step=step, optimizer=torch.optim.Adam)
    assert trainable(workload) == {id(each) for each in list(model.parameters())[-count:]}


def test_integers_are_never_trained() -> None:
    model = Quantized()
    workload = Workload(model, [torch.zeros(2)], step=plain, optimizer=torch.optim.Adam)
    assert trainable(workload) == {id(each) for name, each in model.named_parameters() if name != "rows"}
