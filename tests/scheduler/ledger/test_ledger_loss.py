"""A ledger that has lost what it held is not taken for a new one; a row that makes no sense costs no other."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from weft.scheduler.ledger.ledger import IdTaken, Ledger, LedgerError
from weft.spec.job_state import JobState

SPEC = {"job": {"entry": "digits.py:workload", "epochs": 2}}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def path(state: Path) -> Path:
    return state / "ledger.sqlite"


def opened(path: Path, **options: Any) -> Ledger:
    return Ledger.open(path, path.parent / "runs", **options)


def add(ledger: Ledger, job: str | None = None) -> str:
    return ledger.add(SPEC, uid=1, priority=0, submitted_at=0.0, job=job).row.job


def names(ledger: Ledger) -> list[str]:
    return [row.job for row in ledger.jobs()]


def left_by_a_killed_daemon(path: Path, *jobs: str) -> None:
    """What stands on disk while a ledger is open: a copy of it is what a kill leaves."""
    ledger = opened(path)
    for job in jobs:
        add(ledger, job)
    shutil.copytree(path.parent, path.parent.with_name("killed"))
    ledger.close()
    shutil.rmtree(path.parent)
    path.parent.with_name("killed").rename(path.parent)


def wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def test_what_a_killed_daemon_leaves_is_all_there(path: Path) -> None:
    left_by_a_killed_daemon(path, "a", "b")
    ledger = opened(path)
    assert names(ledger) == ["b", "a"]
    ledger.close()


LOSSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no log": (lambda path: wal(path).unlink(), r"ledger.sqlite-wal is gone, and has the newest jobs"),
    "an empty log": (lambda path: os.truncate(wal(path), 0), r"ledger.sqlite-wal has 0 bytes"),
    "a log without a frame": (lambda path: os.truncate(wal(path), 100), "the newest 2 changes are missing, as in a"),
    "an empty file": (lambda path: os.truncate(path, 0), "it has 0 bytes, and held the jobs"),
    "no file": (lambda path: path.unlink(), "it is gone, and ledger.sqlite-open is still there"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_after_a_kill_is_refused_with_the_file_and_the_remedy(path: Path, loss: str) -> None:
    # A ledger without its log was opened as it was: every acknowledged job was forgotten without a word.
    lose, problem = LOSSES[loss]
    left_by_a_killed_daemon(path, "a", "b")
    lose(path)
    log = wal(path).read_bytes() if wal(path).exists() else b""
    for _ in range(2):  # looking at it changes nothing
        with pytest.raises(LedgerError, match=rf"{path}: .*{problem}.*start with --accept-empty-ledger"):
            opened(path)
    assert (wal(path).read_bytes() if log else b"") == log
    accepted = opened(path, accept_empty=True)
    assert names(accepted) == []
    assert add(accepted, "c") == "c"
    accepted.close()
    again = opened(path)
    assert names(again) == ["c"]
    again.close()


@pytest.mark.parametrize("lost", ["cut short", "damaged", "of a copy from before"])
def test_a_loss_of_the_newest_changes_after_a_kill_is_refused(path: Path, lost: str) -> None:
    # SQLite read such a log as far as it was whole: jobs that had been acknowledged were gone, and nobody said so.
    left_by_a_killed_daemon(path, "a", "b")
    before = wal(path).read_bytes()
    ledger = opened(path)
    for job in ("c", "d"):
        add(ledger, job)
    shutil.copytree(path.parent, path.parent.with_name("killed"))
    ledger.close()
    shutil.rmtree(path.parent)
    path.parent.with_name("killed").rename(path.parent)
    log = wal(path).read_bytes()
    damaged = bytearray(log)
    damaged[-2000] ^= 0xFF
    wal(path).write_bytes({"cut short": log[:-2000], "damaged": damaged, "of a copy from before": before}[lost])
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"the newest [12] changes are missing, .*with --accept-empty-ledger"):
            opened(path)
    assert {each.name for each in path.parent.iterdir()} == {f"ledger.sqlite{end}" for end in ("", "-wal", "-open")}
    accepted = opened(path, accept_empty=True)
    assert names(accepted)[-2:] == ["b", "a"]
    assert "d" not in names(accepted)
    add(accepted, "e")
    accepted.close()
    again = opened(path)
    assert names(again)[0] == "e"
    again.close()


def test_a_ledger_from_before_changes_were_counted_is_opened_and_counts(path: Path) -> None:
    left_by_a_killed_daemon(path, "a")
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE commits")
    database.close()
    path.with_name("ledger.sqlite-open").write_text("open\n")
    wal(path).touch()
    os.truncate(wal(path), 32)
    ledger = opened(path)
    add(ledger, "b")
    assert path.with_name("ledger.sqlite-open").read_text().split() == ["open", "00000000000000000001"]
    assert names(ledger) == ["b", "a"]
    ledger.close()


@pytest.mark.parametrize("lose", [lambda path: os.truncate(path, 0), Path.unlink], ids=["an empty file", "no file"])
def test_a_loss_after_a_clean_end_is_refused(path: Path, lose: Callable[[Path], object]) -> None:
    ledger = opened(path)
    add(ledger, "a")
    ledger.close()
    (path.parent / "runs" / "a").mkdir(parents=True)
    lose(path)
    with pytest.raises(LedgerError, match="--accept-empty-ledger"):
        opened(path)
    opened(path, accept_empty=True).close()
    opened(path).close()


def test_the_log_of_a_lost_file_is_kept_aside(path: Path) -> None:
    left_by_a_killed_daemon(path, "a")
    log = wal(path).read_bytes()
    path.unlink()
    opened(path, accept_empty=True).close()
    assert path.with_name("ledger.sqlite-wal.lost").read_bytes() == log


def test_a_new_state_directory_is_no_loss_whatever_runs_lie_elsewhere(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "digits-1").mkdir(parents=True)
    (path.parent / "runs").mkdir(parents=True)
    Ledger.open(path, tmp_path / "elsewhere").close()
    path.unlink()
    opened(path).close()


def test_a_ledger_whose_making_was_cut_off_is_made(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    path.with_name("ledger.sqlite-open").write_text("new\n")
    ledger = opened(path)
    assert add(ledger) == "digits-1"
    ledger.close()


def test_a_daemon_that_was_killed_before_it_wrote_a_row_has_lost_none(path: Path) -> None:
    left_by_a_killed_daemon(path)
    wal(path).unlink()
    path.unlink()
    opened(path).close()


def test_after_a_clean_end_every_row_is_in_the_file_alone(path: Path) -> None:
    ledger = opened(path)
    add(ledger, "a")
    ledger.close()
    ledger.close()
    assert [file.name for file in path.parent.iterdir()] == ["ledger.sqlite"]


def test_a_ledger_from_before_there_was_a_mark_is_opened(path: Path) -> None:
    left_by_a_killed_daemon(path, "a")
    path.with_name("ledger.sqlite-open").unlink()
    ledger = opened(path)
    assert names(ledger) == ["a"]
    ledger.close()


# --- a loss while a daemon has it open

GONE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (Path.unlink, "ledger.sqlite: is gone"),
    "no log": (lambda path: wal(path).unlink(), "ledger.sqlite-wal: is gone"),
    "no directory": (lambda path: shutil.rmtree(path.parent), "ledger.sqlite: is gone"),
    "a copy": (
        lambda path: (shutil.copy(path, path.with_name("copy")), path.with_name("copy").replace(path)),
        "ledger.sqlite: is another file than the one that was opened",
    ),
}


@pytest.mark.parametrize("loss", GONE)
def test_nothing_is_acknowledged_into_a_file_without_its_name(path: Path, loss: str) -> None:
    # Submits were taken, and gone with the daemon's end, which was a clean one.
    lose, problem = GONE[loss]
    ledger = opened(path)
    add(ledger, "a")
    lose(path)
    ledger.look()
    assert problem in (ledger.health.problem or "")
    for _ in range(2):
        with pytest.raises(LedgerError, match=f"{problem}.* move the very file back.*--accept-empty-ledger") as caught:
            add(ledger, "b")
        assert caught.value.reason == "lost"
    ledger.record("a", state=JobState.COMPLETED)
    assert (names(ledger), ledger.health.unwritten) == (["a"], ("a",))
    with pytest.raises(LedgerError, match=problem):
        ledger.close()


def test_before_the_first_row_as_well(path: Path) -> None:
    ledger = opened(path)
    path.unlink()
    with pytest.raises(LedgerError, match="is gone"):
        add(ledger, "a")
    with pytest.raises(LedgerError, match="is gone"):
        ledger.close()


def test_a_file_that_is_moved_back_takes_what_has_waited(path: Path) -> None:
    ledger = opened(path)
    add(ledger, "a")
    path.rename(path.with_name("aside"))
    ledger.record("a", state=JobState.COMPLETED)
    path.with_name("aside").rename(path)
    assert add(ledger, "b") == "b"
    assert (ledger.health.problem, ledger.health.unwritten) == (None, ())
    ledger.close()
    ledger = opened(path)
    assert [row.job for row in ledger.unfinished()] == ["b"]
    ledger.close()


def test_a_ledger_that_was_lost_under_a_daemon_is_missed_at_the_next_start(path: Path, tmp_path: Path) -> None:
    ledger = Ledger.open(path, tmp_path / "elsewhere")
    add(ledger, "a")
    path.unlink()
    with pytest.raises(LedgerError):
        ledger.close()
    with pytest.raises(LedgerError, match=r"ledger.sqlite-open is still there"):
        Ledger.open(path, tmp_path / "elsewhere")


# --- rows

GARBAGE: dict[str, Any] = {
    "spec": b"\xc1 is no msgpack",
    "spec that is no map": msgpack.packb([1, 2]),
    "spec with text": "{}",
    "state": "sleeping",
    "state of bytes": b"\xff",
    "result": "{'single quotes'}",
    "result that is no map": "[1]",
    "priority": "high",
    "uid": 1.5,
    "attempt": b"\x00",
    "step": "many",
    "loss": "low",
    "submitted_at": "yesterday",
    "run_dir": b"/tmp",
    "reason": b"\xff\xfe",
    "error": b"text",
}


def spoil(path: Path, job: str, column: str, value: Any) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"UPDATE jobs SET {column} = ? WHERE job = ?", (value, job))
    connection.close()


@pytest.mark.parametrize("column", GARBAGE)
def test_a_row_that_makes_no_sense_is_set_aside_and_the_others_are_served(
    path: Path, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = opened(path)
    for job in ("a", "digits-1", "c"):
        add(ledger, job)
    ledger.record("c", state=JobState.COMPLETED)
    ledger.close()
    spoil(path, "digits-1", column.split()[0], GARBAGE[column])
    ledger = opened(path)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert [row.job for row in ledger.unfinished()] == ["a"]
            assert names(ledger) == ["c", "a"]
            assert ledger.job("digits-1") is None
    (told,) = caplog.messages  # once
    assert told.startswith("the row of job digits-1 cannot be read and is set aside, as it is: " + column.split()[0])
    assert ledger.health.unreadable == ("digits-1",)
    counts = ledger.counts_by_state()
    assert (counts[JobState.QUEUED], counts[JobState.COMPLETED], sum(counts.values())) == (1, 1, 2)
    with pytest.raises(IdTaken, match="a job that cannot be read; give another id"):
        add(ledger, "digits-1")
    assert add(ledger) == "digits-2"
    ledger.close()
    connection = sqlite3.connect(path)
    (kept,) = connection.execute(f"SELECT {column.split()[0]} FROM jobs WHERE job = 'digits-1'").fetchone()
    connection.close()
    assert kept == GARBAGE[column]


def test_text_that_is_no_text_spoils_its_row_alone(path: Path) -> None:
    ledger = opened(path)
    add(ledger, "a")
    add(ledger, "b")
    ledger.close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE jobs SET error = CAST(x'ff' AS TEXT) WHERE job = 'a'")
    connection.close()
    ledger = opened(path)
    assert names(ledger) == ["b"]
    ledger.close()
