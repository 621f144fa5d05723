"""The job of the GPU benchmarks: the GPT of examples/gpt.py, made in seconds however large it is, on random tokens.

Weights of the same shape begin with the same numbers, which costs one layer's random numbers instead of billions; how
long an iteration takes does not depend on them. The model is made on torch's default device, so a loop that trains on
the GPU alone can have it made there (`with torch.device("cuda")`), with the same numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import weft

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt


def workload(
    layers: int, dim: int, heads: int, context: int, vocabulary: int, samples: int, optimizer: str = "adamw"
) -> weft.Workload:
    """Inputs and targets are int64 tensors of shape (samples, context); there is no dropout and no validation."""
    with torch.device("meta"):
        model = gpt.gpt(layers, dim, heads, context, vocabulary, dropout=0.0)
    model = model.to_empty(device=torch.get_default_device())
    generator = torch.Generator().manual_seed(1)
    fill(model, generator)
    tokens = torch.randint(vocabulary, (samples, context + 1), generator=generator, device="cpu")
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    return weft.Workload(
        model=model,
        loss=gpt.cross_entropy,
        train=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        optimizer=lambda parameters: make(parameters, lr=1e-4),
    )


@torch.no_grad()
def fill(model: nn.Module, generator: torch.Generator) -> None:
    """The numbers of examples/gpt.py for each kind of parameter; generator: of the CPU."""
    drawn: dict[torch.Size, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            is_norm = name.endswith(".weight")  # the others are biases
            parameter.fill_(1.0 if is_norm else 0.0)
            continue
        if parameter.shape not in drawn:
            numbers = torch.empty(parameter.shape, device="cpu")
            drawn[parameter.shape] = numbers.normal_(std=gpt.INITIAL_DEVIATION, generator=generator)
        parameter.copy_(drawn[parameter.shape])
