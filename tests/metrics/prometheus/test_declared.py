"""The declarations follow the rules that dashboards and Prometheus rely on, and the page made from them is current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weft.metrics.prometheus.declared import MAX_BUCKETS, METRICS, Metric, MetricKind

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
EACH_METRIC = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)


def test_no_name_is_declared_twice() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@EACH_METRIC
def test_a_name_has_the_prefix_and_the_suffix_of_its_kind(metric: Metric) -> None:
    assert metric.name.startswith("weft_")
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    if metric.unit in ("seconds", "bytes"):
        assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")


@EACH_METRIC
def test_a_help_is_a_sentence(metric: Metric) -> None:
    assert metric.help[0].isupper() or metric.help[0].isdigit()
    assert metric.help.endswith(".")


@EACH_METRIC
def test_a_histogram_has_few_rising_buckets_and_nothing_else_has_any(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
    assert len(metric.buckets) + 1 <= MAX_BUCKETS
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_the_page_of_metrics_is_current() -> None:
    page = subprocess.run(
        [sys.executable, "-m", "weft.metrics.prometheus.declared"], capture_output=True, text=True, check=True
    )
    assert PAGE.read_text(encoding="utf-8") == page.stdout, (
        "run python -m weft.metrics.prometheus.declared > docs/metrics.md"
    )
