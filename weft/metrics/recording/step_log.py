"""Step log: `metrics.jsonl` of a run directory as values, a line for each training step, for each validation, and for
what the job's own function says of an epoch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from weft.machine.run_file import cut, read, size
from weft.plan.itinerary import Itinerary

FILE: Final = "metrics.jsonl"
_OF_EPOCH: Final = ("validation", "on_epoch")  # what lines of epochs hold
MAX_LINE_BYTES: Final = 1 << 20  # a step has some 200, with a metric more or less
MAX_BYTES: Final = 1 << 30  # of the file: seven million steps


class StepLogError(ValueError):
    """A line that is none of a step log's. The text names file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step. None: not measured, or not a finite number."""

    step: int  # from 1
    epoch: int  # from 0, as in metrics.jsonl; the job's log counts from 1
    loss: float | None
    lr: float | None
    grad_norm: float | None
    samples: int
    seconds: float | None  # since the iteration before it ended
    measured: Mapping[str, float | None] = field(default_factory=dict)  # by name, what else the step tells


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """After so many steps: the mean of each metric over the validation data, or what the job's own function says."""

    step: int
    epoch: int  # from 0
    values: Mapping[str, float | None]


@dataclass(slots=True)
class StepLog:
    steps: list[Step] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)

    def add(self, entries: Iterable[Step | Validation]) -> None:
        for entry in entries:
            if isinstance(entry, Step):
                self.steps.append(entry)
            elif self.validations and self.validations[-1].step == entry.step:
                before = self.validations.pop()
                self.validations.append(replace(before, values={**before.values, **entry.values}))
            else:
                self.validations.append(entry)


class StepLogReader:
    """Reads what has come since the last time; a line that is not whole yet comes next time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._num_lines = 0
        self._last = b""  # of the lines that were read

    def read(self) -> list[Step | Validation] | None:
        """None where training has started over, and the file with it: forget what was read before, and read again.

        Errors: OSError, StepLogError.
        """
        if self._has_started_over():
            self._offset, self._num_lines, self._last = 0, 0, b""
            return None
        entries: list[Step | Validation] = []
        while self._offset < MAX_BYTES:
            data = read(self._path, MAX_LINE_BYTES, offset=self._offset)
            whole = data[: data.rfind(b"\n") + 1]
            if not whole:
                if len(data) == MAX_LINE_BYTES:
                    raise StepLogError(f"{self._path}, line {self._num_lines + 1}, is no line of a step log (too long)")
                break
            self._offset += len(whole)
            self._last = whole.splitlines(keepends=True)[-1]
            entries += map(self._parse, whole.splitlines())
        return entries

    def _has_started_over(self) -> bool:
        """It may have grown beyond what was read: then another line stands where the last one stood."""
        if size(self._path) < self._offset:
            return True
        last = self._last
        return bool(last) and read(self._path, len(last), offset=self._offset - len(last)) != last

    def _parse(self, line: bytes) -> Step | Validation:
        self._num_lines += 1
        try:
            return _entry(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {str(error)[:100]}"
            raise StepLogError(f"{self._path}, line {self._num_lines}, is no line of a step log ({what})") from error


@dataclass(frozen=True, slots=True)
class Logged:
    """What of a job a log tells, from its begin."""

    iterations: int = 0
    epochs: int = 0  # of which the job's own function has said what it says

    def with_epoch(self, epoch: int) -> Logged:
        return replace(self, epochs=max(self.epochs, epoch + 1))

    def __or__(self, other: Logged) -> Logged:
        return Logged(max(self.iterations, other.iterations), max(self.epochs, other.epochs))


def logged_in(path: Path, itinerary: Itinerary) -> Logged:
    """For who goes on with a job's log; what is behind its last whole line goes.

    Errors: OSError, StepLogError.
    """
    try:
        num_bytes = size(path)
    except FileNotFoundError:
        return Logged()
    start = max(0, num_bytes - MAX_LINE_BYTES)
    data = read(path, MAX_LINE_BYTES, offset=start)
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        cut(path, start + len(whole))
    if not whole:
        return Logged()
    try:
        line = json.loads(whole.splitlines()[-1])
        last = _entry(line)
    except (ValueError, KeyError, TypeError) as error:
        raise StepLogError(f"{path}: its last line is no line of a step log ({type(error).__name__})") from error
    behind = itinerary.validations_per_epoch if isinstance(last, Validation) else 0
    return Logged(itinerary.update_of(last.step) + 1 + behind, last.epoch + ("on_epoch" in line))


def loss_after(path: Path, step: int) -> float | None:
    """Of so many training steps, the loss of the last, for who went on little behind it; None where it is not told."""
    try:
        data = read(path, MAX_LINE_BYTES, offset=max(0, size(path) - MAX_LINE_BYTES))
    except OSError:
        return None
    for line in reversed(data.splitlines()):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            entry = _entry(json.loads(line))
            if isinstance(entry, Step) and entry.step == step:
                return entry.loss
    return None


def read_step_log(path: Path) -> StepLog:
    """The whole log so far. Errors: OSError, StepLogError."""
    log = StepLog()
    log.add(StepLogReader(path).read() or ())
    return log


def _entry(line: dict[str, Any]) -> Step | Validation:
    if (of_epoch := next((name for name in _OF_EPOCH if name in line), None)) is not None:
        values = dict(line[of_epoch])
        _check_are(int, {"step": line["step"], "epoch": line["epoch"]})
        _check_are((int, float, type(None)), values)
        return Validation(step=line["step"], epoch=line["epoch"], values=values)
    names = ("step", "epoch", "loss", "lr", "grad_norm", "samples", "seconds")
    step = {name: line[name] for name in names}
    _check_are(int, {name: step[name] for name in ("step", "epoch", "samples")})
    measured = dict(line.get("measured", {}))
    _check_are((int, float, type(None)), step | measured)
    return Step(**step, measured=measured)


def _check_are(kind: type | tuple[type, ...], values: Mapping[str, Any]) -> None:
    """Errors: TypeError for what no view can reckon with."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {repr(value)[:40]}")
