"""A job's series: what its accounts have grown by, once each; its last values for a while after its end; then none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from weft.scheduler.runs.run import JobRun
from weft.scheduler.runs.series import GRACE_SECONDS, TICKS_PER_LIMIT, JobMetrics
from weft.spec.job_spec import JobSpec

SECOND = 1_000_000_000
WORKERS = ("cpu-0", "cpu-1", "loader-0")


def rows(*parts: tuple[str, int, int], iteration: int = 0) -> bytes:
    return packed_rows(
        [(MODE_INDEX[mode], 0, iteration, -1, start * SECOND, end * SECOND) for mode, start, end in parts]
    )


@pytest.fixture
def run(
    tmp_path: Path,
    plan_of: Callable[..., Plan],
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    spec_of: Callable[..., JobSpec],
) -> Iterator[JobRun]:
    """Two replicas, each on a worker with a compute and a sync lane."""
    parameter = ParameterFacts(units=(0,), num_elements=640, dtype="float32", itemsize=4, trained=True, group=0)
    run = JobRun("digits-1", tmp_path / "digits-1", spec_of())
    run.begin(plan_of(inspection_of([unit_of(0)], parameters=(parameter,)), replicas=2), WORKERS)
    yield run
    run.close()


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


def begun(run: JobRun) -> tuple[Exporter, JobMetrics]:
    exporter = Exporter()
    metrics = JobMetrics(exporter)
    metrics.begin(run)
    return exporter, metrics


def test_hidden_and_exposed_seconds_are_counted_once_by_worker_and_kind(run: JobRun) -> None:
    exporter, metrics = begun(run)
    run.add_report("cpu-0", "compute", rows(("forward", 0, 2), ("backward", 2, 6), ("stall_update", 6, 10)), [])
    run.add_report("cpu-0", "sync", rows(("sync", 4, 7), ("update", 7, 10)), [])
    for _ in range(2):
        metrics.publish(run)
        assert hidden(exporter) == {("cpu-0", "sync"): 2, ("cpu-0", "update"): 0}
        assert exposed(exporter) == {("cpu-0", "sync"): 1, ("cpu-0", "update"): 3}
    run.add_report("cpu-1", "sync", rows(("sync", 5, 7)), [])
    run.add_report("cpu-1", "compute", rows(("backward", 0, 9)), [])
    metrics.publish(run)
    assert hidden(exporter)["cpu-1", "sync"] == 2


def test_a_new_attempt_adds_to_the_counters_of_the_one_before(run: JobRun) -> None:
    exporter, metrics = begun(run)
    for attempt in (1, 2):
        run.add_report("cpu-0", "compute", rows(("backward", 0, 6)), [])
        run.add_report("cpu-0", "sync", rows(("sync", 4, 5)), [])
        metrics.publish(run)
        assert series(exporter, "weft_job_attempt", "job") == {("digits-1",): attempt}
        assert run.plan is not None
        run.begin(run.plan, WORKERS, attempt + 1)
        metrics.begin(run)
    assert hidden(exporter) == {("cpu-0", "sync"): 2}


def test_the_time_of_each_forward_and_backward_is_counted_into_its_bucket(run: JobRun) -> None:
    exporter, metrics = begun(run)
    run.add_report("cpu-0", "compute", rows(("forward", 0, 1), ("backward", 1, 3), ("stall_update", 3, 9)), [])
    for _ in range(2):
        metrics.publish(run)
        buckets = series(exporter, "weft_microbatch_seconds_bucket", "le")
        assert [buckets[(le,)] for le in ("0.1", "1.0", "+Inf")] == [0, 1, 2]
        assert series(exporter, "weft_microbatch_seconds_sum") == {(): 3}


def test_the_last_values_of_a_job_stand_for_a_while_after_its_end_and_then_go(run: JobRun) -> None:
    exporter, metrics = begun(run)
    empty = Exporter().render()
    metrics.tick({run.job: run}, 100.0)
    run.add_report("cpu-0", "compute", rows(("forward", 0, 2)), [])
    run.finish_iteration(0)
    metrics.end(run, 100.5)
    for now in (101.0, 100.4 + GRACE_SECONDS):
        metrics.tick({run.job: run}, now)  # it may still be among the runs while the ledger writes
        assert series(exporter, "weft_lane_seconds_total", "worker", "lane", "mode") == {
            ("cpu-0", "compute", "forward"): 2,
            ("cpu-0", "compute", "idle"): 0,  # there before it happens
            ("cpu-1", "compute", "idle"): 0,
        }
        assert series(exporter, "weft_job_step", "job") == {(run.job,): 1}
        assert series(exporter, "weft_shared_memory_bytes", "job") == {(run.job,): 0}
    metrics.tick({}, 100.5 + GRACE_SECONDS)
    assert exporter.render() == empty


def test_the_limit_is_a_series_while_it_is_known_alone(run: JobRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's stood there before the measured one, and the boards divided a measured iteration by it."""
    exporter, metrics = begun(run)
    for limit in (None, 0.5, None, 0.25):
        monkeypatch.setattr(run, "pace", lambda limit=limit: Pace(iteration_seconds=1.0, limit_seconds=limit))
        for now in range(TICKS_PER_LIMIT):
            metrics.tick({run.job: run}, float(now))
        told = series(exporter, "weft_iteration_limit_seconds", "job")
        assert told == ({} if limit is None else {(run.job,): limit})


@pytest.mark.slow
def test_a_job_with_the_id_of_one_that_was_removed_begins_with_series_of_its_own(run: JobRun) -> None:
    exporter = Exporter()
    metrics = JobMetrics(exporter)
    metrics.begin(run)
    exporter.add("weft_job_samples_total", 9, job=run.job)
    metrics.end(run, now=0.0)
    metrics.begin(run)
    assert series(exporter, "weft_job_samples_total", "job") == {}
    exporter.add("weft_job_samples_total", 2, job=run.job)
    metrics.tick({run.job: run}, now=GRACE_SECONDS + 1.0)
    assert series(exporter, "weft_job_samples_total", "job") == {(run.job,): 2.0}


def test_many_short_jobs_keep_few_series_and_leave_none(run: JobRun) -> None:
    exporter, metrics = begun(run)
    empty = Exporter()
    metrics.end(run, 0.0)
    assert run.plan is not None
    for number in range(1000):
        run.job = f"short-{number}"
        run.begin(run.plan, WORKERS)
        metrics.begin(run)
        run.add_report("cpu-0", "compute", rows(("forward", 0, 2)), [])
        run.finish_iteration(0)
        metrics.tick({run.job: run}, 0.001 * number)
        metrics.end(run, 0.001 * number)
        assert exporter.num_series <= MAX_SERIES
    standing = series(exporter, "weft_job_step", "job")
    assert 100 < len(standing) < 1000
    assert set(standing) == {(f"short-{number}",) for number in range(1000 - len(standing), 1000)}
    metrics.tick({}, 1.0 + GRACE_SECONDS)
    assert exporter.render() == empty.render()
    assert exporter.num_series == empty.num_series


def test_a_job_that_ends_before_it_has_a_plan_has_no_series(run: JobRun) -> None:
    exporter = Exporter()
    JobMetrics(exporter).end(run, 0.0)
    assert exporter.render() == Exporter().render()


def test_a_follower_is_told_how_much_was_hidden(run: JobRun) -> None:
    run.add_report("cpu-0", "compute", rows(("forward", 0, 2), ("backward", 2, 6)), [])
    run.add_report("cpu-0", "sync", rows(("sync", 3, 6)), [])
    run.finish_iteration(0)
    run.add_report("cpu-0", "sync", rows(("update", 6, 7)), [])
    run.add_report("cpu-0", "compute", rows(("forward", 7, 9), iteration=1), [])
    run.finish_iteration(1)
    progress = run.take_progress()
    assert progress is not None
    assert progress["overlap_percent"] == 75.0
