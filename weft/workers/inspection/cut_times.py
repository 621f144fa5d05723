"""Cut times: what each stage of a trial takes, and so each unit with which one begins. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Times = list[tuple[float, float]]  # of each stage of a trial, forward and backward


def between(least: Times, largest: Times, part: float) -> Times:
    return [
        (before[0] + part * (after[0] - before[0]), before[1] + part * (after[1] - before[1]))
        for before, after in zip(least, largest, strict=True)
    ]


def note(units: list[dict[str, Any]], bounds: Sequence[int], times: Times, prefix: str) -> None:
    for unit, (forward, backward) in zip(bounds, times, strict=True):
        units[unit] |= {f"{prefix}forward_seconds": forward, f"{prefix}backward_seconds": backward}
