"""Errors that training itself can meet, as against those of a spec or of a workload's making."""

from __future__ import annotations

from collections.abc import Sequence

from weft.error_places import samples_place
from weft.workload import WorkloadError


class NonFiniteLoss(WorkloadError):
    """The training loss of one microbatch is nan or infinite: training on would only spread it.

    step: training step, from 0. value: the loss. microbatch: its number in the batch, where it is known. samples: of
    the training data, those in it.
    """

    def __init__(self, step: int, value: float, microbatch: int | None = None, samples: Sequence[int] = ()) -> None:
        super().__init__(step, value, microbatch, samples)  # what pickle calls it with again, in another process
        self.step = step
        self.value = value
        self.microbatch = microbatch
        self.samples = samples

    def __str__(self) -> str:
        told = f": {samples_place('train', self.samples)}" if self.samples else ""
        where = "" if self.microbatch is None else f" (microbatch {self.microbatch}{told})"
        return f"loss is {self.value} at step {self.step}{where}; lower the learning rate, or check the data"
