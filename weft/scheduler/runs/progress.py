"""Progress: the numbers of one attempt, from what its lanes report and from the iterations that end. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from weft.metrics.accounts.history import History
from weft.metrics.accounts.speed import SpeedAccount
from weft.plan.itinerary import Iteration
from weft.plan.plan import Plan
from weft.plan.rows import last_ends
from weft.scheduler.runs.iteration_pace import IterationPace


@dataclass(slots=True)
class _Values:
    """What an iteration measured: means, of which each lane has its part of the sum, and facts."""

    means: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)

    def add(self, fragment: dict[str, Any]) -> None:
        for name, value in fragment["means"].items():
            self.means[name] = self.means.get(name, 0.0) + value
        self.facts |= fragment["facts"]


class Progress:
    def __init__(self, plan: Plan, begins: int = 0, before: Progress | None = None) -> None:
        """begins: the first iteration. before: of the attempt that this one goes on from."""
        self.finished_iterations = begins
        self.ended_ns: int | None = None  # when the newest of them ended, by its stamps
        self.step = plan.itinerary.at(begins).step if begins else 0  # training steps that are done
        self.loss: float | None = before.loss if before else None  # of the newest one, as the next
        self.samples = 0  # of the newest training step
        self.counted: float = 0  # what it counts in a mean over several: its samples, or what the workload says
        self.learning_rate: float | None = before.learning_rate if before else None
        self.means: dict[str, float] | None = before.means if before else None  # of the newest whole validation
        self._told_of_epoch: Mapping[str, float] = before._told_of_epoch if before else {}  # by the job's function
        self.pace = IterationPace(plan)
        self.history: History = before.history if before else History()
        self._told: int = before._told if before else -1  # the last iteration that the history has
        self._itinerary = plan.itinerary
        self._speed = SpeedAccount(plan.itinerary.steps)
        self._grad_norm: float | None = None  # of the newest step
        self._reported: dict[str, float] = {}  # in it, what the step tells beside the loss
        self._samples = self._steps = 0  # of this attempt's training steps, and their number
        self._values: dict[int, _Values] = {}  # by iteration, as the next
        self._ends: dict[int, int] = {}
        # Of the validation that is on its way: each batch's means, and what they count, which is divided by all of it
        # before it is multiplied, as in the plain loop.
        self._validating: list[tuple[dict[str, float], float]] = []

    @property
    def validation(self) -> dict[str, float] | None:
        """What the newest epoch has come to, as far as it is known; None before any."""
        is_none = self.means is None and not self._told_of_epoch
        return None if is_none else {**(self.means or {}), **self._told_of_epoch}

    @property
    def samples_per_step(self) -> float:
        """On average; where the user makes the batches only they tell."""
        return self._samples / self._steps if self._steps else self._itinerary.samples_per_step

    @property
    def steps_left(self) -> int:
        return self._itinerary.steps - self.step

    def add(self, packed: bytes, values: list[dict[str, Any]]) -> None:
        """What a lane stamped, as its report has it, and measured."""
        for iteration, end in last_ends(packed).items():
            if iteration >= self.finished_iterations:
                self._ends[iteration] = max(end, self._ends.get(iteration, 0))
        for fragment in values:
            if fragment["iteration"] >= self.finished_iterations:  # what comes after its end is asked for by nobody
                self._values.setdefault(fragment["iteration"], _Values()).add(fragment)

    def end(self, iteration: int) -> float | None:
        """Every lane has finished it. The seconds since the one before ended, where both ends are known."""
        self.finished_iterations = iteration + 1
        before, end = self.ended_ns, self._ends.pop(iteration, 0)
        if not end:
            return None
        self.ended_ns = end
        return None if before is None else max(0, end - before) / 1e9

    def finish(self, iteration: Iteration, seconds: float | None, shares: list[int]) -> dict[str, Any]:
        """Its line of metrics.jsonl; nothing of a part of a validation. shares: of its places that each replica had,
        which are its samples where the job makes the batches."""
        values = self._values.pop(iteration.index, _Values())
        if not iteration.training:
            return self._finish_validation(iteration, values)
        self.step = iteration.step + 1
        self.samples = round(values.facts.get("samples", iteration.size))
        self._samples += self.samples
        self._steps += 1
        self.loss = values.means.get("loss", 0.0)
        self.counted = values.facts.get("weight", iteration.size)
        self.learning_rate = values.facts.get("lr")
        self._grad_norm = values.facts.get("grad_norm")
        self._reported = {name: mean for name, mean in values.means.items() if name != "loss"}
        measured = self._reported if iteration.learns else values.means
        if seconds is not None:
            self.pace.add(iteration.index, iteration.step, seconds)
        if self.ended_ns is not None:
            self._speed.add(self.step, self._samples, self.ended_ns / 1e9)
        if iteration.index > self._told:
            self._told = iteration.index
            self.history.add_step(self.step, self.loss, self.samples, seconds)
        return {
            "step": self.step,
            "epoch": iteration.epoch,
            "loss": self.loss,
            "lr": self.learning_rate,
            "grad_norm": self._grad_norm,
            "skipped": bool(values.facts.get("skipped")),
            "samples": self.samples,
            "seconds": seconds,
            **({"measured": measured} if measured or not iteration.learns else {}),
            **({"shares": _samples_of(shares, self.samples)} if len(shares) > 1 else {}),
        }

    def _finish_validation(self, iteration: Iteration, values: _Values) -> dict[str, Any]:
        weighs = "weight" in values.facts
        self._validating.append((values.means, values.facts["weight"] if weighs else iteration.size))
        if not iteration.last_of_validation:
            return {}
        total = sum(weight for _, weight in self._validating) if weighs else self._itinerary.num_validation
        self.means = {}
        for means, weight in self._validating:
            for name, value in means.items():
                part = value * (weight / total) if weight else 0.0
                self.means[name] = self.means.get(name, 0.0) + part
        self._validating, self._told_of_epoch = [], {}
        if iteration.index > self._told:
            self._told = iteration.index
            self.history.add_validation(self.step, self.means.get("loss"))
        return {"step": self.step, "epoch": iteration.epoch, "validation": self.means}

    def tell(self, values: Mapping[str, float]) -> None:
        """What the job's own function says of the epoch that is over."""
        self._told_of_epoch = values or self._told_of_epoch

    def take_news(self) -> dict[str, Any] | None:
        """What a follower shows, over the time since the last call; None if no step came since."""
        speed = self._speed.take_interval()
        if speed is None:
            return None
        return {
            "step": self.step,
            "steps": self._itinerary.steps,
            "epoch": (self.step - 1) // self._itinerary.steps_per_epoch,
            "loss": self.loss,
            "lr": self.learning_rate,
            "grad_norm": self._grad_norm,
            "measured": self._reported,
            "samples_per_second": speed.samples_per_second,
            "eta_seconds": speed.eta_seconds,
            "validation": self.validation,
        }


def _samples_of(places: list[int], samples: int) -> list[int]:
    """Which each replica had, of a batch with so many at all places (`given_batches.PlaceRun`)."""
    ends = [samples * end // sum(places) for end in accumulate(places, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def finite(value: Any) -> Any:
    """The same with None for nan and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
