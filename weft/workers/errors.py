"""Errors that training itself can meet, as against those of a spec or of a workload's making."""

from __future__ import annotations

from weft.workload import WorkloadError


class NonFiniteLoss(WorkloadError):
    """The training loss of one microbatch is nan or infinite: training on would only spread it.

    step: training step, from 0. value: the loss. microbatch: its number in the batch, where it is known.
    """

    def __init__(self, step: int, value: float, microbatch: int | None = None) -> None:
        super().__init__(step, value, microbatch)  # what pickle calls it with again, in another process
        self.step = step
        self.value = value
        self.microbatch = microbatch

    def __str__(self) -> str:
        where = "" if self.microbatch is None else f" (microbatch {self.microbatch})"
        return f"loss is {self.value} at step {self.step}{where}; lower the learning rate, or check the data"
