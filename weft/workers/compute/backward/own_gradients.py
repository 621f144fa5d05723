"""Own gradients: `p.grad` of a stage whose own optimizer takes it as autograd leaves it, but in memory of its own.

    BACKWARD(m)      slot of m ──▶ view ──▶ p.grad, which is that slot        (table.unsqueeze(0), an embedding's rows)
    BACKWARD(m+1)                           p.grad += ...                     into the slot of m
    the stage after  slot of m: the gradient of m+2                           and p.grad is that

autograd keeps a parameter's first gradient where a node has made it, and behind nodes that only look at what they get
in another way that is where it came from. In the whole model nobody writes there again; in a stage it may be a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from weft.workers.compute.backward.freezing import Freezing


class OwnGradients:
    """parameters: the stage's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self.freezing = Freezing(self._parameters)
        self._without = self._parameters  # that had no gradient yet in this iteration

    def begin(self, step: int) -> None:
        """Before the first backward of an iteration."""
        self._without = self._parameters

    def keep(self, lent: Iterable[torch.Tensor | None]) -> None:
        """After each backward, while nobody else writes there yet. lent: what it has found in slots."""
        if not self._without:
            return
        blocks = _blocks(lent)
        without = []
        for parameter in self._without:
            gradient = parameter.grad
            if gradient is None:
                without.append(parameter)
            elif _is_within(gradient, blocks):
                parameter.grad = gradient.clone()
        self._without = without


def _blocks(tensors: Iterable[torch.Tensor | None]) -> list[tuple[int, int]]:
    """The memory that they are parts of, from and to, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor is not None and not tensor.is_sparse)
    return list({storage.data_ptr(): (storage.data_ptr(), storage.nbytes()) for storage in storages}.values())


def _is_within(gradient: torch.Tensor, blocks: Sequence[tuple[int, int]]) -> bool:
    parts = (gradient._values(), gradient._indices()) if gradient.is_sparse else (gradient,)
    return any(0 <= part.data_ptr() - start < size for part in parts for start, size in blocks)
