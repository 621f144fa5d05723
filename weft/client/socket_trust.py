"""Whether a socket is our daemon's: looked at before a byte is sent, since a job's spec is nobody else's.

Without XDG_RUNTIME_DIR the daemon's directory is /tmp/weft-UID, which any user of the machine can make first. So its
directory must be ours alone to write (ours or root's, and so must a link to it be), the socket ours or root's, and the
process that listens, too: the kernel says whose it was when it began to (SO_PEERCRED). systemd's sockets pass: they are
made by the user's own manager, or by root.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

from weft.client.conversation import UntrustedSocket

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def check_socket_path(path: Path) -> None:
    """Raises UntrustedSocket. What is not there is for the connecting to tell."""
    directory = path.parent
    with suppress(FileNotFoundError):
        for found in (directory.lstat(), directory.stat()):
            _check_owner(directory, found.st_uid)
        _check_mode(directory, stat.S_IMODE(found.st_mode))
        _check_owner(path, path.lstat().st_uid)


def _check_mode(directory: Path, mode: int) -> None:
    if mode & 0o022:
        raise UntrustedSocket(
            f"{directory}: mode {mode:04o} lets other users put a socket there; chmod 700 it if it is your daemon's, "
            "or set WEFT_RUNTIME_DIR to a directory of your own"
        )


def check_peer(path: Path, connection: socket.socket) -> None:
    """After the connection is made and before anything is sent. Raises UntrustedSocket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    _check_owner(path, uid, "a process of uid {} listens there")


def _check_owner(path: Path, uid: int, problem: str = "belongs to uid {}") -> None:
    if uid not in (os.geteuid(), 0):
        raise UntrustedSocket(
            f"{path}: {problem.format(uid)}, and nothing is sent to other users; set WEFT_RUNTIME_DIR to the directory "
            "of your own daemon, and give the daemon the same"
        )
