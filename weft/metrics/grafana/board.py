"""A Grafana board as a value: panels with their queries, laid out in rows, and the JSON that Grafana takes for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from weft.metrics.grafana.queries import QueryError, check_query

SCHEMA_VERSION: Final = 39  # of Grafana 10.4 and later; older ones are migrated by Grafana itself
WIDTH: Final = 24  # of a board, in Grafana's units
TAG: Final = "weft"
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
UNITS: Final = frozenset({"none", "short", "s", "percentunit", "bytes", "Bps", "suffix:samples/s", "suffix:/s"})

Kind = Literal["timeseries", "stat", "heatmap", "table"]

# The variables that a board may have, each with the query that lists its values.
VARIABLES: Final[Mapping[str, tuple[str, str]]] = {
    "instance": ("weft_build_info", "instance"),
    "job": ('weft_job_attempt{instance=~"$instance"}', "job"),
    "worker": ('weft_worker_up{instance=~"$instance"}', "worker"),
}

_LEGEND_LABEL: Final = re.compile(r"{{\s*(\w+)\s*}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    expression: str
    legend: str  # with {{label}} where the label's value belongs


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    text: str  # what the numbers mean and what to do about them
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 12
    height: int = 8
    stacked: bool = False  # series lie on one another
    logarithmic: bool = False
    top: float | None = None  # the axis ends there
    job_link: bool = False  # a series with the label job leads to that job's board


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    text: str
    variables: tuple[str, ...]  # of VARIABLES, in the order in which they are shown, beside the data source
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]  # title, panels

    def panels(self) -> Iterator[Panel]:
        for _, panels in self.rows:
            yield from panels


def check_board(board: Dashboard, families: Mapping[str, frozenset[str]]) -> None:
    """Errors: QueryError for a metric, a label, a variable or a unit that does not exist."""
    for name in board.variables:
        check_query(VARIABLES[name][0], families)
    for panel in board.panels():
        where = f"{board.title}, {panel.title!r}: "
        if panel.unit not in UNITS:
            raise QueryError(f"{where}unit {panel.unit!r} is none of {', '.join(sorted(UNITS))}")
        for query in panel.queries:
            try:
                labels = check_query(query.expression, families)
            except QueryError as error:
                raise QueryError(f"{where}{error}") from None
            if unknown := set(_LEGEND_LABEL.findall(query.legend)) - labels:
                raise QueryError(f"{where}the legend shows {', '.join(unknown)}, which no series has")
            used = {name for name in re.findall(r"\$(\w+)", query.expression) if not name.startswith("__")}
            if unknown := used - set(board.variables):
                raise QueryError(f"{where}the board has no variable {', '.join(unknown)}")


def board_json(board: Dashboard) -> dict[str, Any]:
    return {
        "uid": board.uid,
        "title": f"Weft / {board.title}",
        "description": board.text,
        "tags": [TAG],
        "editable": False,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "15s",
        "schemaVersion": SCHEMA_VERSION,
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [_link_to_others()],
        "templating": {"list": [_datasource(), *(_variable(name) for name in board.variables)]},
        "annotations": {"list": []},
        "panels": _placed(board),
    }


def _link_to_others() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "Weft",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}


def _variable(name: str) -> dict[str, Any]:
    series, label = VARIABLES[name]
    query = f"label_values({series}, {label})"
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time range changes
        "sort": 3,  # as numbers where they are
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _placed(board: Dashboard) -> list[dict[str, Any]]:
    """Panels from left to right, a new line where the next one does not fit."""
    placed: list[dict[str, Any]] = []
    y = 0
    for title, panels in board.rows:
        placed.append(
            {
                "id": len(placed) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            placed.append({"id": len(placed) + 1, "gridPos": place, **_panel_json(panel)})
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return placed


def _panel_json(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "targets": [_target(panel, query, chr(ord("A") + number)) for number, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _target(panel: Panel, query: Query, reference: str) -> dict[str, Any]:
    instant = panel.kind == "table"
    return {
        "refId": reference,
        "datasource": DATASOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
        "format": {"heatmap": "heatmap", "table": "table"}.get(panel.kind, "time_series"),
        "instant": instant,
        "range": not instant,
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.top is not None:
        defaults |= {"min": 0, "max": panel.top}
    if panel.job_link:
        url = "/d/weft-job?var-job=${__field.labels.job}&${instance:queryparam}&${__url_time_range}"
        defaults["links"] = [{"title": "this job", "url": url}]
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 70 if panel.stacked else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "scaleDistribution": {"type": "log", "log": 10} if panel.logarithmic else {"type": "linear"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "timeseries":
            return {
                "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "mean"]},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "area", "textMode": "value_and_name"}
        case "heatmap":
            return {
                "calculate": False,
                "yAxis": {"unit": panel.unit},
                "color": {"mode": "scheme", "scheme": "Oranges"},
                "tooltip": {"mode": "single", "yHistogram": True},
            }
        case "table":
            return {"showHeader": True}
