"""The workload of another file, slowed down where a worker trains it: whoever disturbs its job comes in time."""

from __future__ import annotations

import dataclasses
import runpy
import time
import traceback
from pathlib import Path
from typing import Any

import weft

HERE = Path(__file__).resolve().parent


def workload(file: str, args: dict[str, Any], milliseconds: float) -> weft.Workload:
    """file: below this one's directory or above. milliseconds: of each call of its loss, or of its step."""
    made: weft.Workload = runpy.run_path(str(HERE / file))["workload"](**args)
    name = "loss" if made.step is None else "step"
    quick = getattr(made, name)

    def slow(*given: Any) -> Any:
        if is_in_a_lane():
            time.sleep(milliseconds / 1000)
        return quick(*given)

    return dataclasses.replace(made, **{name: slow})


def is_in_a_lane() -> bool:
    """Who inspects a model of many statements calls them hundreds of times."""
    frames = (frame.f_globals["__name__"] for frame, _ in traceback.walk_stack(None))
    return any(name.startswith("weft.workers.lanes.") for name in frames)
