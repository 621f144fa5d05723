"""Task times: how long each task took in each of the newest training steps. Pure.

A ring of numbers for each task, with the step that each is of beside it: rows of one step come from lanes that are some
way apart, and a validation runs through the same tasks but says nothing of a training step.
"""

from __future__ import annotations

import heapq
import statistics
from array import array
from collections.abc import Iterable, Sequence

from weft.plan.itinerary import Itinerary

STEPS = 512  # kept: the steps that are looked at, and as many as one lane's reports may be ahead of another's
NONE = -1


class TaskTimes:
    def __init__(self, itinerary: Itinerary) -> None:
        self.newest = NONE  # the last step of which any task has been told
        self._itinerary = itinerary
        self._rings: dict[int, tuple[array[int], array[int]]] = {}  # task -> steps, nanoseconds
        self._last = (NONE, NONE)  # iteration, its step: rows of an iteration come one after another

    def add(self, task: int, iteration: int, nanoseconds: int) -> None:
        if iteration != self._last[0]:
            self._last = iteration, self._step_of(iteration)
        step = self._last[1]
        if step == NONE:
            return
        ring = self._rings.get(task)
        if ring is None:
            ring = self._rings[task] = array("i", (NONE,)) * STEPS, array("q", (0,)) * STEPS
        ring[0][step % STEPS], ring[1][step % STEPS] = step, nanoseconds

    def has(self, task: int) -> bool:
        return task in self._rings

    def of(self, task: int, steps: Iterable[int]) -> list[int]:
        """Nanoseconds of a task that has run, in each of these steps; 0 where it had nothing to do and passed."""
        of_steps, nanoseconds = self._rings[task]
        return [nanoseconds[step % STEPS] if of_steps[step % STEPS] == step else 0 for step in steps]

    def medians(self, steps: Sequence[int]) -> dict[int, float]:
        """Seconds of each task that had something to do in any of these steps."""
        found = {}
        for task in self._rings:
            worked = [nanoseconds for nanoseconds in self.of(task, steps) if nanoseconds]
            if worked:
                found[task] = statistics.median(worked) / 1e9
        return found

    def slowest(self, task: int) -> int | None:
        """Nanoseconds, but for the one time that was longer than all others: a first call builds what later ones use.
        None where it has not run."""
        if task not in self._rings:
            return None
        of_steps, nanoseconds = self._rings[task]
        known = heapq.nlargest(2, (taken for step, taken in zip(of_steps, nanoseconds, strict=True) if step != NONE))
        return known[-1]

    def keeps(self, step: int) -> bool:
        """Whether no newer step has taken its place."""
        return step > self.newest - STEPS

    def _step_of(self, iteration: int) -> int:
        if not 0 <= iteration < self._itinerary.num_iterations:
            return NONE
        about = self._itinerary.at(iteration)
        if not about.training:
            return NONE
        self.newest = max(self.newest, about.step)
        return about.step
