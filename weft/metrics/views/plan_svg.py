"""A plan as a picture: one iteration of the steady state, as predicted. Pure: the same plan gives the same text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from weft.metrics.views.timeline import Bar, timeline_svg
from weft.metrics.views.trace import in_order
from weft.quantities import duration

_MOMENTS: Final = {-1: "the iteration before", 0: "this iteration", 1: "the next iteration"}


def plan_svg(planned: Mapping[str, Any]) -> str:
    """planned: as weft/scheduler/planning/choosing/told.py has it. No row for a lane that does nothing."""
    lanes = {lane["lane"]: [_bar(task) for task in lane["tasks"]] for lane in planned["timeline"] if lane["tasks"]}
    seconds = planned["predicted_iteration_seconds"]
    title = f"{planned['title']}: {duration(seconds)} for an iteration, as predicted"
    return timeline_svg({lane: lanes[lane] for lane in in_order(list(lanes))}, title=title, seconds=(0.0, seconds))


def _bar(task: Mapping[str, Any]) -> Bar:
    number = task["iteration"]
    return Bar(
        start=task["start"],
        end=task["end"],
        kind=task["mode"],
        label=task["label"],
        iteration=number,
        detail=task["task"],
        moment=_MOMENTS.get(number, f"{abs(number)} iterations {'later' if number > 0 else 'before'}"),
    )
