"""The ledger against a real SQLite file: what is acknowledged stays, what is terminal stays as it is."""

from __future__ import annotations

import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.scheduler.ledger.ledger import AsyncLedger, IdTaken, JobEnded, JobNotEnded, Ledger, LedgerError, UnknownJob
from weft.spec.job_id import InvalidJobId
from weft.spec.job_state import TERMINAL_STATES, UNFINISHED_STATES, JobState

SPEC = {"job": {"entry": "digits.py:workload", "args": {"hidden": 256}, "epochs": 2, "batch_size": 100}}
OTHER_SPEC = {"job": {"entry": "digits.py:workload", "args": {"hidden": 257}, "epochs": 2, "batch_size": 100}}
PROCESS_SECONDS = 120.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "ledger.sqlite3"


@pytest.fixture
def ledger(path: Path, tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger.open(path, tmp_path / "runs")
    yield ledger
    ledger.close()


def add(ledger: Ledger, job: str | None = None, spec: dict[str, Any] = SPEC, **changes: Any) -> str:
    given = {"uid": 1000, "priority": 0, "submitted_at": 1.5} | changes
    return ledger.add(spec, job=job, **given).row.job


def test_a_new_job_is_queued_with_everything_that_was_submitted(ledger: Ledger, tmp_path: Path) -> None:
    submission = ledger.add(SPEC, uid=1000, priority=3, submitted_at=12.25)
    row = submission.row
    assert submission.is_new
    assert (row.job, row.seq, row.spec, row.uid, row.priority) == ("digits-1", 1, SPEC, 1000, 3)
    assert (row.state, row.submitted_at, row.attempt, row.step) == (JobState.QUEUED, 12.25, 0, 0)
    assert row.run_dir == str(tmp_path / "runs" / "digits-1")
    assert ledger.job("digits-1") == row
    assert ledger.job("digits-2") is None


def test_a_removed_job_is_forgotten_and_its_generated_id_is_not_given_again(ledger: Ledger) -> None:
    first, named = add(ledger), add(ledger, "mine")
    for job in (first, named):
        ledger.record(job, state=JobState.COMPLETED, ended_at=1.0)
        ledger.remove(job)
        assert ledger.job(job) is None
    assert ledger.jobs() == []
    assert add(ledger) == "digits-2"
    assert ledger.add(OTHER_SPEC, uid=1000, priority=0, submitted_at=3.0, job="mine").is_new


@pytest.mark.parametrize("state", sorted(UNFINISHED_STATES))
def test_only_a_job_that_has_ended_can_be_removed(ledger: Ledger, state: JobState) -> None:
    job = add(ledger)
    ledger.record(job, state=state)
    with pytest.raises(JobNotEnded, match=f"is {state}"):
        ledger.remove(job)
    with pytest.raises(UnknownJob):
        ledger.remove("nobody")
    assert ledger.job(job) is not None


def test_the_jobs_that_ended_before_a_moment_come_oldest_first(ledger: Ledger) -> None:
    jobs = [add(ledger) for _ in range(5)]
    for job, ended_at in zip(jobs, (5.0, 1.0, 10.0, None, 3.0), strict=True):
        if ended_at is not None:
            ledger.record(job, state=JobState.FAILED, ended_at=ended_at)
    assert [row.job for row in ledger.ended_before(10.0, limit=9)] == [jobs[0], jobs[1], jobs[4]]
    assert [row.job for row in ledger.ended_before(10.0, limit=2)] == jobs[:2]
    assert ledger.ended_before(float("nan"), limit=9) == []


def test_the_directories_of_jobs_that_have_ended_are_known_the_last_first(ledger: Ledger) -> None:
    """A daemon that starts looks into them: of ten thousand jobs it would do so for seconds."""
    jobs = [add(ledger) for _ in range(4)]
    for job, ended_at in zip(jobs, (5.0, 9.0, 7.0, None), strict=True):
        if ended_at is not None:
            ledger.record(job, state=JobState.COMPLETED, ended_at=ended_at)
    assert [path.name for path in ledger.ended_directories(limit=2)] == [jobs[1], jobs[2]]


def test_the_directories_of_jobs_that_have_ended_are_known(ledger: Ledger, tmp_path: Path) -> None:
    done, _ = add(ledger), add(ledger)
    ledger.record(done, state=JobState.CANCELLED, ended_at=5.0)
    assert [path.name for path in ledger.ended_directories()] == [done]
    ledger._connection.execute("UPDATE jobs SET run_dir = ? WHERE job = ?", (str(tmp_path), done))
    assert ledger.ended_directories() == [], "a row that somebody has garbled names no directory of ours"


def test_generated_ids_count_up_for_each_entry_file(ledger: Ledger) -> None:
    tiny = {"job": {"entry": "models/tiny.gpt.py:main"}}
    assert [add(ledger), add(ledger), add(ledger, spec=tiny), add(ledger)] == [
        "digits-1",
        "digits-2",
        "tiny.gpt-1",
        "digits-3",
    ]


def test_a_generated_id_skips_what_a_user_chose_and_what_has_a_run_directory(ledger: Ledger, tmp_path: Path) -> None:
    add(ledger, "digits-1")
    (tmp_path / "runs" / "digits-2").mkdir(parents=True)
    assert add(ledger) == "digits-3"


def test_generated_ids_go_on_counting_after_a_restart(ledger: Ledger, path: Path, tmp_path: Path) -> None:
    add(ledger)
    ledger.close()
    reopened = Ledger.open(path, tmp_path / "runs")
    assert add(reopened) == "digits-2"
    reopened.close()


def test_the_same_submit_twice_is_one_job(ledger: Ledger) -> None:
    first = ledger.add(SPEC, uid=1000, priority=0, submitted_at=1.0, job="mine")
    ledger.record("mine", state=JobState.RUNNING)
    second = ledger.add(SPEC, uid=1000, priority=0, submitted_at=2.0, job="mine")
    assert (first.is_new, second.is_new) == (True, False)
    assert second.row.state is JobState.RUNNING
    assert len(ledger.jobs()) == 1


def test_an_id_is_not_given_to_another_spec_or_another_user(ledger: Ledger) -> None:
    add(ledger, "mine")
    with pytest.raises(
        IdTaken, match=r"'mine' is another job's \(job\.args\.hidden is 256 there and 257 here\); give another id"
    ):
        add(ledger, "mine", spec=OTHER_SPEC)
    with pytest.raises(IdTaken, match=r"'mine' is another job's \(priority is 0 there and 4 here\); give another id"):
        ledger.add(SPEC, uid=1000, priority=4, submitted_at=1.0, job="mine")  # what a client gives beside the spec
    with pytest.raises(IdTaken, match="another job's \\(of uid 1000, and this one of uid 1001\\)"):
        add(ledger, "mine", uid=1001)
    assert len(ledger.jobs()) == 1


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "-x", ".hidden", "a/b", "a..b", "../up", "a b", "a\n", "a\0", "é", "x" * 129, "~root", "$(id)"],
)
def test_an_id_that_is_no_safe_directory_name_is_refused(ledger: Ledger, text: str) -> None:
    with pytest.raises(InvalidJobId, match="use 1 to 128 letters"):
        add(ledger, text)
    assert ledger.jobs() == []


@pytest.mark.parametrize("terminal", sorted(TERMINAL_STATES))
def test_a_terminal_job_never_changes_again(ledger: Ledger, terminal: JobState) -> None:
    job = add(ledger)
    ledger.record(job, state=terminal, ended_at=9.0)
    for state in JobState:
        with pytest.raises(JobEnded, match=f"digits-1' ended as {terminal} at 9.0"):
            ledger.record(job, state=state)
    with pytest.raises(JobEnded):
        ledger.record(job, step=3)
    row = ledger.job(job)
    assert row is not None
    assert (row.state, row.step) == (terminal, 0)


def test_what_is_recorded_is_read_back(ledger: Ledger) -> None:
    job = add(ledger)
    ledger.record(job, state=JobState.RUNNING, attempt=2, started_at=2.0, step=17, loss=0.25)
    ledger.record(
        job,
        state=JobState.FAILED,
        reason="user-error",
        error="Traceback ...",
        exit_code=1,
        ended_at=3.0,
        result={"validation": {"accuracy": 0.5}},
    )
    row = ledger.job(job)
    assert row is not None
    assert (row.attempt, row.started_at, row.step, row.loss, row.ended_at) == (2, 2.0, 17, 0.25, 3.0)
    assert (row.state, row.reason, row.error, row.exit_code) == (JobState.FAILED, "user-error", "Traceback ...", 1)
    assert row.result == {"validation": {"accuracy": 0.5}}


def test_only_known_columns_of_known_jobs_are_recorded(ledger: Ledger) -> None:
    job = add(ledger)
    with pytest.raises(UnknownJob, match="'ghost-1' is not in the ledger"):
        ledger.record("ghost-1", step=1)
    with pytest.raises(TypeError, match="run_dir"):
        ledger.record(job, run_dir="/elsewhere")  # type: ignore[call-arg]  # the mistake under test
    with pytest.raises(ValueError, match="sleeping"):
        ledger.record(job, state="sleeping")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(TypeError):
        ledger.record(job)


def test_jobs_lists_the_newest_first_within_its_limit_and_states(ledger: Ledger) -> None:
    names = [add(ledger) for _ in range(5)]
    ledger.record(names[3], state=JobState.COMPLETED)
    assert [row.job for row in ledger.jobs(limit=2)] == [names[4], names[3]]
    assert [row.job for row in ledger.jobs(states=TERMINAL_STATES)] == [names[3]]
    assert ledger.jobs(states=()) == []


def test_unfinished_jobs_come_in_the_order_in_which_they_run(ledger: Ledger) -> None:
    for state in JobState:
        ledger.record(add(ledger, f"job-{state}"), state=state)
    add(ledger, "urgent", priority=5)
    add(ledger, "later", priority=-5)
    expected = ["urgent", *(f"job-{state}" for state in JobState if not state.is_terminal), "later"]
    assert [row.job for row in ledger.unfinished()] == expected


def test_counts_by_state_names_every_state(ledger: Ledger) -> None:
    assert ledger.counts_by_state() == dict.fromkeys(JobState, 0)
    ledger.record(add(ledger), state=JobState.PAUSED)
    add(ledger)
    counts = ledger.counts_by_state()
    assert (counts[JobState.PAUSED], counts[JobState.QUEUED], sum(counts.values())) == (1, 1, 2)


def test_the_file_and_its_directory_are_the_owners_alone(ledger: Ledger, path: Path) -> None:
    add(ledger)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_every_commit_waits_for_the_disk(ledger: Ledger) -> None:
    full = 2
    assert ledger._connection.execute("PRAGMA synchronous").fetchone()[0] == full
    assert ledger._connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_a_second_daemon_on_the_same_ledger_is_refused_and_the_first_goes_on(
    ledger: Ledger, path: Path, tmp_path: Path
) -> None:
    # Two daemons with different runtime directories and one state directory would run every job twice.
    with pytest.raises(LedgerError, match="held by another daemon; stop that one"):
        Ledger.open(path, tmp_path / "runs")
    assert add(ledger) == "digits-1"


def test_a_file_that_is_no_database_is_named_with_the_remedy(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(LedgerError, match=rf"{path.name}: damaged or not a ledger .* move it"):
        Ledger.open(path, tmp_path / "runs")


def test_a_damaged_page_is_noticed_when_the_ledger_is_opened(path: Path, tmp_path: Path) -> None:
    first = Ledger.open(path, tmp_path / "runs")
    for _ in range(50):
        add(first)
    first.close()
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(LedgerError, match="damaged or not a ledger"):
        Ledger.open(path, tmp_path / "runs")


def test_the_ledger_of_a_newer_weft_is_left_alone(ledger: Ledger, path: Path, tmp_path: Path) -> None:
    ledger.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(LedgerError, match=r"newer Weft \(schema 2, this one knows 1\); start that version"):
        Ledger.open(path, tmp_path / "runs")


def test_a_database_of_another_program_is_left_alone(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(LedgerError, match="database of something else"):
        Ledger.open(path, tmp_path / "runs")


def test_a_directory_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="give a state_dir that you can write"):
        Ledger.open(tmp_path / "file" / "ledger.sqlite3", tmp_path / "runs")


def test_a_full_disk_fails_the_submit_and_leaves_the_ledger_whole(ledger: Ledger) -> None:
    add(ledger)
    (pages,) = ledger._connection.execute("PRAGMA page_count").fetchone()
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
    big = {"job": {"entry": "digits.py:workload", "args": {"text": "x" * 100_000}}}
    with pytest.raises(LedgerError, match="check that its disk is there and not full"):
        add(ledger, spec=big)
    assert [row.job for row in ledger.jobs()] == ["digits-1"]
    assert add(ledger) == "digits-2"


def test_a_ledger_without_its_table_is_no_matter_of_the_disk(ledger: Ledger, path: Path, tmp_path: Path) -> None:
    ledger.close()
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE jobs RENAME TO others")
    connection.close()
    again = Ledger.open(path, tmp_path / "runs")
    with pytest.raises(LedgerError, match=r"damaged or not a ledger \(no such table: jobs\); move it") as told:
        again.unfinished()
    again.close()
    assert told.value.reason == "damaged"


def test_a_limit_on_the_size_of_files_is_told_as_that(path: Path, tmp_path: Path) -> None:
    """It was told as a disk that is full."""
    opened = f"import resource; from pathlib import Path; from {Ledger.__module__} import Ledger\n"
    opened += "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
    opened += f"Ledger.open(Path({str(path)!r}), Path({str(tmp_path / 'runs')!r}))"
    done = subprocess.run([sys.executable, "-c", opened], capture_output=True, text=True, timeout=PROCESS_SECONDS)
    assert "`ulimit -f unlimited`: no file may have more than 1 KiB here" in done.stderr


def test_the_ledger_refuses_another_thread(ledger: Ledger) -> None:
    errors: list[Exception] = []

    def use() -> None:
        try:
            ledger.jobs()
        except sqlite3.ProgrammingError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 1


SUBMITTER = """
import sys
from pathlib import Path
from weft.scheduler.ledger.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]), Path(sys.argv[2]))
while True:
    row = ledger.add({"job": {"entry": "digits.py:workload"}}, uid=1, priority=0, submitted_at=0.0).row
    print(row.job, flush=True)
"""


def test_who_holds_the_ledger_is_named(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUBMITTER, str(path), str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(LedgerError, match=rf"held by another daemon \(pid {process.pid}\); stop that one, or"):
                Ledger.open(path, tmp_path / "runs")
        finally:
            process.kill()


@pytest.mark.parametrize("num_acknowledged", [1, 7, 40])
def test_a_daemon_killed_amid_submits_has_lost_none_that_it_acknowledged(
    path: Path, tmp_path: Path, num_acknowledged: int
) -> None:
    command = [sys.executable, "-c", SUBMITTER, str(path), str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().strip() for _ in range(num_acknowledged)]
        process.kill()
        acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
    assert process.returncode == -signal.SIGKILL
    ledger = Ledger.open(path, tmp_path / "runs")
    found = [row.job for row in ledger.unfinished()]
    ledger.close()
    assert len(acknowledged) >= num_acknowledged
    assert found[: len(acknowledged)] == acknowledged
    assert len(found) <= len(acknowledged) + 1  # the one whose acknowledgement was cut off


async def test_the_async_ledger_works_in_one_thread_that_ends_with_it(path: Path, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    ledger = await AsyncLedger.open(path, tmp_path / "runs")
    submission = await ledger.run(Ledger.add, SPEC, uid=1, priority=0, submitted_at=0.0)
    await ledger.run(Ledger.record, submission.row.job, state=JobState.CANCELLED)
    with pytest.raises(JobEnded):
        await ledger.run(Ledger.record, submission.row.job, step=1)
    assert len(set(threading.enumerate()) - threads) == 1
    await ledger.close()
    assert set(threading.enumerate()) == threads
    assert not path.with_name(path.name + "-wal").exists()


async def test_an_async_ledger_that_cannot_open_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_bytes(b"x" * 4096)
    threads = set(threading.enumerate())
    with pytest.raises(LedgerError):
        await AsyncLedger.open(tmp_path / "ledger", tmp_path / "runs")
    for thread in set(threading.enumerate()) - threads:
        thread.join()


class LedgerAgainstModel(RuleBasedStateMachine):
    """Any history of submits, changes and restarts leaves what a dict would hold."""

    @initialize()
    def start(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name, "ledger.sqlite3")
        self.model: dict[str, JobState] = {}
        self.ledger = self.open()

    def open(self) -> Ledger:
        return Ledger.open(self.path, Path(self.directory.name, "runs"))

    @rule(job=st.sampled_from([None, "a", "b", "digits-2"]))
    def submit(self, job: str | None) -> None:
        submission = self.ledger.add(SPEC, uid=1, priority=0, submitted_at=0.0, job=job)
        assert submission.is_new == (submission.row.job not in self.model)
        self.model.setdefault(submission.row.job, JobState.QUEUED)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), state=st.sampled_from(JobState))
    def change(self, data: st.DataObject, state: JobState) -> None:
        job = data.draw(st.sampled_from(sorted(self.model)))
        if self.model[job].is_terminal:
            with pytest.raises(JobEnded):
                self.ledger.record(job, state=state)
        else:
            self.ledger.record(job, state=state)
            self.model[job] = state

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.ledger = self.open()

    @invariant()
    def equals_the_model(self) -> None:
        if hasattr(self, "ledger"):
            assert {row.job: row.state for row in self.ledger.jobs()} == self.model
            unfinished = [job for job, state in self.model.items() if state in UNFINISHED_STATES]
            assert [row.job for row in self.ledger.unfinished()] == unfinished

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.directory.cleanup()


LedgerAgainstModel.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
TestLedgerAgainstModel = LedgerAgainstModel.TestCase
