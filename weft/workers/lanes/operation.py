"""Operation: one task of a lane, as the lane runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from weft.plan.itinerary import Iteration

Run = Callable[[Iteration], None]


@dataclass(frozen=True, slots=True)
class Operation:
    """One task of the lane. mode: what its time counts as. waits: (task, distance, cause) of inputs from other lanes.
    update_needed: the iteration whose update to wait for, where that is no fixed distance. passes: does nothing, and
    waits for nothing, in validation iterations. takes: whether it is of the way that its bucket goes; None where that
    is no question. If it is not, it passes. skips: numbers of the waits that are not of that way; None where all count.
    wakes: a task of another lane waits for it. place: what it does, for errors.
    is_milestone: a hook may end it from inside another task.
    reads_on_host: what its inputs have computed, so they must be over before it is launched on a device.
    is_read_on_host: by such a task, which may be of the same lane and then has no wait for it."""

    task: int
    mode: str
    waits: tuple[tuple[int, int, str], ...]
    wakes: bool
    passes: bool
    run: Run
    update_needed: Callable[[Iteration], int] | None = None
    takes: Callable[[Iteration], bool] | None = None
    skips: Callable[[Iteration], Collection[int]] | None = None
    place: str = ""
    is_milestone: bool = False
    reads_on_host: bool = False
    is_read_on_host: bool = False

    def runs(self, iteration: Iteration) -> bool:
        """Whether there is anything to do and to wait for."""
        return (iteration.learns or not self.passes) and (self.takes is None or self.takes(iteration))

    def place_in(self, iteration: Iteration) -> str:
        """Where in the job an error of it was."""
        phase = "step" if iteration.training else "validation after step"
        return f"in {self.place}, {phase} {iteration.step} (iteration {iteration.index})"
