"""A host lane: a lane of a CPU worker, whose tasks are over when their calls return."""

from __future__ import annotations

import time

from weft.plan.error_places import within
from weft.workers.lanes.lane import LaneLoop


class HostLane(LaneLoop):
    def _run_task(self, index: int, task: int, taken_ns: int) -> None:
        operation, account, board = self._operations[task], self._account, self._board
        iteration = self._attempt.iteration(index)
        if taken_ns > account.stamp:
            account.stall(taken_ns)
        runs = operation.runs(iteration)
        if runs:
            words = board.words
            for source, distance, stall in operation.waits_in(iteration):
                if words[1 + source] < index - distance:
                    board.wait(source, index - distance)
                    account.row(stall, task, index, source, time.monotonic_ns())
            with within(lambda: operation.place_in(iteration)):
                operation.run(iteration)
        if operation.wakes:
            board.post(task, index)
        else:
            board.post_quietly(task, index)
        if runs:
            account.row(operation.mode, task, index, -1, time.monotonic_ns())
        self._over(account.stamp)

    def _report(self) -> None:
        super()._report()
        self._account.stall(time.monotonic_ns())
