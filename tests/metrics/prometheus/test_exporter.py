"""What the daemon sets is what Prometheus reads, and a job that has gone leaves no series."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weft.metrics.prometheus.declared import METRICS, Metric, MetricKind
from weft.metrics.prometheus.exporter import Exporter, UndeclaredMetric
from weft.metrics.prometheus.histogram import Observations


def samples(exporter: Exporter) -> dict[str, float]:
    """Every sample by its name and labels as Prometheus's own parser reads them."""
    found = {}
    for family in text_string_to_metric_families(exporter.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def write(exporter: Exporter, metric: Metric, labels: dict[str, str]) -> None:
    match metric.kind:
        case MetricKind.COUNTER:
            exporter.add(metric.name, 2, **labels)
        case MetricKind.GAUGE:
            exporter.set(metric.name, 2, **labels)
        case MetricKind.HISTOGRAM:
            exporter.observe(metric.name, 2, **labels)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_declared_metric_can_be_written_and_read(metric: Metric) -> None:
    exporter = Exporter()
    write(exporter, metric, {label: f"some {label}" for label in metric.labels})
    labels = ",".join(f"{label}=some {label}" for label in sorted(metric.labels))
    name = f"{metric.name}_sum" if metric.kind is MetricKind.HISTOGRAM else metric.name
    assert samples(exporter)[f"{name}{{{labels}}}" if labels else name] == 2


def test_counters_add_up_and_gauges_take_the_newest() -> None:
    exporter = Exporter()
    for value in (3.0, 4.0):
        exporter.add("weft_job_samples_total", value, job="a-1")
        exporter.set("weft_job_loss", value, job="a-1")
    found = samples(exporter)
    assert found["weft_job_samples_total{job=a-1}"] == 7
    assert found["weft_job_loss{job=a-1}"] == 4


def test_a_histogram_counts_into_its_declared_buckets() -> None:
    exporter = Exporter()
    exporter.observe("weft_iteration_seconds", 0.05, job="a-1")
    found = samples(exporter)
    assert found["weft_iteration_seconds_bucket{job=a-1,le=0.03}"] == 0
    assert found["weft_iteration_seconds_bucket{job=a-1,le=0.1}"] == 1
    assert found["weft_iteration_seconds_count{job=a-1}"] == 1


def test_a_job_that_has_gone_leaves_no_series_and_others_keep_theirs() -> None:
    exporter = Exporter()
    before = samples(exporter)
    for metric in METRICS:
        if "job" in metric.labels:
            write(exporter, metric, dict.fromkeys(metric.labels, "gone-1"))
    exporter.set("weft_job_step", 5, job="stays-1")
    exporter.drop_job("gone-1")
    assert samples(exporter) == before | {"weft_job_step{job=stays-1}": 5}
    exporter.drop_job("gone-1")
    exporter.drop_job("never-was")


def test_a_job_that_comes_back_starts_its_counters_anew() -> None:
    exporter = Exporter()
    exporter.add("weft_job_samples_total", 5, job="a-1")
    exporter.drop_job("a-1")
    exporter.add("weft_job_samples_total", 1, job="a-1")
    assert samples(exporter)["weft_job_samples_total{job=a-1}"] == 1
    exporter.drop_job("a-1")
    assert "weft_job_samples_total{job=a-1}" not in samples(exporter)


def test_a_value_that_is_no_longer_known_is_gone_and_may_come_back() -> None:
    exporter = Exporter()
    exporter.set("weft_job_step", 5, job="a-1")
    exporter.set("weft_job_loss", 1.0, job="a-1")
    before = exporter.num_series
    exporter.drop_gauge("weft_job_step", job="a-1")
    assert "weft_job_step{job=a-1}" not in samples(exporter)
    assert exporter.num_series == before - 1
    exporter.set("weft_job_step", 6, job="a-1")
    assert samples(exporter)["weft_job_step{job=a-1}"] == 6
    exporter.drop_job("a-1")
    assert not {name for name in samples(exporter) if "a-1" in name}
    with pytest.raises(UndeclaredMetric, match="drop_gauge is not for those"):
        exporter.drop_gauge("weft_job_samples_total", job="a-1")


def test_what_is_not_declared_is_refused() -> None:
    exporter = Exporter()
    with pytest.raises(UndeclaredMetric, match="'weft_mood' is not declared; declare it in"):
        exporter.set("weft_mood", 1)
    with pytest.raises(UndeclaredMetric, match="declared with job, not with none"):
        exporter.set("weft_job_step", 1)
    with pytest.raises(UndeclaredMetric, match="declared with job, not with job, worker"):
        exporter.set("weft_job_step", 1, job="a", worker="0")
    with pytest.raises(UndeclaredMetric, match="is a gauge; add is not for those"):
        exporter.add("weft_job_step", 1, job="a")
    with pytest.raises(UndeclaredMetric, match="is a counter; set is not for those"):
        exporter.set("weft_job_samples_total", 1, job="a")
    with pytest.raises(UndeclaredMetric, match="is a gauge; observe is not for those"):
        exporter.observe("weft_control_connections", 1)
    with pytest.raises(UndeclaredMetric, match="is a gauge; merge is not for those"):
        exporter.merge("weft_control_connections", Observations(()))


def test_a_counter_never_goes_back() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        Exporter().add("weft_job_samples_total", -1, job="a")


def test_hostile_label_values_stay_label_values() -> None:
    exporter = Exporter()
    exporter.set("weft_worker_up", 1, worker='0"} 1\nweft_jobs{state="x\\')
    assert len(exporter.render().splitlines()) == len(Exporter().render().splitlines()) + 1


def test_no_created_series_are_exported() -> None:
    exporter = Exporter()
    exporter.add("weft_job_samples_total", 1, job="a-1")
    exporter.observe("weft_queue_wait_seconds", 1)
    assert b"_created" not in exporter.render()


def test_exporters_do_not_share_what_they_hold() -> None:
    first, second = Exporter(), Exporter()
    first.set("weft_control_connections", 3)
    assert samples(second)["weft_control_connections"] == 0


def test_the_number_of_series_is_that_of_the_samples_in_a_scrape() -> None:
    exporter = Exporter()
    assert exporter.num_series == len(samples(exporter))
    for job in ("a-1", "b-1"):
        for metric in METRICS:
            write(exporter, metric, dict.fromkeys(metric.labels, job))
            write(exporter, metric, dict.fromkeys(metric.labels, job))
    assert exporter.num_series == len(samples(exporter))
    exporter.drop_job("a-1")
    assert exporter.num_series == len(samples(exporter))
