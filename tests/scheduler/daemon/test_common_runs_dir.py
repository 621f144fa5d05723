"""Daemons that have one runs_dir in common, as several `weft run` in one directory have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from weft.machine.run_file import MARK, claim
from weft.scheduler.daemon import service
from weft.scheduler.ledger.ledger import IdTaken, Ledger, Submission

SPEC = {"job": {"entry": "digits.py:workload"}}


@pytest.fixture
def ledgers(tmp_path: Path) -> Iterator[tuple[Ledger, Ledger]]:
    with ExitStack() as stack:
        one, other = (Ledger.open(tmp_path / name / "ledger.sqlite", tmp_path / "runs") for name in ("one", "other"))
        stack.callback(one.close)
        stack.callback(other.close)
        yield one, other


def add(ledger: Ledger, job: str | None = None) -> Submission:
    return service._add_and_claim(ledger, SPEC, uid=0, priority=0, submitted_at=1.0, job=job)


def test_two_daemons_that_take_a_job_at_once_run_it_in_two_directories(
    ledgers: tuple[Ledger, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other takes its job where the first has looked for a free directory, and has none yet."""
    one, other = ledgers
    taken: list[Submission] = []

    def late(directory: Path, job: str) -> bool:
        monkeypatch.setattr(service, "claim", claim)
        taken.append(add(other))
        return bool(claim(directory, job))

    monkeypatch.setattr(service, "claim", late)
    taken.append(add(one))
    assert sorted(submission.row.job for submission in taken) == ["digits-1", "digits-2"]
    for submission in taken:
        assert Path(submission.row.run_dir, MARK).read_text() == f"{submission.row.job}\n"


def test_a_job_that_is_not_taken_leaves_no_run_directory(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Ledger, clause: str, *arguments: object) -> None:
        raise IdTaken("in the midst of it")

    monkeypatch.setattr(Ledger, "_select", fails)
    with pytest.raises(IdTaken):
        add(ledgers[0])
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_id_that_the_user_gave_is_that_of_a_directory_that_is_there(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert add(ledgers[0], "mine").row.job == "mine"
    assert not (tmp_path / "runs" / "mine" / MARK).exists(), "its files are none of Weft's"
    assert add(ledgers[0], "other").row.run_dir == str(tmp_path / "runs" / "other")
    assert (tmp_path / "runs" / "other" / MARK).exists()
