"""A running job's series: what its accounts have grown by, once each; gone when the job has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weft.metrics.exporter import Exporter
from weft.scheduler.inspection import Inspection, ParameterFacts, UnitFacts
from weft.scheduler.job_metrics import publish
from weft.scheduler.job_run import JobRun
from weft.scheduler.plan import Plan
from weft.transport.records import MODE_INDEX, Row

SECOND = 1_000_000_000
WORKERS = ("cpu-0", "cpu-1", "loader-0")


def rows(*parts: tuple[str, int, int]) -> list[Row]:
    return [(MODE_INDEX[mode], 0, 0, -1, start * SECOND, end * SECOND) for mode, start, end in parts]


@pytest.fixture
def run(
    tmp_path: Path,
    plan_of: Callable[..., Plan],
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
) -> Iterator[JobRun]:
    """Two replicas, each on a worker with a compute and a sync lane."""
    parameter = ParameterFacts(units=(0,), num_elements=640, dtype="float32", itemsize=4, trained=True, group=0)
    run = JobRun("digits-1", tmp_path / "digits-1", {})
    run.begin(plan_of(inspection_of([unit_of(0)], parameters=(parameter,)), replicas=2), WORKERS)
    yield run
    run.close()


def series(exporter: Exporter, name: str) -> dict[tuple[str, str], float]:
    """By worker and kind."""
    return {
        (sample.labels["worker"], sample.labels["kind"]): sample.value
        for family in text_string_to_metric_families(exporter.render().decode())
        for sample in family.samples
        if sample.name == name
    }


def test_hidden_and_exposed_seconds_are_counted_once_by_worker_and_kind(run: JobRun) -> None:
    exporter = Exporter()
    run.add_report("cpu-0", "compute", rows(("forward", 0, 2), ("backward", 2, 6), ("stall_update", 6, 10)), [])
    run.add_report("cpu-0", "sync", rows(("sync", 4, 7), ("update", 7, 10)), [])
    for _ in range(2):
        publish(exporter, run.job, run)
        assert series(exporter, "weft_overlap_seconds_total") == {("cpu-0", "sync"): 2, ("cpu-0", "update"): 0}
        assert series(exporter, "weft_exposed_seconds_total") == {("cpu-0", "sync"): 1, ("cpu-0", "update"): 3}
    run.add_report("cpu-1", "sync", rows(("sync", 5, 7)), [])
    run.add_report("cpu-1", "compute", rows(("backward", 0, 9)), [])
    publish(exporter, run.job, run)
    assert series(exporter, "weft_overlap_seconds_total")["cpu-1", "sync"] == 2
    exporter.drop_job(run.job)
    assert series(exporter, "weft_overlap_seconds_total") == series(exporter, "weft_exposed_seconds_total") == {}


def test_a_new_attempt_adds_to_the_counters_of_the_one_before(run: JobRun) -> None:
    exporter = Exporter()
    for _ in range(2):
        run.add_report("cpu-0", "compute", rows(("backward", 0, 6)), [])
        run.add_report("cpu-0", "sync", rows(("sync", 4, 5)), [])
        publish(exporter, run.job, run)
        assert run.plan is not None
        run.begin(run.plan, WORKERS)
    assert series(exporter, "weft_overlap_seconds_total") == {("cpu-0", "sync"): 2}


def test_a_follower_is_told_how_much_was_hidden(run: JobRun) -> None:
    run.add_report("cpu-0", "compute", rows(("forward", 0, 2), ("backward", 2, 6)), [])
    run.add_report("cpu-0", "sync", rows(("sync", 3, 6)), [])
    run.finish_iteration(0)
    run.add_report("cpu-0", "sync", rows(("update", 6, 7)), [])
    run.add_report("cpu-0", "compute", [(MODE_INDEX["forward"], 0, 1, -1, 7 * SECOND, 9 * SECOND)], [])
    run.finish_iteration(1)
    progress = run.take_progress()
    assert progress is not None
    assert progress["overlap_percent"] == 75.0
