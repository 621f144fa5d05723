"""Pairs: what stages of an `nn.Sequential` read of a microbatch: the first one its inputs, the last one its targets."""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.workers.memory.slots import SlotRing


class DataPair(NamedTuple):
    """Of one microbatch, where the stage's device can compute with it."""

    input: torch.Tensor | None  # of the first stage
    target: torch.Tensor | None  # of the last


class PairReader:
    """input, target: the rings of those that the stage reads."""

    def __init__(self, input: SlotRing | None, target: SlotRing | None) -> None:
        self._input = input
        self._target = target

    def __call__(self, iteration: Iteration, microbatch: int, part: Part) -> DataPair:
        if self._input is None and self._target is None:
            return _NOTHING
        return DataPair(
            _read(self._input, iteration, microbatch, part), _read(self._target, iteration, microbatch, part)
        )


_NOTHING = DataPair(None, None)


def _read(ring: SlotRing | None, iteration: Iteration, microbatch: int, part: Part) -> torch.Tensor | None:
    if ring is None:
        return None
    return ring.read(iteration.index, part.number if ring.by_number else microbatch, part.size)
