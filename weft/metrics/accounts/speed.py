"""Speed: how fast a job has trained of late, and how long it still takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IntervalSpeed:
    samples_per_second: float
    steps_per_second: float
    eta_seconds: float  # to the last step at this speed; 0 when it is done


@dataclass(frozen=True, slots=True)
class _Mark:
    step: int
    samples: int
    now: float


class SpeedAccount:
    """One job's way to `num_steps`, fed after each step and read once for each interval of a follower."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._first: _Mark | None = None
        self._last: _Mark | None = None

    def add(self, step: int, samples: int, now: float) -> None:
        """`step` steps are done and `samples` samples trained on since the job began, at monotonic `now` seconds.

        A step that went back (a recovery replays some) begins the interval anew: replayed work is no progress.
        """
        mark = _Mark(step, samples, now)
        if self._first is None or step < self._first.step or (self._last is not None and step < self._last.step):
            self._first = mark
            self._last = None
        else:
            self._last = mark

    def take_interval(self) -> IntervalSpeed | None:
        """The speed between the mark at which the last interval ended and the newest; None if no step came since."""
        first, last = self._first, self._last
        if first is None or last is None or last.step == first.step or last.now <= first.now:
            return None
        self._first, self._last = last, None
        seconds = last.now - first.now
        steps_per_second = (last.step - first.step) / seconds
        return IntervalSpeed(
            samples_per_second=(last.samples - first.samples) / seconds,
            steps_per_second=steps_per_second,
            eta_seconds=max(0, self._num_steps - last.step) / steps_per_second,
        )
