"""Dynamic: which pass a lane begins next, by what is there as it runs. Pure.

A stage has its forwards in the order of the microbatches, and its backwards too: gradients are summed as in the plain
loop. What is free is how the two rows interleave. A forward may begin while fewer microbatches than the limit are in
flight, and then goes before a backward: a later stage waits for it. A stage whose backwards went first would send back
all that it has whenever its own are the long ones, and nothing would be on its way meanwhile.

    sent        F2 B0 F3 B1 …        in flight 2 of 3        may begin   F2, or else B0: whichever is there
                   B0 F3 B1 …        in flight 3 of 3        may begin   B0

Nobody but the lane has to know: others wait for tasks, not for places in an order. It cannot deadlock. Of the first
microbatch that any stage has not ended, the first pass that is left has all that it needs: those before it are through,
so they take no slot and are not in flight. Where a lane was sent less than an iteration, that is a prefix of an order
that could run as it stands, and the first pass of that order that nobody has begun has been sent, and may begin.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.plan.graph import Task
from weft.plan.kinds import Kind
from weft.plan.schedules.named import last_stage
from weft.plan.schedules.schedule import Schedule

_STEPS = {Kind.FORWARD: 1, Kind.BACKWARD: -1}  # what each does to the number in flight; the ones to prefer first


def of_equal_passes(num_stages: int, num_microbatches: int) -> Schedule:
    """What comes out where all passes take as long. Tasks are sent in this order, and slots and limits are its."""
    return last_stage(num_stages, num_microbatches)


class PassOrder:
    """Of one lane."""

    def __init__(self, program: Iterable[Task], limit: int) -> None:
        """program: its tasks, of an iteration. limit: of microbatches in flight."""
        self._steps = {task.id: _STEPS[task.kind] for task in program if task.kind in _STEPS}
        self._limit = limit
        self._in_flight = 0

    def places(self, sent: Iterable[tuple[int, ...]]) -> list[int]:
        """Where those stand that may be begun if they are ready, the ones to prefer first; at least one. sent:
        (iteration, task, ...) of what was sent and not begun."""
        found: dict[int, int] = {}
        iteration = None
        for place, (of, task, *_) in enumerate(sent):
            step = self._steps.get(task)
            if step is None or len(found) == len(_STEPS) or iteration not in (None, of):
                break
            iteration = of
            found.setdefault(step, place)
        if self._in_flight == 0:
            found.pop(_STEPS[Kind.BACKWARD], None)
        if self._in_flight >= self._limit:
            found.pop(_STEPS[Kind.FORWARD], None)
        return [found[step] for step in _STEPS.values() if step in found] or [0]

    def begin(self, task: int) -> None:
        self._in_flight += self._steps.get(task, 0)
