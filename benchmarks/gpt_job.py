"""The job of benchmarks/pipeline.py: the GPT of examples/gpt.py on windows of text held as two tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import weft

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import gpt


def workload(layers: int, dim: int, heads: int, context: int, vocabulary: int, samples: int) -> weft.Workload:
    """Inputs and targets are int64 tensors of shape (samples, context); there is no dropout and no validation."""
    made = gpt.workload("", layers, dim, heads, context, vocabulary, dropout=0.0, samples=samples, validation_samples=0)
    pairs = [made.train[index] for index in range(samples)]
    inputs, targets = (torch.stack(part) for part in zip(*pairs, strict=True))
    return weft.Workload(model=made.model, loss=made.loss, train=(inputs, targets), optimizer=made.optimizer)
