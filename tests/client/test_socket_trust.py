"""A client sends nothing to a socket that another user may have put there. As root, who can play that user."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.client.client import AsyncClient, Client, RequestRefused

STRANGER = 65534
SPEC = {"job": {"entry": "digits.py:workload"}}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")

# Listens as another user, and tells how many bytes the first client sent. Listening is what counts: SO_PEERCRED.
LISTENER = f"""
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
for path in sys.argv[2:]:
    os.chown(path, {STRANGER}, {STRANGER}, follow_symlinks=False)
os.setuid({STRANGER})
listener.listen()
print("listens", flush=True)
connection, _ = listener.accept()
print(len(connection.recv(1 << 16)), flush=True)
"""


@contextmanager
def listening(path: Path, *strangers: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LISTENER, str(path), *map(str, strangers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "listens\n"
            yield process
        finally:
            process.kill()


def blocking(path: Path) -> Any:
    return Client(path).submit(SPEC)


def awaited(path: Path) -> Any:
    return asyncio.run(AsyncClient(path).submit(SPEC))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "weft").mkdir(mode=0o700)
    return tmp_path / "weft" / "weft.sock"


@pytest.mark.parametrize("submit", [blocking, awaited])
def test_a_process_of_another_user_gets_not_a_byte(path: Path, submit: Callable[[Path], Any]) -> None:
    # Without XDG_RUNTIME_DIR another user can make /tmp/weft-UID/weft.sock; the client sent it the job's spec.
    with listening(path) as stranger:
        with pytest.raises(RequestRefused, match=rf"{path}: a process of uid {STRANGER} listens there") as refused:
            submit(path)
        assert refused.value.code == "not-yours"
        assert "set WEFT_RUNTIME_DIR" in refused.value.message
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "0\n"


@pytest.mark.parametrize("submit", [blocking, awaited])
def test_a_directory_or_a_socket_of_another_user_is_not_even_connected_to(
    path: Path, submit: Callable[[Path], Any]
) -> None:
    with listening(path, path.parent), pytest.raises(RequestRefused, match=f"{path.parent}: belongs to uid {STRANGER}"):
        submit(path)
    os.chown(path.parent, 0, 0)
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(RequestRefused, match=f"{path}: belongs to uid {STRANGER}"):
        submit(path)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_directory_that_others_may_write_is_refused(path: Path, mode: int) -> None:
    path.parent.chmod(mode)
    path.touch()
    with pytest.raises(RequestRefused, match=rf"{path.parent}: mode {mode:04o} lets other users put a socket there"):
        Client(path).status()


def test_a_link_of_another_user_is_refused_wherever_it_leads(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path.parent)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(RequestRefused, match=f"{link}: belongs to uid {STRANGER}"):
        Client(link / "weft.sock").status()


def test_the_command_line_ends_with_77_and_says_what_to_do(path: Path) -> None:
    environment = os.environ | {"WEFT_RUNTIME_DIR": str(path.parent)}
    with listening(path):
        command = [sys.executable, "-m", "weft", "ps"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180.0)
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr.startswith(f"weft: {path}: a process of uid {STRANGER} listens there")
