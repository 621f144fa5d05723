"""What a job's code may put in the place of a file of its run directory. Modules take it with `runpy`."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

SECRET = "nobody may see this\n"  # of the file elsewhere that links lead to
STRANGER = 12345  # a uid that is not ours


def _directory(path: Path, secret: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("x")


def _socket(path: Path, secret: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has 107 bytes
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def _stranger(path: Path, secret: Path) -> None:
    path.write_bytes(b"{}\n")
    os.chown(path, STRANGER, STRANGER)


def _no_permission(path: Path, secret: Path) -> None:
    path.write_bytes(b"{}\n")
    path.chmod(0)


def _sparse(path: Path, secret: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


# Each is given the place, which is empty, and the path of a file elsewhere.
KINDS: dict[str, Callable[[Path, Path], object]] = {
    "gone": lambda path, secret: None,
    "empty": lambda path, secret: path.touch(),
    "garbage": lambda path, secret: path.write_bytes(bytes(range(256)) * 16),
    "sparse": _sparse,
    "directory": _directory,
    "fifo": lambda path, secret: os.mkfifo(path),
    "socket": _socket,
    "loop": lambda path, secret: path.symlink_to(path.name),
    "dangling link": lambda path, secret: path.symlink_to("nowhere"),
    "link": lambda path, secret: path.symlink_to(secret),
    "link to a device": lambda path, secret: path.symlink_to("/dev/zero"),
    "no permission": _no_permission,
}
if os.geteuid() == 0:
    KINDS["another user's"] = _stranger

FOREIGN = frozenset(
    {"directory", "fifo", "socket", "loop", "dangling link", "link", "link to a device", "another user's"}
)


def clear(path: Path) -> None:
    """Whatever stands there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put(kind: str, path: Path, secret: Path) -> None:
    clear(path)
    KINDS[kind](path, secret)
