"""The lanes of one worker beside each other: how they meet, and how what one of them raises ends the others."""

from __future__ import annotations

import functools
import queue
import runpy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.plan.itinerary import Iteration, Itinerary
from weft.plan.kinds import MODE_INDEX
from weft.transport.memory.board import Board, num_words
from weft.workers.compute.measured import Measured
from weft.workers.devices.device import Accelerator, Device
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.lanes.lanes import run_lanes
from weft.workers.lanes.operation import Operation
from weft.workers.lanes.queue import Inbox

thread_device = runpy.run_path(str(Path(__file__).with_name("thread_device.py")))["thread_device"]

RUN_WHERE_THEY_ARE_LAUNCHED = ["host", "stand-in"]
SOON = 180.0  # for anything that is awaited
THREADS = 3  # of torch; another number than the main thread has here
LANES = {"compute": [{"id": 0}], "sync": [{"id": 1}]}
Run = Callable[[Iteration], None]


class Attempt:
    """Stands in for a worker's part of an attempt: a task in each of two lanes, the second waits for the first."""

    num_tasks = 2
    course = SimpleNamespace(begins=0, steals=False)

    def __init__(self, bodies: dict[int, Run], device: Device) -> None:
        self.device = device
        self.course = SimpleNamespace(begins=0, steals=False)
        self.milestones: dict[int, Callable[[int, int], None]] = {}
        self.goes_on: dict[str, Callable[[], None]] = {}
        self._to_abort: list[Board] = []
        words = torch.full((num_words(2),), -1, dtype=torch.int32)
        self.boards = {lane: Board(words, shares_core=True) for lane in LANES}
        self.board = self.boards["compute"]
        self.is_adjusted = self.reports_iterations = False
        self.measured = {lane: Measured() for lane in LANES}
        self._bodies = bodies
        self._itinerary = Itinerary(num_train=1, num_validation=0, batch_size=1, steps=10)

    def abort(self) -> None:
        for board in (self.board, *self._to_abort):
            board.abort()

    def abort_with(self, board: Board) -> None:
        self._to_abort.append(board)

    def iteration(self, index: int) -> Iteration:
        return self._itinerary.at(index)

    def operations(self, lane: str, program: list[dict[str, Any]]) -> dict[int, Operation]:
        return {
            task["id"]: Operation(
                task=task["id"],
                mode=MODE_INDEX["forward"],
                waits=((0, 0, MODE_INDEX["stall_gradient"]),) if task["id"] else (),
                wakes=True,
                passes=False,
                run=self._bodies[task["id"]],
            )
            for task in program
        }


class Stand:
    """`run_lanes` in a thread that stands for a worker's main one."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.inboxes: dict[str, Inbox] = {lane: queue.SimpleQueue() for lane in LANES}
        self.reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.told: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.raised: BaseException | None = None
        self.attempt: Attempt
        self._thread: threading.Thread | None = None

    def begin(self, compute: Run, sync: Run) -> None:
        self.attempt = Attempt({0: compute, 1: sync}, self.device)

        def run() -> None:
            try:
                run_lanes(
                    "compute",
                    LANES,
                    self.inboxes,
                    self.attempt,  # type: ignore[arg-type]  # all that lanes ask of one
                    self.reports.put,
                    self.guard,
                    threads=THREADS,
                )
            except BaseException as error:
                self.raised = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            self.told.put(error)

    def dispatch(self, iteration: int) -> None:
        self.inboxes["sync"].put([(iteration, [1])])
        self.inboxes["compute"].put([(iteration, [0])])

    def join(self) -> None:
        """All lanes have ended."""
        assert self._thread is not None
        self._thread.join(SOON)
        assert not self._thread.is_alive(), "a lane goes on"
        assert not any(thread.name in LANES for thread in threading.enumerate())

    def interrupt(self) -> None:
        for inbox in self.inboxes.values():
            inbox.put(None)
        self.join()


@pytest.fixture(params=["host", "stand-in", "streams that are late"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with thread_device() as make:
        yield {"host": HostDevice, "stand-in": StandIn, "streams that are late": make}[request.param]()


@pytest.fixture
def stand(device: Device) -> Iterator[Stand]:
    stand = Stand(device)
    yield stand
    stand.attempt.abort()
    stand.interrupt()


def nothing(iteration: Iteration) -> None:
    pass


def test_lanes_meet_at_the_board_and_report_each_for_itself(stand: Stand) -> None:
    ran: list[tuple[str, int]] = []
    threads: dict[str, str] = {}

    def run(lane: str, iteration: Iteration) -> None:
        ran.append((lane, iteration.index))
        threads[lane] = threading.current_thread().name

    stand.begin(functools.partial(run, "compute"), functools.partial(run, "sync"))
    main = stand._thread
    assert main is not None
    for index in range(3):
        stand.dispatch(index)
        lanes = {stand.reports.get(timeout=SOON)["lane"] for _ in range(2)}
        assert lanes == {"compute", "sync"}
    assert ran == [(lane, index) for index in range(3) for lane in ("compute", "sync")]
    if not isinstance(stand.device, Accelerator) or stand.device.finishes_at_once:
        assert threads == {"compute": main.name, "sync": "sync"}, "one in the caller's thread"
    stand.interrupt()
    assert stand.raised is None
    assert stand.told.empty()


@pytest.mark.parametrize("device", RUN_WHERE_THEY_ARE_LAUNCHED, indirect=True)
def test_each_lane_computes_with_the_threads_that_it_was_given(stand: Stand) -> None:
    """torch counts them for each thread of ours: a new one has as many as there are cores."""
    counted: list[int] = []

    def count(iteration: Iteration) -> None:
        counted.append(torch.get_num_threads())

    stand.begin(nothing, count)
    stand.dispatch(0)
    for _ in range(2):
        stand.reports.get(timeout=SOON)
    assert counted == [THREADS]


def test_what_a_side_lane_raises_is_told_and_the_main_lane_goes_on(stand: Stand) -> None:
    def fail(iteration: Iteration) -> None:
        raise ZeroDivisionError("theirs")

    stand.begin(nothing, fail)
    stand.dispatch(0)
    assert isinstance(stand.told.get(timeout=SOON), ZeroDivisionError)
    for index in (1, 2):
        stand.inboxes["compute"].put([(index, [0])])
    over = 0
    while over < 3:  # a report may be of several tasks
        over += stand.reports.get(timeout=SOON)["count"]
    assert over == 3
    assert stand.attempt.board.words[1 + 1] == -1, "a task that failed is not posted"
    stand.interrupt()
    assert stand.raised is None


@pytest.mark.parametrize("waits_for", ["an input", "work"])
def test_what_the_main_lane_raises_is_raised_once_the_others_have_ended(stand: Stand, waits_for: str) -> None:
    def fail(iteration: Iteration) -> None:
        raise SystemExit("theirs")

    stand.begin(fail, nothing)
    if waits_for == "an input":
        stand.inboxes["sync"].put([(0, [1])])
    stand.inboxes["compute"].put([(0, [0])])
    stand.join()
    assert isinstance(stand.raised, SystemExit)
    assert stand.told.empty()
    assert stand.attempt.board.aborted
