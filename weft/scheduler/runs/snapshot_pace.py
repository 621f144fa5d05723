"""Paces: when the next snapshot of an attempt is due, and the next replay of a job. Pure; seconds are of one clock.

What a fault costs is the work since the newest snapshot, and what a snapshot costs is known once one has been made. So
the next is due when the time between two of them is COST_SHARE⁻¹ times what the last one took its lanes, or the cores
on which it went on beside them: they may be wanted for something else, and memory is.
"""

from __future__ import annotations

from typing import Final

COST_SHARE: Final = 0.005  # of the time, that copying takes; the first ones, to memory that is new, take more
REPLAY_SHARE: Final = 0.01  # of the time, that replays take
LEAST_SECONDS: Final = 0.5  # between two: beginning again takes about as long


class SnapshotPace:
    def __init__(self, now: float) -> None:
        self._due = now + LEAST_SECONDS
        self._copied_ns = 0  # by the busiest lane, so far
        self._beside_seconds = 0.0  # of the busiest core beside the lanes, for the one that is being made
        self.newest_seconds = 0.0  # that the newest one took it

    def take_due(self, now: float) -> bool:
        """Whether one is to be made; again after a while, where none was."""
        if now < self._due:
            return False
        self._due = now + LEAST_SECONDS
        return True

    def copied_beside(self, seconds: float) -> None:
        """A worker has made its part of it, not in a lane, in so much time of a core."""
        self._beside_seconds = max(self._beside_seconds, seconds)

    def made(self, copied_ns: int, now: float) -> None:
        """copied_ns: what copying has taken the busiest lane since the attempt began."""
        seconds = self.newest_seconds = max((copied_ns - self._copied_ns) / 1e9, self._beside_seconds)
        self._copied_ns, self._beside_seconds = copied_ns, 0.0
        self._due = now + max(LEAST_SECONDS, seconds / COST_SHARE)


class ReplayPace:
    """As seldom as snapshots, by what one has taken the whole job; the first one soon, in case it is needed."""

    def __init__(self, now: float) -> None:
        self._due = now + LEAST_SECONDS

    def take_due(self, now: float) -> bool:
        """Whether an iteration is to be run again; again after a while, where none was."""
        if now < self._due:
            return False
        self._due = now + LEAST_SECONDS
        return True

    def over(self, seconds: float, now: float) -> None:
        """seconds: that the job has not come any further for it."""
        self._due = now + max(LEAST_SECONDS, seconds / REPLAY_SHARE)
