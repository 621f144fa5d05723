"""The workload of another file, slowed down where a worker runs it: whoever disturbs its job comes in time."""

from __future__ import annotations

import dataclasses
import os
import runpy
import time
from pathlib import Path
from typing import Any

import weft

HERE = Path(__file__).resolve().parent


def workload(file: str, args: dict[str, Any], milliseconds: float) -> weft.Workload:
    """file: below this one's directory or above. milliseconds: of each call of its loss, or of its step."""
    made: weft.Workload = runpy.run_path(str(HERE / file))["workload"](**args)
    name = "loss" if made.step is None else "step"
    quick, seconds = getattr(made, name), milliseconds / 1000 if "WEFT_WORKER" in os.environ else 0.0

    def slow(*given: Any) -> Any:
        time.sleep(seconds)
        return quick(*given)

    return dataclasses.replace(made, **{name: slow})
