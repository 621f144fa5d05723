"""What `weft doctor` finds amiss with the daemon's directories, lock and socket."""

from __future__ import annotations

import os
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.cli.doctor.daemon_facts import StorageFacts
from weft.cli.doctor.facts import Facts
from weft.transport.wire.runtime_directory import MAX_PATH_BYTES

_SOUND = runpy.run_path(str(Path(__file__).parents[2] / "sound_facts.py"))
SOUND, GIB = _SOUND["SOUND"], _SOUND["GIB"]
changed, of, the = _SOUND["changed"], _SOUND["of"], _SOUND["the"]


def with_directory(**changes: Any) -> Facts:
    return changed("daemon", runtime_dir=replace(SOUND.daemon.runtime_dir, **changes))


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({"kind": "link"}, "problem", "symbolic link"),
        ({"kind": "file"}, "problem", "no directory"),
        ({"owner": os.geteuid() + 1}, "problem", "belongs to uid"),
        ({"mode": 0o755, "others": ("notes.txt",)}, "problem", "mode 0755"),
        ({"mode": 0o777, "sticky": True}, "problem", "mode 0777"),
        ({"mode": 0o755}, "note", "makes it 0700"),
        ({"path": "/" + "x" * MAX_PATH_BYTES}, "problem", f"{MAX_PATH_BYTES + 1} bytes"),
    ],
    ids=["link", "file", "owner", "not Weft's alone", "sticky", "open", "long"],
)
def test_a_runtime_directory_that_the_daemon_refuses_is_a_problem(
    changes: dict[str, Any], level: str, said: str
) -> None:
    finding = the("runtime-directory", with_directory(**changes))
    assert finding.level == level
    assert said in finding.sentence


def test_a_runtime_directory_that_can_be_made_is_fine_and_one_that_cannot_is_a_problem(tmp_path: Path) -> None:
    assert the("runtime-directory", with_directory(kind="absent", path=str(tmp_path / "a" / "weft"))).level == "ok"
    (tmp_path / "file").touch()
    below_a_file = with_directory(kind="absent", path=str(tmp_path / "file" / "weft"))
    assert the("runtime-directory", below_a_file).level == "problem"


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({"socket": "stale"}, "note", "nobody listens"),
        ({"socket": "file"}, "problem", "no socket"),
        ({"socket": "silent", "why": "it does not answer"}, "problem", "it does not answer"),
        ({"socket": "absent", "lock_pid": 77, "lock_held": True}, "problem", "Process 77 holds"),
    ],
    ids=["stale", "no socket", "silent", "without a socket"],
)
def test_a_daemon_that_cannot_be_reached_is_told(changes: dict[str, Any], level: str, said: str) -> None:
    finding = the("daemon", changed("daemon", **changes))
    assert finding.level == level
    assert said in finding.sentence


def test_workers_that_are_down_are_named() -> None:
    workers = [{"worker": "cpu-0", "state": "down", "pid": None}, {"worker": "cpu-1", "state": "free", "pid": 9}]
    status = {"version": "0.1.0", "pid": 7, "workers": workers, "jobs": {}}
    answered, down = of("daemon", changed("daemon", socket="answers", status=status))
    assert (answered.level, down.level) == ("ok", "note")
    assert down.sentence.startswith("cpu-0 ")


def test_a_ledger_that_takes_nothing_is_a_problem() -> None:
    status: dict[str, Any] = {"version": "0.1.0", "pid": 7, "workers": [], "jobs": {}}
    sound = {"problem": None, "unwritten": [], "unreadable": []}
    assert the("ledger", changed("daemon", socket="answers", status=status | {"ledger": sound})).level == "ok"
    full = sound | {"problem": "its disk is full", "unwritten": ["digits-1"]}
    found = of("ledger", changed("daemon", socket="answers", status=status | {"ledger": full}))
    assert [finding.level for finding in found] == ["problem", "problem"]
    assert found[0].sentence == "The ledger cannot be used: its disk is full. Until then submits are refused."
    assert "digits-1" in found[1].sentence


def test_a_lock_file_that_nobody_holds_needs_no_cleaning() -> None:
    finding = the("lock", changed("daemon", lock_pid=77))
    assert (finding.level, finding.remedy.partition(":")[0]) == ("note", "Nothing has to be done")
    assert of("lock", changed("daemon", lock_pid=77, lock_held=True)) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"writable": False}, "cannot be written to"),
        ({"exists": False, "writable": False}, "cannot be made"),
        ({"free_bytes": 1 << 20}, "1 MiB free"),
    ],
    ids=["not ours", "not to be made", "full"],
)
def test_a_directory_that_cannot_keep_jobs_is_a_problem(changes: dict[str, Any], said: str) -> None:
    storage = replace(StorageFacts(path="/data/runs", exists=True, writable=True, free_bytes=9 * GIB), **changes)
    finding = the("runs-directory", changed("daemon", runs_dir=storage))
    assert (finding.level, said in finding.sentence) == ("problem", True)
    assert "WEFT_RUNS_DIR" in finding.remedy
