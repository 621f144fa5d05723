"""The ledger: the SQLite file in which the daemon keeps jobs. Shell; one thread, off the event loop.

It guarantees:
- a job that was added is on disk (WAL with synchronous=FULL): a submit is acknowledged after `add`, and not before;
- a change that was recorded is on disk, or, while the disk takes nothing, in memory, and follows when it does: see
  `weft/scheduler/ledger/unwritten.py`. Reads tell the newest either way;
- a row that cannot be read is left as it is, and costs no other: it is told once in the log, and counted;
- a submit is whole or absent, and the same submit under the same id is one job, however often it is sent;
- a terminal job never changes again, and a generated id is never given twice;
- one process at a time holds the file (SQLite's exclusive lock, which the kernel drops however the process ends), so
  two daemons with different runtime directories cannot run the same job.

It knows nothing of scheduling: which state may follow which is the core's business, except that terminal is final.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import msgpack

from weft.scheduler.ledger.job_row import JobChanges, JobRow, Submission, job_row
from weft.scheduler.ledger.ledger_file import LedgerError, Names, close_file, explained, open_file, touch
from weft.scheduler.ledger.spec_difference import what_differs
from weft.scheduler.ledger.unwritten import LedgerHealth, Unwritten
from weft.spec.job_id import check_job_id, stem_of
from weft.spec.job_state import TERMINAL_STATES, UNFINISHED_STATES, JobState

__all__ = [
    "AsyncLedger",
    "IdTaken",
    "JobChanges",
    "JobEnded",
    "JobNotEnded",
    "JobRow",
    "Ledger",
    "LedgerError",
    "LedgerLook",
    "Submission",
    "UnknownJob",
]

_log = logging.getLogger("weft.ledger")

P = ParamSpec("P")
T = TypeVar("T")


class IdTaken(ValueError):
    """The id is that of another job: another spec, or another user's."""


class JobEnded(RuntimeError):
    """A change of a job that is in a terminal state. The text tells the job's end and the change."""


class UnknownJob(LookupError):
    """A change of a job that was never added."""


class JobNotEnded(RuntimeError):
    """The removal of a job that is in no terminal state."""


@dataclass(frozen=True, slots=True)
class LedgerLook:
    """What a tick sees."""

    counts: dict[JobState, int] | None  # jobs in each state; None where they cannot be read
    errors: dict[str, int]  # of the file since the look before, by reason


class Ledger:
    """Jobs on disk. Synchronous, and confined to the thread that opened it (sqlite3 raises elsewhere).

    Every method but `record` and `look` raises LedgerError where the file fails (disk full, I/O error); nothing is then
    half-written.
    """

    def __init__(self, path: Path, runs_path: Path, connection: sqlite3.Connection) -> None:
        self.health = LedgerHealth()  # for any thread
        self._path = path
        self._runs_path = runs_path
        self._connection = connection
        self._names = Names(path)
        self._unwritten = Unwritten()
        self._unreadable: dict[int, str] = {}  # by seq: the job's name, as far as it is one

    @classmethod
    def open(cls, path: Path, runs_path: Path, *, accept_empty: bool = False) -> Self:
        """Opens or creates the file; jobs run in `runs_path`/ID.

        accept_empty: begin without the jobs of a ledger that is lost. Raises LedgerError for a file that is lost,
        damaged, not a ledger, of a newer Weft, or held by another daemon.
        """
        path, runs_path = path.absolute(), runs_path.absolute()
        return cls(path, runs_path, open_file(path, runs_path, accept_empty=accept_empty))

    def add(
        self,
        spec: Mapping[str, Any],
        *,
        uid: int,
        priority: int,
        submitted_at: float,
        job: str | None = None,
        takes: Callable[[Path], bool] = lambda path: not path.exists(),
    ) -> Submission:
        """A new queued job, on disk when this returns; or the job of that id, if spec, priority and owner are the same.

        `job` is the user's id; without one it is `<entry's file>-<n>`, no other job's, whose run directory `takes`
        finds free. Raises InvalidJobId and IdTaken. Nothing new is taken while what is older has not been written.
        """
        spec_blob = msgpack.packb(dict(spec))
        with self._noticed():
            self._write_unwritten()
            with self._transaction():
                if job is None:
                    job = self._next_id(stem_of(spec["job"]["entry"]), takes)
                elif (existing := self.job(check_job_id(job))) is not None:
                    if differs := _difference(existing, uid, priority, msgpack.unpackb(spec_blob)):
                        raise IdTaken(
                            f"id: {job!r} is another job's ({differs}); give another id, or none to have one generated"
                        )
                    return Submission(existing, is_new=False)
                elif self._is_known(job):
                    raise IdTaken(f"id: {job!r} is that of a job that cannot be read; give another id, or none")
                self._connection.execute(
                    "INSERT INTO jobs (job, spec, uid, priority, state, submitted_at, run_dir)"
                    " VALUES (?, ?, ?, ?, 'queued', ?, ?)",
                    (job, spec_blob, uid, priority, submitted_at, str(self._runs_path / job)),
                )
                (row,) = self._select("WHERE job = ?", job)
        return Submission(row, is_new=True)

    def record(self, job: str, **changes: Unpack[JobChanges]) -> None:
        """Changes a job's columns, at once or when the disk takes them.

        Raises JobEnded if the job is in a terminal state already, UnknownJob if absent.
        """
        unknown = changes.keys() - JobChanges.__annotations__.keys()
        if unknown or not changes:
            raise TypeError(f"record takes one or more of {', '.join(JobChanges.__annotations__)}, not {unknown}")
        values: dict[str, Any] = dict(changes)
        if "state" in values:
            values["state"] = JobState(values["state"])
        if (before := self._unwritten.of(job)).get("state") in TERMINAL_STATES:
            raise _job_ended(job, before["state"], before.get("ended_at"), values)
        try:
            with self._noticed():
                self._write(job, before | values)
                self._unwritten.forget(job)
        except LedgerError as error:
            self._unwritten.keep(job, values)
            self._tell()
            _log.warning("%s: %s is kept in memory until it can be written: %s", job, ", ".join(values), error)

    def remove(self, job: str) -> None:
        """Forgets a job that has ended; a user may give its id again. Raises UnknownJob and JobNotEnded."""
        with self._noticed(), self._transaction():
            row = self.job(job)
            if row is None:
                raise UnknownJob(f"job {job!r} is not in the ledger")
            if not row.state.is_terminal:
                raise JobNotEnded(f"job {job!r} is {row.state}; only one that has ended can be removed")
            self._connection.execute("DELETE FROM jobs WHERE job = ?", (job,))
        self._unwritten.forget(job)

    def ended_before(self, moment: float, *, limit: int) -> list[JobRow]:
        """The `limit` oldest jobs that ended before `moment` (unix seconds), in the order of their submits."""
        states = sorted(TERMINAL_STATES)
        clause = f"WHERE state IN ({_marks(states)}) AND ended_at < ? ORDER BY seq LIMIT ?"
        return self._select(clause, *states, moment, limit)

    def job(self, job: str) -> JobRow | None:
        rows = self._select("WHERE job = ?", job)
        return rows[0] if rows else None

    def jobs(self, *, limit: int = 100, states: Collection[JobState] = tuple(JobState)) -> list[JobRow]:
        """The newest `limit` jobs in any of `states`, newest first."""
        changed = tuple(self._unwritten)
        where = f"WHERE state IN ({_marks(states)}) OR job IN ({_marks(changed)}) ORDER BY seq DESC LIMIT ?"
        rows = self._select(where, *states, *changed, limit + len(changed))
        return [row for row in rows if row.state in states][:limit]

    def unfinished(self) -> list[JobRow]:
        """The jobs that a restart requeues, in the order in which they run: higher priority, then earlier submit."""
        states = sorted(UNFINISHED_STATES)
        rows = self._select(f"WHERE state IN ({_marks(states)}) ORDER BY priority DESC, seq", *states)
        return [row for row in rows if row.state in states]

    def ended_directories(self, limit: int = 256) -> list[Path]:
        """The run directories of the jobs that ended last. limit: arbitrary, above what a daemon ever saves at once."""
        states = sorted(TERMINAL_STATES)
        last = f"WHERE state IN ({_marks(states)}) ORDER BY ended_at DESC LIMIT ?"
        with explained(self._path):
            found = self._connection.execute(f"SELECT job, run_dir FROM jobs {last}", (*states, limit))
            told = [(job, Path(run_dir)) for job, run_dir in found if isinstance(run_dir, str)]
        return [run_dir for job, run_dir in told if run_dir.name == job]  # of a row that makes sense

    def counts_by_state(self) -> dict[JobState, int]:
        """Of the jobs that are served. Every state is a key."""
        changed, left_out = tuple(self._unwritten), tuple(self._unreadable)
        with explained(self._path):
            served = f"WHERE seq NOT IN ({_marks(left_out)})"
            grouped = f"SELECT state, count(*) FROM jobs {served} GROUP BY state"
            counted = self._connection.execute(grouped, left_out).fetchall()
            where = f"WHERE job IN ({_marks(changed)})"
            stale = self._connection.execute(f"SELECT job, state FROM jobs {where}", changed).fetchall()
        counts = dict.fromkeys(JobState, 0) | dict(counted)
        for job, state in stale:
            counts[state] -= 1
            counts[self._unwritten.of(job).get("state", state)] += 1
        return {state: counts[state] for state in JobState}

    def look(self) -> LedgerLook:
        """For a tick: tries again what could not be written, where it is time, and counts the jobs."""
        counts = None
        try:
            with self._noticed():
                if self._unwritten.is_due:
                    self._write_unwritten()
                counts = self.counts_by_state()
                self._names.check()
        except LedgerError as error:
            _log.debug("%s", error)  # it is in `health` and in the metrics
        return LedgerLook(counts, self._unwritten.take_errors())

    def close(self) -> None:
        """Writes what is unwritten, if it can, folds the write-ahead log into the file and gives up the lock.

        May be called twice.
        """
        if self._unwritten:
            try:
                self._write_unwritten()
            except LedgerError as error:
                lost = ", ".join(self._unwritten)
                _log.error(
                    "the newest states of %s are lost; unfinished in the ledger, they run again: %s", lost, error
                )
        close_file(self._connection, self._path, self._names)

    def _write(self, job: str, values: dict[str, Any]) -> None:
        if values.get("result") is not None:
            values = values | {"result": json.dumps(values["result"])}
        columns = ", ".join(f"{column} = ?" for column in values)
        with explained(self._path):  # before anything is written: a mistake of the caller's is told on a full disk, too
            row = self._connection.execute("SELECT state, ended_at FROM jobs WHERE job = ?", (job,)).fetchone()
        if row is None:
            raise UnknownJob(f"job {job!r} is not in the ledger; only a job that was added can change")
        if row["state"] in TERMINAL_STATES:
            raise _job_ended(job, row["state"], row["ended_at"], values)
        with self._transaction():
            self._connection.execute(f"UPDATE jobs SET {columns} WHERE job = ?", (*values.values(), job))

    def _write_unwritten(self) -> None:
        """Everything, in the order in which it came. Raises LedgerError at the first that the disk does not take."""
        if not self._unwritten and self._unwritten.problem is None:
            return
        for job in self._unwritten:
            try:
                self._write(job, self._unwritten.of(job))
            except (JobEnded, UnknownJob) as error:  # the disk had taken it, although it said no
                _log.warning("%s", error)
            self._unwritten.forget(job)
        with explained(self._path):
            touch(self._connection)  # where nothing waited: does it take anything?
        self._names.check()
        self._unwritten.worked()

    @contextmanager
    def _noticed(self) -> Iterator[None]:
        """Keeps count of what becomes of a use of the file, and tells it in `health`."""
        try:
            yield
        except LedgerError as error:
            self._unwritten.failed(error.reason, str(error))
            raise
        finally:
            self._tell()

    def _tell(self) -> None:
        health = LedgerHealth(
            problem=self._unwritten.problem,
            unwritten=tuple(self._unwritten),
            unreadable=tuple(sorted(self._unreadable.values())),
        )
        if health.problem is None and self.health.problem is not None:
            _log.info("the ledger takes what is written again")
        self.health = health  # whole at once: the event loop reads it

    def _next_id(self, stem: str, takes: Callable[[Path], bool]) -> str:
        while True:
            (number,) = self._connection.execute(
                "INSERT INTO stems VALUES (?, 1) ON CONFLICT DO UPDATE SET last = last + 1 RETURNING last", (stem,)
            ).fetchone()
            job = f"{stem}-{number}"
            if not self._is_known(job) and takes(self._runs_path / job):
                return job

    def _is_known(self, job: str) -> bool:
        return self._connection.execute("SELECT 1 FROM jobs WHERE job = ?", (job,)).fetchone() is not None

    def _select(self, clause: str, *arguments: str | float) -> list[JobRow]:
        with explained(self._path):
            rows = self._connection.execute(f"SELECT * FROM jobs {clause}", arguments).fetchall()
        return [row for row in map(self._read, rows) if row is not None]

    def _read(self, columns: sqlite3.Row) -> JobRow | None:
        """The job with its unwritten changes; None for a row that makes no sense."""
        try:
            row = job_row(columns)
        except ValueError as error:
            if columns["seq"] not in self._unreadable:
                name = str(columns["job"]).encode("ascii", "backslashreplace").decode()
                self._unreadable[columns["seq"]] = name
                _log.error("the row of job %s cannot be read and is set aside, as it is: %s", name, error)
                self._tell()
            return None
        return replace(row, **self._unwritten.of(row.job))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with explained(self._path):
            self._names.mark_open(self._connection)
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._names.commit(self._connection)
                self._unwritten.worked()
            finally:
                if self._connection.in_transaction:  # not committed; a full disk can have rolled it back already
                    self._connection.execute("ROLLBACK")


class AsyncLedger:
    """A Ledger in a thread of its own: `await ledger.run(Ledger.record, job, state=JobState.RUNNING)`.

    Calls are done one at a time, in the order in which they were made. A caller that is cancelled while it waits
    doesn't undo its call. Raises what the Ledger raises.
    """

    def __init__(self, ledger: Ledger, executor: ThreadPoolExecutor) -> None:
        self._ledger = ledger
        self._executor = executor

    @classmethod
    async def open(cls, path: Path, runs_path: Path, *, accept_empty: bool = False) -> Self:
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        with ExitStack() as undoing:
            undoing.callback(executor.shutdown, wait=False)
            ledger = await asyncio.get_running_loop().run_in_executor(
                executor, lambda: Ledger.open(path, runs_path, accept_empty=accept_empty)
            )
            undoing.pop_all()
        return cls(ledger, executor)

    @property
    def health(self) -> LedgerHealth:
        """As of the newest call that is done."""
        return self._ledger.health

    async def run(self, method: Callable[Concatenate[Ledger, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a Ledger method in the ledger's thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: method(self._ledger, *args, **kwargs)
        )

    async def close(self) -> None:
        """Returns when all calls are done, the file is closed and the thread has ended."""
        try:
            await self.run(Ledger.close)
        finally:
            self._executor.shutdown(wait=True)


def _job_ended(job: str, state: str, ended_at: float | None, changes: Mapping[str, Any]) -> JobEnded:
    return JobEnded(f"job {job!r} ended as {state} at {ended_at}; it cannot take {dict(changes)!r}")


def _difference(existing: JobRow, uid: int, priority: int, spec: dict[str, Any]) -> str:
    """In words; "" where the same user submits the same spec. priority: as it counts, whatever the spec has."""
    if existing.uid != uid:
        return f"of uid {existing.uid}, and this one of uid {uid}"
    own = {"priority": existing.priority}, {"priority": priority}
    return what_differs(existing.spec, spec) or what_differs(*own)


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))
