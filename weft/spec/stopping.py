"""Stopping: whether training is to go on after an epoch, from what the epochs so far have come to. Pure.

    epoch           1      2      3      4      5      6
    accuracy      0.81   0.90   0.91   0.91   0.89   0.90
    since best       0      0      0      1      2      3   stop, with patience = 3

The daemon and the plain loop ask the same rule, and what it remembers is a value that belongs to an iteration as the
parameters do: who goes on from a snapshot goes on with what was remembered then, and comes to the same decisions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.spec.field_errors import SpecError
from weft.spec.job_spec import CheckpointSection, JobSpec, Mode, StopSection, mode_of

ON_EPOCH = "Workload.on_epoch said so"
MAX_KEPT = 8  # standings, beside the best's: more than are copied, or were and are still to go on from, at one time


class UnknownMetric(SpecError):
    """Validations do not report what the rule is to look at."""

    def __init__(self, field: str, metric: str, reported: Iterable[str], otherwise: str) -> None:
        """reported: the names of what they do. otherwise: what to do where there are none."""
        names = ", ".join(reported)
        remedy = f"validations report {names}; use one of these, or name it in Workload.epoch_metrics"
        if not names:
            remedy = (
                "the job has no validation; give Workload.validation, or Workload.epoch_metrics with what your "
                f"Workload.on_epoch returns, or {otherwise}"
            )
        super().__init__(f"{field} = {metric!r:.80}: {remedy}")


def value_for_scheduler(metric: str | None, values: Mapping[str, float | None]) -> float | None:
    """Of what an epoch has come to, or of the names that epochs report. metric: that the job's scheduler takes; None
    where it takes none. Errors: UnknownMetric."""
    if metric is None or metric in values:
        return None if metric is None else values[metric]
    field, other = "Workload.scheduler_metric, for ReduceLROnPlateau,", "a scheduler that takes no measured value"
    raise UnknownMetric(field, metric, values, f"{other}, for example CosineAnnealingLR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What training has come to, as far as the rule remembers it."""

    best: float | None = None  # of `[stop] metric`, improved by min_delta each time; None before any number
    best_epoch: int = 0  # that had it, from 0
    kept: float | None = None  # the best of `[checkpoint] keep_best`
    since: int = 0  # epochs that told it, without an improvement on it
    loss: float = 0.0  # sum over the samples of the epoch so far
    samples: float = 0.0  # of the epoch, so far, or what counts in their place
    seconds: float = 0.0  # of training

    def trained(self, loss: float, samples: float, *, begins_epoch: bool) -> Standing:
        """After one more step. loss: the mean over its samples, or over what counts in their place."""
        before = Standing() if begins_epoch else self
        return dataclasses.replace(self, loss=before.loss + loss * samples, samples=before.samples + samples)

    @property
    def mean_loss(self) -> float | None:
        """Of the epoch so far."""
        return self.loss / self.samples if self.samples else None

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, data: object) -> Standing:
        """Errors: ValueError for what is none."""
        fields = {field.name: field.default for field in dataclasses.fields(cls)}
        if not isinstance(data, dict) or data.keys() - fields.keys():
            raise ValueError("it does not say how training stood")
        for name, value in data.items():
            if value is None and fields[name] is None:
                continue
            kinds = int if isinstance(fields[name], int) else (int, float)
            is_endless = isinstance(value, int) and value.bit_length() >= 64  # JSON's numbers have any length
            if isinstance(value, bool) or not isinstance(value, kinds) or is_endless:
                raise ValueError(f"{name} is {value!r:.40}")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class Rule:
    stop: StopSection | None
    checkpoint: CheckpointSection | None = None

    @classmethod
    def of(cls, spec: JobSpec) -> Rule:
        return cls(spec.stop, spec.checkpoint)

    @property
    def judges(self) -> bool:
        """Whether what follows an epoch depends on its validation."""
        return (self.stop is not None and self.stop.metric is not None) or self.keeps_best

    @property
    def keeps_best(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.keep_best is not None

    def check(self, reported: Iterable[str], scheduler_metric: str | None = None) -> None:
        """reported: the names of what epochs do. scheduler_metric: as value_for_scheduler has it. Errors:
        UnknownMetric."""
        names = list(reported)
        value_for_scheduler(scheduler_metric, dict.fromkeys(names))
        stop = None if self.stop is None else self.stop.metric
        best = None if self.checkpoint is None else self.checkpoint.keep_best
        for field, metric in (("stop.metric", stop), ("checkpoint.keep_best", best)):
            if metric is not None and metric not in names:
                raise UnknownMetric(field, metric, names, f"leave {field} out")

    def is_best(self, standing: Standing, values: Mapping[str, float | None]) -> Standing | None:
        """What is remembered of an epoch that is better than all before; None of another."""
        if self.checkpoint is None or self.checkpoint.keep_best is None:
            return None
        mode = mode_of(self.checkpoint.keep_best, self.checkpoint.best)
        value = values[self.checkpoint.keep_best]
        if value is None or not is_better(value, standing.kept, mode):
            return None
        return dataclasses.replace(standing, kept=value)

    def validated(
        self, standing: Standing, epoch: int, values: Mapping[str, float | None]
    ) -> tuple[Standing, str | None]:
        """After the epoch's validation: what is remembered, and why training is to stop; None to go on. values: None
        under a name that this epoch says nothing of, as if there had been none.

        Errors: UnknownMetric.
        """
        self.check(values)
        stop = self.stop
        if stop is None or stop.metric is None:
            return standing, None
        if (value := values[stop.metric]) is None:
            return standing, None
        if is_better(value, standing.best, mode_of(stop.metric, stop.mode), stop.min_delta):
            return dataclasses.replace(standing, best=value, best_epoch=epoch, since=0), None
        standing = dataclasses.replace(standing, since=standing.since + 1)
        return standing, self._told(stop, standing) if standing.since >= stop.patience else None

    @staticmethod
    def _told(stop: StopSection, standing: Standing) -> str:
        count = f"{standing.since} epoch{'s' * (standing.since > 1)}"
        if standing.best is None:
            return f"{stop.metric} has been no number for {count}"
        by = f" by {stop.min_delta:g}" if stop.min_delta else ""
        best = f"{standing.best:.6g} of epoch {standing.best_epoch + 1}"
        return f"{stop.metric} has not improved{by} on {best} for {count}"


class Training:
    """How the training of one run stands, and stood after the iterations that an attempt may go on from. Seconds are of
    one clock."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.now = Standing()
        self._kept: dict[int, Standing] = {}  # by iteration, in their order
        self._best = -1  # the iteration of those behind which the best validation was: it may wait for the disk
        self._since = math.inf  # when the attempt began to train; its time counts from what was spent before
        self._spent = 0.0

    def begin(self, begins: int) -> None:
        """An attempt that begins with an iteration: it goes on with what is known of the one before."""
        self._kept = {iteration: standing for iteration, standing in self._kept.items() if iteration < begins}
        self.now = self.at(begins - 1)
        self._spent, self._since = self.now.seconds, math.inf

    def start(self, now: float) -> None:
        """The attempt trains from now on."""
        self._since = now

    def step(self, loss: float, samples: float, *, begins_epoch: bool, now: float) -> None:
        """One more is over."""
        standing = self.now.trained(loss, samples, begins_epoch=begins_epoch)
        self.now = dataclasses.replace(standing, seconds=self._spent + max(0.0, now - self._since))

    def keep(self, iteration: int, standing: Standing | None = None) -> None:
        """An attempt may go on from there. standing: what is known of it; None: it is over just now."""
        kept = {**self._kept, iteration: standing or self.now}
        newest = sorted(kept)[-MAX_KEPT:]
        self._kept = {index: kept[index] for index in sorted({*newest, self._best} & kept.keys())}

    def at(self, iteration: int) -> Standing:
        """As it was kept."""
        return self._kept.get(iteration, Standing())

    def validated(self, epoch: int, values: Mapping[str, float | None]) -> str | None:
        """As Rule.validated."""
        self.now, stop = self.rule.validated(self.now, epoch, values)
        return stop

    def take_best(self, values: Mapping[str, float | None]) -> bool:
        """Whether an epoch is better than all before."""
        best = self.rule.is_best(self.now, values)
        if best is not None:
            self.now, self._best = best, max(self._kept, default=-1)
        return best is not None

    def time_up(self) -> str | None:
        """Why training is to stop for its time, from when that is up."""
        stop = self.rule.stop
        if stop is None or self.now.seconds < stop.max_seconds:
            return None
        return f"{stop.max_time} of training are over"


def reported_names(validated: Iterable[str], told: Iterable[str]) -> list[str]:
    """Of what epochs come to. validated: the names of what validations report. told: `Workload.epoch_metrics`. Errors:
    SpecError for one that is both."""
    names = list(validated)
    for name in told:
        if name in names:
            raise SpecError(f"Workload.epoch_metrics: validations report {name!r:.80}, too; give it another name")
        names.append(name)
    return names


def is_better(value: float, than: float | None, mode: Mode, by: float = 0.0) -> bool:
    """What is no finite number is never."""
    if not math.isfinite(value):
        return False
    return than is None or (value < than - by if mode == "min" else value > than + by)
