"""What the control path costs: a round trip through the daemon, an event through the core, a hand-over on the board.

    round_trip      peer process ──report──▶ Link, Driver, Books, Core ──dispatch──▶ peer process      (window = 1)
    bare            peer process ──bytes───▶ recv, sendall              ──bytes─────▶ peer process     (same sizes)
    handover        process 0: post 0, wait 1          process 1: wait 0, post 1

Processes that talk to each other are pinned to two cores where there are two, in every row and for every peer alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mmap
import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import uvloop
from measure import Result, interleave, main, pin, ratio_result, value_result

from weft.machine.crew import muster
from weft.metrics.prometheus.exporter import Exporter
from weft.plan.graph import Lane
from weft.plan.inspection import Inspection, TensorFacts, UnitFacts
from weft.plan.kinds import MODE_INDEX
from weft.plan.plan import Plan
from weft.plan.rows import pack
from weft.scheduler.core.core import Core
from weft.scheduler.core.events import JobPlanned, JobSubmitted, TasksFinished, WorkerJoined, WorkerPrepared
from weft.scheduler.daemon.driver import Driver
from weft.scheduler.daemon.link import Child
from weft.scheduler.daemon.pool import SPIN_SECONDS, Pool
from weft.scheduler.daemon.replacing.estate import Estate
from weft.scheduler.ledger.ledger import AsyncLedger, Ledger
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.runs.run_writer import RunWriter
from weft.spec.job_spec import JobSection, JobSpec, Strategy
from weft.spec.settings import Settings
from weft.transport.memory.board import SLEEP_SECONDS, Board, futex_wait, futex_wake
from weft.transport.wire.frames import MAX_WORKER_FRAME_BYTES, FrameReader, encode

JOB = "bench-1"
MICROBATCHES = 4
WARM_UP = 50
TASK_SECONDS = 100e-6  # between two round trips: a short task, and time for the other side to finish its own work
RECEIVE_BYTES = 1 << 16
SPINS_PER_CLOCK = 32  # as in weft.transport.memory.board

_fork = get_context("fork")


def collect(quick: bool) -> list[Result]:
    runs, trips = (3, 100) if quick else (15, 1000)
    results = round_trips(runs, trips)
    results += core_events(3 if quick else 9, 20_000 if quick else 100_000)
    results += handovers(runs, 500 if quick else 5000)
    return results


# --- a job to run: one stage, a plan from the real planner


def job_spec(steps: int, window: int | None) -> JobSpec:
    return JobSpec(
        job=JobSection(entry="bench.py:workload", steps=steps, batch_size=4 * MICROBATCHES),
        strategy=Strategy(microbatches=MICROBATCHES, window=window),
        directory="/",
    )


def job_plan(spec: JobSpec) -> Plan:
    unit = UnitFacts(
        name="0.",
        parameter_bytes=1 << 20,
        buffer_bytes=0,
        forward_seconds=1e-3,
        backward_seconds=2e-3,
    )
    facts = TensorFacts(dtype="float32", itemsize=4, shapes={4: (4, 64)})
    inspection = Inspection(
        units=(unit,),
        input=facts,
        target=facts,
        num_train=1 << 20,
        num_validation=0,
        load_seconds=1e-4,
        update_seconds=1e-3,
        metrics=(),
    )
    return make_plan(spec, inspection, shared_bytes_free=1 << 40)


def run_loader_ahead(core: Core, iterations: int) -> None:
    """The loader's lane, to its end: what comes after are the compute lane's events alone."""
    event = TasksFinished(JOB, 1, "loader-0", "load", 1)
    for _ in range(iterations * MICROBATCHES):
        core.handle(event, 0.0)


# --- the round trip through the daemon


class PeerPool(Pool):
    """The daemon's pool with the workers' sockets given instead of workers forked."""

    def __init__(self, sockets: dict[str, socket.socket], settings: Settings, driver: Callable[[], Driver]) -> None:
        super().__init__(
            settings,
            muster(settings),
            {},
            lambda worker, message: driver().hearing.said(worker, message),
            lambda worker, problem: None,
            lambda worker, what, at: None,
            lambda worker, code, shortage: None,
            lambda job, answer: None,
            lambda: None,
            lambda: None,
        )
        self._sockets = sockets

    async def start_worker(self, worker: str, job: str) -> None:
        child = self._children[worker] = Child(worker, "worker")
        connection = self._sockets[worker]
        _, child.link = await asyncio.get_running_loop().create_connection(
            lambda: self._link(child, connection),
            sock=connection,
        )


def serve_as_daemon(peer: socket.socket, trips: int) -> None:
    """The daemon's process: driver, core, ledger, exporter and run directory as they are; no workers behind them."""
    pin(1)
    with tempfile.TemporaryDirectory() as home:
        uvloop.run(_serve_as_daemon(peer, Path(home), trips))


async def _serve_as_daemon(peer: socket.socket, home: Path, trips: int) -> None:
    loader, _loader_peer = socket.socketpair()
    settings = Settings(runtime_dir=home, state_dir=home, workers=1, gpus=0, metrics="")
    exporter = Exporter()
    ledger = await AsyncLedger.open(home / "ledger.sqlite", home / "runs")
    pool = PeerPool({"cpu-0": peer, "loader-0": loader}, settings, lambda: driver)
    async with asyncio.TaskGroup() as group:

        def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
            return group.create_task(work, name=name)

        driver = Driver(Estate.begin(muster(settings)), ledger, exporter, pool, spawn, RunWriter())
        driver.start()
        spec = job_spec(steps=trips, window=1)
        submission = await ledger.run(
            Ledger.add, spec.to_wire(), uid=os.getuid(), priority=0, submitted_at=time.time(), job=JOB
        )
        await asyncio.sleep(0.1)  # both links are up
        driver.adopt(submission.row, attempt=1)
        plan = job_plan(spec)
        for worker in ("cpu-0", "loader-0"):
            driver.feed(WorkerJoined(worker=worker))
        driver.feed(JobPlanned(job=JOB, attempt=1, plan=plan))
        driver.feed(WorkerPrepared(job=JOB, attempt=1, worker="loader-0"))
        driver.feed(WorkerPrepared(job=JOB, attempt=1, worker="cpu-0"))  # the first dispatch: the peer begins
        run_loader_ahead(driver.core, plan.itinerary.num_iterations)
        await asyncio.Event().wait()


def reports(plan: Plan, count: int) -> Iterator[bytes]:
    """Frames as a lane sends them with window 1: one task, the wait for its dispatch before it, an iteration's loss."""
    program = plan.graph.programs[Lane(0, "compute")]
    waited, stamp = MODE_INDEX["stall_dispatch"], time.monotonic_ns()
    for number in range(count):
        iteration, position = divmod(number, len(program))
        task = plan.graph.tasks[program[position]]
        rows = [waited, -1, -1, -1, stamp, stamp + 50_000]
        rows += [MODE_INDEX[task.kind], task.id, iteration, -1, stamp + 50_000, stamp + 1_000_000]
        stamp += 1_000_000
        last = position == len(program) - 1
        measured = {"iteration": iteration, "means": {"loss": 1 / (1 + iteration)}, "facts": {"lr": 1e-3}}
        values = [measured] if last else []
        report = {"type": "report", "lane": "compute", "count": 1, "records": pack(rows), "values": values}
        yield encode({**report, "job": JOB, "attempt": 1})


def echo(peer: socket.socket, reply: bytes) -> None:
    """The bare peer: a blocking socket in a process that does nothing else. A frame comes and a frame goes."""
    pin(1)
    while data := peer.recv(RECEIVE_BYTES):
        missing = 4 + int.from_bytes(data[:4], "big") - len(data)
        while missing > 0:
            missing -= len(peer.recv(missing))
        peer.sendall(reply)


class Trips:
    """The worker's side, the same for the daemon and for the bare peer: send a frame, wait for a whole one."""

    def __init__(self, connection: socket.socket, frames: Sequence[bytes]) -> None:
        self._connection = connection
        self._frames = iter(frames)

    def receive(self) -> bytes:
        data = self._connection.recv(RECEIVE_BYTES)
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
            data += self._connection.recv(RECEIVE_BYTES)
        assert len(data) == 4 + int.from_bytes(data[:4], "big"), "one frame came for each that went"
        return data

    def receive_first_dispatch(self) -> bytes:
        """What the daemon says before it (inspect, prepare) is passed over."""
        frames = FrameReader(MAX_WORKER_FRAME_BYTES)
        messages: list[dict[str, Any]] = []
        while not messages or messages[-1]["type"] != "dispatch":
            messages += frames.feed(self._connection.recv(RECEIVE_BYTES))
        return encode(messages[-1])

    def make(self) -> None:
        self._connection.sendall(next(self._frames))
        self.receive()


def median_seconds(count: int, *trips: Callable[[], object], pause_seconds: float = 0.0) -> list[float]:
    """Of each trip, the median of `count`; they take turns one by one, each after the same busy pause."""
    seconds: list[list[float]] = [[] for _ in trips]
    for _ in range(count):
        for make, taken in zip(trips, seconds, strict=True):
            until = time.perf_counter() + pause_seconds
            while (started := time.perf_counter()) < until:
                pass
            make()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in seconds]


@contextlib.contextmanager
def beside(target: Callable[..., None], *arguments: Any) -> Iterator[socket.socket]:
    """A process that runs target(socket, *arguments), and our end of the socket pair."""
    ours, theirs = socket.socketpair()
    process = _fork.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.kill()
        process.join()


@contextlib.contextmanager
def ray_echo() -> Iterator[Callable[[bytes], bytes] | None]:
    """A call of a method of a Ray actor in a process of its own; None where Ray is not installed."""
    try:
        import ray
    except ImportError:
        yield None
        return
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    class Echo:
        def __init__(self, reply: bytes) -> None:
            self._reply = reply

        def call(self, frame: bytes) -> bytes:
            return self._reply

    actor = ray.remote(Echo).remote(b"x" * 100)
    try:
        yield lambda frame: ray.get(actor.call.remote(frame))
    finally:
        ray.shutdown()


def round_trips(runs: int, count: int) -> list[Result]:
    total = 3 * (WARM_UP + runs * count)
    frames = list(reports(job_plan(job_spec(steps=total, window=1)), total))
    cores = os.sched_getaffinity(0)
    with beside(serve_as_daemon, total) as daemon_socket:
        daemon = Trips(daemon_socket, frames)
        reply = daemon.receive_first_dispatch()
        with beside(echo, reply) as bare_socket:
            pin(0)
            bare = Trips(bare_socket, frames)
            median_seconds(WARM_UP, daemon.make, bare.make)
            paced = [median_seconds(count, daemon.make, bare.make, pause_seconds=TASK_SECONDS) for _ in range(runs)]
            dense = interleave(
                runs, *(lambda trip=each.make: median_seconds(count, trip)[0] for each in (daemon, bare))
            )
            os.sched_setaffinity(0, cores)
        results = _round_trip_results(count, len(frames[0]), len(reply), [*zip(*paced, strict=True)], dense)
        return results + _round_trips_of_ray(runs, count, daemon, frames[0])


def _round_trip_results(
    count: int, sent: int, received: int, paced: Sequence[Sequence[float]], dense: Sequence[Sequence[float]]
) -> list[Result]:
    included = (
        "two processes on a core each: a worker's stand-in sends a report frame of one task "
        f"({sent} bytes, built beforehand, with its stamped rows) and blocks until the whole dispatch frame "
        f"({received} bytes) is there. On the daemon's side everything of the real path: uvloop, Link and its frame "
        "reader, Hearing.said, Core with window 1, Pool.send, PlannedAttempt.add_report with the accounting; every "
        "ninth trip ends an iteration, with its line in metrics.jsonl and its metrics. Not included: the worker's own "
        "thread hand-over, building its report and decoding the dispatch. Against a process that blocks in recv and "
        "answers with a frame of the same size"
    )
    back_to_back = f"median of {count} round trips in a row, then {count} of the peer's; "
    after_task = (
        f"the same turn by turn, each after {TASK_SECONDS * 1e6:.0f} us of busy work as a task would be, in which the "
        "other side goes idle"
    )
    return [
        ratio_result("round_trip_vs_bare", *dense, goal="<= 1.5", how=back_to_back + included),
        value_result("round_trip", dense[0], "us", scale=1e6, how="the daemon's round trip of the row above"),
        value_result("round_trip_bare", dense[1], "us", scale=1e6, how="the bare one"),
        ratio_result("round_trip_after_task_vs_bare", *paced, how=after_task),
        value_result("round_trip_after_task", paced[0], "us", scale=1e6, how="the daemon's of the row above"),
        value_result("round_trip_after_task_bare", paced[1], "us", scale=1e6, how="the bare one"),
    ]


def _round_trips_of_ray(runs: int, count: int, daemon: Trips, frame: bytes) -> list[Result]:
    with ray_echo() as call:
        if call is None:
            return []
        trips = (functools.partial(call, frame), daemon.make)
        median_seconds(WARM_UP, *trips)
        values = [median_seconds(count, *trips, pause_seconds=TASK_SECONDS) for _ in range(runs)]
    how = (
        "a call of a Ray actor's method with the same frame, waited for with ray.get, against the round trip of "
        "round_trip_after_task_vs_bare, turn by turn"
    )
    return [ratio_result("round_trip_vs_ray", *zip(*values, strict=True), goal=">= 10", how=how)]


# --- the core alone


def core_events(runs: int, count: int) -> list[Result]:
    return [
        value_result(
            "core_events_per_second",
            [events_per_second(1, count) for _ in range(runs)],
            "1/s",
            goal=">= 200000",
            how=f"{count} TasksFinished events of one task each through Core.handle in steady state, no IO, window 1: "
            "each one makes a Dispatch, every ninth a RecordIteration too; events built beforehand",
        ),
        value_result(
            "core_events_per_second_default_window",
            [events_per_second(None, count) for _ in range(runs)],
            "1/s",
            how="the same with the window that the planner chooses: a Dispatch once half of it is free",
        ),
    ]


def events_per_second(window: int | None, count: int) -> float:
    spec = job_spec(steps=count, window=window)
    plan = job_plan(spec)
    core = Core({"cpu-0": "cpu", "loader-0": "loader"})
    for name in core.workers:
        core.handle(WorkerJoined(worker=name), 0.0)
    core.handle(JobSubmitted(job=JOB, needs=Counter(plan.workers)), 0.0)
    core.handle(JobPlanned(job=JOB, attempt=1, plan=plan), 0.0)
    for name in core.workers:
        core.handle(WorkerPrepared(job=JOB, attempt=1, worker=name), 0.0)
    run_loader_ahead(core, count // len(plan.graph.programs[Lane(0, "compute")]) + 1)
    events = [TasksFinished(JOB, 1, "cpu-0", "compute", 1) for _ in range(count)]
    handle = core.handle
    started = time.perf_counter()
    for event in events:
        handle(event, 0.0)
    return count / (time.perf_counter() - started)


# --- the board


class BareWords:
    """A hand-over with nothing but a word, a futex and a spin as long as the board's: no epoch, no tasks, no errors."""

    def __init__(self, words: torch.Tensor, spin_seconds: float) -> None:
        self._words = memoryview(words.numpy())  # type: ignore[arg-type]  # an ndarray is a buffer
        self._address = words.data_ptr()
        self._spin_ns = int(spin_seconds * 1e9)

    def post(self, word: int, value: int) -> None:
        self._words[word] = value
        futex_wake(self._address + 4 * word)

    def wait(self, word: int, value: int) -> None:
        words = self._words
        until = time.monotonic_ns() + self._spin_ns
        while time.monotonic_ns() < until:
            for _ in range(SPINS_PER_CLOCK):
                if words[word] == value:
                    return
        while (seen := words[word]) != value:
            futex_wait(self._address + 4 * word, seen, SLEEP_SECONDS)


class PingPong:
    """One side of a ping-pong over words 1 and 2; `first` posts before it waits."""

    def __init__(self, memory: mmap.mmap, spin_seconds: float, *, first: bool) -> None:
        words = torch.frombuffer(memory, dtype=torch.int32)
        self._both: dict[str, Board | BareWords] = {
            "board": Board(words[:64], spin_seconds),
            "futex": BareWords(words[64:128], spin_seconds),  # cache lines of its own
        }
        self._first = first
        self._round = dict.fromkeys(self._both, 0)

    def seconds(self, name: str, count: int) -> float:
        """Of one hand-over (half a round trip), the mean over `count` round trips."""
        post, wait = self._both[name].post, self._both[name].wait
        mine, other = (1, 2) if self._first else (2, 1)
        start = self._round[name]
        self._round[name] += count
        started = time.perf_counter()
        if self._first:
            for value in range(start, start + count):
                post(mine, value)
                wait(other, value)
        else:
            for value in range(start, start + count):
                wait(other, value)
                post(mine, value)
        return (time.perf_counter() - started) / count / 2


def answer(commands: socket.socket, memory: mmap.mmap, spin_seconds: float) -> None:
    """The other process: takes its side in each ping-pong that it is told of."""
    pin(1)
    game = PingPong(memory, spin_seconds, first=False)
    while command := commands.recv(64).decode():
        name, count = command.split()
        commands.sendall(b"go")
        game.seconds(name, int(count))


def handovers(runs: int, count: int) -> list[Result]:
    spin = SPIN_SECONDS if len(os.sched_getaffinity(0)) > 1 else 0.0
    spun = _handovers(runs, count, spin)
    how = (
        f"mean of {count} round trips a run, halved, two processes on a core each. Board.post and Board.wait with the "
        f"workers' spin of {spin * 1e6:.0f} us, against the same futex calls on a bare word with the same spin: a look "
        f"at the clock every {SPINS_PER_CLOCK} reads, then FUTEX_WAIT"
    )
    return [
        ratio_result("handover_vs_futex", spun["board"], spun["futex"], goal="<= 1.3", how=how),
        value_result("handover", spun["board"], "us", scale=1e6, how="the board's hand-over of the row above"),
        value_result("handover_futex", spun["futex"], "us", scale=1e6, how="the bare one"),
    ]


def _handovers(runs: int, count: int, spin_seconds: float) -> dict[str, list[float]]:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    torch.frombuffer(memory, dtype=torch.int32).fill_(-1)
    cores = os.sched_getaffinity(0)
    with beside(answer, memory, spin_seconds) as commands:
        pin(0)
        game = PingPong(memory, spin_seconds, first=True)

        def seconds(name: str, count: int) -> float:
            commands.sendall(f"{name} {count}".encode())
            commands.recv(2)
            return game.seconds(name, count)

        names = ("board", "futex")
        for name in names:
            seconds(name, WARM_UP)
        values = interleave(runs, *(functools.partial(seconds, name, count) for name in names))
    os.sched_setaffinity(0, cores)
    return dict(zip(names, values, strict=True))


if __name__ == "__main__":
    main("dispatch", collect)
