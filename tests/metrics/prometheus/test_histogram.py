"""Histograms count values where Prometheus expects them, and lose none on their way to the exporter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from weft.metrics.prometheus.histogram import HistogramFamily, Observations

EDGES = (0.1, 1.0, 10.0)


@given(st.lists(st.floats(0, 20) | st.sampled_from(EDGES)))
def test_the_exposition_is_that_of_prometheus_clients_own_histogram(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    family = HistogramFamily("weft_times", "Times.", ("job",), EDGES)
    ours.register(family)
    histogram = Histogram("weft_times", "Times.", ("job",), buckets=EDGES, registry=theirs)
    series, reference = family.labels("a"), histogram.labels("a")
    for value in values:
        series.add(value)
        reference.observe(value)
    without_created = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == without_created


def test_what_is_taken_and_merged_is_counted_once() -> None:
    source, target = Observations(EDGES), Observations(EDGES)
    for values in ((0.05, 0.5), (), (0.5, 50.0)):
        for value in values:
            source.add(value)
        target.merge(source.take())
    assert target.counts == [1, 2, 0, 1]
    assert target.total == pytest.approx(51.05)


def test_other_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be merged"):
        Observations(EDGES).merge(Observations((1.0,)))
