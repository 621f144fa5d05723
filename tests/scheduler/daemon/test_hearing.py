"""What workers say to a driver: every field of every message with values that no worker sends, rows that cannot be.

A driver with the real core, ledger, run directories and tasks; in the pool's place stands `Answering`, whose workers do
what they are told at once. Beside the job that is spoken for, another one runs, which none of it may reach.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from weft.machine.crew import make_crew
from weft.metrics.prometheus.exporter import Exporter
from weft.plan.kinds import MODE_INDEX
from weft.plan.rows import pack
from weft.scheduler.core.events import CancelRequested, PlanJob, Prepare
from weft.scheduler.core.job import Phase
from weft.scheduler.daemon import plans
from weft.scheduler.daemon.driver import Driver
from weft.scheduler.daemon.orders import order_of
from weft.scheduler.daemon.pool import Pool
from weft.scheduler.daemon.replacing.estate import Estate
from weft.scheduler.ledger.ledger import AsyncLedger, JobRow, Ledger
from weft.scheduler.runs.run_directory import CODE, read_code
from weft.scheduler.runs.run_writer import RunWriter
from weft.spec.job_spec import JobSpec
from weft.spec.settings import Settings
from weft.transport.wire.frames import Message

SECONDS = 180.0
POLL_SECONDS = 0.001
NUM_TRIED = 100  # of a message's mutations, in `make test`
JOB = "<its job>"

UNIT = {
    "name": "0.",
    "kind": "Linear",
    "parameter_bytes": 100,
    "buffer_bytes": 0,
    "forward_seconds": 1e-3,
    "backward_seconds": 2e-3,
    "tied_to": [],
    "in_place": False,
    "carries_state": False,
    "small_forward_seconds": 0.0,
    "small_backward_seconds": 0.0,
    "input_part": 0.5,
    "weight_part": 0.75,
}
VALUE = {
    "name": "0",
    "maker": 0,
    "readers": [1],
    "dtype": "float32",
    "itemsize": 4,
    "shapes": [[4, [4, 8]]],
    "differentiable": True,
}
PARAMETER = {
    "units": [0],
    "num_elements": 25,
    "dtype": "float32",
    "itemsize": 4,
    "trained": True,
    "number": 0,
    "digest": None,
    "group": 0,
    "state": [["exp_avg", "elements", "float32", 4]],
}
INSPECTION = {
    "units": [UNIT],
    "values": [VALUE],
    "cut_problems": [[2, "unit 1 (Pair) passes on a tuple"]],
    "input": {"dtype": "float32", "itemsize": 4, "shapes": [[4, [4, 3]]]},
    "target": {"dtype": "int64", "itemsize": 8, "shapes": [[4, [4]]]},
    "num_train": 8,
    "num_validation": 4,
    "load_seconds": 1e-4,
    "update_seconds": 1e-3,
    "device_update_seconds": None,
    "metrics": ["accuracy"],
    "parameters": [PARAMETER],
    "elementwise": True,
    "weighted": False,
    "streams": [],
    "data_bytes": None,
    "batch_modules": [],
    "unsaved": None,
    "on_epoch": False,
    "scheduler_metric": None,
    "copy_bytes_per_second": 5e9,
    "small_size": 0,
}
JOINED = {"type": "joined", "link_bytes_per_second": None, "device_bytes": None, "probe_seconds": None}
ROW = [MODE_INDEX["stall_dispatch"], -1, 0, -1, 1_000, 2_000]
VALUES = [{"iteration": 0, "means": {"loss": 1.0}, "facts": {"lr": 0.1}}]
PROGRESS = {"lane": "compute", "done": 0, "taken": 1, "seconds": 0.5, "waits_for": 0}
SAID: dict[str, tuple[Phase, Message]] = {  # the phase of the job in which its worker says it
    "inspected": (Phase.PLANNING, {"inspection": INSPECTION, "code": {"/line.py": 64 * "0"}}),
    "prepared": (Phase.PREPARING, {}),
    "report": (Phase.RUNNING, {"lane": "compute", "count": 0, "records": pack(ROW), "values": VALUES}),
    "progress": (Phase.RUNNING, {"lanes": [PROGRESS]}),
    "saved": (Phase.RUNNING, {}),
    "released": (Phase.RELEASING, {"clean": True, "peak_bytes": 1, "device_peak_bytes": None}),
    "fault": (Phase.RUNNING, {"reason": "user-error", "message": "no", "exit_code": 1, "exception": "ValueError"}),
    "directory-missed": (Phase.PREPARING, {"message": "gone"}),
    "epoch": (Phase.RUNNING, {"stop": True, "values": {"f1": 0.5, "auc": None}, "changes": b""}),
    "uncopied": (Phase.RUNNING, {"iteration": 0}),
    "copying": (Phase.RUNNING, {"iteration": 0}),
    "copied": (Phase.RUNNING, {"iteration": 0, "seconds": 0.1}),
    "output": (Phase.RUNNING, {"text": "hello\n"}),
    "profiled": (Phase.RUNNING, {"text": "done"}),
    "joined": (Phase.RUNNING, {}),
}
NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 255, 1 << 31, 1 << 53, (1 << 53) + 1, 1 << 63, (1 << 64) - 1, -(1 << 63)),
    *(0.5, -0.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
    *("", "x" * 70_000, "\0\n", "../..", "line-2", b"", b"\0" * 7, b"\xff" * 48),
    *([], {}, [None], [[]], [1, 2, 3], [["a", "b"]], {"": None}, {"loss": "x"}, {"type": "fault"}),
)


class Answering:
    """holds: the phase of a job at which its workers answer no more."""

    def __init__(self) -> None:
        self._dying: set[str] = set()
        self.holds: dict[str, Phase] = {}
        self.driver: Driver

    async def start_worker(self, worker: str, job: str) -> None:
        self.driver.hearing.said(worker, dict(JOINED))

    def drop(self, blocks: str) -> None:
        """It has none."""

    async def start_saver(self, job: str, config: Any) -> None:
        raise AssertionError("no job of these tests has a snapshot")

    def send(self, worker: str, message: Message) -> None:
        asyncio.get_running_loop().call_soon(self._answer, worker, message)

    def _answer(self, worker: str, message: Message) -> None:
        match message.get("type"):
            case "inspect" if self.holds.get(message["job"]) is not Phase.PLANNING:
                self._say(worker, message, "inspected")
            case "prepare" if self.holds.get(message["job"]) is not Phase.PREPARING:
                self._say(worker, message, "prepared")
            case "release" if self.holds.get(message["job"]) is not Phase.RELEASING:
                self._say(worker, message, "released")

    def _say(self, worker: str, asked: Message, kind: str) -> None:
        said = {"type": kind, "job": asked["job"], "attempt": asked["attempt"], **SAID[kind][1]}
        self.driver.hearing.said(worker, said)

    def kill(self, worker: str, cause: str) -> None:
        if worker not in self._dying:
            self._dying.add(worker)
            asyncio.get_running_loop().call_soon(self._lose, worker)

    def _lose(self, worker: str) -> None:
        self._dying.discard(worker)
        self.driver.core.workers[worker].failures = 0  # the next start need not wait
        self.driver.hearing.lost(worker, -9)

    def look(self) -> None:
        pass


class Stage:
    """The driver, its pool and its ledger; jobs of it are one after another."""

    def __init__(self, driver: Driver, pool: Answering, ledger: AsyncLedger) -> None:
        self.driver = driver
        self.pool = pool
        self.ledger = ledger

    async def submit(self, spec: JobSpec, *, holds: Phase | None = None, until: Phase) -> str:
        """A job that has come so far."""
        submission = await self.ledger.run(Ledger.add, spec.to_wire(), uid=0, priority=0, submitted_at=time.time())
        job = submission.row.job
        if holds is not None:
            self.pool.holds[job] = holds
        self.driver.adopt(submission.row, attempt=1)
        await self.until(lambda: self.phase(job) is until, f"{job} {until}")
        return job

    def phase(self, job: str) -> Phase | None:
        found = self.driver.core.jobs.get(job)
        return found.phase if found else None

    async def submit_for(self, kind: str) -> str:
        """A job whose worker is to say this next."""
        await self.until(lambda: all(each.up for each in self.driver.core.workers.values()), "every worker up")
        if kind != "released":
            return await self.submit(spec(), holds=SAID[kind][0], until=SAID[kind][0])
        job = await self.submit(spec(), holds=Phase.RELEASING, until=Phase.RUNNING)
        self.driver.hearing.said(self.driver.core.jobs[job].workers[0], of(job, "fault"))
        return job

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {what}"
            await asyncio.sleep(POLL_SECONDS)

    async def end(self, job: str) -> JobRow:
        """Whatever has become of it: it ends, and its end is in the ledger."""
        held = self.pool.holds.pop(job, None)
        self.driver.feed(CancelRequested(job=job))
        found = self.driver.core.jobs.get(job)
        if found is not None and held is Phase.RELEASING:
            for worker in sorted(found.waiting_for):
                self.pool.kill(worker, "it holds")
        await self.until(lambda: job not in self.driver.runs, f"the end of {job}")
        row = await self.ledger.run(Ledger.job, job)
        assert row is not None
        assert row.state.is_terminal
        return row


@asynccontextmanager
async def staged(home: Path) -> AsyncIterator[Stage]:
    """Errors: those of the driver's tasks, which would end the daemon."""
    settings = Settings(runtime_dir=home, state_dir=home, workers=2, gpus=0, metrics="")
    ledger = await AsyncLedger.open(home / "ledger.sqlite", home / "runs")
    writer, pool = RunWriter(), Answering()
    try:
        async with asyncio.TaskGroup() as group:
            pool.driver = Driver(
                Estate.begin(make_crew(settings, (), (0,), {})),
                ledger,
                Exporter(),
                cast(Pool, pool),
                lambda work, name: group.create_task(work, name=name),
                writer,
            )
            pool.driver.start()
            yield Stage(pool.driver, pool, ledger)
    finally:
        await writer.close()
        await ledger.close()


def spec(**strategy: Any) -> JobSpec:
    job = {"entry": "line.py:workload", "batch_size": 4, "steps": 1000}
    return JobSpec.parse({"job": job, "strategy": strategy, "directory": "/"})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every field and item, at any depth."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


def mutations(message: Message) -> Iterator[Message]:
    for path in places(message):
        for nasty in NASTY:
            yield changed(message, path, nasty)
        yield changed(message, path, None, remove=True)
    yield message | {"more": 1}
    yield {}


def changed(message: Message, path: tuple[Any, ...], value: Any, *, remove: bool = False) -> Message:
    other = copy.deepcopy(message)
    inner = other
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return other


@pytest.mark.slow
@pytest.mark.pairs(3, kind=SAID)
async def test_no_field_of_a_message_reaches_the_daemon_or_another_job(tmp_path: Path, kind: str) -> None:
    """One odd inspection, a KeyError in a task of the driver's, ended the daemon with every job."""
    await say(tmp_path, kind, NUM_TRIED)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", SAID)
async def test_no_field_with_any_value_reaches_the_daemon_or_another_job(tmp_path: Path, kind: str) -> None:
    await say(tmp_path, kind, 1_000_000)


async def say(home: Path, kind: str, num_tried: int) -> None:
    """So many mutations of the message, each said by a worker whose job is in the phase for it."""
    phase, fields = SAID[kind]
    tried = list(mutations(JOINED if kind == "joined" else {"type": kind, "job": JOB, "attempt": 1, **fields}))
    random.Random(kind).shuffle(tried)
    async with staged(home) as stage:
        other = await stage.submit(spec(), until=Phase.RUNNING)
        job = ""
        for mutated in tried[:num_tried]:
            if stage.phase(job) is not phase or (kind == "inspected" and stage.driver.runs[job].inspected_attempt):
                if job:
                    await stage.end(job)
                job = await stage.submit_for(kind)
            holders = [each.name for each in stage.driver.core.workers.values() if each.job == job]
            worker = holders[0]
            stage.driver.hearing.said(worker, mutated | {"job": job} if mutated.get("job") == JOB else mutated)
        await stage.end(job)
        assert stage.phase(other) is Phase.RUNNING
        assert stage.driver.core.jobs[other].attempt == 1
        await stage.end(other)


def of(job: str, kind: str) -> Message:
    return {"type": kind, "job": job, "attempt": 1, **SAID[kind][1]}


# --- rows and counts that are well formed and cannot be


COLUMNS = {"mode": 0, "task": 1, "iteration": 2, "waited_for": 3, "start": 4, "end": 5}
FAR = (-(1 << 63), -2, (1 << 62) + 1, (1 << 63) - 1)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("number", FAR)
async def test_a_row_that_cannot_be_is_its_workers_end(tmp_path: Path, column: str, number: int) -> None:
    """It was found when somebody looked at the accounts: at a tick, whose task ended the daemon."""
    async with staged(tmp_path) as stage:
        job = await stage.submit(spec(), until=Phase.RUNNING)
        row = list(ROW)
        row[COLUMNS[column]] = number
        worker = stage.driver.core.jobs[job].workers[0]
        stage.driver.hearing.said(worker, of(job, "report") | {"records": pack(row)})
        assert stage.phase(job) is Phase.RELEASING
        stage.driver.tick()
        end = await stage.end(job)
        assert (end.state, end.reason) == ("failed", "worker-lost")
        assert end.error is not None
        assert "what no worker sends (report: records: " in end.error


async def test_rows_that_overlap_those_before_are_their_workers_end(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        job = await stage.submit(spec(), until=Phase.RUNNING)
        worker = stage.driver.core.jobs[job].workers[0]
        for _ in range(2):
            stage.driver.hearing.said(worker, of(job, "report"))
        end = await stage.end(job)
        assert (end.state, end.reason) == ("failed", "worker-lost")


async def test_what_a_worker_says_of_a_job_that_it_does_not_hold_is_not_heard(tmp_path: Path) -> None:
    """`released`, said by another job's worker, took a worker from its job; `fault` ended it."""
    async with staged(tmp_path) as stage:
        first = await stage.submit(spec(), until=Phase.RUNNING)
        second = await stage.submit(spec(), until=Phase.RUNNING)
        stranger = stage.driver.core.jobs[first].workers[0]
        for kind in SAID:
            if kind != "joined":
                stage.driver.hearing.said(stranger, of(second, kind))
        assert stage.phase(first) is stage.phase(second) is Phase.RUNNING
        await stage.end(first)
        await stage.end(second)


async def test_the_version_of_its_code_goes_with_every_order_to_load_a_job_and_is_kept(tmp_path: Path) -> None:
    first, other = 64 * "0", 64 * "1"
    async with staged(tmp_path) as stage:
        job = await stage.submit(spec(), holds=Phase.PLANNING, until=Phase.PLANNING)
        run, worker = stage.driver.runs[job], stage.driver.core.jobs[job].workers[0]
        inspect = PlanJob(job=job, attempt=1, worker=worker)
        assert order_of(inspect, stage.driver.estate)["code"] == {}
        stage.driver.hearing.said(worker, of(job, "inspected"))
        await stage.until(lambda: stage.phase(job) is Phase.RUNNING, "its run")
        assert run.attempt is not None
        prepare = Prepare(job=job, attempt=1, arenas=1, worker=worker, position=0, plan=run.attempt.plan)
        for order in inspect, prepare:
            assert order_of(order, stage.driver.estate)["code"] == {"/line.py": first}
        stage.driver.hearing.lost(worker, -9)  # its next attempt is planned anew, by a worker that has loaded more
        found = {"/line.py": other, "/layers.py": other}
        stage.driver.hearing._note_code(found, run)
        assert run.code == {"/line.py": first, "/layers.py": other}
        await run.files.written()
        assert read_code(run.files.path) == run.code
        await stage.end(job)


async def test_the_next_daemon_knows_it_and_a_new_job_does_not(tmp_path: Path) -> None:
    """A run directory may have been there before: of a job of the same name, in a ledger that was lost."""
    async with staged(tmp_path) as stage:
        submission = await stage.ledger.run(Ledger.add, spec().to_wire(), uid=0, priority=0, submitted_at=time.time())
        row, known = submission.row, {"/line.py": 64 * "0"}
        await asyncio.to_thread(Path(row.run_dir).mkdir, parents=True)
        await asyncio.to_thread(Path(row.run_dir, CODE).write_text, json.dumps(known))
        stage.pool.holds[row.job] = Phase.PLANNING
        for attempt, code in (1, {}), (2, known):
            stage.driver.adopt(row, attempt=attempt)
            assert stage.driver.runs[row.job].code == code
            await stage.end(row.job)


# --- bugs of ours, at every place where the driver does something about one job


def fails(*arguments: Any, **named: Any) -> Any:
    raise KeyError("a bug")


PLACES = {
    "the plan": ("weft.scheduler.daemon.plans.make_plan", fails, "internal"),
    "its memory": ("weft.scheduler.daemon.plans.free_memory", fails, "internal"),
    "its directory": ("weft.scheduler.runs.run_writer.RunWriter.make_directory", fails, "internal"),
    "its begin": ("weft.scheduler.runs.run.Run.begin", fails, "internal"),
    "its lanes' first work": ("weft.scheduler.core.dispatch.begin", fails, "internal"),
    "the core": ("weft.scheduler.core.core.Core._job_planned", fails, "internal"),
    "its reports": ("weft.scheduler.runs.run.PlannedAttempt.add_report", fails, "internal"),
    "its figures": ("weft.scheduler.daemon.driver.details_of", fails, "cancelled"),
    "its recording": ("weft.scheduler.daemon.driver.conclude", fails, "cancelled"),
    "its metrics": ("weft.scheduler.runs.series.JobMetrics.end", fails, "cancelled"),
    "the tick": ("weft.scheduler.runs.run.PlannedAttempt.take_news", fails, "internal"),
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_bug_of_ours_about_one_job_is_that_jobs_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """Each was an exception in the group of the daemon's tasks."""
    name, bug, reason = PLACES[place]
    async with staged(tmp_path) as stage:
        other = await stage.submit(spec(), until=Phase.RUNNING)
        with monkeypatch.context() as patch:
            patch.setattr(name, bug)
            submission = await stage.ledger.run(  # another job than the first, whose plan is kept
                Ledger.add, spec(clip_norm=1.0).to_wire(), uid=0, priority=0, submitted_at=time.time()
            )
            job = submission.row.job
            stage.driver.adopt(submission.row, attempt=1)
            if place in ("its reports", "the tick", "its figures", "its recording", "its metrics"):
                await stage.until(lambda: stage.phase(job) is Phase.RUNNING, "its run")
                stage.driver.hearing.said(stage.driver.core.jobs[job].workers[0], of(job, "report"))
            if place == "the tick":
                patch.setattr(stage.driver.runs[other], "attempt", None)  # a tick has nothing to do about it
                stage.driver.tick()
            if reason == "internal":
                await stage.until(lambda: job not in stage.driver.runs, f"the end of {job}")
            row = await stage.end(job)
        assert row.reason == reason
        assert "KeyError: 'a bug'" in caplog.text
        if reason == "internal":
            assert row.error is not None
            assert "a fault of Weft's own (KeyError: 'a bug')" in row.error
        assert stage.phase(other) is Phase.RUNNING
        await stage.end(other)


@pytest.mark.parametrize("step", ["make_plan", "find_checkpoint"])
async def test_a_job_that_is_cancelled_while_a_thread_plans_it_has_only_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    work = getattr(plans, step)

    def held(*arguments: Any, **named: Any) -> Any:
        begun.set()
        may_end.wait(SECONDS)
        return work(*arguments, **named)

    async with staged(tmp_path) as stage:
        with monkeypatch.context() as patch:
            patch.setattr(plans, step, held)
            job = await stage.submit(spec(), until=Phase.PLANNING)
            await stage.until(begun.is_set, step)
            row = await stage.end(job)
            may_end.set()
        other = await stage.submit(spec(), until=Phase.RUNNING)
        await stage.end(other)
    assert row.state == "cancelled"
    assert not caplog.records


async def test_a_job_of_a_daemon_that_had_more_workers_fails_at_once_with_the_remedy(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        tables = spec(stages=3).to_wire()
        row = (await stage.ledger.run(Ledger.add, tables, uid=0, priority=0, submitted_at=time.time())).row
        stage.driver.adopt(row, attempt=2)
        assert stage.phase(row.job) is None
        end = await stage.end(row.job)
        assert (end.state, end.reason, end.exit_code) == ("failed", "invalid-plan", 2)
        assert end.error == (
            "strategy.stages = 3 needs 3 CPU workers and this daemon has 2; "
            "use fewer stages, or start the daemon with --workers 3"
        )
        assert f'job="{row.job}"' not in stage.driver._exporter.render().decode(), "it never had a plan"


async def test_a_worker_whose_start_fails_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(tmp_path) as stage:
        await stage.until(lambda: all(each.up for each in stage.driver.core.workers.values()), "workers")
        start, failures = stage.pool.start_worker, [OSError("no more of it"), OSError("no more of it")]

        async def start_later(worker: str, job: str) -> None:
            if failures:
                raise failures.pop()
            await start(worker, job)

        monkeypatch.setattr(stage.pool, "start_worker", start_later)
        stage.pool.kill("cpu-0", "to start it again")
        await stage.until(lambda: not failures, "its failures")
        await stage.until(lambda: stage.driver.core.workers["cpu-0"].up, "its start")
