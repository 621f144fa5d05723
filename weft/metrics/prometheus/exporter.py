"""The Prometheus view of the daemon: declared metrics in, text exposition out.

Not a place where anything is counted: the daemon sets it from the accounts and the state that it keeps anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from weft.metrics.prometheus.declared import METRICS, Metric, MetricKind
from weft.metrics.prometheus.histogram import HistogramFamily, Observations

Family = Counter | Gauge | HistogramFamily
Series = Counter | Gauge | Observations
_Key = tuple[str, tuple[str, ...]]


class UndeclaredMetric(ValueError):
    """A metric that declared.py does not have, or not of that kind or with those labels: a bug of the caller."""


class Exporter:
    """The declared metrics in a registry of their own. For one thread, except `render`, which any may call.

    Labels are given by keyword, all of them: `exporter.add("weft_job_samples_total", 100, job="digits-1")`. Each method
    raises UndeclaredMetric for a name, a kind or a label that is not declared.
    """

    def __init__(self, metrics: Sequence[Metric] = METRICS) -> None:
        # Process-wide in prometheus_client, and without a way to say it for one registry.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client gives it no hints
        self._registry = CollectorRegistry()
        self._metrics = {metric.name: metric for metric in metrics}
        self._families = {metric.name: _family(metric, self._registry) for metric in metrics}
        self._series: dict[_Key, Series] = {}
        self._keys_of_job: defaultdict[str, list[_Key]] = defaultdict(list)
        self.num_series = sum(_num_series(metric) for metric in metrics if not metric.labels)  # of a scrape

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Sets a gauge."""
        series = self._find(name, labels)
        if not isinstance(series, Gauge):
            raise self._wrong_kind(name, "set")
        series.set(value)

    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Adds to a counter; raises ValueError for a negative amount."""
        series = self._find(name, labels)
        if not isinstance(series, Counter):
            raise self._wrong_kind(name, "add")
        series.inc(amount)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Counts a value into a histogram."""
        series = self._find(name, labels)
        if not isinstance(series, Observations):
            raise self._wrong_kind(name, "observe")
        series.add(value)

    def merge(self, name: str, observations: Observations, /, **labels: str) -> None:
        """Adds to a histogram what was counted into the same buckets elsewhere."""
        series = self._find(name, labels)
        if not isinstance(series, Observations):
            raise self._wrong_kind(name, "merge")
        series.merge(observations)

    def drop_job(self, job: str) -> None:
        """Removes every series labelled with the job. Call it when the job has ended; a later write makes them anew."""
        for key in self._keys_of_job.pop(job, ()):
            self._remove(key)

    def drop_gauge(self, name: str, /, **labels: str) -> None:
        """Removes one series of a job, if it is there: a value that is no longer known. A later `set` makes it anew."""
        if not isinstance(self._find(name, labels), Gauge):
            raise self._wrong_kind(name, "drop_gauge")
        key = name, tuple([labels[label] for label in self._metrics[name].labels])
        self._keys_of_job[labels["job"]].remove(key)
        self._remove(key)

    def _remove(self, key: _Key) -> None:
        name, values = key
        self._families[name].remove(*values)
        del self._series[key]
        self.num_series -= _num_series(self._metrics[name])

    def render(self) -> bytes:
        """The text exposition format of everything."""
        return generate_latest(self._registry)

    def _find(self, name: str, labels: dict[str, str]) -> Series:
        metric = self._metrics.get(name)
        if metric is None or labels.keys() != set(metric.labels):
            raise self._undeclared(name, labels)
        if not metric.labels:
            family = self._families[name]
            return family.labels() if isinstance(family, HistogramFamily) else family
        key = name, tuple([labels[label] for label in metric.labels])
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._families[name].labels(*key[1])
            self.num_series += _num_series(metric)
            if "job" in labels:
                self._keys_of_job[labels["job"]].append(key)
        return series

    def _undeclared(self, name: str, labels: dict[str, str]) -> UndeclaredMetric:
        metric = self._metrics.get(name)
        if metric is None:
            return UndeclaredMetric(
                f"metric {name!r} is not declared; declare it in weft/metrics/prometheus/declared.py"
            )
        declared = ", ".join(metric.labels) or "no labels"
        return UndeclaredMetric(f"metric {name!r} is declared with {declared}, not with {', '.join(labels) or 'none'}")

    def _wrong_kind(self, name: str, verb: str) -> UndeclaredMetric:
        return UndeclaredMetric(f"metric {name!r} is a {self._metrics[name].kind}; {verb} is not for those")


def _num_series(metric: Metric) -> int:
    """Of one set of labels: a histogram has its buckets, that for +Inf, a sum and a count."""
    return len(metric.buckets) + 3 if metric.kind is MetricKind.HISTOGRAM else 1


def _family(metric: Metric, registry: CollectorRegistry) -> Family:
    match metric.kind:
        case MetricKind.COUNTER:
            return Counter(metric.name, metric.help, metric.labels, registry=registry)
        case MetricKind.GAUGE:
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)
        case MetricKind.HISTOGRAM:
            family = HistogramFamily(metric.name, metric.help, metric.labels, metric.buckets)
            registry.register(family)
            return family
