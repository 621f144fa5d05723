"""What a board would show, without Grafana: each panel's queries with the variables filled in, and their answers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_server import PrometheusServer

from weft.metrics.grafana.board import VARIABLES, Dashboard, Panel

EVERYTHING = ".*"  # what Grafana fills in for "All"
_LABEL = re.compile(r"{{\s*(\w+)\s*}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the boards' time picker would say; all in seconds. rate: what $__rate_interval stands for."""

    start: float
    end: float
    step: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """points: (time, value), finite ones alone."""

    legend: str
    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


def filled_in(expression: str, window: Window) -> str:
    text = expression.replace("$__rate_interval", f"{window.rate:g}s")
    for name in VARIABLES:
        text = text.replace(f"${name}", EVERYTHING)
    return text


def answers(server: PrometheusServer, panel: Panel, window: Window) -> list[list[Series]]:
    """The series of each of the panel's queries that have a value in the window."""
    return [
        [series for series in _series(server, query.expression, query.legend, window) if series.points]
        for query in panel.queries
    ]


def _series(server: PrometheusServer, expression: str, legend: str, window: Window) -> Iterator[Series]:
    asked = filled_in(expression, window)
    for found in server.query_range(asked, window.start, window.end, window.step):
        labels = found["metric"]
        points = ((float(time), float(value)) for time, value in found["values"])
        yield Series(
            legend=_named(legend, labels),
            labels=labels,
            points=tuple(point for point in points if math.isfinite(point[1])),
        )


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return _LABEL.sub(lambda match: labels.get(match[1], ""), legend)


def empty_panels(server: PrometheusServer, board: Dashboard, window: Window) -> list[str]:
    """Panels with a query that has no data, and variables without values, in words."""
    empty = [
        f"{board.title}: the variable {name} has no values"
        for name in board.variables
        if not server.label_values(VARIABLES[name][1], filled_in(VARIABLES[name][0], window))
    ]
    for panel in board.panels():
        for query, series in zip(panel.queries, answers(server, panel, window), strict=True):
            if not series:
                empty.append(f"{board.title}: {panel.title}: no data for {filled_in(query.expression, window)}")
    return empty
