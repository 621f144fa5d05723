"""Switching: when a running job is planned again by what its tasks have taken, and whether another plan pays. Pure.

    step 0 ··· 64 ··· 192 ··· 448 ···      planned again, with what the newest SAMPLE steps took; each time twice as
               │                           many steps lie between, and after a change four times as many
               └─ another plan ─ SAMPLE steps ─ what it has brought is told

A change costs time, and what it brings is a prediction. So a job changes

- where an iteration is expected to be shorter by more than HYSTERESIS: what two predictions are off by half of the
  time, so a job does not go to and fro;
- where what that saves over the steps that are left is more than what a change costs: letting go and preparing, as long
  as preparing took the last time, or, once the job has changed, as long as that took; a snapshot; and an iteration in
  which lanes run empty and fill again;
- MAX_CHANGES times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from weft.quantities import duration

FIRST: Final = 64  # steps of an attempt before its tasks' times are looked at: the first ones build what others use
SAMPLE: Final = 32  # steps; of as many a median does not see what a few of them were held up by
HYSTERESIS: Final = 1.1  # a prediction is off by 5 % half of the time (benchmarks/plan_accuracy.py), and there are two
MAX_CHANGES: Final = 3  # of a job: each corrects what the one before has shown; arbitrary
GROWTH: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What another plan is thought to bring."""

    before_seconds: float  # the median iteration that was measured
    expected_seconds: float  # of an iteration with the other plan

    @property
    def is_enough(self) -> bool:
        return self.before_seconds >= HYSTERESIS * self.expected_seconds

    def told(self) -> str:
        share = 100 * (1 - self.expected_seconds / self.before_seconds)
        before, expected = duration(self.before_seconds), duration(self.expected_seconds)
        return f"{expected} an iteration expected instead of {before}, {share:.0f} % less"


@dataclass(slots=True, kw_only=True)
class Change:
    """One that the job has made."""

    sentence: str  # what is different, and what that is expected to bring
    gain: Gain
    left_ns: int | None  # when the last iteration before it ended, as the next
    came_ns: int | None = None  # and the first one behind it
    iteration_seconds: float | None = None  # the median behind it, once there are as many as before

    @property
    def seconds(self) -> float | None:
        """That it took: from one of those ends to the other, but for the iteration between."""
        if None in (self.left_ns, self.came_ns, self.iteration_seconds):
            return None
        assert self.left_ns is not None
        assert self.came_ns is not None
        assert self.iteration_seconds is not None
        return max(0.0, (self.came_ns - self.left_ns) / 1e9 - self.iteration_seconds)

    def told(self) -> Iterator[str]:
        yield self.sentence
        if self.iteration_seconds is None:
            return
        change = 100 * (self.iteration_seconds / self.gain.before_seconds - 1)
        took = "" if self.seconds is None else f"; the change took {duration(self.seconds)}"
        yield (
            f"the other plan takes {duration(self.iteration_seconds)} an iteration, {abs(change):.0f} % "
            f"{'more' if change > 0 else 'less'} than the one before{took}"
        )

    def numbers(self) -> dict[str, float | None]:
        """As `weft show --json` has them."""
        return {
            "before_seconds": self.gain.before_seconds,
            "expected_seconds": self.gain.expected_seconds,
            "iteration_seconds": self.iteration_seconds,
            "seconds": self.seconds,
        }


@dataclass(slots=True)
class Switching:
    """Of a job, over all its attempts."""

    may_change: bool = False  # in this attempt
    due: int = FIRST  # the step
    interval: int = FIRST
    preparing_seconds: float = 0.0  # of the newest attempt
    changes: list[Change] = field(default_factory=list)

    @property
    def newest(self) -> Change | None:
        """Of which it is not known yet what it brings."""
        return self.changes[-1] if self.changes and self.changes[-1].iteration_seconds is None else None

    def begin(self, step: int, *, may_change: bool) -> None:
        """An attempt, which has no times yet. may_change: its plan is one to which there are others."""
        self.may_change = may_change
        self.due = max(self.due, step + (FIRST if self.newest is None else self.interval))

    def is_due(self, step: int) -> bool:
        """Whether something is to be told, or looked for, as soon as there are enough steps."""
        looks = self.may_change and step >= self.due and len(self.changes) < MAX_CHANGES
        return looks or self.newest is not None

    def take_due(self, step: int, steps_left: int, iteration_seconds: float) -> bool:
        """Whether the job is to be planned again. Where not even a plan that took nothing would pay, it never is."""
        if not self.is_due(step) or step < self.due:
            return False
        self.interval *= GROWTH
        self.due = step + self.interval
        return steps_left * iteration_seconds > self.cost_seconds(iteration_seconds)

    def cost_seconds(self, iteration_seconds: float, snapshot_seconds: float = 0.0) -> float:
        """Of a change."""
        known = [each.seconds for each in self.changes if each.seconds is not None]
        return (known[-1] if known else self.preparing_seconds) + snapshot_seconds + iteration_seconds

    def pays(self, gain: Gain, steps_left: int, snapshot_seconds: float) -> bool:
        saved = steps_left * (gain.before_seconds - gain.expected_seconds)
        return saved > self.cost_seconds(gain.before_seconds, snapshot_seconds)

    def change(self, sentence: str, gain: Gain, left_ns: int | None) -> None:
        """The job goes on with another plan."""
        self.interval *= GROWTH
        self.changes.append(Change(sentence=sentence, gain=gain, left_ns=left_ns))

    def note_end(self, ended_ns: int | None) -> None:
        """Of an iteration."""
        if self.newest is not None and self.newest.came_ns is None:
            self.newest.came_ns = ended_ns

    def judge(self, iteration_seconds: float) -> str:
        """What the newest change has brought, by the median iteration since."""
        assert self.newest is not None
        self.newest.iteration_seconds = iteration_seconds
        return self.told()[-1]

    def told(self) -> list[str]:
        return [line for change in self.changes for line in change.told()]
