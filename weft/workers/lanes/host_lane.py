"""A host lane: a lane of a CPU worker, whose tasks are over when their calls return."""

from __future__ import annotations

import time

from weft.plan.error_places import within
from weft.plan.kinds import MODE_INDEX
from weft.workers.lanes.lane import LaneLoop
from weft.workers.lanes.operation import Operation

_SNAPSHOT = MODE_INDEX["snapshot"]
_DATA = MODE_INDEX["stall_data"]  # which comes from a loader, that has no core of its own


class HostLane(LaneLoop):
    _may_owe = True
    _now: tuple[Operation, int, bool]  # the task that has begun, its iteration, and whether there is anything to run

    def _run_task(self, index: int, task: int, taken_ns: int) -> None:
        if self._begin_task(index, task, taken_ns):
            operation, iteration = self._operations[task], self._attempt.iteration(index)
            with within(lambda: operation.place_in(iteration)):
                operation.run(iteration)
        self._end_task()

    def _begin_task(self, index: int, task: int, taken_ns: int) -> bool:
        operation, account, board = self._operations[task], self._account, self._board
        iteration = self._attempt.iteration(index)
        if taken_ns > account.stamp:
            account.stall(taken_ns)
        runs = operation.runs(iteration)
        if runs:
            words = board.words
            for source, distance, stall in operation.waits_in(iteration):
                if words[1 + source] < index - distance:
                    if self._owes_report:  # who is waited for may be sent its task on that alone
                        self._report()
                    self._awaited = source
                    board.wait(source, index - distance + operation.rested(distance), spins=stall != _DATA)
                    self._awaited = None
                    account.row(stall, task, index, source, time.monotonic_ns())
            if operation.finish_copies is not None and (copied := operation.finish_copies()) is not None:
                account.row(_SNAPSHOT, copied, index, -1, time.monotonic_ns())
        self._now = operation, index, runs
        return runs

    def _end_task(self) -> None:
        (operation, index, runs), board = self._now, self._board
        if operation.wakes:
            board.post(operation.task, index)
        else:
            board.post_quietly(operation.task, index)
        if runs:
            self._account.row(operation.mode, operation.task, index, -1, time.monotonic_ns())
        if not self._inbox.empty():  # what the last report was answered with, or this one asks for it again
            try:
                self._queue.take(self._inbox)
            except BaseException:  # the lane ends, and the task is over
                self._queue.done += 1
                raise
        self._over(self._account.stamp)

    def _report(self) -> None:
        super()._report()
        self._account.stall(time.monotonic_ns())
