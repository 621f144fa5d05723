"""The handover: what comes out of it goes on as what went in would have; what is no handover is told apart."""

from __future__ import annotations

import asyncio
import os
import runpy
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from weft.machine.crew import make_crew
from weft.machine.oom_kills import OomKills
from weft.metrics.prometheus.exporter import Exporter
from weft.plan.kinds import MODE_INDEX
from weft.plan.plan import Plan
from weft.plan.rows import pack
from weft.scheduler.core.core import Core
from weft.scheduler.core.events import (
    CancelRequested,
    CheckpointDue,
    Command,
    Event,
    JobMeasured,
    JobPlanned,
    PauseRequested,
    ResultSaved,
    ResumeRequested,
    SnapshotDue,
    SnapshotSaved,
    TasksFinished,
    Ticked,
    WorkerJoined,
    WorkerLost,
    WorkerPrepared,
)
from weft.scheduler.core.job import Phase
from weft.scheduler.daemon import plans
from weft.scheduler.daemon.driver import Driver
from weft.scheduler.daemon.link import Brood, Child, HeldLink, Link
from weft.scheduler.daemon.pool import Pool
from weft.scheduler.daemon.replacing.estate import Estate
from weft.scheduler.daemon.replacing.handover import VARIABLE, Handover, Letter, packed, unpacked, write
from weft.scheduler.runs.run_writer import RunWriter
from weft.spec.settings import Settings
from weft.transport.wire.frames import Message, encode
from weft.version import __version__

_CORE = runpy.run_path(str(Path(__file__).parents[2] / "core" / "test_core.py"))
_HEARING = runpy.run_path(str(Path(__file__).parents[1] / "test_hearing.py"))
staged, spec, of = (_HEARING[name] for name in ("staged", "spec", "of"))
NOTHING = os.open(os.devnull, os.O_RDONLY)  # a descriptor that may become anybody's
SETTINGS = Settings(workers=2, gpus=0, metrics="")
BROOD = Brood(
    stamp="of files",
    authkey=b"key",
    server_pid=1,
    server=HeldLink(5, b"", b"", False),
    children=((Child("cpu-0", "worker", pid=2), HeldLink(6, b"half", b"unsent", False)),),
    directory_failures=1,
    oom_kills=OomKills(),
)


@pytest.fixture
def writer() -> Iterator[RunWriter]:
    made = RunWriter()
    yield made
    made._executor.shutdown()


# --- the core


class Handed(_CORE["Rehearsal"]):  # type: ignore[misc]
    """Whose core goes over to another daemon before each event."""

    def tell(self, event: Event) -> list[Command]:
        self.core = handed_over(self.core)
        commands: list[Command] = self.core.handle(event, self.now)
        return commands


def handed_over(core: Core) -> Core:
    writer = RunWriter()
    estate = Estate(crew=make_crew(SETTINGS, (), (0,), {}), core=core)
    return unpacked(packed(estate, BROOD, writer), writer)[0].core


PLANS: dict[str, dict[str, Any]] = {
    "a pipeline": {"stages": 2, "microbatches": 2},
    "replicas that steal": {"replicas": 2, "microbatches": 4, "share": "stealing"},
    "replicas that adapt": {"replicas": 2, "microbatches": 2, "share": "adaptive"},
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_core_that_is_handed_over_before_each_event_says_what_another_says(
    kind: str, plan_of: Callable[..., Plan]
) -> None:
    """Two jobs: one that waits, and one through every phase, with snapshots, a lost worker, a pause and its end."""
    plan = plan_of(steps=60, window=4, **PLANS[kind])
    handed = list(played(Handed(plan)))
    assert handed == list(played(_CORE["Rehearsal"](plan)))
    said = {type(command).__name__ for commands in handed for command in commands}
    assert said >= {"RecordSnapshot", "SaveSnapshot", "RecordIteration", "SaveResult", "DropArenas"}


def played(rehearsal: Any) -> Iterator[list[Command]]:
    tell = rehearsal.tell
    yield rehearsal.submit("a", stages=2)
    yield rehearsal.submit("b")
    yield tell(JobPlanned(job="a", attempt=1, plan=rehearsal.plan))
    for worker in rehearsal.workers("a"):
        yield tell(WorkerPrepared(job="a", attempt=1, worker=worker))
    about: dict[str, Any] = {"job": "a", "attempt": 1}
    for number in range(100):
        yield from some_finished(rehearsal, number)
        match number:
            case 5:
                yield tell(SnapshotDue(**about))
            case 12:
                yield tell(CheckpointDue(**about))
            case 90:
                yield tell(SnapshotSaved(job="a", path="somewhere"))
    yield tell(WorkerLost(worker="cpu-1", exit_code=-9))
    yield rehearsal.release("a")
    yield tell(WorkerJoined(worker="cpu-1"))
    for worker in tuple(rehearsal.core.jobs["a"].waiting_for):
        yield tell(WorkerPrepared(job="a", attempt=2, worker=worker))
    yield tell(PauseRequested(job="b"))
    yield tell(ResumeRequested(job="b"))
    yield rehearsal.finish("a")
    yield tell(ResultSaved(job="a", attempt=2))
    yield rehearsal.release("a")
    yield tell(Ticked())
    yield tell(CancelRequested(job="b"))


def some_finished(rehearsal: Any, number: int) -> Iterator[list[Command]]:
    """One or two tasks of each lane."""
    job = rehearsal.core.jobs["a"]
    for name in sorted(job.lanes):
        lane = rehearsal.core.jobs["a"].lanes[name]
        count = min(1 + number % 2, lane.sent - lane.finished)
        if count:
            yield rehearsal.tell(TasksFinished("a", 1, *name, count))
    for policy in range(len(job.policies)):
        if (measured := rehearsal.core.jobs["a"].policies[policy].take()) is not None:
            yield rehearsal.tell(JobMeasured(job="a", attempt=1, policy=policy, measured=measured))


# --- the driver


class Keeping(_HEARING["Answering"]):  # type: ignore[misc]
    """Whose processes are all there."""

    def has(self, name: str) -> bool:
        return True


async def driver_after(stage: Any) -> Driver:
    """Another daemon's, with the estate of the stage's; the stage's jobs are its from here on."""
    before: Driver = stage.driver
    await before.settle()
    assert before.is_settled
    estate, brood = unpacked(packed(before.estate, BROOD, before.writer), before.writer)
    assert brood.children == BROOD.children
    pool = Keeping()
    pool.holds = stage.pool.holds
    driver = Driver(estate, stage.ledger, Exporter(), cast(Pool, pool), before._spawn, before.writer)
    pool.driver = stage.driver = driver
    stage.pool = pool
    driver.go_on()
    return driver


async def test_a_running_job_has_its_figures_and_its_end_with_the_next_daemon(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.until(lambda: all(each.up for each in stage.driver.core.workers.values()), "workers")
        job = await stage.submit(spec(), until=Phase.RUNNING)
        row = pack([MODE_INDEX["stall_dispatch"], -1, 0, -1, 1_000, 2_000])
        said = of(job, "report") | {"records": row}
        worker = stage.driver.core.jobs[job].workers[0]
        stage.driver.hearing.said(worker, said)
        before = stage.driver.runs[job].attempt
        driver = await driver_after(stage)
        after = driver.runs[job].attempt
        assert after is not None
        assert after is not before
        assert after.books.account.lane_seconds() == before.books.account.lane_seconds()
        assert driver.core.jobs[job].plan == before.plan
        assert driver.runs[job].files._writer is driver.writer
        assert all(ours is theirs for ours, theirs in zip(after._policies, driver.core.jobs[job].policies, strict=True))
        driver.tick()
        metrics = driver._exporter.render().decode()
        assert f'weft_job_attempt{{job="{job}"}} 1.0' in metrics
        assert f'weft_worker_up{{worker="{worker}"}} 1.0' in metrics
        row = await stage.end(job)
        assert row.state == "cancelled"
        log = (tmp_path / "runs" / job / "job.log").read_text()
        assert log.count(" running") == 1


async def test_a_plan_that_was_being_made_is_made_by_the_next_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, may_end = plans.make_plan, threading.Event()

    def held(*arguments: Any, **named: Any) -> Any:
        may_end.wait()
        return make(*arguments, **named)

    async with staged(tmp_path) as stage:
        with monkeypatch.context() as patch:
            patch.setattr(plans, "make_plan", held)
            job = await stage.submit(spec(), until=Phase.PLANNING)
            await stage.until(lambda: stage.driver.runs[job].inspection, "the inspection")
        first = stage.driver
        await driver_after(stage)
        await stage.until(lambda: stage.phase(job) is Phase.RUNNING, "the job")
        may_end.set()
        assert first.core.jobs[job].phase is Phase.PLANNING
        await stage.end(job)


# --- links


async def over_amid_frames() -> tuple[list[Message], bytes, bytes]:
    """What is heard on a link, sent on it, and read at its other end, where it goes over amid a frame each way."""
    ours, theirs = socket.socketpair()
    said: list[Message] = []
    loop = asyncio.get_running_loop()

    async def linked(connection: socket.socket, held: HeldLink | None = None) -> Link:
        _, link = await loop.create_connection(
            lambda: Link(connection, said.append, lambda: None, pytest.fail, held), sock=connection
        )
        return link

    link = await linked(ours)
    frame = encode({"type": "output", "text": "x" * 5000})
    theirs.sendall(frame + frame[:100])
    while not said:  # noqa: ASYNC110  (a protocol tells nobody)
        await asyncio.sleep(0)
    sent = [{"number": number, "text": "y" * 10_000} for number in range(100)]
    for message in sent[:60]:
        link.send(message)
    await asyncio.sleep(0)
    for message in sent[60:]:
        link.send(message)
    link.hold()
    held = link.held()
    assert held is not None
    assert len(held.unsent) > 100_000, "the socket had taken all"
    copy = os.dup(held.descriptor)  # as in a process that becomes another program
    link.abort()
    theirs.sendall(frame[100:])
    again = await linked(socket.socket(fileno=copy), HeldLink(copy, held.unread, held.unsent, is_deaf=False))
    await asyncio.sleep(0)
    assert len(said) == 1
    again.resume()
    theirs.setblocking(False)
    wanted, read = b"".join(map(encode, sent)), b""
    while len(said) < 2 or len(read) < len(wanted):
        try:
            read += theirs.recv(1 << 20)
        except BlockingIOError:
            await asyncio.sleep(0)
    again.abort()
    theirs.close()
    return said, wanted, read


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_lost_on_a_link_and_nothing_said_twice(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        said, wanted, read = runner.run(over_amid_frames())
    assert said == [{"type": "output", "text": "x" * 5000}] * 2
    assert read == wanted


# --- what is no handover


def letter(**changes: Any) -> Letter:
    fields: dict[str, Any] = {"version": __version__, "successor": __version__, "owns_socket": True, "call": 3}
    fields |= {"settings": SETTINGS.model_dump(mode="json"), "http": [], "links": [], "server_pid": 1}
    fields |= {"listener": NOTHING, "lock": NOTHING, "caller": NOTHING}
    return Letter(**(fields | changes))


def test_a_daemon_that_was_left_nothing_begins_as_ever() -> None:
    assert Handover.inherited({}) is None


def test_what_is_left_is_found_once_with_the_settings_of_the_daemon_before(writer: RunWriter) -> None:
    estate = Estate.begin(make_crew(SETTINGS, (), (0,), {}))
    environment = {VARIABLE: str(write(letter(), packed(estate, BROOD, writer)))}
    handover = Handover.inherited(environment)
    assert handover is not None
    assert environment == {}
    assert handover.settings() == SETTINGS
    opened = handover.open(writer)
    assert opened is not None
    assert opened[0].crew == estate.crew
    assert opened[1].children == BROOD.children


@pytest.mark.parametrize(
    ("pickled", "changes", "problem"),
    [
        (b"no pickle", {}, "it cannot be unpickled"),
        (b"", {"successor": "9.9"}, f"Weft {__version__} has left it to Weft 9.9, and this is {__version__}"),
    ],
)
def test_what_cannot_be_read_is_told_and_the_letter_still_counts(
    pickled: bytes, changes: dict[str, Any], problem: str, writer: RunWriter, caplog: pytest.LogCaptureFixture
) -> None:
    handover = Handover.inherited({VARIABLE: str(write(letter(**changes), pickled))})
    assert handover is not None
    assert handover.open(writer) is None
    assert handover.problem.startswith(problem)
    assert problem in caplog.text
    assert handover.settings() == SETTINGS


def test_a_pickle_that_has_changed_is_not_read(writer: RunWriter) -> None:
    memory = write(letter(), b"a pickle")
    os.pwrite(memory, b"E", os.fstat(memory).st_size - 1)
    handover = Handover.inherited({VARIABLE: str(memory)})
    assert handover is not None
    assert handover.problem == "it has changed on the way"


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\0\0\0\4\xff\xff\xff\xff", encode({"version": "1"})])
def test_a_letter_that_cannot_be_read_leaves_a_daemon_that_begins_anew(
    data: bytes, monkeypatch: pytest.MonkeyPatch, writer: RunWriter
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(os, "closerange", lambda first, last: closed.append(first))
    memory = os.memfd_create("nothing")
    os.write(memory, data)
    handover = Handover.inherited({VARIABLE: str(memory)})
    assert handover is not None
    assert "the letter cannot be read" in handover.problem
    assert handover.settings() is None
    assert handover.runtime(SETTINGS) is None
    assert handover.open(writer) is None
    assert closed == [3], "the children of the daemon before would live"


def test_what_cannot_be_pickled_raises(writer: RunWriter) -> None:
    estate = Estate.begin(make_crew(SETTINGS, (), (0,), {}))
    estate.runs["a"] = cast(Any, lambda: None)
    with pytest.raises((AttributeError, TypeError, ValueError), match="pickle"):
        packed(estate, BROOD, writer)
