"""Time summary: where a job's time went, as the one structure that `show JOB --time` prints, for people or as JSON.

What is worst stands first: compute lanes by what they waited, then the lanes beside them by what they did, since those
wait as a matter of course. docs/top.md describes every field. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from weft.cli.screens.diagnosis import Times, diagnose, is_wait
from weft.plan.error_places import without_places
from weft.plan.kinds import is_compute_lane
from weft.spec.presets import AUTO
from weft.transport.wire.frames import Message

VERSION: Final = 1
ABOUT: Final = ("job", "state", "reason", "step", "steps", "iteration_seconds", "limit_seconds")


def time_summary(shown: Message) -> dict[str, Any]:
    """From what `Client.show` says of a job. `nothing`: why there is nothing to tell, or None."""
    time = shown.get("time") or {}
    lanes: Mapping[str, Message] = time.get("lanes") or {}
    plan = shown.get("plan") or {}
    seconds, limit = shown.get("iteration_seconds"), shown.get("limit_seconds")
    return {
        "version": VERSION,
        **{key: shown.get(key) for key in ABOUT},
        "predicted_iteration_seconds": plan.get("predicted_iteration_seconds"),
        "limit_ratio": seconds / limit if seconds and limit else None,
        "attempt": time.get("attempt"),
        "began_after_step": time.get("began_after_step"),
        "nothing": None if lanes else why_nothing(shown),
        "diagnosis": _diagnosis(shown, lanes, time),
        "bubble_ratio": time.get("bubble_ratio"),
        "imbalance": time.get("imbalance"),
        "lanes": _lanes(lanes),
        "stalls": _stalls(time.get("stalls") or (), lanes),
        "overlap": _overlap(shown.get("overlap") or {}),
        "critical_path": _critical_path(time.get("critical_path")),
    }


def later_attempt(time: Mapping[str, Any]) -> str | None:
    """Which the times are of, where that is not the job's first: one that was lost, paused or planned anew is over."""
    number = time.get("attempt") or 1
    return f"attempt {number}, which began after step {time['began_after_step']}" if number > 1 else None


def why_nothing(shown: Message) -> str:
    """Of a job whose lanes have not reported a thing."""
    job, state = shown["job"], shown["state"]
    if shown.get("ended_at") is None:
        step = shown.get("step")
        so_far = f"goes on after step {step}, and has run nothing since" if step else "has run nothing yet"
        return f"{job} {so_far}: {shown.get('why') or f'it is {state}.'}"
    if shown.get("step"):
        return f"{job} was recorded by an older Weft, which kept no times; run it again."
    lines = without_places((shown.get("error") or "").strip().splitlines())
    error = lines[-1 if lines[0].startswith(("Traceback", "File ")) else 0] if lines else ""
    reason = f" ({shown['reason']})" if shown.get("reason") not in (None, shown["state"]) else ""
    return f"{job} {state}{reason} before a training step was reported" + (f": {error}" if error else ".")


def _diagnosis(shown: Message, lanes: Mapping[str, Message], time: Message) -> dict[str, Any] | None:
    found = diagnose(
        Times(
            lanes={lane: told["modes"] for lane, told in lanes.items()},
            stalls=time.get("stalls") or (),
            overlap=shown.get("overlap") or {},
            plan=shown.get("plan") or {},
            path=time.get("critical_path"),
            chosen=((shown.get("spec") or {}).get("strategy") or {}).get("preset") == AUTO,
        )
    )
    return asdict(found) if found else None


def _lanes(lanes: Mapping[str, Message]) -> list[dict[str, Any]]:
    rows = []
    for lane, told in lanes.items():
        wall, modes = told["wall_seconds"], told["modes"]
        waited = sum(seconds for mode, seconds in modes.items() if is_wait(mode))
        rows.append(
            {
                "lane": lane,
                "wall_seconds": wall,
                "residual_seconds": told["residual_seconds"],
                "wait_percent": part(waited, wall),
                "seconds": modes,
                "percent": {mode: part(seconds, wall) for mode, seconds in modes.items()},
            }
        )
    return sorted(rows, key=_lane_order)


def _lane_order(row: Mapping[str, Any]) -> tuple[bool, float, str]:
    compute = is_compute_lane(row["lane"])
    return not compute, -row["wait_percent"] if compute else row["wait_percent"], row["lane"]


def _stalls(stalls: Sequence[Message], lanes: Mapping[str, Message]) -> list[dict[str, Any]]:
    rows = [{**stall, "percent": part(stall["seconds"], lanes[stall["lane"]]["wall_seconds"])} for stall in stalls]
    return sorted(rows, key=lambda row: (not is_compute_lane(row["lane"]), -row["seconds"], row["lane"]))


def _overlap(overlap: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    rows = [
        {
            "worker": worker,
            "kind": kind,
            "hidden_seconds": seconds["hidden"],
            "exposed_seconds": seconds["exposed"],
            "hidden_percent": part(seconds["hidden"], seconds["hidden"] + seconds["exposed"]),
        }
        for worker, kinds in overlap.items()
        for kind, seconds in kinds.items()
    ]
    return sorted(rows, key=lambda row: (-row["exposed_seconds"], row["worker"], row["kind"]))


def _critical_path(path: Message | None) -> dict[str, Any] | None:
    if path is None:
        return None
    parts = [{**each, "percent": part(each["seconds"], path["seconds"])} for each in path["parts"]]
    return {**path, "parts": parts, "gap_percent": part(path["gap_seconds"], path["seconds"])}


def part(seconds: float, of: float) -> float:
    """In percent; 0 of nothing."""
    return 100 * seconds / of if of else 0.0
