"""Weights: what each microbatch counts in its batch, where the workload says so (tokens with loss, for example).

Loaders weigh the targets, or a batch of another structure, as they load them and leave the numbers in shared memory, a
row for each batch on its way, with how many samples they are; the graph lets a batch's first FORWARD of a last stage
wait for the last LOAD of each loader. Without a function, and with batches that the job makes, a microbatch counts its
samples, and nothing is shared.
"""

from __future__ import annotations

import torch

from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.transport.memory.directory import Directory


class Weights:
    """num_microbatches: of all replicas. depth: batches that may be on their way at once."""

    def __init__(self, directory: Directory, *, weighs: bool, num_microbatches: int, depth: int) -> None:
        self.weighs = weighs
        self._rows = torch.empty(0)
        if weighs:
            block = directory.block("weights", 8 * 2 * num_microbatches * depth)
            self._rows = block.view(torch.float64).view(depth, 2, num_microbatches)

    def set(self, iteration: Iteration, part: Part, weight: float, samples: int) -> None:
        """A loader's call, for every microbatch of its turns; 0 of one without samples."""
        if self.weighs:
            row = self._row(iteration)
            row[0, part.number], row[1, part.number] = weight, samples

    def fraction(self, iteration: Iteration, part: Part) -> float:
        """The microbatch's part of its batch; 0 where nothing in it, or in the whole batch, counts."""
        if not self.weighs:
            return part.size / iteration.size
        total = self.total(iteration)
        return float(self._row(iteration)[0, part.number]) / total if total else 0.0

    def total(self, iteration: Iteration) -> float:
        """What the whole batch counts."""
        return float(sum(self._row(iteration)[0].tolist())) if self.weighs else iteration.size

    def samples(self, iteration: Iteration) -> int:
        """Of the whole batch."""
        return int(sum(self._row(iteration)[1].tolist())) if self.weighs else iteration.size

    def _row(self, iteration: Iteration) -> torch.Tensor:
        return self._rows[iteration.index % len(self._rows)]
