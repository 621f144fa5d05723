"""A lane with made-up operations: what it runs when, what it waits for, what it stamps and when it reports."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import runpy
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.plan.itinerary import Iteration, Itinerary
from weft.plan.kinds import MODE_INDEX, MODES
from weft.plan.rows import Row, unpack
from weft.transport.memory.board import Board, num_words
from weft.workers.compute.measured import Measured
from weft.workers.devices.device import Accelerator, Act, Device, Event, Stream
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import HostEvent, StandIn
from weft.workers.lanes import account, lane
from weft.workers.lanes.host_lane import HostLane
from weft.workers.lanes.lane import LaneLoop
from weft.workers.lanes.launched import Launched
from weft.workers.lanes.operation import Operation
from weft.workers.lanes.queue import Inbox
from weft.workers.lanes.stream_lane import StreamLane

thread_device = runpy.run_path(str(Path(__file__).with_name("thread_device.py")))["thread_device"]

RUN_WHERE_THEY_ARE_LAUNCHED = ["host", "stand-in"]
SOON = 180.0  # for anything that is awaited
ELSEWHERE = 9  # a task of another lane


class Attempt:
    """Stands in for a worker's part of an attempt: a board, and ten training steps with a validation after each."""

    def __init__(self) -> None:
        self.board = Board(torch.full((num_words(10),), -1, dtype=torch.int32))
        self.milestones: dict[int, Callable[[int, int], None]] = {}
        self.goes_on: dict[str, Callable[[], None]] = {}
        self.boards = {"compute": self.board}
        self.measured = {"compute": Measured()}
        self.course = SimpleNamespace(begins=0, steals=False)
        self.is_adjusted = self.reports_iterations = False
        self._itinerary = Itinerary.of(num_train=1, num_validation=1, batch_size=1, epochs=10, steps=None)

    def iteration(self, index: int) -> Iteration:
        return self._itinerary.at(index)

    def abort(self) -> None:
        self.board.abort()


class Stand:
    """A lane on a thread of its own, its inbox, and what it has run and reported."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.attempt = Attempt()
        self.inbox: Inbox = queue.SimpleQueue()
        self.spins: list[bool] = []  # of the lane's waits, once they are told
        self.reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.ran: list[tuple[int, int]] = []
        self.error: BaseException | None = None
        self.progress: Callable[[], dict[str, Any]]  # of the lane, once it has begun
        self._thread: threading.Thread | None = None

    def begin(self, *operations: Operation) -> None:
        own = {op.task: op for op in operations}
        attempt: Any = self.attempt  # all that a lane asks of one
        made: LaneLoop = HostLane("compute", attempt, own, self.reports.put)
        if isinstance(self.device, Accelerator):
            launched = Launched(10, frozenset(own))
            made = StreamLane("compute", attempt, own, self.reports.put, device=self.device, launched=launched)
        self.progress = made.progress

        def run() -> None:
            try:
                made.run(self.inbox)
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def operation(
        self,
        task: int,
        *,
        mode: str = "forward",
        waits: tuple[tuple[int, int, str], ...] = (),
        passes: bool = False,
        wakes: bool = True,
        run: Callable[[Iteration], None] | None = None,
        update_needed: Callable[[Iteration], int] | None = None,
        rests: bool = False,
    ) -> Operation:
        def body(iteration: Iteration) -> None:
            self.ran.append((iteration.index, task))
            if run is not None:
                run(iteration)

        return Operation(
            task=task,
            mode=MODE_INDEX[mode],
            waits=tuple((source, back, MODE_INDEX[f"stall_{cause}"]) for source, back, cause in waits),
            wakes=wakes,
            passes=passes,
            run=body,
            update_needed=update_needed,
            rests=rests,
        )

    def tell_waits(self) -> queue.SimpleQueue[tuple[int, int]]:
        """(task, iteration) of each wait of the lane at the board, which has been found to be needed and now begins."""
        told: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        wait = self.attempt.board.wait

        def told_wait(task: int, iteration: int, *, spins: bool = True) -> None:
            self.spins.append(spins)
            told.put((task, iteration))
            wait(task, iteration, spins=spins)

        self.attempt.board.wait = told_wait  # type: ignore[method-assign]
        return told

    def report(self) -> dict[str, Any]:
        return self.reports.get(timeout=SOON)

    def count(self, total: int) -> list[dict[str, Any]]:
        """The next reports, up to `total` tasks in all."""
        reports = []
        while sum(report["count"] for report in reports) < total:
            reports.append(self.report())
        return reports

    def end(self) -> None:
        """The control thread has another message: the lane stops at once, or as soon as its task is done."""
        self.inbox.put(None)
        self.join()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(SOON)
            assert not self._thread.is_alive(), "the lane goes on"


@pytest.fixture(params=["host", "stand-in", "streams that are late"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with thread_device() as make:
        yield {"host": HostDevice, "stand-in": StandIn, "streams that are late": make}[request.param]()


@pytest.fixture
def every_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "MIN_STALL_NS", 0)


@contextlib.contextmanager
def stand_of(device: Device) -> Iterator[Stand]:
    stand = Stand(device)
    try:
        yield stand
    finally:
        stand.attempt.board.abort()
        stand.end()


@pytest.fixture
def stand(device: Device) -> Iterator[Stand]:
    with stand_of(device) as stand:
        yield stand


def rows_of(reports: list[dict[str, Any]]) -> list[Row]:
    return [row for report in reports for row in unpack(report["records"])]


def test_tasks_run_in_the_order_in_which_they_were_sent_and_are_posted(stand: Stand) -> None:
    stand.begin(stand.operation(1), stand.operation(2, wakes=False))
    stand.inbox.put([(0, [1, 2])])
    stand.inbox.put([(2, [2, 1]), (4, [1])])
    reports = stand.count(5)
    assert stand.ran == [(0, 1), (0, 2), (2, 2), (2, 1), (4, 1)]
    assert list(stand.attempt.board.words[1:4]) == [-1, 4, 2]
    assert all(report["type"] == "report" and report["lane"] == "compute" for report in reports)
    assert sum(report["count"] for report in reports) == 5


def test_a_task_waits_for_its_inputs_from_other_lanes(stand: Stand) -> None:
    reached, waits = threading.Event(), stand.tell_waits()
    stand.begin(
        stand.operation(1, run=lambda iteration: reached.set()),
        stand.operation(2, waits=((ELSEWHERE, 0, "activation"), (8, 1, "slot"))),
    )
    stand.inbox.put([(0, [1, 2])])
    assert reached.wait(SOON)
    assert waits.get(timeout=SOON) == (ELSEWHERE, 0)
    assert stand.ran == [(0, 1)], "task 8 has nothing to say for iteration -1, and task 9 has"
    stand.attempt.board.post(ELSEWHERE, 0)
    rows = rows_of(stand.count(2))
    assert stand.ran == [(0, 1), (0, 2)]
    stalls = [(MODES[mode], task, iteration, waited) for mode, task, iteration, waited, *_ in rows if waited >= 0]
    assert stalls == [("stall_activation", 2, 0, ELSEWHERE)]


@pytest.mark.parametrize("device", ["host"], indirect=True)
def test_a_loader_that_has_to_wait_sleeps_until_it_has_several_batches_to_load(stand: Stand) -> None:
    """With eight slots it sleeps once all are full, and wakes when four can be filled; others are being read then."""
    waits, board = stand.tell_waits(), stand.attempt.board
    stand.begin(stand.operation(1, mode="load", waits=((ELSEWHERE, 8, "slot"),), rests=True))
    stand.inbox.put([(iteration, [1]) for iteration in range(12)])
    assert waits.get(timeout=SOON) == (ELSEWHERE, 3)
    assert stand.ran == [(iteration, 1) for iteration in range(8)]
    assert stand.progress()["waits_for"] == ELSEWHERE
    board.post(ELSEWHERE, 2)  # one that sleeps for the first free slot would go on
    assert stand.progress()["waits_for"] == ELSEWHERE
    board.post(ELSEWHERE, 3)
    stand.count(12)
    assert [number for number, _ in stand.ran] == list(range(12))
    assert waits.empty()


@pytest.mark.parametrize("device", ["host"], indirect=True)
@pytest.mark.parametrize(("cause", "spins"), [("data", False), ("activation", True), ("update", True)])
def test_a_lane_leaves_a_loader_the_core_that_it_needs(stand: Stand, cause: str, spins: bool) -> None:
    waits = stand.tell_waits()
    stand.begin(stand.operation(1, waits=((ELSEWHERE, 0, cause),)))
    stand.inbox.put([(0, [1])])
    assert waits.get(timeout=SOON) == (ELSEWHERE, 0)
    stand.attempt.board.post(ELSEWHERE, 0)
    stand.count(1)
    assert stand.spins == [spins]


@pytest.mark.parametrize(("distance", "beyond"), [(1, 0), (2, 0), (3, 0), (4, 1), (8, 3), (9, 3)])
def test_a_resting_wait_leaves_something_to_read(stand: Stand, distance: int, beyond: int) -> None:
    assert stand.operation(1, rests=True).rested(distance) == beyond
    assert stand.operation(1).rested(distance) == 0


@pytest.mark.parametrize("device", RUN_WHERE_THEY_ARE_LAUNCHED, indirect=True)
@pytest.mark.usefixtures("every_stall")
def test_a_task_may_go_on_as_the_next_one_which_waits_for_inputs_of_its_own(stand: Stand) -> None:
    """The first is posted before the wait, each has its own row, and what is left of the call is the second's time."""
    seen: list[list[int]] = []

    def run(iteration: Iteration) -> None:
        threading.Timer(0.01, lambda: stand.attempt.board.post(ELSEWHERE, iteration.index)).start()
        stand.attempt.goes_on["compute"]()
        seen.append([stand.attempt.board.words[1 + task] for task in (1, 2, ELSEWHERE)])

    stand.begin(
        stand.operation(1, run=run),
        stand.operation(2, waits=((ELSEWHERE, 0, "update"),)),
        stand.operation(3, mode="backward"),
    )
    stand.inbox.put([(0, [1])])  # the others come while the lane is inside of the first
    stand.inbox.put([(0, [2, 3]), (2, [1, 2, 3])])
    rows = rows_of(stand.count(6))
    assert stand.ran == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert seen == [[0, -1, 0], [2, 0, 2]]
    told = [(MODES[mode], task, waited) for mode, task, _, waited, *_ in rows if MODES[mode] != "stall_dispatch"]
    assert told == [("forward", 1, -1), ("stall_update", 2, ELSEWHERE), ("forward", 2, -1), ("backward", 3, -1)] * 2
    assert all(before[5] == after[4] for before, after in pairwise(rows))


@pytest.mark.parametrize("device", RUN_WHERE_THEY_ARE_LAUNCHED, indirect=True)
def test_an_abort_ends_a_lane_that_waits_inside_of_a_task_whatever_the_users_code_catches(stand: Stand) -> None:
    waits = threading.Event()

    def run(iteration: Iteration) -> None:
        waits.set()
        with contextlib.suppress(Exception):
            stand.attempt.goes_on["compute"]()
        stand.ran.append((iteration.index, -1))

    stand.begin(stand.operation(1, run=run), stand.operation(2, waits=((ELSEWHERE, 0, "update"),)))
    stand.inbox.put([(0, [1, 2])])
    assert waits.wait(SOON)
    stand.attempt.board.abort()
    stand.join()
    assert stand.error is None
    assert stand.ran == [(0, 1)]


@pytest.mark.parametrize("device", RUN_WHERE_THEY_ARE_LAUNCHED, indirect=True)
def test_an_input_that_is_there_is_no_stall(stand: Stand) -> None:
    stand.attempt.board.post(ELSEWHERE, 3)
    stand.begin(stand.operation(1, waits=((ELSEWHERE, 0, "data"), (8, 3, "slot"))))
    stand.inbox.put([(2, [1])])
    modes = [MODES[row[0]] for row in rows_of(stand.count(1))]
    assert modes == ["forward"]


def test_a_task_may_wait_for_an_update_that_is_no_fixed_distance_away(stand: Stand) -> None:
    """A stale replica's UP, whose version depends on warm-up and on the validations in between.

    Beside busy loops the update was there before the lane had looked, once, and no stall: it is posted to who waits.
    """
    reached, waits = threading.Event(), stand.tell_waits()
    stand.attempt.board.post(8, 4)
    stand.begin(
        stand.operation(1, run=lambda iteration: reached.set()),
        stand.operation(2, waits=((ELSEWHERE, 2, "update"), (8, 0, "slot")), update_needed=lambda iteration: 3),
    )
    stand.attempt.board.post(ELSEWHERE, 2)
    stand.inbox.put([(4, [1, 2])])
    assert reached.wait(SOON)
    assert waits.get(timeout=SOON) == (ELSEWHERE, 3)
    assert stand.ran == [(4, 1)], "iteration 4 less the distance is there, and iteration 3 is asked for"
    stand.attempt.board.post(ELSEWHERE, 3)
    rows = rows_of(stand.count(2))
    assert stand.ran == [(4, 1), (4, 2)]
    assert [MODES[mode] for mode, _, _, waited, *_ in rows if waited == ELSEWHERE] == ["stall_update"]


@pytest.mark.usefixtures("every_stall")
def test_stamps_follow_one_another_without_a_gap_or_an_overlap(stand: Stand) -> None:
    stand.attempt.board.post(ELSEWHERE, 100)
    stand.begin(stand.operation(1, waits=((ELSEWHERE, 0, "data"),)), stand.operation(2, mode="update"))
    reports = []
    for iteration in range(0, 8, 2):
        stand.inbox.put([(iteration, [1, 2, 1])])
        reports += stand.count(3)
    rows = rows_of(reports)
    assert all(start <= end for *_, start, end in rows)
    assert all(before[5] == after[4] for before, after in pairwise(rows)), "one row ends, the next one starts"
    told = [(MODES[mode], task) for mode, task, *_ in rows if MODES[mode] != "stall_dispatch"]
    assert told == [("forward", 1), ("update", 2), ("forward", 1)] * 4


@pytest.mark.parametrize("device", RUN_WHERE_THEY_ARE_LAUNCHED, indirect=True)
@pytest.mark.usefixtures("every_stall")
def test_the_wait_for_the_first_work_is_not_the_jobs(stand: Stand) -> None:
    stand.begin(stand.operation(1))
    stand.inbox.put([(0, [1])])
    assert [MODES[row[0]] for row in rows_of(stand.count(1))] == ["forward"]
    stand.inbox.put([(2, [1])])
    assert list(dict.fromkeys(MODES[row[0]] for row in rows_of(stand.count(1)))) == ["stall_dispatch", "forward"]


def test_a_task_that_passes_does_and_waits_for_nothing_in_validation(stand: Stand) -> None:
    stand.begin(stand.operation(1), stand.operation(2, passes=True, waits=((ELSEWHERE, 0, "gradient"),)))
    stand.inbox.put([(1, [1, 2])])
    rows = rows_of(stand.count(2))
    assert stand.ran == [(1, 1)]
    assert stand.attempt.board.words[1 + 2] == 1, "it is posted like any other"
    assert [task for _, task, *_ in rows if task >= 0] == [1]


@pytest.mark.parametrize(("steals", "counts"), [(False, [4, 2]), (True, [6, 2])])
def test_a_lane_reports_at_half_of_what_it_was_sent_or_late_where_replicas_steal_and_when_it_runs_dry(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, steals: bool, counts: list[int]
) -> None:
    """Before its queue is empty, so that the daemon's next tasks are there in time; and no more often."""
    stand.attempt.course.steals = steals
    monkeypatch.setattr(lane, "REPORT_SECONDS", 3600.0)
    monkeypatch.setattr(account, "LEAST_REPORT_NS", 0)
    stand.begin(stand.operation(1))
    stand.inbox.put([(0, [1] * 8)])
    assert [report["count"] for report in stand.count(8)][:2] == counts
    assert len(stand.ran) == 8


def test_reports_that_would_come_one_behind_the_other_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred tasks that took no time there were seven, each of half of what was left."""
    monkeypatch.setattr(lane, "REPORT_SECONDS", 3600.0)
    monkeypatch.setattr(account, "LEAST_REPORT_NS", 3600 * 10**9)
    with stand_of(HostDevice()) as stand:
        stand.begin(stand.operation(1))
        stand.inbox.put([(0, [1] * 100)])
        assert [report["count"] for report in stand.count(100)] == [50, 50]


@pytest.mark.parametrize("device", RUN_WHERE_THEY_ARE_LAUNCHED, indirect=True)
@pytest.mark.parametrize("how", ["raises", "is aborted", "is told to end"])
def test_however_a_lane_ends_it_reports_what_was_over(stand: Stand, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(lane, "REPORT_SECONDS", 3600.0)
    waits, reached = stand.tell_waits(), threading.Event()
    ends = threading.Event()

    def run(iteration: Iteration) -> None:
        reached.set()
        if how == "raises":
            raise KeyError("lost")
        assert ends.wait(SOON)

    awaited = ((ELSEWHERE, 0, "gradient"),) if how == "is aborted" else ()
    stand.begin(stand.operation(1), stand.operation(2, waits=awaited, run=run))
    stand.inbox.put([(0, [1] * 3 + [2] + [1] * 16)])
    if how == "is aborted":
        assert waits.get(timeout=SOON) == (ELSEWHERE, 0)
        stand.attempt.board.abort()
    else:
        assert reached.wait(SOON)
        stand.inbox.put(None)
        ends.set()
    stand.join()
    assert sum(report["count"] for report in stand.count(1)) == (4 if how == "is told to end" else 3)
    assert stand.reports.empty()


def test_a_report_that_is_owed_comes_before_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon may send the task that is waited for on that alone."""
    monkeypatch.setattr(lane, "REPORT_SECONDS", 3600.0)
    monkeypatch.setattr(account, "LEAST_REPORT_NS", 3600 * 10**9)
    with stand_of(HostDevice()) as stand:
        stand.begin(stand.operation(1), stand.operation(2, waits=((ELSEWHERE, 0, "gradient"),)))
        stand.inbox.put([(0, [1] * 9 + [2] + [1] * 2)])
        assert [report["count"] for report in stand.count(9)] == [6, 3]
        stand.attempt.board.post(ELSEWHERE, 0)
        assert [report["count"] for report in stand.count(3)] == [3]


def test_what_a_report_was_answered_with_is_taken_before_another_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that was sent little at a time asked for it twice."""
    monkeypatch.setattr(lane, "REPORT_SECONDS", 3600.0)
    monkeypatch.setattr(account, "LEAST_REPORT_NS", 0)
    with stand_of(HostDevice()) as stand:

        def answer(iteration: Iteration) -> None:
            if iteration.index == 1:
                stand.inbox.put([(2, [1] * 8)])

        stand.begin(stand.operation(1, run=answer))
        stand.inbox.put([(0, [1] * 2), (1, [1]), (2, [1])])
        assert [report["count"] for report in stand.count(12)][:2] == [2, 5]


def test_where_each_iteration_is_copied_its_end_is_reported_at_once(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next snapshot but one waits for that, and who is lost goes on from there."""
    monkeypatch.setattr(lane, "REPORT_SECONDS", 3600.0)
    stand.attempt.reports_iterations = True
    stand.begin(stand.operation(1), stand.operation(2), stand.operation(3))
    stand.inbox.put([(iteration, [1, 2, 3]) for iteration in range(8)])
    assert [report["count"] for report in stand.count(24)][:4] == [3] * 4


def test_a_lane_that_is_sent_one_task_reports_each(stand: Stand) -> None:
    stand.begin(stand.operation(1))
    for iteration in range(0, 6, 2):
        stand.inbox.put([(iteration, [1])])
        assert stand.report()["count"] == 1


def test_a_long_queue_is_reported_now_and_then(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "REPORT_SECONDS", 1e-9)
    stand.begin(stand.operation(1))
    stand.inbox.put([(0, [1] * 20)])
    assert [stand.report()["count"] for _ in range(5)] == [1] * 5


def test_all_lanes_report_at_the_same_moment() -> None:
    """So that the daemon wakes once for all of them."""
    made = [account.Account("compute", Measured(), lambda report: None) for _ in range(2)]
    while True:
        for each in made:
            each.begin()
        first, second = made
        if second.stamp < first.due_ns:  # else the moment was between the two
            break
    assert first.due_ns == second.due_ns
    assert 0 < first.due_ns - first.stamp <= account.REPORT_SECONDS * 1e9


def test_values_travel_with_the_report_after_their_iteration(stand: Stand) -> None:
    def measure(iteration: Iteration) -> None:
        fragment = stand.attempt.measured["compute"].of(iteration.index)
        fragment.means["loss"] = 0.5 + iteration.index
        fragment.complete = iteration.index == 4

    stand.begin(stand.operation(1, run=measure))
    for iteration, told in ((2, []), (4, [{"iteration": 4, "means": {"loss": 4.5}, "facts": {}}])):
        stand.inbox.put([(iteration, [1])])
        assert stand.report()["values"] == told


def test_an_abort_ends_a_lane_that_waits_for_an_input(stand: Stand) -> None:
    reached = threading.Event()
    stand.begin(
        stand.operation(1, run=lambda iteration: reached.set()),
        stand.operation(2, waits=((ELSEWHERE, 0, "activation"),)),
    )
    stand.inbox.put([(0, [1, 2])])
    assert reached.wait(SOON)
    stand.attempt.board.abort()
    stand.join()
    assert stand.error is None
    assert stand.ran == [(0, 1)]


def test_another_message_ends_a_lane_that_waits_for_work(stand: Stand) -> None:
    stand.begin(stand.operation(1))
    stand.inbox.put([(0, [1])])
    stand.count(1)
    stand.end()
    assert stand.error is None


def test_another_message_that_is_there_before_any_work_ends_the_lane(stand: Stand) -> None:
    stand.begin(stand.operation(1))
    stand.end()
    assert (stand.error, stand.ran) == (None, [])


def test_what_a_task_raises_comes_out_of_the_lane_and_the_task_is_not_posted(stand: Stand) -> None:
    def fail(iteration: Iteration) -> None:
        raise ZeroDivisionError("theirs")

    stand.begin(stand.operation(1, run=fail))
    stand.inbox.put([(0, [1])])
    stand.join()
    assert isinstance(stand.error, ZeroDivisionError)
    assert stand.attempt.board.words[1 + 1] == -1


class Watched(StandIn):
    """Launches as a GPU does: the host's part at once, in the launcher's thread. story: what that thread does."""

    finishes_at_once = False

    def __init__(self) -> None:
        super().__init__()
        self.story: list[str] = []
        self.launcher = 0

    def stream(self, lane: str) -> Stream:
        return WatchedStream(self)


class WatchedStream:
    def __init__(self, device: Watched) -> None:
        self._device = device

    def launch(self, work: Act) -> None:
        self._device.launcher = threading.get_ident()
        work()

    def wait_for(self, event: Event) -> None:
        pass

    def record(self) -> Event:
        return WatchedEvent(self._device)


class WatchedEvent(HostEvent):
    def __init__(self, device: Watched) -> None:
        super().__init__()
        self._device = device

    def wait(self) -> None:
        if threading.get_ident() == self._device.launcher:
            self._device.story.append("waits")


def test_what_a_lane_itself_tells_the_host_is_over_before_its_next_task_reads_it() -> None:
    """A clipped update read the norm while the kernel that sums the squares, launched by the same lane, was on its way:
    lanes wait for other lanes alone."""
    watched = Watched()
    stand = Stand(watched)
    tasks = [
        dataclasses.replace(
            stand.operation(task, run=lambda iteration, name=name: watched.story.append(name)),
            is_read_on_host=name == "sync",
            reads_on_host=name == "update",
        )
        for task, name in enumerate(("sync", "forward", "update"), start=1)
    ]
    stand.begin(*tasks)
    stand.inbox.put([(0, [1, 2, 3])])
    stand.count(3)
    stand.end()
    assert watched.story == ["sync", "forward", "waits", "update"]


@pytest.mark.parametrize("device", ["streams that are late"], indirect=True)
def test_what_the_host_takes_before_it_launches_anything_is_no_time_of_the_stream(
    stand: Stand, every_stall: None
) -> None:
    """The stream is idle: its event behind the wait happens at once, and the copy it waits for comes much later."""
    launched: list[int] = []

    def run(iteration: Iteration) -> None:
        time.sleep(0.02)  # what the host takes: the very time that is told
        launched.append(time.monotonic_ns())
        stand.device.copy(torch.zeros(1), torch.ones(1))

    stand.begin(stand.operation(0, run=run))
    stand.inbox.put([(0, [0])])
    rows = [row for report in stand.count(1) for row in unpack(report["records"])]
    assert [MODES[row[0]] for row in rows][-2:] == ["stall_dispatch", "forward"]
    late, task = rows[-2:]
    assert late[5] == task[4] >= launched[0]
