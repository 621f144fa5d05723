"""Operation: one task of a lane, as the lane runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from weft.plan.itinerary import Iteration
from weft.plan.kinds import MODE_INDEX

Run = Callable[[Iteration], None]
Wait = tuple[int, int, int]  # a task of another lane, how many iterations back it is needed, the stall's mode

_UPDATE = MODE_INDEX["stall_update"]


@dataclass(frozen=True, slots=True)
class Operation:
    task: int
    mode: int  # what its time counts as
    waits: tuple[Wait, ...]
    wakes: bool  # a task of another lane waits for it
    passes: bool  # does nothing, and waits for nothing, in validation iterations
    run: Run
    update_needed: Callable[[Iteration], int] | None = None  # whose update to wait for, where that is no fixed distance
    takes: Callable[[Iteration], bool] | None = None  # whether its bucket goes its way, or it is its loader's turn
    skips: Callable[[Iteration], Collection[int]] | None = None  # numbers of waits that are not of that way
    place: str = ""  # what it does, for errors
    is_milestone: bool = False  # a hook may end it from inside another task
    reads_on_host: bool = False  # what its inputs have computed: they are over before it is launched on a device
    is_read_on_host: bool = False  # by such a task, which may be of the same lane and then has no wait for it
    finish_copies: Callable[[], int | None] | None = None  # before it changes what snapshots copy; see Copies.finish
    rests: bool = False  # once it has to wait it waits for more than it needs, so that its lane wakes less often

    def runs(self, iteration: Iteration) -> bool:
        """Whether there is anything to do and to wait for."""
        return (iteration.learns or not self.passes) and (self.takes is None or self.takes(iteration))

    def rested(self, distance: int) -> int:
        """Iterations beyond the needed one that a wait of this distance waits for: they have all that they need of the
        lane, so they come. What it has made for the others is read meanwhile."""
        return max(0, distance - 2) // 2 if self.rests else 0

    def waits_in(self, iteration: Iteration) -> Sequence[Wait]:
        """Of the iteration's inputs."""
        if self.skips is None and self.update_needed is None:
            return self.waits
        skipped = () if self.skips is None else self.skips(iteration)
        waits = [wait for number, wait in enumerate(self.waits) if number not in skipped]
        if self.update_needed is not None:
            update = iteration.index - self.update_needed(iteration)
            waits = [(task, update if stall == _UPDATE else distance, stall) for task, distance, stall in waits]
        return waits

    def place_in(self, iteration: Iteration) -> str:
        """Where in the job an error of it was."""
        phase = "step" if iteration.training else "validation after step"
        return f"in {self.place}, {phase} {iteration.step} (iteration {iteration.index})"
