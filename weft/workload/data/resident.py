"""Resident data: tensors that lie on a device as a whole, of which it takes the samples of each microbatch itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.data import TensorDataset

from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.workload.data.batches import Batches
from weft.workload.data.source import DataSource, Tensors
from weft.workload.data.tree import Skeleton, flatten

Whole = tuple[list[torch.Tensor], Skeleton]  # the samples along the first dimension of each


def whole_of(source: DataSource) -> Whole | None:
    """What a source consists of, where items are rows of tensors and batches nothing else; None otherwise. A sampler of
    the user's may draw by torch's generator, which computing draws by, too."""
    if source.collate is not None or source.sampler is not None:
        return None
    if isinstance(source.dataset, Tensors):
        return source.dataset.whole
    if type(source.dataset) is TensorDataset:  # a subclass may change its items
        return flatten([tensor.view_as(tensor) for tensor in source.dataset.tensors])
    return None


class ResidentData:
    """Of one device, which has of the tensors those that it is asked for."""

    def __init__(self, batches: Batches, put: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """put: brings a tensor to the device."""
        self._batches, self._put = batches, put
        self._whole = {training: whole_of(source) for training, source in batches.sources().items()}
        self._tensors: dict[tuple[bool, int], torch.Tensor] = {}  # of training or not, by number
        self._orders: dict[bool, tuple[int, torch.Tensor]] = {}  # likewise: an epoch, and the order of its samples

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
        epoch, order = self._orders.get(iteration.training, (-1, torch.empty(0)))
        if iteration.epoch != epoch:
            order = self._put(self._batches.order(iteration))
            self._orders[iteration.training] = iteration.epoch, order
        start = iteration.start + part.start
        return order[start : start + part.size]
