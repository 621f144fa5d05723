"""Changes that the ledger's disk does not take: kept, seen by every read, written later, in the end lost only with
a word."""

from __future__ import annotations

import logging
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.ledger.ledger import JobEnded, Ledger, LedgerError
from weft.scheduler.ledger.series import publish
from weft.spec.job_state import TERMINAL_STATES, JobState

SPEC = {"job": {"entry": "digits.py:workload", "epochs": 2}}
FAULTS = {
    "full": sqlite3.SQLITE_FULL,
    "io": sqlite3.SQLITE_IOERR | 3 << 8,
    "cannot-open": sqlite3.SQLITE_CANTOPEN,
    "read-only": sqlite3.SQLITE_READONLY,
}
NEVER = 1 << 30


class FaultyConnection:
    """A connection of which the statements that write fail, from the fails_from-th on."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self._real = real
        self.num_writes = 0
        self.fails_from = NEVER
        self.code = sqlite3.SQLITE_FULL

    @property
    def in_transaction(self) -> bool:
        return self._real.in_transaction

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if statement.split()[0] in ("BEGIN", "INSERT", "UPDATE", "COMMIT", "PRAGMA"):
            self.num_writes += 1
            if self.num_writes > self.fails_from:
                error = sqlite3.OperationalError("the disk fails")
                error.sqlite_errorcode = self.code
                raise error
        return self._real.execute(statement, *arguments)

    def close(self) -> None:
        self._real.close()


def opened(path: Path) -> tuple[Ledger, FaultyConnection]:
    ledger = Ledger.open(path, path.parent / "runs")
    connection: Any = FaultyConnection(ledger._connection)
    ledger._connection = connection
    return ledger, connection


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def both(path: Path) -> Iterator[tuple[Ledger, FaultyConnection]]:
    ledger, connection = opened(path)
    yield ledger, connection
    connection.fails_from = NEVER
    ledger.close()


def add(ledger: Ledger, job: str | None = None) -> str:
    return ledger.add(SPEC, uid=1, priority=0, submitted_at=0.0, job=job).row.job


def test_a_change_that_the_disk_does_not_take_is_seen_by_every_read(both: tuple[Ledger, FaultyConnection]) -> None:
    ledger, connection = both
    for job in ("a", "b", "c"):
        add(ledger, job)
    connection.fails_from = 0
    ledger.record("b", state=JobState.RUNNING, step=3)
    ledger.record("b", state=JobState.COMPLETED, ended_at=9.0, result={"seconds": 2.0})
    row = ledger.job("b")
    assert row is not None
    assert (row.state, row.step, row.ended_at, row.result) == (JobState.COMPLETED, 3, 9.0, {"seconds": 2.0})
    assert [row.job for row in ledger.unfinished()] == ["a", "c"]
    assert [row.job for row in ledger.jobs(states=TERMINAL_STATES)] == ["b"]
    assert [row.job for row in ledger.jobs(states=[JobState.QUEUED], limit=1)] == ["c"]
    assert {state: n for state, n in ledger.counts_by_state().items() if n} == {
        JobState.QUEUED: 2,
        JobState.COMPLETED: 1,
    }
    with pytest.raises(JobEnded, match=r"'b' ended as completed at 9\.0"):
        ledger.record("b", step=4)
    assert ledger.health.unwritten == ("b",)


def test_what_is_kept_is_written_at_a_look_once_the_disk_takes_it(
    both: tuple[Ledger, FaultyConnection], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, connection = both
    monkeypatch.setattr("weft.scheduler.ledger.unwritten.FIRST_PAUSE_SECONDS", 0.0)
    ledger._unwritten.worked()  # begins with that pause
    add(ledger, "a")
    connection.fails_from = 0
    ledger.record("a", state=JobState.FAILED, reason="user-error")
    ledger.look()
    assert ledger.health.unwritten == ("a",)
    connection.fails_from = NEVER
    ledger.look()
    assert (ledger.health.problem, ledger.health.unwritten) == (None, ())
    ledger.close()
    again, _ = opened(path)
    row = again.job("a")
    again.close()
    assert row is not None
    assert (row.state, row.reason) == (JobState.FAILED, "user-error")


def test_a_disk_that_fails_is_tried_less_and_less_often(both: tuple[Ledger, FaultyConnection]) -> None:
    ledger, connection = both
    add(ledger, "a")
    connection.fails_from = 0
    ledger.record("a", state=JobState.RUNNING)
    before = connection.num_writes
    for _ in range(100):
        ledger.look()
    assert connection.num_writes == before  # its first second is not over


def test_nothing_new_is_taken_before_what_is_older_is_written(both: tuple[Ledger, FaultyConnection]) -> None:
    ledger, connection = both
    add(ledger, "a")
    connection.fails_from = 0
    ledger.record("a", state=JobState.COMPLETED)
    connection.fails_from = connection.num_writes + 1  # the next try comes a little further
    with pytest.raises(LedgerError, match="not full"):
        add(ledger, "b")
    connection.fails_from = NEVER
    add(ledger, "b")
    assert ledger.health.unwritten == ()


@pytest.mark.parametrize("reason", FAULTS)
def test_each_statement_of_a_submit_and_of_an_end_may_fail(path: Path, reason: str) -> None:
    for fails_from in range(12):
        ledger, connection = opened(path.with_name(f"{fails_from}.sqlite"))
        connection.code = FAULTS[reason]
        add(ledger, "a")
        connection.num_writes, connection.fails_from = 0, fails_from
        ledger.record("a", state=JobState.RUNNING)
        ledger.record("a", state=JobState.COMPLETED)
        acknowledged = {"a": JobState.COMPLETED}
        try:
            acknowledged[add(ledger, "b")] = JobState.QUEUED
        except LedgerError as error:
            assert error.reason == reason  # noqa: PT017  (no error is as right)
        assert {row.job: row.state for row in ledger.jobs()} == acknowledged
        connection.fails_from = NEVER
        ledger.close()
        again, _ = opened(path.with_name(f"{fails_from}.sqlite"))
        assert {row.job: row.state for row in again.jobs()} == acknowledged
        again.close()


def test_the_end_says_which_states_are_lost(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger, connection = opened(path)
    add(ledger, "a")
    add(ledger, "b")
    connection.fails_from = 0
    ledger.record("b", state=JobState.COMPLETED)
    with caplog.at_level(logging.ERROR):
        ledger.close()
    assert "the newest states of b are lost; unfinished in the ledger, they run again" in caplog.text
    again, _ = opened(path)
    assert [row.job for row in again.unfinished()] == ["a", "b"]
    again.close()


def test_metrics_tell_how_the_ledger_is(both: tuple[Ledger, FaultyConnection]) -> None:
    ledger, connection = both
    exporter = Exporter()
    add(ledger, "a")
    connection.fails_from = 0
    ledger.record("a", state=JobState.RUNNING)
    publish(ledger.look(), ledger.health, exporter)
    text = exporter.render().decode()
    for line in (
        "weft_ledger_writable 0.0",
        "weft_ledger_unwritten_jobs 1.0",
        "weft_ledger_unreadable_jobs 0.0",
        'weft_ledger_errors_total{reason="full"} 1.0',
        'weft_jobs{state="running"} 1.0',
    ):
        assert line in text
    publish(ledger.look(), ledger.health, exporter)
    assert 'weft_ledger_errors_total{reason="full"} 1.0' in exporter.render().decode()


class FailingLedgerAgainstModel(RuleBasedStateMachine):
    """Any history of submits, changes, faults and restarts tells what a dict would; a restart on a disk that fails goes
    back to what was written."""

    @initialize()
    def start(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.told: dict[str, JobState] = {}
        self.written: dict[str, JobState] = {}
        self.open()

    def open(self) -> None:
        self.ledger, self.connection = opened(Path(self.directory.name, "ledger.sqlite"))

    @property
    def fails(self) -> bool:
        return self.connection.fails_from == 0

    def settle(self) -> None:
        """After a call that writes everything."""
        if not self.fails:
            self.written = dict(self.told)

    @rule(fails=st.booleans())
    def disk(self, fails: bool) -> None:
        self.connection.fails_from = 0 if fails else NEVER

    @rule()
    def submit(self) -> None:
        try:
            self.told[add(self.ledger)] = JobState.QUEUED
        except LedgerError:
            assert self.fails
        else:
            assert not self.fails
        self.settle()

    @precondition(lambda self: self.told)
    @rule(data=st.data(), state=st.sampled_from(JobState))
    def change(self, data: st.DataObject, state: JobState) -> None:
        job = data.draw(st.sampled_from(sorted(self.told)))
        if self.told[job].is_terminal:
            with pytest.raises(JobEnded):
                self.ledger.record(job, state=state)
            return
        self.ledger.record(job, state=state)
        self.told[job] = state
        if not self.fails:
            self.written[job] = state

    @rule()
    def restart(self) -> None:
        self.settle()
        self.ledger.close()
        self.told = dict(self.written)
        self.open()

    @invariant()
    def tells_the_newest(self) -> None:
        if hasattr(self, "ledger"):
            assert {row.job: row.state for row in self.ledger.jobs()} == self.told
            unwritten = {job for job in self.told if self.told[job] != self.written.get(job)}
            assert unwritten <= set(self.ledger.health.unwritten)
            counts = self.ledger.counts_by_state()
            assert counts == {state: list(self.told.values()).count(state) for state in JobState}

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.directory.cleanup()


FailingLedgerAgainstModel.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestFailingLedgerAgainstModel = FailingLedgerAgainstModel.TestCase
