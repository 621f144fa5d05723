"""What there is of a daemon: its directory, lock and socket as they lie on disk, and its workers where it answers.

Only looks: nothing is made, locked, narrowed or removed, as `weft.transport.wire.runtime_directory` would.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.client.client import Client, DaemonUnreachable, RequestRefused
from weft.spec.settings import Settings
from weft.transport.wire.frames import Message
from weft.transport.wire.runtime_directory import LOCK_NAME, SOCKET_NAME, is_refused

ANSWER_SECONDS = 5.0  # a daemon answers in milliseconds; one that systemd starts for us takes a second or two


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeDirectoryFacts:
    path: str
    kind: Literal["absent", "directory", "link", "file"]
    owner: int | None = None
    mode: int | None = None  # permission bits
    sticky: bool = False
    others: tuple[str, ...] | None = ()  # names in it that are not Weft's; None where it cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFacts:
    path: str
    exists: bool
    writable: bool  # by us, or where it has yet to be made, whether it can be
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    runtime_dir: RuntimeDirectoryFacts
    state_dir: StorageFacts
    runs_dir: StorageFacts
    socket: Literal["absent", "answers", "stale", "silent", "file"]  # stale: nobody behind it; silent: no daemon
    why: str | None  # how it is silent
    lock_pid: int | None  # what stands in the lock file
    lock_held: bool  # whether that process holds the lock
    status: Message | None  # the daemon's answer


def read_daemon(settings: Settings) -> DaemonFacts:
    directory = settings.runtime_dir
    kind, status, why = _ask(settings.socket_path)
    pid, held = _lock(directory / LOCK_NAME)
    told = status or {}  # one that runs may have been started with others
    return DaemonFacts(
        runtime_dir=_runtime_directory(directory),
        state_dir=_storage(Path(told.get("state_dir", settings.state_dir))),
        runs_dir=_storage(Path(told.get("runs_dir", settings.runs_path))),
        socket=kind,
        why=why,
        lock_pid=pid,
        lock_held=held,
        status=status,
    )


def _ask(path: Path) -> tuple[Literal["absent", "answers", "stale", "silent", "file"], Message | None, str | None]:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return "absent", None, None
    if not stat.S_ISSOCK(mode):
        return "file", None, None
    if is_refused(path):
        return "stale", None, None
    try:
        return "answers", Client(path, timeout=ANSWER_SECONDS).status(), None
    except DaemonUnreachable as error:
        return "silent", None, str(error).partition("; start the daemon")[0]
    except RequestRefused as refusal:
        return "silent", None, refusal.message


def _lock(path: Path) -> tuple[int | None, bool]:
    """The pid in the lock file, and whether /proc/locks has that process hold a lock on that file."""
    try:
        text, inode = path.read_text(encoding="utf-8").strip(), path.stat().st_ino
    except (OSError, UnicodeDecodeError):
        return None, False
    if not text.isdigit():
        return None, False
    try:
        locks = Path("/proc/locks").read_text(encoding="utf-8")
    except OSError:
        locks = ""
    held = re.search(rf"\bFLOCK\s+ADVISORY\s+WRITE\s+{int(text)}\s+\w+:\w+:{inode}\b", locks)
    return int(text), held is not None


def _runtime_directory(path: Path) -> RuntimeDirectoryFacts:
    try:
        status = path.lstat()
    except OSError:
        return RuntimeDirectoryFacts(path=str(path), kind="absent")
    if not stat.S_ISDIR(status.st_mode):
        return RuntimeDirectoryFacts(path=str(path), kind="link" if stat.S_ISLNK(status.st_mode) else "file")
    try:
        others = tuple(sorted(set(os.listdir(path)) - {LOCK_NAME, SOCKET_NAME}))
    except OSError:
        others = None
    return RuntimeDirectoryFacts(
        path=str(path),
        kind="directory",
        owner=status.st_uid,
        mode=status.st_mode & 0o777,
        sticky=bool(status.st_mode & stat.S_ISVTX),
        others=others,
    )


def _storage(path: Path) -> StorageFacts:
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    return StorageFacts(
        path=str(path),
        exists=there == path,
        writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(there).free,
    )
