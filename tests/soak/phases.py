"""The phases of a job as they are seen from outside, so that a fault can be aimed at one."""

from __future__ import annotations

import random
import time
from typing import Any

from stage import AT_REST, Stage, until

PHASES = ("inspecting", "preparing", "running", "snapshotting", "saving")
SNAPSHOT_SECONDS = (0.4, 0.7)  # after one was made the next is about due
AIM_SECONDS = 30.0  # a phase that has not come by then is not waited for any longer


def phase_of(shown: dict[str, Any]) -> str:
    """Of what `show` tells: one of PHASES, or the job's state."""
    if shown["state"] == "planning":
        return "preparing" if shown["plan"] else "inspecting"
    if shown["state"] != "running":
        return str(shown["state"])
    return "saving" if shown["steps"] and shown["step"] >= shown["steps"] else "running"


def reach(stage: Stage, job: str, phase: str, chance: random.Random) -> None:
    """Waits until the job is in the phase, and a random part of it longer; or has ended."""
    wanted = "running" if phase == "snapshotting" else phase
    began = time.monotonic()
    if phase == "saving":  # it may be over within what others wait between two looks
        while phase_of(stage.daemon.client.show(job)) == "running" and time.monotonic() - began < AIM_SECONDS:
            pass
        return

    def is_there() -> bool:
        return phase_of(stage.daemon.client.show(job)) in (wanted, *AT_REST) or time.monotonic() - began > AIM_SECONDS

    until(is_there, f"{job} in {phase}")
    if phase == "snapshotting":
        before = stage.daemon.client.show(job)["snapshot_step"]
        until(
            lambda: (
                stage.is_at_rest(job)
                or stage.daemon.client.show(job)["snapshot_step"] != before
                or time.monotonic() - began > AIM_SECONDS
            ),
            "a snapshot",
        )
        time.sleep(chance.choice((0.0, chance.uniform(*SNAPSHOT_SECONDS))))
    elif phase == "running":
        time.sleep(chance.uniform(0.0, 1.0))
    elif phase in ("inspecting", "preparing"):
        time.sleep(chance.uniform(0.0, 0.2))
