"""A job's run directory and live numbers, from the rows and values that its lanes report."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.metrics.recording.recording import Recording
from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.kinds import MODE_INDEX
from weft.plan.plan import Plan
from weft.plan.rows import packed_rows
from weft.plan.tables import NO_MORE, Adjustment
from weft.scheduler.adapting.policy import Verdict
from weft.scheduler.core.events import EpochJudged, JobFaulted, JudgeEpoch, Snapshot
from weft.scheduler.runs import judging, run_directory
from weft.scheduler.runs.recording import keep_recording
from weft.scheduler.runs.run import PlannedAttempt, Run
from weft.scheduler.runs.run_directory import RunDirectory
from weft.spec.job_spec import JobSpec

WriteAtOnce = runpy.run_path(str(Path(__file__).parents[2] / "write_at_once.py"))["WriteAtOnce"]
SECOND = 1_000_000_000
SPEC = JobSpec.parse({"job": {"entry": "digits.py:workload", "batch_size": 8, "steps": 4}, "directory": "/"})
MAX_SECONDS = 4  # of one iteration of the stamps below


@pytest.fixture
def plan(
    plan_of: Callable[..., Plan], inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> Plan:
    """Two epochs of two steps (8 and 4 samples) and two validations (8 and 2 samples): T T V V T T V V."""
    return plan_of(inspection_of([unit_of(0)], num_train=12, num_validation=10), batch_size=8, steps=4)


def run_in(directory: Path, spec: JobSpec = SPEC) -> Run:
    return Run(job="digits-1", spec=spec, files=RunDirectory("digits-1", directory, WriteAtOnce()))


def attempt_of(run: Run) -> PlannedAttempt:
    assert run.attempt is not None
    return run.attempt


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Iterator[Run]:
    run = run_in(tmp_path / "runs" / "digits-1")
    run.begin(plan, ("cpu-0", "loader-0"))
    yield run
    run.files.close()


def stamps(iteration: int, start: int, seconds: int) -> bytes:
    """The compute lane of one iteration: waits for data a second, then forward; ends `seconds` after the start."""
    return packed_rows(
        [
            (MODE_INDEX["stall_data"], 1, iteration, 0, start * SECOND, (start + 1) * SECOND),
            (MODE_INDEX["forward"], 1, iteration, -1, (start + 1) * SECOND, (start + seconds) * SECOND),
        ]
    )


def fragment(iteration: int, means: dict[str, float], **facts: float) -> dict[str, Any]:
    return {"iteration": iteration, "means": means, "facts": facts}


def report(run: Run, iteration: int, start: int, seconds: int, means: dict[str, float], **facts: float) -> None:
    values = [fragment(iteration, means, **facts)]
    attempt_of(run).add_report("cpu-0", "compute", stamps(iteration, start, seconds), values)


def lines(run: Run) -> list[dict[str, Any]]:
    run.files.flush()
    return [json.loads(line) for line in (run.files.path / "metrics.jsonl").read_text().splitlines()]


def test_each_step_and_each_validation_is_a_line(run: Run) -> None:
    means = [{"loss": 2.0}, {"loss": 1.5}, {"loss": 1.0, "accuracy": 0.5}, {"loss": 2.0, "accuracy": 1.0}]
    facts = [{"lr": 0.1}, {"lr": 0.05, "grad_norm": 3.0, "skipped": 1.0}, {}, {}]
    for iteration in range(4):
        report(run, iteration, iteration * MAX_SECONDS, 2 + iteration % 2, means[iteration], **facts[iteration])
        run.finish_iteration(iteration)
    first, second, validation = lines(run)
    assert first == {
        "step": 1,
        "epoch": 0,
        "loss": 2.0,
        "lr": 0.1,
        "grad_norm": None,
        "skipped": False,
        "samples": 8,
        "seconds": None,
    }
    assert second == {
        "step": 2,
        "epoch": 0,
        "loss": 1.5,
        "lr": 0.05,
        "grad_norm": 3.0,
        "skipped": True,
        "samples": 4,
        "seconds": 5.0,
    }
    assert validation == {
        "step": 2,
        "epoch": 0,
        "validation": {"loss": pytest.approx(1.2), "accuracy": pytest.approx(0.6)},
    }
    assert attempt_of(run).progress.validation == validation["validation"]
    assert "epoch 1: step 2  validation loss 1.2  accuracy 0.6\n" in (run.files.path / "job.log").read_text()


def test_a_validation_is_the_mean_over_its_samples_and_the_next_one_starts_over(run: Run) -> None:
    for iteration in range(8):
        report(run, iteration, iteration * MAX_SECONDS, 2, {"loss": float(iteration)})
        run.finish_iteration(iteration)
    means = [line["validation"]["loss"] for line in lines(run) if "validation" in line]
    assert means == [pytest.approx(0.8 * 2 + 0.2 * 3), pytest.approx(0.8 * 6 + 0.2 * 7)]


def test_seconds_go_from_the_end_of_one_iteration_to_the_end_of_the_next(run: Run) -> None:
    """By the stamps of the lane that ends last, whatever the order in which reports arrive."""
    report(run, 0, 0, 2, {"loss": 1.0})
    report(run, 1, 4, 3, {"loss": 1.0})
    attempt_of(run).add_report("loader-0", "load", packed_rows([(MODE_INDEX["load"], 0, 0, -1, 0, 3 * SECOND)]), [])
    run.finish_iteration(0)
    run.finish_iteration(1)
    assert [line["seconds"] for line in lines(run)] == [None, 4.0]
    assert attempt_of(run).pace().iteration_seconds == 4.0


def test_waiting_does_not_end_an_iteration(run: Run) -> None:
    report(run, 0, 0, 2, {"loss": 1.0})
    report(run, 1, 4, 2, {"loss": 1.0})
    attempt_of(run).add_report(
        "loader-0", "load", packed_rows([(MODE_INDEX["stall_slot"], 0, 1, 3, 0, 100 * SECOND)]), []
    )
    run.finish_iteration(0)
    run.finish_iteration(1)
    assert lines(run)[1]["seconds"] == 4.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_have_is_null(run: Run, value: float) -> None:
    """A validation loss of nan made a line that no other JSON reader takes."""
    for iteration in range(4):
        report(run, iteration, iteration * MAX_SECONDS, 2, {"loss": value})
        run.finish_iteration(iteration)
    run.files.flush()
    text = (run.files.path / "metrics.jsonl").read_text()
    told = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]
    assert told[0]["loss"] is None
    assert told[2]["validation"] == {"loss": None}


def test_a_new_attempt_starts_its_numbers_and_its_metrics_over(run: Run, plan: Plan) -> None:
    for iteration in range(3):
        report(run, iteration, iteration * MAX_SECONDS, 2, {"loss": 9.0})
        run.finish_iteration(iteration)
    progress = run.begin(plan, ("cpu-1", "loader-0")).progress
    assert (progress.step, progress.loss, progress.validation) == (0, None, None)
    assert lines(run) == []
    for iteration in range(4):
        report(run, iteration, 1000 + iteration * MAX_SECONDS, 2, {"loss": 1.0})
        run.finish_iteration(iteration)
    assert [line.get("seconds") for line in lines(run)] == [None, 4.0, None]
    assert lines(run)[2]["validation"] == {"loss": pytest.approx(1.0)}


def test_the_plan_and_the_spec_stand_beside_the_metrics(run: Run, plan: Plan) -> None:
    assert json.loads((run.files.path / "spec.json").read_text()) == SPEC.to_wire()
    told = json.loads((run.files.path / "plan.json").read_text())
    assert told["workers"] == ["cpu-0", "loader-0"]
    assert told["lanes"]["cpu-0/compute"] == ["FORWARD(0,0)", "BACKWARD(0,0)", "UPDATE(0)", "SNAPSHOT(0)"]
    assert (told["steps"], told["iterations"]) == (4, 8)
    assert run.files.path.stat().st_mode & 0o777 == 0o700


def test_the_log_keeps_what_was_there_and_gives_each_line_of_ours_its_time(run: Run, tmp_path: Path) -> None:
    run.files.log("queued\nrunning")
    run.files.log_output("the user's own\n")
    run.files.log_output("half a line")
    run.files.close()
    again = run_in(run.files.path)
    again.files.log("recovered")
    again.files.close()
    first, second, third, last = (run.files.path / "job.log").read_text().splitlines()
    assert (first[8:], second[8:], third) == (" queued", " running", "the user's own")
    assert last.startswith("half a line")
    assert last.endswith(" recovered")


def test_text_that_is_no_unicode_reaches_the_log_all_the_same(run: Run) -> None:
    run.files.log_output("a \udcff b\n")
    assert (run.files.path / "job.log").read_text() == "a ? b\n"


def test_a_log_has_a_bound_and_says_so_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "MAX_LOG_BYTES", 100)
    for _ in range(50):
        run.files.log_output("a print in an inner loop\n")
    text = (run.files.path / "job.log").read_text()
    assert text.count("the log is full; nothing more is kept\n") == 1
    assert len(text) < 200


def test_progress_covers_the_time_since_it_was_last_asked_for(run: Run) -> None:
    assert attempt_of(run).take_news() is None
    for iteration in range(2):
        report(run, iteration, iteration * MAX_SECONDS, 4, {"loss": 2.0 - iteration}, lr=0.1, grad_norm=2.5)
        run.finish_iteration(iteration)
    told = attempt_of(run).take_news()
    assert told is not None
    assert (told["step"], told["steps"], told["epoch"], told["loss"]) == (2, 4, 0, 1.0)
    assert (told["lr"], told["grad_norm"]) == (0.1, 2.5)
    assert told["samples_per_second"] == 1.0
    assert told["eta_seconds"] == 8.0
    assert told["data_percent"] == told["stall_percent"] == 25.0
    assert attempt_of(run).take_news() is None


def test_a_step_in_which_nothing_counts_is_a_line_like_any_other(run: Run) -> None:
    """No microbatch of it has a loss, as in the reference, whose sum over none is 0 as well."""
    attempt_of(run).add_report("cpu-0", "compute", b"", [fragment(0, {}, lr=0.1)])
    run.finish_iteration(0)
    assert (lines(run)[0]["loss"], lines(run)[0]["lr"]) == (0.0, 0.1)
    assert attempt_of(run).pace().iteration_seconds is None


def test_each_lanes_part_of_a_mean_is_added_up_and_a_fact_is_a_fact(run: Run) -> None:
    """Two replicas have each their part of the batch's loss, and an owner knows the rate and the norm."""
    for worker, part in (("cpu-0", 0.5), ("cpu-1", 0.25)):
        attempt_of(run).add_report(worker, "compute", b"", [fragment(0, {"loss": part}), fragment(1, {"loss": 10.0})])
    attempt_of(run).add_report("cpu-0", "sync", b"", [fragment(0, {}, lr=0.1, grad_norm=4.0)])
    run.finish_iteration(0)
    (line,) = lines(run)
    assert (line["loss"], line["lr"], line["grad_norm"], line["skipped"]) == (0.75, 0.1, 4.0, False)
    assert (attempt_of(run).progress.loss, attempt_of(run).progress.learning_rate) == (0.75, 0.1)


def test_a_validation_that_is_weighed_is_the_mean_over_what_counts(run: Run) -> None:
    """What the batches of 8 and 2 samples count is another matter than their samples."""
    for iteration, weight in ((2, 10.0), (3, 30.0), (6, 0.0), (7, 0.0)):
        means = {"loss": float(iteration)} if weight else {}
        attempt_of(run).add_report("cpu-0", "compute", b"", [fragment(iteration, means, weight=weight)])
        attempt_of(run).add_report("cpu-1", "compute", b"", [fragment(iteration, {}, weight=weight)])
        run.finish_iteration(iteration)
        if iteration == 3:
            assert attempt_of(run).progress.validation == {"loss": (10 * 2.0 + 30 * 3.0) / 40}
    assert attempt_of(run).progress.validation == {}, "where nothing counts there is no mean"


def test_a_recording_that_waited_for_another_tells_that_the_job_has_ended_meanwhile(run: Run) -> None:
    async def ask_then_end() -> None:
        async with run.recording:
            asked = asyncio.create_task(keep_recording(run))
            await asyncio.sleep(0)
            run.files.close()
        await asked

    report(run, 0, 0, 2, {"loss": 2.0}, lr=0.1)
    run.finish_iteration(0)
    asyncio.run(ask_then_end())
    recording = Recording.load(run.files.path / "recording.msgpack")
    assert recording.facts["ended"] is True
    assert recording.iteration_ends == {0: 2 * SECOND}


def test_of_an_epochs_validation_the_job_is_told_what_its_scheduler_takes(tmp_path: Path, plan: Plan) -> None:
    judge = JudgeEpoch(job="digits-1", attempt=1, iteration=3, worker="cpu-0")
    judged = {}
    for metric in (None, "accuracy", "f1"):
        run = run_in(tmp_path / "runs" / f"digits-{metric}")
        run.begin(dataclasses.replace(plan, scheduler_metric=metric), ("cpu-0", "loader-0"))
        for iteration in (2, 3):
            report(run, iteration, iteration * MAX_SECONDS, 2, {"loss": 2.0, "accuracy": 0.5})
            run.finish_iteration(iteration)
        judged[metric] = judging.judge_epoch(run, judge)
        run.files.close()
    assert judged[None] == EpochJudged(job="digits-1", attempt=1, iteration=3)
    assert judged["accuracy"] == EpochJudged(job="digits-1", attempt=1, iteration=3, measured=0.5)
    assert isinstance(fault := judged["f1"], JobFaulted)
    assert "= 'f1': validations report loss, accuracy; use one of these" in fault.message


# --- what changes as it runs


def test_a_jobs_log_tells_of_new_shares_and_of_a_replica_that_does_not_pay(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    run = run_in(tmp_path / "runs" / "digits-1")
    run.begin(plan_of(replicas=2, share="adaptive", shares=[3, 1], steps=9), ("cpu-0", "cpu-1", "loader-0"))
    assert attempt_of(run).shares() == [0.75, 0.25]
    run.adjust(4, Adjustment(shares=(1.0, 0.0)))
    run.judge(Verdict(replica=1, with_seconds=0.0123, without_seconds=0.011), 4)
    assert attempt_of(run).shares() == [1.0, 0.0]
    run.files.close()
    log = (run.files.path / "job.log").read_text()
    assert "shares from step 5 on: 100.0 %, 0.0 %\n" in log
    assert attempt_of(run).verdicts == [log.splitlines()[-1].partition(" ")[2]]
    assert attempt_of(run).verdicts[0].endswith("its share is 0 from step 5 on")


def test_a_jobs_log_tells_who_updates_which_bucket_from_when_on(
    tmp_path: Path, plan_of: Callable[..., Plan], inspection_of: Any, unit_of: Any, parameter_of: Any
) -> None:
    parameters = tuple(parameter_of(number, num_elements=1000, state=()) for number in range(2))
    inspection = inspection_of([unit_of(number) for number in range(2)], parameters=parameters)
    run = run_in(tmp_path / "runs" / "digits-1")
    strategy = {"replicas": [{"device": "gpu"}], "update": "balanced", "bucket_mib": 0.004, "steps": 9}
    run.begin(plan_of(inspection, **strategy), ("cpu-0", "gpu-0", "loader-0"))
    run.adjust(7, Adjustment(local=(1,)))
    run.files.close()
    log = (run.files.path / "job.log").read_text()
    assert "updates from step 8 on: bucket 0 by the host; bucket 1 by gpu-0\n" in log
    assert attempt_of(run).course.local.newest == (7, {1})


def test_where_replicas_steal_shares_are_those_of_the_newest_iteration(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    run = run_in(tmp_path / "runs" / "digits-1")
    run.begin(plan_of(replicas=2, microbatches=4, share="stealing"), ("cpu-0", "cpu-1", "loader-0"))
    assert attempt_of(run).shares() == [0.5, 0.5]
    run.adjust(0, Adjustment(grants=[(0, 0, 0, 0), (0, 0, 1, 1), (1, 0, 0, 2), (0, 0, 2, 3), (1, 0, 1, NO_MORE)]))
    run.finish_iteration(0)
    assert attempt_of(run).shares() == [0.75, 0.25]
    run.files.close()


# --- profiles


def test_a_profiled_jobs_recording_is_due_once_all_workers_told_and_its_iterations_are_over(
    tmp_path: Path, plan: Plan
) -> None:
    spec = JobSpec.parse({**SPEC.to_wire(), "profile": {"first": 1, "iterations": 2}})
    run = run_in(tmp_path / "runs" / "digits-1", spec)
    run.begin(plan, ("cpu-0", "loader-0"))
    due = []
    for iteration in range(4):
        if iteration == 2:
            run.note_profile("cpu-0", 1, "profiled iterations 1 to 2: 7 events in profile-cpu-0.msgpack")
        if iteration == 1:
            run.note_profile("loader-0", 1, "not profiled: no CUPTI here")
        report(run, iteration, 10 * iteration, 3, {"loss": 1.0})
        run.finish_iteration(iteration)
        due.append(run.take_profiled())
    assert due == [False, False, True, False]
    run.begin(plan, ("cpu-0", "loader-0"), number=2)
    report(run, 0, 0, 3, {"loss": 1.0})
    run.finish_iteration(2)
    for worker in ("cpu-0", "loader-0"):
        run.note_profile(worker, 1, "late: of the attempt before")
    assert not run.take_profiled()
    for worker in ("cpu-0", "loader-0"):
        run.note_profile(worker, 2, "profiled")
    assert run.take_profiled()
    run.files.close()
    log = (run.files.path / "job.log").read_text()
    assert "cpu-0: profiled iterations 1 to 2: 7 events in profile-cpu-0.msgpack\n" in log
    assert "loader-0: not profiled: no CUPTI here\n" in log


def test_a_job_that_is_not_profiled_has_no_recording_of_profiled_iterations(run: Run) -> None:
    report(run, 0, 0, 3, {"loss": 1.0})
    run.finish_iteration(0)
    assert not run.take_profiled()


# --- going on from a snapshot


def iterate(run: Run, first: int, last: int, *, start: int = 0, loss: float = 1.0) -> None:
    for iteration in range(first, last):
        report(run, iteration, start + iteration * MAX_SECONDS, 2, {"loss": loss + iteration}, lr=0.1)
        run.finish_iteration(iteration)


def go_on(run: Run, plan: Plan, begins: int, number: int = 2) -> PlannedAttempt:
    return run.begin(plan, ("cpu-0", "loader-0"), number, begins=begins)


def test_what_is_made_again_is_in_the_metrics_already(run: Run, plan: Plan) -> None:
    """T T V V T T: killed behind the first step of the second epoch, and gone on from behind the first one."""
    iterate(run, 0, 5)
    before = lines(run)
    assert [line["step"] for line in before] == [1, 2, 2, 3]
    attempt = go_on(run, plan, 1)
    assert lines(run) == before
    iterate(run, 1, 5, start=1000)
    assert lines(run) == before, "each of them is made again"
    iterate(run, 5, 8, start=1000)
    assert [line["step"] for line in lines(run)] == [1, 2, 2, 3, 4, 4]
    assert attempt.progress.step == 4


def test_an_attempt_that_goes_on_knows_where_it_is_and_what_was_last_known(run: Run, plan: Plan) -> None:
    iterate(run, 0, 5)
    known = attempt_of(run).progress
    progress = go_on(run, plan, 4).progress
    assert (progress.step, progress.finished_iterations) == (2, 4)
    assert (progress.loss, progress.learning_rate, progress.validation) == (5.0, 0.1, known.validation)
    assert known.validation is not None


def test_the_history_has_each_step_once(run: Run, plan: Plan) -> None:
    iterate(run, 0, 5)
    history = attempt_of(run).progress.history
    once = pickle.dumps(history)
    assert go_on(run, plan, 1).progress.history is history
    iterate(run, 1, 5, start=1000)
    assert pickle.dumps(history) == once
    iterate(run, 5, 6, start=1000)
    assert pickle.dumps(history) != once


def test_a_job_that_goes_on_twice_from_the_same_place_writes_each_line_once(run: Run, plan: Plan) -> None:
    iterate(run, 0, 5)
    for number in (2, 3):
        go_on(run, plan, 1, number)
        iterate(run, 1, 3 + number, start=1000 * number)
    assert [line["step"] for line in lines(run)] == [1, 2, 2, 3, 4]


def test_a_job_that_begins_again_after_it_went_on_starts_its_lines_over(run: Run, plan: Plan) -> None:
    iterate(run, 0, 5)
    go_on(run, plan, 1)
    attempt = run.begin(plan, ("cpu-0", "loader-0"), 3)
    assert (attempt.progress.step, attempt.progress.loss) == (0, None)
    assert lines(run) == []
    iterate(run, 0, 2, start=2000)
    assert [line["step"] for line in lines(run)] == [1, 2]


def test_the_first_iteration_of_an_attempt_that_goes_on_has_no_beginning(run: Run, plan: Plan) -> None:
    """Nothing says when it began: the one before it was another attempt's."""
    iterate(run, 0, 1)
    go_on(run, plan, 1)
    iterate(run, 1, 2, start=1000)
    assert [line["seconds"] for line in lines(run)] == [None, None]


def test_a_snapshot_is_due_again_by_what_it_took_the_busiest_lane(run: Run) -> None:
    attempt = attempt_of(run)
    made: list[int] = []
    attempt.snapshots.made = lambda copied_ns, now: made.append(copied_ns)  # type: ignore[method-assign]
    attempt.note_snapshot(Snapshot(iteration=0))
    for worker, start in (("cpu-0", 0), ("cpu-0", 20)):
        rows = packed_rows([(MODE_INDEX["snapshot"], 4, 0, -1, start * SECOND, (start + 3) * SECOND)])
        attempt.add_report(worker, "compute", rows, [])
        attempt.note_snapshot(Snapshot(iteration=0))
    assert made == [0, 3 * SECOND, 6 * SECOND]
