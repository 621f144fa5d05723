"""The norm of the whole gradient, and what it says about an update.

    Norm         read on the host, when every owner has summed its squares
    DeviceNorm   computed on a device, when its stream gets there; the host neither waits for it nor knows it

Both take the owners' sums from shared memory, in one order and in float64. A device's own sums get there by its own
stream, so for those no host has to wait; those of other processes are there before the update is launched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from weft.plan.course import Course
from weft.plan.itinerary import Iteration
from weft.workers.devices.device import Memory
from weft.workers.memory.bucket_memory import BucketMemory

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


@dataclass(frozen=True, slots=True)
class Bound:
    """What the norm says about one update. Tensors are a device's, of no dimension, and their numbers are not there
    yet."""

    norm: float | torch.Tensor | None = None  # before clipping; None where nobody asks
    scale: float | torch.Tensor = 1.0  # what to multiply the gradient with
    skips: bool = False  # nothing is to change
    found_inf: torch.Tensor | None = None  # as torch's fused optimizers take it: 1.0 where nothing is to change


class Norm:
    def __init__(self, memory: BucketMemory, course: Course, clip_norm: float | None, *, skips_nonfinite: bool) -> None:
        self._memory = memory
        self._course = course
        self._two_ways = [bucket for bucket in memory.buckets if bucket.device_ranges]
        self._clip_norm = clip_norm
        self._skips_nonfinite = skips_nonfinite

    def bound(self, iteration: Iteration) -> Bound:
        squares = float(self._written(self._memory.norms(iteration.step), iteration).sum())
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        return Bound(norm, self._factor(norm), self.skips(norm))

    def skips(self, norm: float) -> bool:
        return self._skips_nonfinite and not math.isfinite(norm)

    def _written(self, norms: torch.Tensor, iteration: Iteration) -> torch.Tensor:
        """The sums of squares of the step, without those of an earlier one that stand where a bucket no longer goes."""
        if not self._two_ways:
            return norms
        written = norms.clone()
        for bucket in self._two_ways:
            away = bucket.ranges if self._course.is_local(bucket.index, iteration) else bucket.device_ranges
            for owned in away:
                written[bucket.index, owned.owner].zero_()  # an assignment would make the host wait for a device
        return written

    def _factor(self, norm: float) -> float:
        if self._clip_norm is None:
            return 1.0
        factor = self._clip_norm / (norm + CLIP_EPSILON)
        return factor if not factor > 1 else 1.0  # nan stays, as it does in torch


class DeviceNorm(Norm):
    """For the updates of one lane of a device."""

    def __init__(
        self,
        memory: BucketMemory,
        course: Course,
        clip_norm: float | None,
        *,
        skips_nonfinite: bool,
        device: Memory,
    ) -> None:
        super().__init__(memory, course, clip_norm, skips_nonfinite=skips_nonfinite)
        self._device = device
        self._known: tuple[int, Bound] = (-1, Bound())  # iteration, and what is found in it

    def bound(self, iteration: Iteration) -> Bound:
        """In the stream, behind all that the sums come from. One for all of the lane's updates of an iteration."""
        if self._known[0] != iteration.index:
            self._known = (iteration.index, self._found(iteration))
        return self._known[1]

    def _found(self, iteration: Iteration) -> Bound:
        """In the arithmetic of the host's, to the bit."""
        norm = _root(self._written(self._device.put(self._memory.norms(iteration.step)), iteration).sum())
        scale: float | torch.Tensor = 1.0
        if self._clip_norm is not None:
            # A number over a tensor would be torch's reciprocal, times the number.
            scale = torch.full_like(norm, self._clip_norm).div(norm + CLIP_EPSILON).clamp(max=1.0)
        return Bound(norm, scale, found_inf=norm.isfinite().logical_not().float() if self._skips_nonfinite else None)


def _root(squares: torch.Tensor) -> torch.Tensor:
    """The nearest number, as a GPU's is. torch's own on a CPU is the one beside it now and then."""
    if not squares.is_cpu:
        return squares.sqrt()
    root = torch.empty_like(squares)
    np.sqrt(squares.numpy(), out=root.numpy())
    return root
