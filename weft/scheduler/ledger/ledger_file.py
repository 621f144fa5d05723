"""The ledger's file: how it is opened, how a loss of it is noticed, and what its errors are called.

    ledger.sqlite         the database
    ledger.sqlite-wal     what has been committed and not yet folded into it; the newest rows may stand here alone
    ledger.sqlite-open    the mark: `new` before there is a row, `open N` while a daemon has it or once it lost it; N
                          changes were committed

SQLite takes an empty database for a new one, one without its write-ahead log for a complete one, and reads a log that
was cut short as far as it is whole: each time acknowledged jobs would be forgotten without a word. The mark tells a
loss from a beginning. It is on disk before a row can be, and goes only when every row is in the database itself. Its
number is written behind the commit, so it is never above what is on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from weft.machine.run_file import sync

SCHEMA_VERSION = 1
_COMMITS = "CREATE TABLE IF NOT EXISTS commits (number INTEGER NOT NULL)"  # one row; ledgers of old have none
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
{_COMMITS};
PRAGMA user_version = {SCHEMA_VERSION};
"""

_NEW, _OPEN = b"new\n", b"open %020d\n"  # what the mark says
_REASONS = {
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_IOERR: "io",
    sqlite3.SQLITE_CANTOPEN: "cannot-open",
    sqlite3.SQLITE_READONLY: "read-only",
    sqlite3.SQLITE_BUSY: "held",
    sqlite3.SQLITE_LOCKED: "held",
}
_FLOCK = "@hhqqi4x"  # struct flock: type, whence, start, length, pid
_REASONS_OF_ERRNO = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EIO: "io", errno.EROFS: "read-only"}


class LedgerError(RuntimeError):
    """The ledger's file cannot be used or written. The text names the file and the remedy; reason is one of
    `_REASONS`, "damaged", "lost" or "other"."""

    def __init__(self, text: str, reason: str = "other") -> None:
        super().__init__(text)
        self.reason = reason


def open_file(path: Path, runs_path: Path, *, accept_empty: bool = False) -> sqlite3.Connection:
    """Opens or creates the database (0600, in a directory made 0700).

    accept_empty: begin without the jobs of a ledger that is lost. Raises LedgerError for a file that is lost, damaged,
    not a ledger, of a newer Weft, or held by another daemon.
    """
    with explained(path, _holder):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_for_loss(path, runs_path, accept_empty)
        if not _size(path):
            _mark(path, _NEW)
            path.touch(mode=0o600)
        with ExitStack() as undoing:
            connection = sqlite3.connect(path, timeout=0, isolation_level=None)
            undoing.callback(connection.close)
            _prepare(connection, path, accept_empty)
            undoing.pop_all()
    return connection


class Names:
    """Which files a ledger's names mean. What is removed while a daemon has it open, or has another put in its place,
    takes what is written as before: it would be acknowledged, and be gone when the daemon ends."""

    def __init__(self, path: Path) -> None:
        """Of a database that has been opened."""
        self._path = path
        self._meant: dict[Path, tuple[int, int] | None] = {path: _file_at(path)}

    def mark_open(self, connection: sqlite3.Connection) -> None:
        """Before the first row is written: from here on the log is there and has something in it; an empty one is a
        loss. Not when the file is opened: a daemon starts on a full disk too, and serves what is in the ledger."""
        log = _log_of(self._path)
        if log not in self._meant:
            self.check()
            touch(connection)
            with explained(self._path):
                _mark(self._path, _OPEN % num_commits(connection))
                self._meant[log] = _file_at(log)

    def commit(self, connection: sqlite3.Connection) -> None:
        """What has been written since BEGIN. Errors: those of check, sqlite3.Error; then it is not committed."""
        self.check()
        number = num_commits(connection) + 1
        connection.execute(_COMMITS)
        connection.execute("DELETE FROM commits")
        connection.execute("INSERT INTO commits VALUES (?)", (number,))
        connection.execute("COMMIT")
        with suppress(OSError):  # a number that is too low tells less
            _write_mark(self._path, _OPEN % number)

    def check(self) -> None:
        """Raises LedgerError where one means another file by now, or none."""
        with explained(self._path):
            for path, meant in self._meant.items():
                if (found := _file_at(path)) != meant:
                    what = "is gone" if found is None else "is another file than the one that was opened"
                    raise LedgerError(
                        f"{path}: {what}, so that nothing can be kept; move the very file back, or stop the daemon, "
                        "bring a copy back and start it (without one, with --accept-empty-ledger: jobs that the file "
                        "alone knew are then unknown, their run directories stay)",
                        "lost",
                    )


def num_commits(connection: sqlite3.Connection) -> int:
    """Since they are counted."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'commits'").fetchone():
        return 0
    row = connection.execute("SELECT number FROM commits").fetchone()
    return 0 if row is None else int(row[0])


def touch(connection: sqlite3.Connection) -> None:
    """Writes, and changes nothing: whether the disk takes something. Errors: sqlite3.Error."""
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def close_file(connection: sqlite3.Connection, path: Path, names: Names) -> None:
    """Folds the write-ahead log into the database, takes the mark away and gives up the lock. May be called twice.

    Raises LedgerError, with the lock given up, where the file is gone or another; the mark stays then.
    """
    with explained(path):
        try:
            is_whole = _fold(connection)
        except sqlite3.ProgrammingError:  # closed before
            return
        try:
            names.check()
            if is_whole:
                _unmark(path)
        finally:
            connection.close()
        if not is_whole and _size(_log_of(path)) is None:  # SQLite has folded it after all
            _unmark(path)


def _fold(connection: sqlite3.Connection) -> bool:
    """Whether every row is in the database itself. On a full disk the log stays, and so does the mark."""
    try:
        busy, in_log, folded = connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
    except sqlite3.OperationalError:
        return False
    return not busy and in_log == folded


@contextmanager
def explained(path: Path, holder: Callable[[Path], str] = lambda path: "") -> Iterator[None]:
    """Turns what SQLite and the file system raise into a LedgerError that names the file and the remedy.

    holder: tells more of who has the file, where somebody has.
    """
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"{path}: cannot be opened ({error.strerror}); give a state_dir that you can write",
            _REASONS_OF_ERRNO.get(error.errno or 0, "cannot-open"),
        ) from error
    except sqlite3.OperationalError as error:
        reason = _REASONS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "other")
        if reason == "held":
            problem = f"held by another daemon{holder(path)}; stop that one, or give another state_dir"
        elif getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR:  # a table or a column is not there
            raise _damaged(path, error) from error
        else:
            problem = f"cannot be used ({error}); check that its disk is there and not full{_told_limit()}"
        raise LedgerError(f"{path}: {problem}", reason) from error
    except sqlite3.DatabaseError as error:
        if type(error) is not sqlite3.DatabaseError:  # its other subclasses are mistakes of ours
            raise
        raise _damaged(path, error) from error


def _damaged(path: Path, error: sqlite3.DatabaseError) -> LedgerError:
    return LedgerError(
        f"{path}: damaged or not a ledger ({error}); move it and its -wal file aside and start with "
        "--accept-empty-ledger: its jobs are then unknown, their run directories stay",
        "damaged",
    )


def _told_limit() -> str:
    """Of the size of files, which SQLite tells as an error of the disk."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most == resource.RLIM_INFINITY:
        return ""
    return f", or start the daemon after `ulimit -f unlimited`: no file may have more than {most >> 10} KiB here"


def _holder(path: Path) -> str:
    """The pid of the process whose lock keeps others out; empty where it is not to be seen from here.

    Only while this process has no connection to the file: that would lose its locks when the file is closed here.
    """
    try:
        with path.open("rb") as file:
            wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, wanted))
    except OSError:
        return ""
    return f" (pid {pid})" if kind != fcntl.F_UNLCK and pid > 0 else ""  # in another namespace it has none


def _check_for_loss(path: Path, runs_path: Path, accept_empty: bool) -> None:
    """Raises LedgerError where the database, or the rows that only its log had, are gone."""
    problem = _loss(path, runs_path)
    if problem is None:
        return
    if not accept_empty:
        raise LedgerError(
            f"{path}: {problem}; bring it back, or start with --accept-empty-ledger: jobs that it alone knew are then "
            "unknown, their run directories stay",
            "lost",
        )
    if not _size(path) and _size(_log_of(path)):  # SQLite would delete the log of an empty database
        os.replace(_log_of(path), path.with_name(f"{path.name}-wal.lost"))


def _loss(path: Path, runs_path: Path) -> str | None:
    mark, size, log_size = _read_mark(path), _size(path), _size(_log_of(path))
    if mark == _NEW:  # its making was cut off: no row was ever in it
        return None
    if size == 0:
        return "it has 0 bytes, and held the jobs of this state directory"
    if size is None and (mark or log_size):
        return f"it is gone, and {_mark_of(path).name if mark else _log_of(path).name} is still there"
    if size is None and _has_runs(path.parent, runs_path):
        return f"it is gone, and {runs_path} has run directories of its jobs"
    if size and mark and not log_size:
        what = "is gone" if log_size is None else "has 0 bytes"
        return f"its {_log_of(path).name} {what}, and has the newest jobs: the daemon before was killed"
    return None


def _check_is_newest(connection: sqlite3.Connection, path: Path, accept_empty: bool) -> None:
    """Raises LedgerError where changes that were committed are not there: of a log that was cut short or damaged, or in
    a copy from before."""
    _, _, told = _read_mark(path).partition(b" ")
    missing = (int(told) if told.strip().isdigit() else 0) - num_commits(connection)
    if missing <= 0 or accept_empty:
        return
    log, kept = _log_of(path), path.with_name(f"{path.name}-wal.kept")
    kept.unlink(missing_ok=True)
    os.link(log, kept)
    connection.close()  # SQLite folds what it can read of the log, and removes it
    os.replace(kept, log)
    raise LedgerError(
        f"{path}: the newest {missing} changes are missing, as in a {log.name} that was cut short or damaged; bring it "
        "back, or start with --accept-empty-ledger: what they told of jobs is then unknown, their run directories stay",
        "lost",
    )


def _has_runs(state_dir: Path, runs_path: Path) -> bool:
    """Runs elsewhere may be those of other ledgers."""
    return runs_path.is_relative_to(state_dir) and runs_path.is_dir() and any(runs_path.iterdir())


def _prepare(connection: sqlite3.Connection, path: Path, accept_empty: bool) -> None:
    connection.row_factory = sqlite3.Row
    connection.text_factory = _text
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA temp_store = MEMORY")  # no file is opened in the midst of a change
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
    _check_is_newest(connection, path, accept_empty)
    if version == 0:
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")


def _text(data: bytes) -> str:
    """A column's text; what is no UTF-8 in it spoils its own row, not the answer with all the others."""
    return data.decode("utf-8", "surrogateescape")


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _mark_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-open")


def _file_at(path: Path) -> tuple[int, int] | None:
    """Its device and inode."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _read_mark(path: Path) -> bytes:
    try:
        return _mark_of(path).read_bytes()
    except FileNotFoundError:
        return b""


def _mark(path: Path, text: bytes) -> None:
    """On disk when it returns, and so is the name of every file beside it."""
    _write_mark(path, text, to_disk=True)
    sync(path.parent)


def _write_mark(path: Path, text: bytes, *, to_disk: bool = False) -> None:
    fd = os.open(_mark_of(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))
        if to_disk:
            os.fsync(fd)
    finally:
        os.close(fd)


def _unmark(path: Path) -> None:
    _mark_of(path).unlink(missing_ok=True)
    sync(path.parent)
