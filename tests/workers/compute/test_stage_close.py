"""What a stage lets go of for good."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.workers.compute.stage import forget_results


@dataclass
class Pair:
    one: torch.Tensor


class Odd(Mapping[str, Any]):
    """Raises when it is looked into."""

    def __getitem__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError

    def __len__(self) -> int:
        return 1


def test_results_that_modules_keep_go_and_what_they_were_given_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    made = model(torch.ones(1, 2))
    batch = torch.zeros(3)
    model.last, model[1].odd, model[1].count = made, Odd(), 3
    model.losses, model.by_name, model.pair, model.batch = [made.sum()], {"loss": made.sum()}, Pair(made), batch
    losses = model.losses
    forget_results(model.modules())
    assert (model.last, model.pair, model.losses, losses, model.by_name) == (None, None, [], [], {})
    assert model.batch is batch
    assert (model[1].count, type(model[1].odd)) == (3, Odd)
    assert model(torch.ones(1, 2)).shape == (1, 2)
