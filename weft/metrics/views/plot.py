"""Plot: a job's loss, throughput, iteration time and stalls over its steps, in one picture. Needs matplotlib.

Of more than MAX_POINTS steps each point stands for a group of steps that follow one another: the line is the group's
median, the band behind it goes from its least to its greatest value.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from weft.metrics.recording.step_log import StepLog
from weft.plan.kinds import STALL_MODES
from weft.quantities import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS: Final = 600
MAX_STALL_BINS: Final = 120
INCHES: Final = (8.0, 9.6)
DPI: Final = 110
SHOWN_PART: Final = 0.99  # of the steps: a rare long one must not flatten the rest

# Okabe and Ito's palette, which colour-blind readers tell apart, and two greys.
LINE, OTHER, LIMIT = "#0072b2", "#d55e00", "#000000"
CAUSE_COLOURS: Final[Mapping[str, str]] = {
    "data": "#e69f00",
    "activation": "#56b4e9",
    "gradient": "#009e73",
    "sync": "#f0e442",
    "update": "#0072b2",
    "slot": "#d55e00",
    "dispatch": "#cc79a7",
    "recovery": "#000000",
    "idle": "#999999",
}
CAUSES: Final = tuple(mode.removeprefix("stall_") for mode in STALL_MODES)

Points = Sequence[tuple[int, float]]  # step and value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStalls:
    """Of one step's time in the compute lanes."""

    step: int
    seconds: float  # that the step took
    shares: Mapping[str, float]  # the part (0 to 1) of each stall


def plot(
    log: StepLog, *, title: str, limit_seconds: float | None, stalls: Sequence[StepStalls], picture_format: str = "png"
) -> bytes:
    """A file of the format: png, svg or pdf. stalls: of the steps that are recorded, in order."""
    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    loss, throughput, seconds, stalled = figure.subplots(4, 1, sharex=True)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    _loss(loss, log)
    _throughput(throughput, log)
    _iteration_time(seconds, log, limit_seconds)
    _stalls(stalled, log, stalls)
    stalled.set_xlabel("training step")
    stalled.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss, throughput, seconds, stalled):
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    buffer = io.BytesIO()
    no_date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(picture_format)
    figure.savefig(buffer, format=picture_format, metadata=no_date)
    return buffer.getvalue()


def grouped(points: Points) -> list[tuple[float, float, float, float]]:
    """(step, least, median, greatest) of groups of the same number of points; each point alone where they are few."""
    size = -(-len(points) // MAX_POINTS)
    groups = [list(group) for _, group in groupby(enumerate(points), key=lambda each: each[0] // size)]
    found = []
    for group in groups:
        steps, values = zip(*(point for _, point in group), strict=True)
        found.append((sum(steps) / len(steps), min(values), float(median(values)), max(values)))
    return found


def _line(axes: Axes, points: Points, colour: str, label: str) -> None:
    if not points:
        return
    steps, least, middle, greatest = zip(*grouped(points), strict=True)
    if len(steps) < len(points):
        axes.fill_between(steps, least, greatest, color=colour, alpha=0.2, linewidth=0)
    axes.plot(steps, middle, color=colour, linewidth=1.2, marker="." if len(steps) == 1 else "", label=label)


def _loss(axes: Axes, log: StepLog) -> None:
    _line(axes, [(step.step, step.loss) for step in log.steps if step.loss is not None], LINE, "training")
    validated = [(entry.step, loss) for entry in log.validations if (loss := entry.values.get("loss")) is not None]
    if validated:
        steps, losses = zip(*validated, strict=True)
        marker = "o" if len(steps) <= MAX_POINTS // 10 else ""
        axes.plot(steps, losses, color=OTHER, linewidth=1.2, marker=marker, markersize=4, label="validation")
    axes.set_ylabel("loss")
    _legend(axes)


def _throughput(axes: Axes, log: StepLog) -> None:
    points = [(step.step, step.samples / step.seconds) for step in log.steps if step.seconds]
    _line(axes, points, LINE, "throughput")
    axes.set_ylabel("samples / s")
    axes.set_ylim(bottom=0)
    _cut(axes, [value for _, value in points])


def _iteration_time(axes: Axes, log: StepLog, limit_seconds: float | None) -> None:
    usual = median([step.seconds for step in log.steps if step.seconds] or [0.0])
    factor, unit = (1.0, "s") if usual >= 1 else (1e3, "ms")
    points = [(step.step, step.seconds * factor) for step in log.steps if step.seconds is not None]
    _line(axes, points, LINE, "measured")
    if limit_seconds:
        limit = limit_seconds * factor
        axes.axhline(
            limit, color=LIMIT, linestyle="--", linewidth=1.2, label=f"limit of the graph, {duration(limit_seconds)}"
        )
    axes.set_ylabel(f"iteration time ({unit})")
    axes.set_ylim(bottom=0)
    _cut(axes, [value for _, value in points], at_least=1.25 * (limit_seconds or 0.0) * factor)
    _legend(axes)


def _stalls(axes: Axes, log: StepLog, stalls: Sequence[StepStalls]) -> None:
    axes.set_ylabel("stalled (% of compute lanes)")
    axes.set_ylim(0, 100)
    first = log.steps[0].step if log.steps else 0
    last = log.steps[-1].step if log.steps else 0
    if not stalls:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="#555555")
        return
    size = -(-len(stalls) // MAX_STALL_BINS)
    bins = [stalls[begin : begin + size] for begin in range(0, len(stalls), size)]
    edges = [each[0].step - 0.5 for each in bins] + [stalls[-1].step + 0.5]
    seen = [cause for cause in CAUSES if any(stall.shares.get(cause) for stall in stalls)]
    base = [0.0] * len(bins)
    for cause in seen:
        top = [low + _percent(each, cause) for low, each in zip(base, bins, strict=True)]
        axes.stairs(top, edges, baseline=base, fill=True, color=CAUSE_COLOURS[cause], label=cause)
        base = top
    for begin, end in ((first - 0.5, edges[0]), (edges[-1], last + 0.5)):
        if end > begin:
            _not_recorded(axes, begin, end, (last - first) or 1)
    _legend(axes, columns=5)


def _percent(stalls: Sequence[StepStalls], cause: str) -> float:
    """Of the time of these steps together."""
    total = sum(stall.seconds for stall in stalls)
    return 100 * sum(stall.shares.get(cause, 0.0) * stall.seconds for stall in stalls) / total


def _not_recorded(axes: Axes, begin: float, end: float, length: float) -> None:
    axes.axvspan(begin, end, facecolor="#eeeeee", edgecolor="#bbbbbb", hatch="//", linewidth=0)
    if (end - begin) / length > 0.12:  # where the words fit
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        axes.text((begin + end) / 2, 50, "not recorded", ha="center", va="center", color="#333333", bbox=box)


def _cut(axes: Axes, values: Sequence[float], at_least: float = 0.0) -> None:
    """Shows nearly all of the values, and says how many are above."""
    if not values:
        return
    shown = sorted(values)[int(SHOWN_PART * (len(values) - 1))]
    top = max(1.25 * (shown if max(values) > 2 * shown else max(values)), at_least)
    above = sum(value > top for value in values)
    axes.set_ylim(0, top if top > 0 else None)
    if above:
        text = f"{above} of {len(values)} steps lie above, up to {max(values):.4g}"
        axes.text(0.99, 0.95, text, transform=axes.transAxes, ha="right", va="top", fontsize=8, color="#555555")


def _legend(axes: Axes, columns: int = 2) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, fontsize=8, ncols=columns, loc="best", framealpha=0.9)
