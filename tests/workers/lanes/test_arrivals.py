"""The next task of a lane whose passes begin as they are ready: which it is, and what is told of the wait for it."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest
import torch

from weft.plan.graph import Lane, Task
from weft.plan.kinds import MODE_INDEX, MODES, Kind
from weft.plan.rows import unpack
from weft.plan.schedules.dynamic import PassOrder
from weft.transport.memory.board import Aborted, Board, num_words
from weft.workers.compute.measured import Measured
from weft.workers.lanes.account import Account
from weft.workers.lanes.arrivals import Arrivals
from weft.workers.lanes.operation import Wait
from weft.workers.lanes.queue import Inbox, Interrupted, TaskQueue

FORWARDS = (0, 1)  # of two microbatches
WAITS = {1: (8, 0, MODE_INDEX["stall_activation"]), 2: (9, 0, MODE_INDEX["stall_gradient"])}  # of other lanes' tasks


class Stand:
    """A lane's queue, which was sent an iteration, and an account whose report is the last of `reports`."""

    def __init__(self) -> None:
        kinds = (Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD)
        program = [Task(id=n, kind=kind, lane=Lane(0, "compute"), microbatch=n % 2) for n, kind in enumerate(kinds)]
        self.board = Board(torch.full((num_words(10),), -1, dtype=torch.int32))
        self.inbox: Inbox = queue.SimpleQueue()
        self.inbox.put([(0, [0, 1, 2, 3])])
        self.reports: list[dict[str, bytes]] = []
        self.account = Account("compute", Measured(), self.reports.append, stamps=True)
        tasks = TaskQueue()
        tasks.take(self.inbox)
        self.account.begin()
        self.looks: list[Callable[[], None]] = []  # what happens, one after the other, as a task's input is looked at
        order = PassOrder(program, limit=2)
        self.arrivals = Arrivals(order, self.board, tasks, self.account, self._missing)

    def _missing(self, iteration: int, task: int) -> Wait | None:
        wait = WAITS.get(task)
        found = None if wait is None or self.board.words[1 + wait[0]] >= iteration else wait
        if found is not None and self.looks:
            self.looks.pop(0)()
        return found

    def take(self) -> int:
        return self.arrivals.take(self.inbox)[1]

    def stalls(self) -> list[tuple[str, int, int]]:
        self.account.report(0)
        rows = unpack(self.reports[-1]["records"])
        return [(MODES[mode], task, waited) for mode, task, _, waited, *_ in rows if waited >= 0]


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_a_backward_that_is_there_is_begun_while_the_forward_is_not(stand: Stand) -> None:
    assert stand.take() == 0
    stand.board.post(9, 0)
    assert stand.take() == 2
    assert stand.arrivals.at == (2, None)
    stand.looks = [lambda: stand.board.post(8, 0)]
    assert [stand.take(), stand.take()] == [1, 3]
    assert stand.stalls() == [("stall_activation", 1, 8)]


def test_whichever_of_two_comes_first_is_begun_and_told(stand: Stand) -> None:
    assert stand.take() == 0
    at = []
    stand.looks = [lambda: None, lambda: stand.board.post(9, 0), lambda: at.append(stand.arrivals.at)]
    assert stand.take() == 2
    assert at == [(1, 8)], "the one that it would rather begin"
    assert stand.stalls() == [("stall_gradient", 2, 9)]


def test_what_is_there_is_begun_in_the_order_that_is_preferred(stand: Stand) -> None:
    stand.board.post(8, 0)
    stand.board.post(9, 0)
    assert [stand.take() for _ in range(4)] == [0, 1, 2, 3]
    assert stand.stalls() == []


def test_an_abort_and_another_message_end_the_wait(stand: Stand) -> None:
    assert stand.take() == 0
    stand.looks = [lambda: stand.inbox.put(None), lambda: stand.board.post(7, 0)]
    with pytest.raises(Interrupted):
        stand.take()
    stand.board.abort()
    with pytest.raises(Aborted):
        stand.take()
