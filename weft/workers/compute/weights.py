"""Weights: what each microbatch counts in its batch, where the workload says so (tokens with loss, for example).

Loaders weigh the targets, or a batch of another structure, as they load them and leave the numbers in shared memory, a
row for each batch on its way; the graph lets a batch's first FORWARD of a last stage wait for the last LOAD of each
loader. Without a function a microbatch counts its samples, and nothing is shared.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.transport.memory.directory import Directory
from weft.workload.workload import WeightFunction, weight_of


class Weights:
    """num_microbatches: of all replicas. depth: batches that may be on their way at once."""

    def __init__(
        self, function: WeightFunction | None, directory: Directory, *, num_microbatches: int, depth: int
    ) -> None:
        self._function = function
        self._rows = torch.empty(0)
        if function is not None:
            block = directory.block("weights", 8 * num_microbatches * depth)
            self._rows = block.view(torch.float64).view(depth, num_microbatches)

    @property
    def weighs(self) -> bool:
        return self._function is not None

    def weigh(self, iteration: Iteration, part: Part, batch: Any) -> None:
        """A loader's call, for every microbatch of its turns. batch: as `weight_of` takes it; None without samples."""
        if self._function is not None:
            weight = 0.0 if batch is None else weight_of(batch, self._function)
            self._row(iteration)[part.number] = weight

    def fraction(self, iteration: Iteration, part: Part) -> float:
        """The microbatch's part of its batch; 0 where nothing in it, or in the whole batch, counts."""
        if self._function is None:
            return part.size / iteration.size
        total = self.total(iteration)
        return float(self._row(iteration)[part.number]) / total if total else 0.0

    def total(self, iteration: Iteration) -> float:
        """What the whole batch counts."""
        return iteration.size if self._function is None else float(sum(self._row(iteration).tolist()))

    def _row(self, iteration: Iteration) -> torch.Tensor:
        return self._rows[iteration.index % len(self._rows)]
