"""Histograms: values counted into buckets where they are measured, many at a time, and merged into what is exported.

    values ──add──▶ Observations of a running job ──merge, once a tick──▶ those of the exporter ──collect──▶ scrape

A lane's rows come by the thousand a second, and a count costs a bisection; what is labelled and exported follows later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Observations:
    """How many values lie in each bucket, and their sum."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges  # the finite upper ends, ascending, inclusive
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.total += value

    def merge(self, other: Observations) -> None:
        """Adds what the other, of the same edges, has counted."""
        if tuple(other.edges) != tuple(self.edges):
            raise ValueError(f"buckets up to {other.edges} cannot be merged into buckets up to {self.edges}")
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def take(self) -> Observations:
        """What was counted since the last call."""
        taken = Observations(self.edges)
        taken.counts, self.counts = self.counts, taken.counts
        taken.total, self.total = self.total, 0.0
        return taken


class HistogramFamily(Collector):
    """All series of one histogram, for a registry of prometheus_client. `collect` may run in another thread."""

    def __init__(self, name: str, text: str, labels: Sequence[str], edges: Sequence[float]) -> None:
        self._name = name
        self._help = text
        self._labels = labels
        self._edges = edges
        self._ends = [*(repr(float(edge)) for edge in edges), "+Inf"]
        self._series: dict[tuple[str, ...], Observations] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> Observations:
        """The series of these label values, made where there is none yet."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Observations(self._edges)
        return series

    def remove(self, *values: str) -> None:
        """Raises KeyError where there is no such series."""
        del self._series[values]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, series in list(self._series.items()):
            buckets = list(zip(self._ends, accumulate(series.counts), strict=True))
            family.add_metric(values, buckets=buckets, sum_value=series.total)
        yield family
