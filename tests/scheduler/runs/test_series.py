"""A job's series: what its accounts have grown by, once each; its last values for a while after its end; then none."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weft.metrics.prometheus.declared import MAX_SERIES
from weft.metrics.prometheus.exporter import Exporter
from weft.plan.inspection import Inspection, ParameterFacts, UnitFacts
from weft.plan.kinds import MODE_INDEX
from weft.plan.plan import Plan
from weft.plan.rows import packed_rows
from weft.scheduler.runs.iteration_pace import Pace
from weft.scheduler.runs.run import PlannedAttempt, Run
from weft.scheduler.runs.run_directory import RunDirectory
from weft.scheduler.runs.series import GRACE_SECONDS, TICKS_PER_LIMIT, JobMetrics
from weft.spec.job_spec import JobSpec
from weft.spec.job_state import JobState

WriteAtOnce = runpy.run_path(str(Path(__file__).resolve().parents[2] / "write_at_once.py"))["WriteAtOnce"]

SECOND = 1_000_000_000
WORKERS = ("cpu-0", "cpu-1", "loader-0")


def rows(*parts: tuple[str, int, int], iteration: int = 0) -> bytes:
    return packed_rows(
        [(MODE_INDEX[mode], 0, iteration, -1, start * SECOND, end * SECOND) for mode, start, end in parts]
    )


@pytest.fixture
def attempt(
    plan_of: Callable[..., Plan], inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> PlannedAttempt:
    """Two replicas, each on a worker with a compute and a sync lane."""
    parameter = ParameterFacts(units=(0,), num_elements=640, dtype="float32", itemsize=4, trained=True, group=0)
    plan = plan_of(inspection_of([unit_of(0)], parameters=(parameter,)), replicas=2)
    return PlannedAttempt("digits-1", 1, plan, WORKERS)


def series(exporter: Exporter, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """By these labels."""
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in text_string_to_metric_families(exporter.render().decode())
        for sample in family.samples
        if sample.name == name
    }


def hidden(exporter: Exporter) -> dict[tuple[str, ...], float]:
    return series(exporter, "weft_overlap_seconds_total", "worker", "kind")


def exposed(exporter: Exporter) -> dict[tuple[str, ...], float]:
    return series(exporter, "weft_exposed_seconds_total", "worker", "kind")


def begun(attempt: PlannedAttempt) -> tuple[Exporter, JobMetrics]:
    exporter = Exporter()
    metrics = JobMetrics(exporter)
    metrics.begin(attempt)
    return exporter, metrics


def test_hidden_and_exposed_seconds_are_counted_once_by_worker_and_kind(attempt: PlannedAttempt) -> None:
    exporter, metrics = begun(attempt)
    attempt.add_report("cpu-0", "compute", rows(("forward", 0, 2), ("backward", 2, 6), ("stall_update", 6, 10)), [])
    attempt.add_report("cpu-0", "sync", rows(("sync", 4, 7), ("update", 7, 10)), [])
    for _ in range(2):
        metrics.publish(attempt)
        assert hidden(exporter) == {("cpu-0", "sync"): 2, ("cpu-0", "update"): 0}
        assert exposed(exporter) == {("cpu-0", "sync"): 1, ("cpu-0", "update"): 3}
    attempt.add_report("cpu-1", "sync", rows(("sync", 5, 7)), [])
    attempt.add_report("cpu-1", "compute", rows(("backward", 0, 9)), [])
    metrics.publish(attempt)
    assert hidden(exporter)["cpu-1", "sync"] == 2


def test_a_new_attempt_adds_to_the_counters_of_the_one_before(attempt: PlannedAttempt) -> None:
    exporter, metrics = begun(attempt)
    for number in (1, 2):
        attempt.add_report("cpu-0", "compute", rows(("backward", 0, 6)), [])
        attempt.add_report("cpu-0", "sync", rows(("sync", 4, 5)), [])
        metrics.publish(attempt)
        assert series(exporter, "weft_job_attempt", "job") == {("digits-1",): number}
        attempt = PlannedAttempt("digits-1", number + 1, attempt.plan, WORKERS)
        metrics.begin(attempt)
    assert hidden(exporter) == {("cpu-0", "sync"): 2}


def test_the_time_of_each_forward_and_backward_is_counted_into_its_bucket(attempt: PlannedAttempt) -> None:
    exporter, metrics = begun(attempt)
    attempt.add_report("cpu-0", "compute", rows(("forward", 0, 1), ("backward", 1, 3), ("stall_update", 3, 9)), [])
    for _ in range(2):
        metrics.publish(attempt)
        buckets = series(exporter, "weft_microbatch_seconds_bucket", "le")
        assert [buckets[(le,)] for le in ("0.1", "1.0", "+Inf")] == [0, 1, 2]
        assert series(exporter, "weft_microbatch_seconds_sum") == {(): 3}


def test_the_last_values_of_a_job_stand_for_a_while_after_its_end_and_then_go(attempt: PlannedAttempt) -> None:
    exporter, metrics = begun(attempt)
    empty = Exporter().render()
    metrics.tick([attempt], 100.0)
    attempt.add_report("cpu-0", "compute", rows(("forward", 0, 2)), [])
    attempt.finish(attempt.plan.itinerary.at(0))
    metrics.end(attempt, 100.5)
    for now in (101.0, 100.4 + GRACE_SECONDS):
        metrics.tick([attempt], now)  # it may still be among the runs while the ledger writes
        assert series(exporter, "weft_lane_seconds_total", "worker", "lane", "mode") == {
            ("cpu-0", "compute", "forward"): 2,
            ("cpu-0", "compute", "idle"): 0,  # there before it happens
            ("cpu-1", "compute", "idle"): 0,
        }
        assert series(exporter, "weft_job_step", "job") == {(attempt.job,): 1}
        assert series(exporter, "weft_shared_memory_bytes", "job") == {(attempt.job,): 0}
    metrics.tick([], 100.5 + GRACE_SECONDS)
    assert exporter.render() == empty


def test_a_job_that_has_let_go_has_no_memory_until_its_next_attempt(attempt: PlannedAttempt) -> None:
    exporter, metrics = begun(attempt)
    metrics.let_go(attempt.job)
    metrics.tick([attempt], 100.0)
    assert series(exporter, "weft_shared_memory_bytes", "job") == {(attempt.job,): 0}
    metrics.begin(PlannedAttempt(attempt.job, 2, attempt.plan, WORKERS))
    assert series(exporter, "weft_shared_memory_bytes", "job") == {(attempt.job,): attempt.plan.shared_bytes}
    metrics.let_go("unplanned")  # it has been inspected alone, and has no series
    assert ("unplanned",) not in series(exporter, "weft_shared_memory_bytes", "job")


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PAUSED])
def test_a_daemon_that_goes_on_with_a_paused_job_gives_it_no_memory(
    attempt: PlannedAttempt, tmp_path: Path, state: JobState
) -> None:
    job = {"entry": "digits.py:workload", "epochs": 1, "batch_size": 8}
    spec = JobSpec.parse({"job": job, "directory": str(tmp_path)})
    run = Run(
        job=attempt.job,
        spec=spec,
        files=RunDirectory(attempt.job, tmp_path, WriteAtOnce()),
        state=state,
        attempt=attempt,
    )
    exporter = Exporter()
    JobMetrics(exporter).go_on(run)
    memory = attempt.plan.shared_bytes if state is JobState.RUNNING else 0
    assert series(exporter, "weft_shared_memory_bytes", "job") == {(attempt.job,): memory}


def test_the_limit_is_a_series_while_it_is_known_alone(
    attempt: PlannedAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's stood there before the measured one, and the boards divided a measured iteration by it."""
    exporter, metrics = begun(attempt)
    for limit in (None, 0.5, None, 0.25):
        monkeypatch.setattr(attempt, "pace", lambda limit=limit: Pace(iteration_seconds=1.0, limit_seconds=limit))
        for now in range(TICKS_PER_LIMIT):
            metrics.tick([attempt], float(now))
        told = series(exporter, "weft_iteration_limit_seconds", "job")
        assert told == ({} if limit is None else {(attempt.job,): limit})


def test_a_limit_that_a_job_has_not_is_looked_for_less_often_once_it_has_run_for_a_while(
    attempt: PlannedAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where replicas steal there is none, mostly: the search took a tenth of the daemon's time."""
    _, metrics = begun(attempt)
    looks: list[int] = []
    monkeypatch.setattr(attempt, "pace", lambda: looks.append(tick) or Pace(iteration_seconds=1.0))
    for tick in range(1, 4 * TICKS_PER_LIMIT):
        metrics.tick([attempt], float(tick))
    early = [tick for tick in looks if tick <= TICKS_PER_LIMIT]
    assert len(early) >= TICKS_PER_LIMIT - 1, "a new one is to be known soon"
    assert [tick for tick in looks if tick > TICKS_PER_LIMIT] == [2 * TICKS_PER_LIMIT, 3 * TICKS_PER_LIMIT]


@pytest.mark.slow
def test_a_job_with_the_id_of_one_that_was_removed_begins_with_series_of_its_own(attempt: PlannedAttempt) -> None:
    exporter = Exporter()
    metrics = JobMetrics(exporter)
    metrics.begin(attempt)
    exporter.add("weft_job_samples_total", 9, job=attempt.job)
    metrics.end(attempt, now=0.0)
    metrics.begin(attempt)
    assert series(exporter, "weft_job_samples_total", "job") == {}
    exporter.add("weft_job_samples_total", 2, job=attempt.job)
    metrics.tick([attempt], now=GRACE_SECONDS + 1.0)
    assert series(exporter, "weft_job_samples_total", "job") == {(attempt.job,): 2.0}


def test_many_short_jobs_keep_few_series_and_leave_none(attempt: PlannedAttempt) -> None:
    exporter, metrics = begun(attempt)
    empty = Exporter()
    metrics.end(attempt, 0.0)
    for number in range(1000):
        attempt = PlannedAttempt(f"short-{number}", 1, attempt.plan, WORKERS)
        metrics.begin(attempt)
        attempt.add_report("cpu-0", "compute", rows(("forward", 0, 2)), [])
        attempt.finish(attempt.plan.itinerary.at(0))
        metrics.tick([attempt], 0.001 * number)
        metrics.end(attempt, 0.001 * number)
        assert exporter.num_series <= MAX_SERIES
    standing = series(exporter, "weft_job_step", "job")
    assert 100 < len(standing) < 1000
    assert set(standing) == {(f"short-{number}",) for number in range(1000 - len(standing), 1000)}
    metrics.tick([], 1.0 + GRACE_SECONDS)
    assert exporter.render() == empty.render()
    assert exporter.num_series == empty.num_series


def test_a_follower_is_told_how_much_was_hidden(attempt: PlannedAttempt) -> None:
    attempt.add_report("cpu-0", "compute", rows(("forward", 0, 2), ("backward", 2, 6)), [])
    attempt.add_report("cpu-0", "sync", rows(("sync", 3, 6)), [])
    attempt.finish(attempt.plan.itinerary.at(0))
    attempt.add_report("cpu-0", "sync", rows(("update", 6, 7)), [])
    attempt.add_report("cpu-0", "compute", rows(("forward", 7, 9), iteration=1), [])
    attempt.finish(attempt.plan.itinerary.at(1))
    progress = attempt.take_news()
    assert progress is not None
    assert progress["overlap_percent"] == 75.0
