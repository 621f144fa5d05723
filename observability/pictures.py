"""Draws a board without Grafana: the answers of Prometheus to each panel's queries, placed as the board has them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter
from panels import Series, Window, answers
from PIL import Image
from prometheus_server import PrometheusServer

from weft.metrics.grafana.board import WIDTH, Dashboard, Panel, board_json

INCHES_WIDE, INCHES_PER_UNIT, DPI = 15.0, 0.34, 80
NUM_COLOURS = 256  # of the picture's palette: a third of the bytes
MAX_LEGEND = 10  # lines; a board in Grafana scrolls
FONT: Final = {"font.size": 7, "axes.titlesize": 8, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True}

UNITS: Final = {"Bps": "B/s", "bytes": "B", "s": "s"}

# As in the timelines of docs/, so that a mode has one colour everywhere; stalls are greys and reds.
MODES: Final[Mapping[str, str]] = {
    "forward": "#56b4e9",
    "backward": "#009e73",
    "sync": "#f0e442",
    "update": "#e69f00",
    "transfer": "#cc79a7",
    "load": "#a0a0a0",
    "stall_data": "#7f3b08",
    "stall_activation": "#d6604d",
    "stall_gradient": "#b2182b",
    "stall_sync": "#fddbc7",
    "stall_update": "#f4a582",
    "stall_slot": "#878787",
    "stall_dispatch": "#4d4d4d",
    "idle": "#e0e0e0",
    "recovery": "#762a83",
}


def draw_board(server: PrometheusServer, board: Dashboard, window: Window, path: Path) -> None:
    """Writes one PNG."""
    placed = [place for place in board_json(board)["panels"] if place["type"] != "row"]
    height = max(place["gridPos"]["y"] + place["gridPos"]["h"] for place in placed)
    with matplotlib.rc_context(cast(Any, FONT)):
        figure = Figure(figsize=(INCHES_WIDE, height * INCHES_PER_UNIT), dpi=DPI)
        figure.text(0.01, 1 - 0.2 / (height * INCHES_PER_UNIT), f"Weft / {board.title}", fontsize=12, weight="bold")
        for place, panel in zip(placed, board.panels(), strict=True):
            box = place["gridPos"]
            axes = figure.add_axes(
                (
                    (box["x"] + 0.9) / WIDTH,
                    1 - (box["y"] + box["h"] - 1.0) / height,
                    (box["w"] - 1.2) / WIDTH,
                    (box["h"] - 2.4) / height,
                )
            )
            suffix = f", {panel.unit.removeprefix('suffix:')}" if panel.unit.startswith("suffix:") else ""
            axes.set_title(panel.title + suffix, loc="left")
            _draw_panel(axes, panel, answers(server, panel, window), window)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(buffer).convert("RGB").quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)


def _draw_panel(axes: Any, panel: Panel, found: list[list[Series]], window: Window) -> None:
    everything = [series for query in found for series in query]
    match panel.kind:
        case "stat":
            newest = [f"{series.legend or 'value'}  {series.points[-1][1]:g}" for series in everything]
            _write(axes, newest, 10)
        case "table":
            hidden = ("__name__", "job")
            rows = [
                "   ".join(f"{name} {value}" for name, value in series.labels.items() if name not in hidden)
                for series in everything
            ]
            _write(axes, rows, 9)
        case "heatmap":
            _draw_heatmap(axes, everything, window)
        case "timeseries":
            _draw_lines(axes, panel, everything, window)


def _write(axes: Any, lines: Sequence[str], size: int) -> None:
    axes.axis("off")
    for number, line in enumerate(lines):
        axes.text(0.0, 0.85 - 0.22 * number, line, transform=axes.transAxes, fontsize=size)


def _draw_lines(axes: Any, panel: Panel, everything: list[Series], window: Window) -> None:
    colours = [matplotlib.colormaps["tab10"](n) for n in range(10)]
    chosen = [MODES.get(series.legend, colours[n % len(colours)]) for n, series in enumerate(everything)]
    if panel.stacked:
        times = sorted({time for series in everything for time, _ in series.points})
        values = [[dict(series.points).get(time, 0.0) for time in times] for series in everything]
        seconds = [time - window.start for time in times]
        axes.stackplot(seconds, values, colors=chosen, labels=[series.legend for series in everything], linewidth=0)
    else:
        for series, colour in zip(everything, chosen, strict=True):
            seconds = [time - window.start for time, _ in series.points]
            axes.plot(seconds, [v for _, v in series.points], color=colour, linewidth=1, label=series.legend)
    axes.set_xlim(0, window.end - window.start)
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    if panel.logarithmic:
        axes.set_yscale("log")
    elif panel.top is not None:
        axes.set_ylim(0, 1.02 * panel.top)
    else:
        axes.set_ylim(bottom=0)
    if panel.unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif not panel.logarithmic and panel.unit != "none":
        axes.yaxis.set_major_formatter(EngFormatter(unit=UNITS.get(panel.unit, "")))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:MAX_LEGEND], labels[:MAX_LEGEND], loc="best", fontsize=6, ncols=2, framealpha=0.7)


def _draw_heatmap(axes: Any, everything: list[Series], window: Window) -> None:
    """Prometheus's buckets count what lies below their edge; drawn is what lies between two."""
    buckets = sorted(everything, key=lambda series: float(series.labels["le"]))
    times = sorted({time for series in buckets for time, _ in series.points})
    below = [0.0] * len(times)
    rows = []
    for series in buckets:
        values = dict(series.points)
        row = [values.get(time, 0.0) for time in times]
        rows.append([max(0.0, value - less) for value, less in zip(row, below, strict=True)])
        below = row
    seconds = [time - window.start for time in times]
    axes.pcolormesh(seconds, [series.legend for series in buckets], rows, cmap="Oranges", shading="nearest")
    axes.set_xlim(0, window.end - window.start)
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.grid(visible=False)
