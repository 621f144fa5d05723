"""The job file of the tests with replicas: small models, and what a workload may do that replicas have to get right."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

import weft

SAMPLES = 19  # in batches of 8: two whole ones and one of 3
TOKENS = 11
IGNORED = -100
CULPRIT = 5.0  # a target whose gradient is nan
PAUSE_SECONDS = 2e-3  # of a layer; far more than it computes
LATE_PRODUCTS = 30  # of matrices; some 10 ms, far more than forward and backward take


class Embedding(nn.Module):
    """int64 (B, T) -> (B, T, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(TOKENS, 8), nn.Embedding(4, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.dropout(self.token(tokens) + self.position.weight)


class Block(nn.Module):
    """(B, T, 8) -> (B, T, 8). Without a bias of the keys: its gradient is rounding alone, which Adam makes large."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.2)
        self.query_key_value = nn.Linear(8, 24, bias=False)
        self.output = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> Any:
        query, key, value = self.query_key_value(self.norm(hidden)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + self.dropout(self.output(attended))


class Sometimes(nn.Module):
    """Uses its parameters only where a sample of the microbatch has its first feature above 2."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> Any:
        return inputs + self.extra(inputs) if inputs[:, 0].max() > 2 else inputs.clone()


class Noise(nn.Module):
    """Draws from Python's generator and from numpy's, and not from torch's."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * (1 + 0.1 * random.random()) + 0.1 * float(np.random.random())


class Pausing(nn.Linear):
    """Others have the time to update what comes after it."""

    def forward(self, inputs: torch.Tensor) -> Any:
        time.sleep(PAUSE_SECONDS)
        return super().forward(inputs).tanh()


class Stack(nn.Module):
    """Cut by its own forward; with a parameter that no module called has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pausing(6, 6) for _ in range(4))
        self.dropout = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> Any:
        for block in self.blocks:
            inputs = inputs + self.dropout(block(inputs))
        return self.head(inputs * self.scale)


class Noisy(nn.Module):
    """Cut by its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = noisy()

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)


class Trusting(torch.optim.Optimizer):
    """Each tensor moves by a part of its own norm (You et al., LARS, 2017): no element is updated by itself."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["steps"] = state.get("steps", 0) + 1
                    trust = parameter.norm() / (parameter.grad.norm() + 1e-3)
                    parameter.sub_(parameter.grad * trust, alpha=group["lr"] / state["steps"])


class Late(torch.optim.SGD):
    """Whoever updates beside a backward has much to compute first."""

    def step(self, closure: Any = None) -> Any:
        if threading.current_thread().name == "sync":
            matrix = torch.eye(256)
            for _ in range(LATE_PRODUCTS):
                matrix = matrix @ matrix
        return super().step(closure)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))


def noisy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), Noise(), nn.Tanh(), nn.Linear(12, 12), Noise(), nn.Linear(12, 1))


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 1))


def gpt() -> nn.Sequential:
    """The head's weight is the embedding's."""
    embedding, head = Embedding(), nn.Linear(8, TOKENS, bias=False)
    head.weight = embedding.token.weight
    return nn.Sequential(embedding, Block(), Block(), nn.LayerNorm(8), head)


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def sometimes() -> nn.Sequential:
    return nn.Sequential(Sometimes(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def partly_frozen() -> nn.Sequential:
    model = mlp()
    for parameter in (*model[0].parameters(), model[3].bias):
        parameter.requires_grad_(False)
    return model


def columns() -> tuple[torch.Tensor, torch.Tensor]:
    """Features and targets. One sample has a first feature above 2, the last one the target CULPRIT."""
    inputs, targets = numbers(SAMPLES, 6).tanh(), numbers(SAMPLES, 1).tanh()
    inputs[9, 0], targets[-1] = 3.0, CULPRIT
    return inputs, targets


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(SAMPLES, 1, 8, 8), torch.arange(SAMPLES) % 3


def pausing() -> nn.Sequential:
    return nn.Sequential(Pausing(6, 12), Pausing(12, 12), nn.Dropout(0.3), Pausing(12, 12), nn.Linear(12, 1))


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Some targets are ignored; of every third sample all are."""
    tokens = (numbers(SAMPLES, 5).abs() * 100).long() % TOKENS
    targets = tokens[:, 1:].clone()
    targets[::3], targets[:, 0] = IGNORED, IGNORED
    return tokens[:, :-1], targets


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def singular(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Finite, with a gradient of nan where a target is CULPRIT: that of a root at 0, times 0."""
    flaw = (0 * (output * (targets != CULPRIT)).abs()).sqrt().sum()
    return nn.functional.mse_loss(output, targets) + (flaw if (targets == CULPRIT).any() else 0)


def decayed(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "mlp": (mlp, columns, nn.functional.mse_loss),
    "linear": (linear, columns, nn.functional.mse_loss),
    "gpt": (gpt, text, cross_entropy),
    "cnn": (cnn, images, cross_entropy),
    "sometimes": (sometimes, columns, nn.functional.mse_loss),
    "partly frozen": (partly_frozen, columns, nn.functional.mse_loss),
    "singular": (mlp, columns, singular),
    "pausing": (pausing, columns, nn.functional.mse_loss),
    "noisy": (noisy, columns, nn.functional.mse_loss),
    "noisy by calls": (Noisy, columns, nn.functional.mse_loss),
    "stack": (Stack, columns, nn.functional.mse_loss),
}

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "late sgd": lambda parameters: Late(parameters, lr=0.05, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "trusting": lambda parameters: Trusting(parameters, lr=0.05),
    "decayed": decayed,
}


def workload(
    model: str = "mlp", dtype: str = "float64", optimizer: str = "adamw", schedules: bool = False
) -> weft.Workload:
    """What the text models count is their targets, all others their samples."""
    build, data, loss = MODELS[model]
    inputs, targets = (part.to(getattr(torch, dtype)) if part.is_floating_point() else part for part in data())
    return weft.Workload(
        model=build().to(getattr(torch, dtype)),
        loss=loss,
        train=(inputs, targets),
        validation=(inputs, targets),
        metrics={"largest": lambda output, _: output.abs().mean()},
        optimizer=OPTIMIZERS[optimizer],
        weight=(lambda target: (target != IGNORED).sum()) if model == "gpt" else None,
        scheduler=(lambda built: torch.optim.lr_scheduler.ExponentialLR(built, 0.9)) if schedules else None,
    )
