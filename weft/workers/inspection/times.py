"""Times: what passes take, each stage of a trial and so each unit with which one begins, as facts of units; and what a
copy takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import psutil
import torch

from weft.spec.job_spec import JobSpec
from weft.workers.devices.device import Device
from weft.workers.inspection.ran import tried

TIMED_RUNS = 3  # after one that warms up; the fastest counts
MORE_RUNS, MORE_SECONDS = 6, 0.3  # so many of what is quick: of a whole model, in no more time than this
AGAIN = 4  # times more, as long as none went without memory that is new to the process
NEW_BYTES = 1 << 20  # to fault them in takes some 3 ms on a virtual machine; tiny models never come to so many
LOADS, LOADING_SECONDS = 2, 0.05  # beside a first one that took no longer
COPIED_BYTES = 16 << 20  # beyond the caches of a core

Result = TypeVar("Result")
Times = list[tuple[float, float]]  # of each stage of a trial, forward and backward; or both parts of a backward
LEAST_OF_UNITS = 0.1  # of what a stage of one unit takes, at least; arbitrary: nothing takes no time


def between(least: Times, largest: Times, part: float) -> Times:
    return [
        (before[0] + part * (after[0] - before[0]), before[1] + part * (after[1] - before[1]))
        for before, after in zip(least, largest, strict=True)
    ]


def repeated(once: Callable[[], Result], least: int, spec: JobSpec | None = None, parts: int = 1) -> list[Result]:
    """What so many runs tell; some more that are quick, where strategies are compared or a plan is asked for; and where
    all of them had to fault in memory, which a job has after its first iterations. parts: in which the model is timed,
    this one among them."""
    compares = spec is not None and (spec.strategy.is_auto or spec.plan_for is not None)
    most = MORE_RUNS if compares else least
    began = time.perf_counter()
    found: list[Result] = []
    is_settled = False
    while (
        len(found) < least
        or (not is_settled and len(found) < least + AGAIN)
        or (len(found) < most and time.perf_counter() - began < MORE_SECONDS / parts)
    ):
        before = _resident_bytes()
        found.append(once())
        is_settled |= _resident_bytes() - before < NEW_BYTES
    return found


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def fastest(runs: Sequence[Times]) -> Times:
    """Of each stage."""
    return [(min(first for first, _ in stage), min(second for _, second in stage)) for stage in zip(*runs, strict=True)]


class Timed(Protocol):
    """A trial of a cut step."""

    splits: bool

    def seconds(self) -> Times: ...


class CutTimes:
    """What the units of a cut step take, and what a stage takes beside its units: the user's step, skipped calls.

    alone: a trial of a stage for each unit. together: one of the first stage, and of one of all other units; None where
    there are no two of these. run: one of them, with a batch.
    """

    def __init__(self, alone: Timed, together: Timed | None, run: Callable[[Any, Any], None], spec: JobSpec) -> None:
        self._alone, self._together = alone, together
        self._run, self._spec = run, spec
        self.around = (0.0, 0.0)

    def of(self, batch: Any, runs: int) -> Times:
        """Of each unit; and what is around them is known."""
        times, self.around = self._apart(batch, runs)
        return times

    def of_other(self, batch: Any, runs: int) -> Times:
        return _without(self._times(self._alone, batch, runs), self.around)

    def parts_of(self, batch: Any, runs: int) -> tuple[Times, tuple[float, float]]:
        """Of backwards, of each unit, and what is around them."""
        self.splits(True)
        return self._apart(batch, runs)

    def splits(self, splits: bool) -> None:
        """Whether backwards are in two parts."""
        self._alone.splits = splits
        if self._together is not None:
            self._together.splits = splits

    def _apart(self, batch: Any, runs: int) -> tuple[Times, tuple[float, float]]:
        alone = self._times(self._alone, batch, runs)
        # nobody has proved the cut that is left there
        found = None if self._together is None else tried(partial(self._times, self._together, batch, runs))
        if found is None:
            return alone, (0.0, 0.0)
        others, together = alone[1:], found[1]
        first, second = (
            max(0.0, (sum(own) - both) / (len(others) - 1))
            for own, both in zip(zip(*others, strict=True), together, strict=True)
        )
        return _without(alone, (first, second)), (first, second)

    def _times(self, trial: Timed, batch: Any, runs: int) -> Times:
        def once() -> Times:
            self._run(trial, batch)
            return trial.seconds()

        return fastest(repeated(once, runs, self._spec))


def _without(times: Times, around: tuple[float, float]) -> Times:
    """Of the units alone. times: of stages of a unit each."""
    return [
        (max(first - around[0], LEAST_OF_UNITS * first), max(second - around[1], LEAST_OF_UNITS * second))
        for first, second in times
    ]


def note(units: list[dict[str, Any]], bounds: Sequence[int], times: Times, prefix: str) -> None:
    for unit, (forward, backward) in zip(bounds, times, strict=True):
        units[unit] |= {f"{prefix}forward_seconds": forward, f"{prefix}backward_seconds": backward}


def note_around(
    units: list[dict[str, Any]], bounds: Sequence[int], kinds: tuple[str, str], around: tuple[float, float]
) -> None:
    """kinds: of passes, as facts are called."""
    for unit in bounds:
        units[unit] |= {f"around_{kind}_seconds": seconds for kind, seconds in zip(kinds, around, strict=True)}


def note_split(units: list[dict[str, Any]], bounds: Sequence[int], whole: Times, split: Times) -> None:
    """whole: of the same microbatch."""
    for unit, (_, backward), parts in zip(bounds, whole, split, strict=True):
        units[unit] |= parts_of_backward(backward, *parts)


def parts_of_backward(backward: float, of_input: float, of_weight: float) -> dict[str, float | None]:
    """What the two parts of a backward take of its seconds, together no less than all of it. Nobody knows where it took
    none."""
    if backward <= 0:
        return {"input_part": None, "weight_part": None}
    first = min(1.0, of_input / backward)
    return {"input_part": first, "weight_part": max(1.0 - first, of_weight / backward)}


def loaded(load: Callable[[], Result], *, again: bool) -> tuple[Result, float]:
    """What it loads first, and the seconds that a microbatch takes behind the first one, which has made what all of
    them use. again: whether it may be loaded once more, as what is quick is."""
    began = time.perf_counter()
    result = load()
    found = [time.perf_counter() - began]
    for _ in range(LOADS if again and found[0] < LOADING_SECONDS else 0):
        began = time.perf_counter()
        load()
        found.append(time.perf_counter() - began)
    return result, min(found)


class OtherMemory:
    """What a device's caches hold besides, while it lives."""

    def __init__(self, device: Device) -> None:
        self._bytes = device.zeros(device.cache_bytes(), torch.uint8)

    def fill_caches(self) -> None:
        """As the units do that run between two forwards of a unit."""
        self._bytes.fill_(1)


@functools.cache
def copy_bytes_per_second(threads: int) -> float:
    """Of the machine, so a worker measures it once. threads: those that copy, torch's own."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return COPIED_BYTES / min(seconds)
