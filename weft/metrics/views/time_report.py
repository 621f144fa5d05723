"""The time report: where a job's worker-seconds went, as plain data for `weft show --time`, `weft top` and the page.

lanes            seconds of each lane by mode, its wall time, and the residual that no mode accounts for
stalls           the longest waits: the lane, the cause, the task that was waited for and the lane that ran it
bubble_ratio     of the compute lanes' time, the part in which they waited for one another's activations or gradients
imbalance        the busiest compute lane's forward and backward over the mean of all, less 1
critical_path    of the last iterations: what their length is made of, by task kind and lane
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from weft.metrics.accounts.accounting import NANOSECONDS, JobAccount, LaneSeconds
from weft.metrics.accounts.waits import WaitAccount
from weft.metrics.recording.critical_path import PathStep, critical_path
from weft.metrics.recording.recording import Recording
from weft.plan.kinds import COMPUTE_MODES, MODES, is_compute_lane

MAX_STALLS = 20  # arbitrary: a screen; those of compute lanes count first, since the others wait as a matter of course
PATH_ITERATIONS = 8

Report = dict[str, Any]


def time_report(
    account: JobAccount, waits: WaitAccount, task_name: Callable[[int], str], lane_of_task: Callable[[int], str]
) -> Report:
    """Since the job began. Of the window of last iterations, `path_report` tells."""
    seconds = account.lane_seconds()
    return {
        "lanes": {
            lane: {
                "wall_seconds": account.wall_seconds(lane),
                "residual_seconds": account.residual_seconds(lane),
                "modes": modes,
            }
            for lane, modes in seconds.items()
        },
        "stalls": [
            {
                "lane": lane,
                "cause": cause,
                "task": task_name(task) if task >= 0 else None,
                "on": lane_of_task(task) if task >= 0 else None,
                "seconds": stalled,
            }
            for lane, cause, task, stalled in _longest(waits)
        ],
        "bubble_ratio": bubble_ratio(seconds),
        "imbalance": imbalance(seconds),
    }


def _longest(waits: WaitAccount) -> list[tuple[str, str, int, float]]:
    kept = sorted(waits.seconds(), key=lambda wait: not is_compute_lane(wait[0]))[:MAX_STALLS]
    return sorted(kept, key=lambda wait: -wait[3])


def bubble_ratio(lanes: LaneSeconds) -> float | None:
    """None without a compute lane that has run."""
    computing = _compute_lanes(lanes)
    total = sum(sum(modes.values()) for modes in computing)
    waited = sum(modes.get("stall_activation", 0.0) + modes.get("stall_gradient", 0.0) for modes in computing)
    return waited / total if total else None


def imbalance(lanes: LaneSeconds) -> float | None:
    """0 where all compute lanes compute for as long; None where none has."""
    busy = [sum(modes.get(mode, 0.0) for mode in COMPUTE_MODES) for modes in _compute_lanes(lanes)]
    return max(busy) / fmean(busy) - 1 if busy and any(busy) else None


def path_report(recording: Recording, iterations: int = PATH_ITERATIONS) -> Report | None:
    """The critical path of the last complete iterations; None where there is none yet."""
    window = recording.window(iterations)
    if window is None:
        return None
    steps = critical_path(recording, *window)
    ends = recording.iteration_ends
    within = [end for end in ends.values() if window[0] < end <= window[1]]
    before_last = [window[0], *sorted(within)][-2]
    return {
        "iterations": len(within),
        "seconds": (window[1] - window[0]) / NANOSECONDS,
        "parts": _parts(steps, recording),
        "gap_seconds": sum(step.gap_ns for step in steps) / NANOSECONDS,
        "steps": [
            {
                "task": recording.tasks[step.task].name,
                "iteration": step.iteration,
                "label": recording.label(step.iteration),
                "lane": step.lane,
                "mode": MODES[step.mode],
                "start_seconds": (step.start_ns - window[0]) / NANOSECONDS,
                "seconds": (step.end_ns - step.start_ns) / NANOSECONDS,
                "gap_seconds": step.gap_ns / NANOSECONDS,
            }
            for step in steps
            if step.end_ns > before_last
        ],
    }


def _parts(steps: Sequence[PathStep], recording: Recording) -> list[Report]:
    sums: dict[tuple[str, str], int] = {}
    for step in steps:
        key = recording.tasks[step.task].kind, step.lane
        sums[key] = sums.get(key, 0) + step.end_ns - step.start_ns
    return [
        {"kind": kind, "lane": lane, "seconds": ns / NANOSECONDS}
        for (kind, lane), ns in sorted(sums.items(), key=lambda each: (-each[1], each[0]))
    ]


def _compute_lanes(lanes: LaneSeconds) -> list[dict[str, float]]:
    return [modes for lane, modes in lanes.items() if is_compute_lane(lane)]
