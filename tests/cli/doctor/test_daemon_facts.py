"""What lies on disk of a daemon, and what it answers: real directories, locks and sockets."""

from __future__ import annotations

import os
import runpy
import socket
from pathlib import Path
from typing import Any

import pytest

from weft.cli.doctor.daemon_facts import DaemonFacts, read_daemon
from weft.spec.settings import Settings
from weft.transport.wire.runtime_directory import LOCK_NAME, SOCKET_NAME, RuntimeDirectory

_SCRIPTED = runpy.run_path(str(Path(__file__).parents[2] / "scripted_daemon.py"))
ScriptedDaemon, HANG_UP = _SCRIPTED["ScriptedDaemon"], _SCRIPTED["HANG_UP"]
STATUS: dict[str, Any] = {"pid": 7, "version": "0.1.0", "workers": [], "jobs": {}, "metrics": None}


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


def read(runtime: Path) -> DaemonFacts:
    return read_daemon(Settings(runtime_dir=runtime, state_dir=runtime.parent / "state"))


def test_where_nothing_is_nothing_is_made(tmp_path: Path) -> None:
    facts = read(tmp_path / "run")
    assert (facts.runtime_dir.kind, facts.socket, facts.lock_pid, facts.status) == ("absent", "absent", None, None)
    assert (facts.state_dir.exists, facts.state_dir.writable) == (False, True)
    assert facts.state_dir.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_that_answers_is_quoted(runtime: Path) -> None:
    with ScriptedDaemon(runtime / SOCKET_NAME, {"status": [[{"ok": STATUS}]]}):
        facts = read(runtime)
    assert (facts.socket, facts.status, facts.why) == ("answers", STATUS, None)


def test_of_a_daemon_that_answers_its_own_directories_are_looked_at(runtime: Path) -> None:
    told = {"state_dir": str(runtime.parent / "its-state"), "runs_dir": str(runtime.parent / "its-runs")}
    with ScriptedDaemon(runtime / SOCKET_NAME, {"status": [[{"ok": STATUS | told}]]}):
        facts = read(runtime)
    assert {"state_dir": facts.state_dir.path, "runs_dir": facts.runs_dir.path} == told


def test_one_that_refuses_or_hangs_up_is_silent_and_its_words_are_kept(runtime: Path) -> None:
    refusal = {"error": {"code": "not-yours", "message": "it belongs to uid 7"}}
    with ScriptedDaemon(runtime / SOCKET_NAME, {"status": [[refusal], [HANG_UP]]}):
        assert (read(runtime).socket, read(runtime).socket) == ("silent", "silent")
    with ScriptedDaemon(runtime / SOCKET_NAME, {"status": [[refusal]]}):
        assert read(runtime).why == "it belongs to uid 7"


def test_a_socket_that_a_killed_daemon_has_left_is_stale_and_stays(runtime: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(runtime / SOCKET_NAME))
    assert read(runtime).socket == "stale"
    assert (runtime / SOCKET_NAME).exists()


def test_a_file_in_the_sockets_place_is_no_socket(runtime: Path) -> None:
    (runtime / SOCKET_NAME).touch()
    assert read(runtime).socket == "file"


def test_a_lock_is_held_while_its_daemon_lives_and_left_afterwards(runtime: Path) -> None:
    held = RuntimeDirectory.open(runtime)
    try:
        held.listener.close()
        (runtime / SOCKET_NAME).unlink()
        facts = read(runtime)
        assert (facts.socket, facts.lock_pid, facts.lock_held) == ("absent", os.getpid(), True)
    finally:
        held.close()
    (runtime / LOCK_NAME).write_text(f"{os.getpid()}\n")
    facts = read(runtime)
    assert (facts.lock_pid, facts.lock_held) == (os.getpid(), False)


@pytest.mark.parametrize("text", ["", "no number", "\0\xff"])
def test_a_lock_file_without_a_pid_says_nothing(runtime: Path, text: str) -> None:
    (runtime / LOCK_NAME).write_text(text, encoding="latin-1")
    assert read(runtime).lock_pid is None


def test_mode_owner_and_strangers_of_the_runtime_directory_are_told_and_nothing_is_narrowed(runtime: Path) -> None:
    runtime.chmod(0o755)
    (runtime / "notes.txt").touch()
    (runtime / LOCK_NAME).touch()
    facts = read(runtime).runtime_dir
    assert (facts.mode, facts.owner, facts.others) == (0o755, os.geteuid(), ("notes.txt",))
    assert runtime.stat().st_mode & 0o777 == 0o755


def test_a_link_and_a_file_are_told_from_a_directory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    assert read(tmp_path / "link").runtime_dir.kind == "link"
    assert read(tmp_path / "file").runtime_dir.kind == "file"


def test_a_state_directory_below_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    facts = read_daemon(Settings(runtime_dir=tmp_path / "run", state_dir=tmp_path / "state" / "weft"))
    assert (facts.state_dir.exists, facts.state_dir.writable) == (False, False)
