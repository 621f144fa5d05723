"""Resident data: tensors that lie on a device as a whole, of which it takes the samples of each microbatch itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.workload.data.batches import Batches, run_of
from weft.workload.data.datasets import Whole
from weft.workload.data.source import DataSource
from weft.workload.data.tree import Skeleton


def can_be_resident(source: DataSource) -> bool:
    """A sampler of the user's may draw by torch's generator, which computing draws by, too."""
    return source.whole is not None and source.sampler is None


class ResidentData:
    """Of one device, which has of the tensors those that it is asked for."""

    def __init__(self, batches: Batches, put: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """put: brings a tensor to the device."""
        self._batches, self._put = batches, put
        self._whole = {training: source.whole for training, source in batches.sources().items()}
        self._tensors: dict[tuple[bool, int], torch.Tensor] = {}  # of training or not, by number
        self._orders: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}  # likewise: of an epoch, here and there

    def fill(self, number: int, slot: torch.Tensor, iteration: Iteration, part: Part) -> None:
        """slot: the place of the microbatch's samples of one tensor."""
        torch.index_select(self._tensor(iteration, number), 0, self._samples(iteration, part), out=slot)

    def batch(self, iteration: Iteration, part: Part) -> tuple[list[torch.Tensor], Skeleton]:
        """As of `Batches.batch`, on the device."""
        tensors, skeleton = self._of(iteration)
        samples = self._samples(iteration, part)
        return [self._tensor(iteration, n).index_select(0, samples) for n in range(len(tensors))], skeleton

    def _of(self, iteration: Iteration) -> Whole:
        whole = self._whole[iteration.training]
        assert whole is not None, "the planner asks first"
        return whole

    def _tensor(self, iteration: Iteration, number: int) -> torch.Tensor:
        key = iteration.training, number
        if key not in self._tensors:
            self._tensors[key] = self._put(self._of(iteration)[0][number])
        return self._tensors[key]

    def _samples(self, iteration: Iteration, part: Part) -> torch.Tensor:
        order = self._batches.order(iteration)
        before, there = self._orders.get(iteration.training, (None, order))
        if before is not order:
            there = self._put(order)
            self._orders[iteration.training] = order, there
        return run_of(there, iteration, part)
