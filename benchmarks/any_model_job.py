"""The job of benchmarks/any_model.py: the GPT of gpt_job.py in a class of its own, whose forward calls its parts."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from torch import nn

import weft

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpt_job


class OwnForward(nn.Module):
    """int64 (B, T) -> (B, T, V), by the modules that the `nn.Sequential` has, in its order."""

    def __init__(self, modules: nn.Sequential) -> None:
        super().__init__()
        embedding, *blocks, head = modules
        self.embedding, self.blocks, self.head = embedding, nn.ModuleList(blocks), head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def workload(layers: int, dim: int, heads: int, context: int, vocabulary: int, samples: int) -> weft.Workload:
    made = gpt_job.workload(layers, dim, heads, context, vocabulary, samples)
    assert isinstance(made.model, nn.Sequential)
    return dataclasses.replace(made, model=OwnForward(made.model))
