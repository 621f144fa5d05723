"""Models whose units are worth compiling, small, for tests: `compiled_models.py:workload`, args = {name = "rows"}.

rows      an `nn.Sequential` of rows of layers, with dropout, and a batch norm between two of them
attends   a class of its own: transformer blocks behind an embedding
breaks    an `nn.Sequential` with a unit of which torch's compiler can make nothing
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import weft

VOCABULARY, LENGTH, WIDTH = 11, 6, 8
NUM_TRAIN, NUM_HELD_OUT = 12, 4  # batches of 8 and 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(self.before(x)).chunk(3, dim=-1)
        x = x + self.drop(scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.drop(nn.functional.gelu(self.out(self.behind(x))))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows() -> nn.Sequential:
    row = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)]
    row[1].insert(1, nn.BatchNorm1d(WIDTH))
    return nn.Sequential(*row, nn.Linear(WIDTH, 3))


def workload(name: str = "rows") -> weft.Workload:
    generator = torch.Generator().manual_seed(0)
    how: dict[str, Any] = {"optimizer": lambda params: torch.optim.Adam(params, lr=1e-2)}
    if name == "attends":
        tokens = torch.randint(VOCABULARY, (NUM_TRAIN + NUM_HELD_OUT, LENGTH + 1), generator=generator)
        data = [(each[:, :-1], each[:, 1:]) for each in (tokens[:NUM_TRAIN], tokens[NUM_TRAIN:])]
        return weft.Workload(
            model=Attends(),
            loss=lambda output, target: cross_entropy(output.flatten(0, 1), target.flatten()),
            train=data[0],
            validation=data[1],
            **how,
        )
    x = torch.randn(NUM_TRAIN + NUM_HELD_OUT, WIDTH, generator=generator)
    y = torch.randint(3, (len(x),), generator=generator)
    return weft.Workload(
        model=rows(),
        loss=nn.CrossEntropyLoss(),
        train=(x[:NUM_TRAIN], y[:NUM_TRAIN]),
        validation=(x[NUM_TRAIN:], y[NUM_TRAIN:]),
        **how,
    )
