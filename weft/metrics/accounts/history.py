"""History: a job's loss and speed by step, in a bounded number of points. Pure.

steps    1 2 3 4 5 6 7 8 | 9 10 11 12 ...         a curve that is full halves itself: two neighbours become one,
points   ● ● ● ● ● ● ● ● → ●   ●   ●   ●   ○      and from there on a point takes twice as many steps
"""

from __future__ import annotations

import math
from typing import Any

MAX_POINTS = 400  # of a curve: about one for each two pixels of a chart


class Curve:
    """The weighted mean of a value over runs of steps, each of as many values. max_points: an even number."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._full: list[tuple[int, float, float]] = []  # the last step, the sum of weighted values, of weights
        self._values_per_point = 1
        self._num_values = 0  # of the point that is not full
        self._open = (0, 0.0, 0.0)

    def add(self, step: int, value: float, weight: float = 1.0) -> None:
        """A value that is not finite leaves no trace: a mean over it would be none."""
        if not math.isfinite(value) or weight <= 0:
            return
        _, total, weights = self._open
        self._open = step, total + value * weight, weights + weight
        self._num_values += 1
        if self._num_values == self._values_per_point:
            self._full.append(self._open)
            self._num_values, self._open = 0, (0, 0.0, 0.0)
            if len(self._full) == self._max_points:
                self._halve()

    def points(self) -> list[list[float]]:
        """[last step, mean], in order; the last one may be of fewer values."""
        points = [*self._full, self._open] if self._num_values else self._full
        return [[step, total / weights] for step, total, weights in points]

    def _halve(self) -> None:
        pairs = zip(self._full[::2], self._full[1::2], strict=True)
        self._full = [(late[0], early[1] + late[1], early[2] + late[2]) for early, late in pairs]
        self._values_per_point *= 2


class History:
    """One attempt's curves."""

    def __init__(self) -> None:
        self._loss = Curve()
        self._samples_per_second = Curve()
        self._validation_loss = Curve()

    def add_step(self, step: int, loss: float, samples: int, seconds: float | None) -> None:
        """seconds: that the iteration took; None where that is not known."""
        self._loss.add(step, loss)
        if seconds:
            self._samples_per_second.add(step, samples / seconds, seconds)

    def add_validation(self, step: int, loss: float | None) -> None:
        if loss is not None:
            self._validation_loss.add(step, loss)

    def curves(self) -> dict[str, Any]:
        """As plain data: the points of each curve by its name."""
        return {
            "loss": self._loss.points(),
            "samples_per_second": self._samples_per_second.points(),
            "validation_loss": self._validation_loss.points(),
        }
