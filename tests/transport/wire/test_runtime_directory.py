"""One daemon for each runtime directory: what is in the way is refused with a clear error, and the first keeps serving.

Real directories, locks, sockets and processes; F11 of the promises is here.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.spec.settings import Settings
from weft.transport.wire.runtime_directory import (
    LOCK_NAME,
    MAX_PATH_BYTES,
    SOCKET_NAME,
    RuntimeDirectory,
    RuntimeDirectoryError,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "weft"


@pytest.fixture
def first(path: Path) -> Iterator[RuntimeDirectory]:
    directory = RuntimeDirectory.open(path)
    yield directory
    directory.close()


def is_served(directory: RuntimeDirectory, path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path / SOCKET_NAME))
        connection, _ = directory.listener.accept()
        connection.close()
    return True


def refusal(path: Path, inherited_fd: int | None = None) -> str:
    """The error of opening, which must leave no descriptor behind."""
    fds = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeDirectoryError) as refused:
        RuntimeDirectory.open(path, inherited_fd)
    assert set(os.listdir("/proc/self/fd")) <= fds
    return str(refused.value)


def test_the_directory_is_made_locked_and_served_for_its_owner_alone(first: RuntimeDirectory, path: Path) -> None:
    assert is_served(first, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / SOCKET_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE((path / LOCK_NAME).stat().st_mode) == 0o600
    assert (path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    assert not first.listener.getblocking()
    assert not first.listener.get_inheritable()


def test_the_socket_is_where_the_settings_say(path: Path) -> None:
    assert Settings(runtime_dir=path).socket_path == path / SOCKET_NAME


def test_closing_leaves_nothing_and_may_be_repeated(path: Path) -> None:
    directory = RuntimeDirectory.open(path)
    directory.close()
    directory.close()
    assert list(path.iterdir()) == []
    RuntimeDirectory.open(path).close()


def test_a_second_daemon_is_refused_with_the_pid_of_the_first_which_keeps_serving(
    first: RuntimeDirectory, path: Path
) -> None:
    told = refusal(path)
    assert f"a daemon (pid {os.getpid()}) has this directory; use it, stop it, or give another runtime_dir" in told
    assert "(one that is told to stop drains first, and has it until its jobs end, at most drain_seconds)" in told
    assert is_served(first, path)
    assert (path / LOCK_NAME).exists()


def test_a_live_socket_is_not_taken_over_when_someone_removed_the_lock_file(
    first: RuntimeDirectory, path: Path
) -> None:
    # Cleaners of /tmp remove old files; a new lock file is free although the first daemon lives.
    (path / LOCK_NAME).unlink()
    assert "something answers there, although daemon.lock is free" in refusal(path)
    assert is_served(first, path)


def test_a_socket_that_clients_do_not_find_any_more_is_told_with_the_remedy(
    first: RuntimeDirectory, path: Path
) -> None:
    first.check()
    (path / LOCK_NAME).unlink()
    first.check()  # clients need no lock
    shutil.rmtree(path)
    with pytest.raises(
        RuntimeDirectoryError, match=rf"{path / SOCKET_NAME}: .* \(pid {os.getpid()}\) is gone.* start it"
    ):
        first.check()
    path.parent.rmdir()
    path.parent.write_text("")
    with pytest.raises(RuntimeDirectoryError, match="is gone"):
        first.check()


def test_a_directory_that_another_daemon_has_made_anew_is_that_ones(first: RuntimeDirectory, path: Path) -> None:
    shutil.rmtree(path)
    second = RuntimeDirectory.open(path)
    (path / "directory-1.sock").touch()
    with pytest.raises(RuntimeDirectoryError, match="is another one"):
        first.check()
    with pytest.raises(RuntimeDirectoryError, match=rf"a daemon \(pid {os.getpid()}\) has this directory"):
        first.make_again()
    first.close()
    second.check()
    assert is_served(second, path)
    assert {each.name for each in path.iterdir()} == {LOCK_NAME, SOCKET_NAME, "directory-1.sock"}
    second.close()
    assert list(path.iterdir()) == []


def test_a_directory_that_is_made_again_is_kept_from_others_until_it_is_closed(
    first: RuntimeDirectory, path: Path
) -> None:
    first.make_again()
    assert is_served(first, path)
    shutil.rmtree(path)
    first.make_again()
    assert f"a daemon (pid {os.getpid()}) has this directory" in refusal(path)
    first.close()
    assert list(path.iterdir()) == []
    RuntimeDirectory.open(path).close()


HOLDER = """
import sys
from pathlib import Path
from weft.transport.wire.runtime_directory import RuntimeDirectory
directory = RuntimeDirectory.open(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_daemon_left_is_taken_over(path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert f"a daemon (pid {process.pid}) has this directory" in refusal(path)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert {file.name for file in path.iterdir()} == {LOCK_NAME, SOCKET_NAME}
    directory = RuntimeDirectory.open(path)
    assert is_served(directory, path)
    directory.close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [(SOCKET_NAME, "file")]  # for a lock, a file is what belongs there
    + [(name, kind) for name in (SOCKET_NAME, LOCK_NAME) for kind in ("directory", "link", "dangling link", "fifo")],
)
def test_what_stands_in_the_place_of_socket_or_lock_is_refused_and_left_alone(path: Path, name: str, kind: str) -> None:
    path.mkdir(mode=0o700, parents=True)
    (path / "elsewhere").write_text("precious")
    match kind:
        case "file":
            (path / name).write_text("precious")
        case "directory":
            (path / name).mkdir()
        case "link":
            (path / name).symlink_to("elsewhere")
        case "dangling link":
            (path / name).symlink_to("nowhere")
        case "fifo":
            os.mkfifo(path / name)
    before = (path / name).lstat()
    assert f"{path / name}: " in (text := refusal(path))
    assert "move" in text
    assert os.path.samestat((path / name).lstat(), before)
    assert (path / "elsewhere").read_text() == "precious"
    assert not (path / "nowhere").exists()


def test_a_refused_daemon_leaves_no_lock_file(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True)
    (path / SOCKET_NAME).write_text("")
    refusal(path)
    assert [file.name for file in path.iterdir()] == [SOCKET_NAME]


def test_a_disk_that_takes_no_lock_file_is_told_with_the_remedy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error named no file, and ended the daemon with another exit code than one that cannot start."""

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    told = "cannot be written (No space left on device); make room, or give another runtime_dir"
    assert refusal(path) == f"{path / LOCK_NAME}: {told}"
    assert list(path.iterdir()) == []


def test_a_link_in_the_directorys_place_is_refused(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(tmp_path)
    assert f"{path}: is a symbolic link; give another runtime_dir" in refusal(path)


def test_a_file_in_the_directorys_place_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("")
    assert f"{path}: cannot be made" in refusal(path)


def test_a_directory_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir(mode=0o700, parents=True)
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    assert f"belongs to uid {us}, not to {us + 1}; give a runtime_dir of your own" in refusal(path)


def test_a_directory_open_to_others_is_narrowed_if_it_is_wefts_alone(path: Path) -> None:
    path.mkdir(parents=True)
    path.chmod(0o755)
    RuntimeDirectory.open(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_shared_directory_is_never_narrowed(path: Path) -> None:
    # runtime_dir = "/tmp" given to root would otherwise close /tmp to everyone.
    path.mkdir(parents=True)
    path.chmod(0o1777)
    assert "chmod it to 0700, or give another runtime_dir" in refusal(path)
    path.chmod(0o755)
    (path / "theirs").write_text("")
    assert "not Weft's alone" in refusal(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_a_directory_that_cannot_be_narrowed_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(_fd: int, _mode: int) -> None:
        raise OSError(30, "Read-only file system")

    path.mkdir(parents=True)
    path.chmod(0o750)
    monkeypatch.setattr(os, "fchmod", read_only)
    assert "cannot be made 0700 (Read-only file system)" in refusal(path)


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    room = MAX_PATH_BYTES - len(os.fsencode(tmp_path)) - len("/")
    longest = tmp_path / ("x" * room)
    RuntimeDirectory.open(longest).close()
    too_long = tmp_path / ("y" * (room + 1))
    assert (
        "85 bytes, and at most 84 leave room for the paths of the sockets in it; give a shorter runtime_dir"
        in refusal(too_long)
    )
    assert not too_long.exists()


def test_an_inherited_socket_is_used_and_not_unlinked(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / SOCKET_NAME))
        listener.listen()
        directory = RuntimeDirectory.open(path, inherited_fd=os.dup(listener.fileno()))
        assert is_served(directory, path)
        directory.close()
        assert [file.name for file in path.iterdir()] == [SOCKET_NAME]


def test_a_second_daemon_with_an_inherited_socket_is_refused_too(first: RuntimeDirectory, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path.parent / "other.sock"))
        listener.listen()
        fd = os.dup(listener.fileno())
        with pytest.raises(RuntimeDirectoryError, match=f"pid {os.getpid()}"):
            RuntimeDirectory.open(path, inherited_fd=fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert is_served(first, path)


ACTIVATED = """
import os, sys
from pathlib import Path
from weft.scheduler.daemon.notify import listen_fds
from weft.transport.wire.runtime_directory import RuntimeDirectory
(fd,) = listen_fds(os.environ, os.getpid())
directory = RuntimeDirectory.open(Path(sys.argv[1]), inherited_fd=fd)
connection, _ = directory.listener.accept()
connection.sendall(b"hello")
directory.close()
"""


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="systemd-socket-activate is not installed")
def test_a_client_that_connects_before_the_daemon_runs_is_served_by_socket_activation(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True)
    name = str(path / SOCKET_NAME)
    command = ["systemd-socket-activate", "-l", name, sys.executable, "-c", ACTIVATED, str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Listening on")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
            assert client.recv(16) == b"hello"
    assert process.returncode == 0
    assert [file.name for file in path.iterdir()] == [SOCKET_NAME]


def test_an_inherited_descriptor_that_does_not_listen_is_refused(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as idle, socket.create_server(("127.0.0.1", 0)) as tcp:
        reader, writer = os.pipe()
        for fd in (os.dup(idle.fileno()), os.dup(tcp.fileno()), os.dup(reader)):
            assert "is not a listening Unix stream socket; write ListenStream=<path>" in refusal(path, fd)
        os.close(reader)
        os.close(writer)
