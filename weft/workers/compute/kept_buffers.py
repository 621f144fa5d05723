"""Kept buffers: those of a stage as they were before a run that may have to be made again."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import nn

from weft.workers.compute.handover import is_plain
from weft.workload.cutting.placeholder import Placeholder

MOST_BYTES = 256 << 10  # to copy more takes as long as to seed some hundred calls


class KeptBuffers:
    def __init__(self, model: nn.Module) -> None:
        tables = {id(module._buffers): module._buffers for module in model.modules()}.values()
        self._slots = [
            (table, name)
            for table in tables
            for name, buffer in table.items()
            if not isinstance(buffer, Placeholder)  # another stage's
        ]
        self._buffers: list[torch.Tensor | None] = []  # where each was, at the last look
        self._values: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def keep(self) -> bool:
        """Before a run. Whether they can be put back behind it, which is not worth it for a large one."""
        buffers = [table.get(name) for table, name in self._slots]
        if len(buffers) == len(self._buffers) and all(map(is_, buffers, self._buffers)):
            if self._copies:
                with torch.no_grad():
                    torch._foreach_copy_(self._copies, self._values)
            return True
        values = list({id(buffer): buffer.detach() for buffer in buffers if buffer is not None}.values())
        if not _can_be_kept(values):
            return False
        self._buffers, self._values, self._copies = buffers, values, [value.clone() for value in values]
        return True

    @torch.no_grad()
    def put_back(self) -> None:
        """What has not changed is not touched: a backward may need it as it is."""
        for (table, name), buffer in zip(self._slots, self._buffers, strict=True):
            table[name] = buffer
        for value, copy in zip(self._values, self._copies, strict=True):
            if not torch.equal(value, copy):
                value.copy_(copy)


def _can_be_kept(values: Sequence[torch.Tensor]) -> bool:
    return all(map(is_plain, values)) and sum(value.nbytes for value in values) <= MOST_BYTES
