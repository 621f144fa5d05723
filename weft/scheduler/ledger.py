"""The ledger: the SQLite file in which the daemon keeps jobs. Shell; one thread, off the event loop.

It guarantees:
- a call that has returned is on disk (WAL with synchronous=FULL): a submit is acknowledged after `add`, and not before;
- a submit is whole or absent, and the same submit under the same id is one job, however often it is sent;
- a terminal job never changes again, and a generated id is never given twice;
- one process at a time holds the file (SQLite's exclusive lock, which the kernel drops however the process ends), so
  two daemons with different runtime directories cannot run the same job.

It knows nothing of scheduling: which state may follow which is the core's business, except that terminal is final.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar, Unpack

import msgpack

from weft.scheduler.job_id import check_job_id, stem_of
from weft.scheduler.job_state import UNFINISHED_STATES, JobState
from weft.scheduler.spec_difference import what_differs

SCHEMA_VERSION = 1
_SCHEMA = f"""
CREATE TABLE jobs (
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,  -- submit order
    job          TEXT NOT NULL UNIQUE,
    spec         BLOB NOT NULL,                      -- msgpack map
    uid          INTEGER NOT NULL,
    priority     INTEGER NOT NULL,
    state        TEXT NOT NULL,
    reason       TEXT,
    error        TEXT,
    exit_code    INTEGER,
    attempt      INTEGER NOT NULL DEFAULT 0,
    submitted_at REAL NOT NULL,                      -- unix seconds
    started_at   REAL,
    ended_at     REAL,
    step         INTEGER NOT NULL DEFAULT 0,
    loss         REAL,
    result       TEXT,                               -- JSON
    run_dir      TEXT NOT NULL
);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE stems (stem TEXT PRIMARY KEY, last INTEGER NOT NULL);  -- counters of generated ids
PRAGMA user_version = {SCHEMA_VERSION};
"""

P = ParamSpec("P")
T = TypeVar("T")


class LedgerError(RuntimeError):
    """The ledger's file cannot be used or written. The text names the file and the remedy."""


class IdTaken(ValueError):
    """The id is that of another job: another spec, or another user's."""


class JobEnded(RuntimeError):
    """A change of a job that is in a terminal state. The text tells the job's end and the change."""


class UnknownJob(LookupError):
    """A change of a job that was never added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as the ledger has it. Times are unix seconds; spec is `JobSpec.to_wire`; loss is None before the first
    step, and where it was not a number (SQLite has no NaN)."""

    seq: int
    job: str
    spec: dict[str, Any]
    uid: int
    priority: int
    state: JobState
    reason: str | None
    error: str | None
    exit_code: int | None
    attempt: int
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    step: int
    loss: float | None
    result: dict[str, Any] | None
    run_dir: str


@dataclass(frozen=True, slots=True)
class Submission:
    """What `add` did: the job's row, and whether it is a new one."""

    row: JobRow
    is_new: bool


class JobChanges(TypedDict, total=False):
    """What `record` may change."""

    priority: int
    state: JobState
    reason: str | None
    error: str | None
    exit_code: int | None
    attempt: int
    started_at: float | None
    ended_at: float | None
    step: int
    loss: float | None
    result: dict[str, Any] | None


class Ledger:
    """Jobs on disk. Synchronous, and confined to the thread that opened it (sqlite3 raises elsewhere).

    Every method raises LedgerError where the file fails (disk full, I/O error); nothing is then half-written.
    """

    def __init__(self, path: Path, runs_path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._runs_path = runs_path
        self._connection = connection

    @classmethod
    def open(cls, path: Path, runs_path: Path) -> Self:
        """Opens or creates the file (0600, in a directory made 0700); jobs run in `runs_path`/ID.

        Raises LedgerError for a file that is damaged, not a ledger, of a newer Weft, or held by another daemon.
        """
        path = path.absolute()
        with _explained(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            with ExitStack() as undoing:
                connection = sqlite3.connect(path, timeout=0, isolation_level=None)
                undoing.callback(connection.close)
                _prepare(connection, path)
                undoing.pop_all()
        return cls(path, runs_path.absolute(), connection)

    def add(
        self, spec: Mapping[str, Any], *, uid: int, priority: int, submitted_at: float, job: str | None = None
    ) -> Submission:
        """A new queued job, on disk when this returns; or the job of that id, if it has the same spec and owner.

        `job` is the user's id; without one it is `<entry's file>-<n>`. Raises InvalidJobId and IdTaken.
        """
        spec_blob = msgpack.packb(dict(spec))
        with self._transaction():
            if job is None:
                job = self._next_id(stem_of(spec["job"]["entry"]))
            elif (existing := self.job(check_job_id(job))) is not None:
                differs = what_differs(existing.spec, msgpack.unpackb(spec_blob))
                if existing.uid != uid:
                    differs = f"of uid {existing.uid}, and this one of uid {uid}"
                if differs:
                    raise IdTaken(
                        f"id: {job!r} is another job's ({differs}); give another id, or none to have one generated"
                    )
                return Submission(existing, is_new=False)
            self._connection.execute(
                "INSERT INTO jobs (job, spec, uid, priority, state, submitted_at, run_dir)"
                " VALUES (?, ?, ?, ?, 'queued', ?, ?)",
                (job, spec_blob, uid, priority, submitted_at, str(self._runs_path / job)),
            )
            (row,) = self._select("WHERE job = ?", job)
        return Submission(row, is_new=True)

    def record(self, job: str, **changes: Unpack[JobChanges]) -> None:
        """Changes a job's columns. Raises JobEnded if the job is in a terminal state already, UnknownJob if absent."""
        unknown = changes.keys() - JobChanges.__annotations__.keys()
        if unknown or not changes:
            raise TypeError(f"record takes one or more of {', '.join(JobChanges.__annotations__)}, not {unknown}")
        values: dict[str, Any] = dict(changes)
        if "state" in values:
            values["state"] = JobState(values["state"])
        if values.get("result") is not None:
            values["result"] = json.dumps(values["result"])
        columns = ", ".join(f"{column} = ?" for column in values)
        with self._transaction():
            row = self.job(job)
            if row is None:
                raise UnknownJob(f"job {job!r} is not in the ledger; only a job that was added can change")
            if row.state.is_terminal:
                raise JobEnded(f"job {job!r} ended as {row.state} at {row.ended_at}; it cannot take {dict(changes)!r}")
            self._connection.execute(f"UPDATE jobs SET {columns} WHERE job = ?", (*values.values(), job))

    def job(self, job: str) -> JobRow | None:
        rows = self._select("WHERE job = ?", job)
        return rows[0] if rows else None

    def jobs(self, *, limit: int = 100, states: Collection[JobState] = tuple(JobState)) -> list[JobRow]:
        """The newest `limit` jobs in any of `states`, newest first."""
        return self._select(f"WHERE state IN ({_marks(states)}) ORDER BY seq DESC LIMIT ?", *states, limit)

    def unfinished(self) -> list[JobRow]:
        """The jobs that a restart requeues, in the order in which they run: higher priority, then earlier submit."""
        states = sorted(UNFINISHED_STATES)
        return self._select(f"WHERE state IN ({_marks(states)}) ORDER BY priority DESC, seq", *states)

    def counts_by_state(self) -> dict[JobState, int]:
        """Every state is a key."""
        with _explained(self._path):
            rows = self._connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()
        return dict.fromkeys(JobState, 0) | {JobState(state): count for state, count in rows}

    def close(self) -> None:
        """Folds the write-ahead log into the file and gives up the lock. May be called twice."""
        with _explained(self._path):
            self._connection.close()

    def _next_id(self, stem: str) -> str:
        # Skips ids that a user chose, and those whose run directory outlived a ledger that was moved aside.
        while True:
            (number,) = self._connection.execute(
                "INSERT INTO stems VALUES (?, 1) ON CONFLICT DO UPDATE SET last = last + 1 RETURNING last", (stem,)
            ).fetchone()
            job = f"{stem}-{number}"
            if self.job(job) is None and not (self._runs_path / job).exists():
                return job

    def _select(self, clause: str, *arguments: str | int) -> list[JobRow]:
        with _explained(self._path):
            rows = self._connection.execute(f"SELECT * FROM jobs {clause}", arguments).fetchall()
        return [_job_row(row) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _explained(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
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
    async def open(cls, path: Path, runs_path: Path) -> Self:
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        with ExitStack() as undoing:
            undoing.callback(executor.shutdown, wait=False)
            ledger = await asyncio.get_running_loop().run_in_executor(executor, Ledger.open, path, runs_path)
            undoing.pop_all()
        return cls(ledger, executor)

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


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    (damage,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if damage != "ok":
        raise sqlite3.DatabaseError(damage)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"{path}: written by a newer Weft (schema {version}, this one knows {SCHEMA_VERSION}); "
            "start that version, or give another state_dir"
        )
    if version == 0 and num_tables:
        raise LedgerError(f"{path}: a database of something else, not a Weft ledger; give another state_dir")
    if version == 0:
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns what SQLite and the file system raise into a LedgerError that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"{path}: cannot be opened ({error.strerror}); give a state_dir that you can write"
        ) from error
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LedgerError(f"{path}: held by another daemon; stop that one, or give another state_dir") from error
        raise LedgerError(f"{path}: cannot be used ({error}); check that its disk is there and not full") from error
    except sqlite3.DatabaseError as error:
        if type(error) is not sqlite3.DatabaseError:  # its other subclasses are mistakes of ours
            raise
        raise LedgerError(
            f"{path}: damaged or not a ledger ({error}); move it and its -wal file aside and start again: "
            "its jobs are then unknown, their run directories stay"
        ) from error


def _job_row(row: sqlite3.Row) -> JobRow:
    columns = dict(row)
    columns["spec"] = msgpack.unpackb(columns["spec"])
    columns["state"] = JobState(columns["state"])
    columns["result"] = None if columns["result"] is None else json.loads(columns["result"])
    return JobRow(**columns)


def _marks(values: Collection[str]) -> str:
    return ", ".join("?" * len(values))
