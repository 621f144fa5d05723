"""The daemon: startup, serve, drain. Signals only set a flag; what started in order ends in reverse order.

startup  lock and socket → ledger → fork server, directory, workers → metrics → unfinished jobs → READY
serve    clients, workers and a tick a second, until SIGTERM, SIGINT or SIGHUP
drain    no new jobs; running ones may end within the budget, then they stop and stay unfinished in the ledger
         (a second signal skips the wait) → workers end → ledger and socket close

`weft daemon --replace` has it begin again as another program, in the same process: replacing/ is about that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop

from weft.machine.crew import CrewError, muster
from weft.machine.descriptors import AMPLE, raise_limit
from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.core.events import DirectoryLost, DrainRequested
from weft.scheduler.daemon import notify
from weft.scheduler.daemon.driver import Driver
from weft.scheduler.daemon.fork_server import WORKERS_LOG, PoolError, bound, last_line
from weft.scheduler.daemon.guard import Spawn
from weft.scheduler.daemon.http.server import MetricsAddressError, MetricsServer
from weft.scheduler.daemon.link import DIRECTORY, Brood
from weft.scheduler.daemon.observatory import Observatory
from weft.scheduler.daemon.pool import Pool
from weft.scheduler.daemon.replacing.estate import Estate
from weft.scheduler.daemon.replacing.handover import Handover
from weft.scheduler.daemon.replacing.succession import Succession, ending_signals
from weft.scheduler.daemon.service import Service
from weft.scheduler.ledger.ledger import AsyncLedger, Ledger, LedgerError
from weft.scheduler.ledger.series import publish
from weft.scheduler.runs.checkpoints import come_to
from weft.scheduler.runs.run_directory import RunsDirectoryError, make_runs_directory, tidy
from weft.scheduler.runs.run_writer import RunWriter
from weft.spec.settings import Settings
from weft.transport.wire.runtime_directory import RuntimeDirectory, RuntimeDirectoryError
from weft.version import __version__

TICK_SECONDS = 1.0
LAG_PROBE_SECONDS = 0.25  # between looks at how late the loop is
BACKLOG = 1024  # clients that connect while the loop is busy; where it is full, the kernel refuses the next
STOP_SECONDS = 12.0  # for running jobs to let go once they are told to: above the core's RELEASE_SECONDS
SAVE_SECONDS = 60.0  # for checkpoints of the jobs that were stopped
EXIT_UNAVAILABLE = 1

_log = logging.getLogger("weft.daemon")


def main(settings: Settings, *, accept_empty_ledger: bool = False, handover: Handover | None = None) -> int:
    """Runs the daemon until it is told to stop; returns its exit code. Prints why where it cannot start.

    accept_empty_ledger: begin without the jobs of a ledger that is lost. handover: what this process had as another.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    limit = raise_limit()
    if limit < AMPLE:
        _log.warning("only %d descriptors may be open: clients are refused early; raise LimitNOFILE", limit)
    problems: list[BaseException] = []
    try:
        uvloop.run(_Daemon(settings, os.environ, accept_empty_ledger, handover).run())
    except* (
        RuntimeDirectoryError,
        RunsDirectoryError,
        LedgerError,
        CrewError,
        PoolError,
        MetricsAddressError,
        notify.ServiceManagerError,
    ) as group:
        problems += _errors_in(group)
    for problem in problems[:1]:  # the others follow from it
        print(f"weft: {problem}", file=sys.stderr)
    return EXIT_UNAVAILABLE if problems else 0


class _Daemon:
    def __init__(
        self, settings: Settings, environment: Mapping[str, str], accept_empty_ledger: bool, handover: Handover | None
    ) -> None:
        self._settings = settings
        self._handover = handover
        self._environment = environment
        self._accept_empty_ledger = accept_empty_ledger
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._exporter = Exporter()
        self._failure: PoolError | RuntimeDirectoryError | None = None

    async def run(self) -> None:
        """Errors: those that main names."""
        loop = asyncio.get_running_loop()
        for number in (ending := ending_signals()):  # a terminal that closes may send more than one
            loop.add_signal_handler(number, self._stop.set if number == signal.SIGHUP else self._signalled)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)  # that came while the process became this program
        settings = self._settings
        async with contextlib.AsyncExitStack() as stack:
            runtime = self._open_runtime()
            stack.callback(runtime.close)
            ledger = await AsyncLedger.open(
                settings.state_dir / "ledger.sqlite", settings.runs_path, accept_empty=self._accept_empty_ledger
            )
            stack.push_async_callback(ledger.close)
            make_runs_directory(settings.runs_path)
            await self._serve(runtime, ledger, stack)
        if self._failure is not None:
            raise self._failure

    def _open_runtime(self) -> RuntimeDirectory:
        handed = None if self._handover is None else self._handover.runtime(self._settings)
        if handed is not None:
            return handed
        inherited = notify.listen_fds(self._environment, os.getpid())
        return RuntimeDirectory.open(self._settings.runtime_dir, inherited[0] if inherited else None)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def _server_lost(self) -> None:
        """Without the fork server nothing can run: end, and let the service manager start us again."""
        log = self._settings.state_dir / WORKERS_LOG
        self._failure = PoolError(f"the fork server died; {log} ends with: {last_line(log)}")
        self._stop_now.set()
        self._stop.set()

    async def _serve(self, runtime: RuntimeDirectory, ledger: AsyncLedger, stack: contextlib.AsyncExitStack) -> None:
        writer = RunWriter()
        stack.push_async_callback(writer.close)
        handed = await self._take_over(writer)
        estate = Estate.begin(muster(self._settings)) if handed is None else handed[0]
        pool = self._make_pool(estate, lambda: driver, lambda: restart_directory())
        async with asyncio.TaskGroup() as group:
            spawn = _spawner(group)
            background: list[asyncio.Task[None]] = []

            def restart_directory() -> None:
                driver.feed(DirectoryLost())
                background.append(spawn(start_directory(), "restart directory"))

            def restart_soon(bug: Exception) -> None:
                asyncio.get_running_loop().call_later(TICK_SECONDS, restart_directory)

            async def start_directory() -> None:
                with driver.guard.around("the start of the directory", restart_soon):
                    await pool.start_directory()

            driver = Driver(estate, ledger, self._exporter, pool, spawn, writer)
            service = Service(self._settings, driver, ledger, self._exporter, pool)
            stack.push_async_callback(pool.stop)
            if handed is None:
                await pool.start(self._settings.state_dir / WORKERS_LOG)
                driver.start()
                writer.put(partial(tidy, await ledger.run(Ledger.ended_directories)))  # others when they are taken up
            else:
                await pool.take_over(handed[1])
                driver.go_on()
                if not pool.has(DIRECTORY):  # one of which we hear only now that it has died is started again for that
                    background.append(spawn(start_directory(), "start directory"))
                pool.resume()
            http = await self._serve_http(service, Observatory(driver, ledger), stack)
            await self._adopt_unfinished(driver, ledger)
            door = _Door(runtime, lambda reader, writer: service.reception.accept(spawn, reader, writer))
            self._allow_succession(runtime, ledger, driver, pool, service, door, http)
            await door.open()
            background += [
                group.create_task(self._tick(runtime, driver, ledger, pool), name="tick"),
                group.create_task(self._watch_lag(), name="lag"),
            ]
            self._tell_ready(runtime, estate, driver, goes_on=handed is not None)
            await self._stop.wait()
            await self._drain(driver)
            await self._until_saved(driver)
            door.close()
            service.reception.close()
            driver.close()
            for task in background:
                task.cancel()

    def _tell_ready(self, runtime: RuntimeDirectory, estate: Estate, driver: Driver, *, goes_on: bool) -> None:
        """All who wait for it. goes_on: with the jobs that the daemon before had running."""
        gc.collect()
        gc.freeze()  # all that was imported: some 50 ms of every later collection that nothing would come of
        notify.notify_ready(self._environment)
        _log.info("weft %s serves %s with %s", __version__, runtime.path, estate.crew)
        if self._handover is not None:
            jobs = driver.num_running() if goes_on else driver.num_unfinished()
            self._handover.answer({"version": __version__, "jobs": jobs, "problem": self._handover.problem})

    def _make_pool(self, estate: Estate, driver: Callable[[], Driver], restart_directory: Callable[[], None]) -> Pool:
        """driver: which is made with the pool, and there before it hears anything."""
        return Pool(
            self._settings,
            estate.crew,
            notify.child_environment(self._environment),
            lambda worker, message: driver().hearing.said(worker, message),
            lambda worker, problem: driver().hearing.garbled(worker, problem),
            lambda worker, what, at: driver().hearing.stopped(worker, what, at),
            lambda worker, code, shortage: driver().hearing.lost(worker, code, shortage),
            lambda job, answer: driver().savers.answered(job, answer),
            restart_directory,
            self._server_lost,
        )

    def _allow_succession(
        self,
        runtime: RuntimeDirectory,
        ledger: AsyncLedger,
        driver: Driver,
        pool: Pool,
        service: Service,
        door: _Door,
        http: MetricsServer | None,
    ) -> None:
        """From here on another daemon may be asked for."""
        succession = Succession(
            settings=self._settings,
            environment=self._environment,
            runtime=runtime,
            driver=driver,
            pool=pool,
            ledger=ledger,
            reception=service.reception,
            door=door,
            http=http,
            is_stopping=self._stop.is_set,
        )
        service.announce_succession(succession.asked)

    async def _take_over(self, writer: RunWriter) -> tuple[Estate, Brood] | None:
        """What the daemon before has left, if it can be read; else nothing of it is left."""
        if self._handover is None:
            return None
        handed = self._handover.open(writer)
        if handed is None:
            await asyncio.to_thread(self._handover.end_children)
        return handed

    async def _serve_http(
        self, service: Service, observatory: Observatory, stack: contextlib.AsyncExitStack
    ) -> MetricsServer | None:
        self._exporter.set(
            "weft_build_info", 1, version=__version__, python=platform.python_version(), torch=version("torch")
        )
        address = self._settings.metrics_address
        if address is None:
            return None
        letter = None if self._handover is None else self._handover.letter
        metrics = MetricsServer(self._exporter, *address, observatory, () if letter is None else letter.http)
        stack.push_async_callback(metrics.stop)
        url = await metrics.start()
        service.announce_metrics(url)
        _log.info("timelines at %s/, metrics at %s/metrics", url, url)
        return metrics

    async def _adopt_unfinished(self, driver: Driver, ledger: AsyncLedger) -> None:
        """Those of them that have not been handed over."""
        for row in await ledger.run(Ledger.unfinished):
            if row.job in driver.runs:
                continue
            with driver.guard.around(f"what {row.job} has come to"):  # it may wait for long before it trains again
                if (found := await asyncio.to_thread(come_to, Path(row.run_dir))) is not None:
                    await ledger.run(Ledger.record, row.job, step=found[0], loss=found[1])
            with driver.guard.around(f"the return of {row.job}"):  # it stays as it is in the ledger
                driver.adopt(row, attempt=row.attempt + 1)

    async def _tick(self, runtime: RuntimeDirectory, driver: Driver, ledger: AsyncLedger, pool: Pool) -> None:
        watchdog = notify.watchdog_seconds(self._environment, os.getpid())
        interval = min(TICK_SECONDS, watchdog) if watchdog else TICK_SECONDS
        while True:
            driver.tick()
            with driver.guard.around("the look at the ledger"):
                publish(await ledger.run(Ledger.look), ledger.health, self._exporter)
            with driver.guard.around("the look at the socket"):
                self._look_at(runtime, pool)
            bound(self._settings.state_dir / WORKERS_LOG)
            if pool.is_of_another_weft and driver.is_idle:
                _log.info("no job has a worker: all are started again, of weft %s", __version__)
                await driver.renew(self._settings.state_dir / WORKERS_LOG)
            if watchdog:
                notify.notify_watchdog(self._environment)
            await asyncio.sleep(interval)

    def _look_at(self, runtime: RuntimeDirectory, pool: Pool) -> None:
        """Where clients do not find the socket any more: end as when told to, and let whoever looks start us again."""
        if self._stop.is_set():
            return
        try:
            runtime.check()
        except RuntimeDirectoryError as lost:
            _log.error("%s", lost)
            self._failure = lost
            self._stop.set()
            try:
                runtime.make_again()
                pool.send(DIRECTORY, {"arenas": None, "listens_again": True})  # which savers ask
            except RuntimeDirectoryError as error:
                _log.error("what jobs have come to since their newest checkpoints is lost: %s", error)

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PROBE_SECONDS
            await asyncio.sleep(LAG_PROBE_SECONDS)
            self._exporter.observe("weft_event_loop_lag_seconds", max(0.0, loop.time() - due))

    async def _drain(self, driver: Driver) -> None:
        notify.notify_stopping(self._environment)
        driver.feed(DrainRequested(now=False))
        if isinstance(self._failure, PoolError):
            return  # no worker lives to be waited for
        running = driver.num_running()
        if running:
            _log.info("draining: %d jobs run, for at most %.0f s", running, self._settings.drain_seconds)
        if not await self._until_idle(driver, self._settings.drain_seconds, self._stop_now):
            driver.feed(DrainRequested(now=True))
            await self._until_idle(driver, STOP_SECONDS, None)
            _log.info("stopped; unfinished jobs run again after a restart")

    async def _until_idle(self, driver: Driver, seconds: float, interrupt: asyncio.Event | None) -> bool:
        """True once nothing runs; False if the time is up or the interrupt comes first."""
        deadline = asyncio.get_running_loop().time() + seconds
        while driver.num_running():
            if asyncio.get_running_loop().time() > deadline or (interrupt is not None and interrupt.is_set()):
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await driver.any_change.wait()
        return True

    async def _until_saved(self, driver: Driver) -> None:
        """What running jobs had come to is on the disk, or takes too long for whoever stops us."""
        deadline = asyncio.get_running_loop().time() + SAVE_SECONDS
        can_save = not isinstance(self._failure, PoolError)
        while driver.savers.num_active and can_save and asyncio.get_running_loop().time() < deadline:
            notify.notify_extend(self._environment, 2 * TICK_SECONDS)
            await asyncio.sleep(0.05)
        for job in driver.core.jobs.values():
            if job.saves_again is not None:
                _log.error("%s is paused, and what it had come to since its newest checkpoint is lost", job.name)


class _Door:
    """The control socket. While it is closed, clients wait in the kernel's queue."""

    def __init__(
        self, runtime: RuntimeDirectory, accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
    ) -> None:
        self._runtime = runtime
        self._accept = accept
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(
            self._accept, sock=self._runtime.listener.dup(), backlog=BACKLOG, **_KEEP_INHERITED_SOCKET
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def _spawner(group: asyncio.TaskGroup) -> Spawn:
    def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return group.create_task(work, name=name)

    return spawn


def _errors_in(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _errors_in(error)
        else:
            yield error


# Python 3.13 unlinks a Unix server's path when it closes; ours is unlinked by its owner, systemd's by systemd.
_KEEP_INHERITED_SOCKET: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
