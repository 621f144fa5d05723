"""Workload: what the user's entry function returns. Plain PyTorch objects, nothing of ours inside.

The model is cut into *units*: the children of a plain `nn.Sequential`, otherwise what its own forward does from one
call to the next (`weft.workload.cutting`). A stage is a contiguous run of units. Units or calls key the random numbers,
not stages, so a result does not depend on where the planner cuts.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from weft.plan.error_places import IN_ON_EPOCH, within

BatchFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MetricFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | float]
StepFunction = Callable[[nn.Module, Any], Any]
WeightFunction = Callable[[Any], float | torch.Tensor]
CollateFunction = Callable[[list[Any]], Any]
EpochFunction = Callable[[Mapping[str, Any]], Mapping[str, Any] | str | None]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


STOP = "stop"
_SPANS = ("T_max", "T_0", "step_size")  # of torch's schedulers, what they count in calls of `step()`


class WorkloadError(Exception):
    """The user's workload cannot be trained as the spec asks. The text says what to change."""


def kind_of(value: object) -> str:
    """What a value is, for whoever gave it."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else type(value).__name__


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and what it takes to train it, by a `loss` over pairs or by a `step` over batches of any structure.

    model: any `nn.Module`; an `nn.Sequential` is cut into stages between its children, any other by its own forward.
    train, validation: a `TensorDataset`, a pair of tensors (inputs, targets) with equal first dimension, or any
        map-style dataset, whose items are (input, target) pairs of tensors or numbers where there is a `loss`.
    loss: (output, target) -> scalar tensor, the mean over the samples given (or over what `weight` counts of them).
    step: (model, batch) -> that scalar tensor, or a mapping with it as "loss" and other scalars to report, means as the
        loss is. A batch is any tree of tensors, numbers and strings: what `collate` makes of items.
    optimizer: called with an iterable of the model's parameters, returns a `torch.optim.Optimizer`, of which a stage
        keeps what is its own.
    validate: as `step`, for validation where it differs.
    metrics: name -> (output, target) -> scalar tensor or number, a mean as the loss is; reported for validation. With a
        `loss` alone: a `step` returns what it reports.
    weight: target, or with a `step` the batch -> what a microbatch counts in its batch, a number of 0 or more, for
        example its tokens with loss: `lambda target: (target != -100).sum()`. Unset, its samples. Where it is 0 the
        microbatch runs forward only, and its loss, which may be nan, is not asked for.
    collate: list of items -> batch; unset, `torch.utils.data.default_collate`, which takes dataclasses here, too.
    scheduler: called once with each optimizer, returns a `torch.optim.lr_scheduler.LRScheduler`; its `step()` is
        called after every training step; of a `ReduceLROnPlateau` its `step(value)` after every epoch's validation.
    scheduler_every: "step", or "epoch": its `step()` is called after the last training step of each epoch instead.
    scheduler_metric: the value of the validation that a `ReduceLROnPlateau` takes: "loss", or a metric's name.
    on_epoch: called in one process after each epoch and its validation, with what it has come to: {"epoch": from 0,
        "step": training steps done, "loss": the mean over the epoch's training, "validation": {name: value}}. Returns
        "stop" to end training there, None, or {name: number} for the names in `epoch_metrics`, with "stop": True
        among them to end it.
    epoch_metrics: the names of what `on_epoch` returns of the whole model, beside what validations report: for
        `[stop]`, `keep_best`, `scheduler_metric` and the logs. Of an epoch for which it returns none they say nothing.
    start: what the model begins with in place of what it has: the path of a safetensors file, or a state dict. Of it
        each worker reads the tensors of its own stages, one after another.
    """

    model: nn.Module
    train: Any
    _: KW_ONLY
    loss: BatchFunction | None = None
    step: StepFunction | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    validation: Any = None
    validate: StepFunction | None = None
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    weight: WeightFunction | None = None
    collate: CollateFunction | None = None
    scheduler: SchedulerFactory | None = None
    scheduler_every: Literal["step", "epoch"] = "step"
    scheduler_metric: str = "loss"
    on_epoch: EpochFunction | None = None
    epoch_metrics: Sequence[str] = ()
    start: str | Path | Mapping[str, torch.Tensor] | None = None

    @property
    def functions(self) -> dict[str, MetricFunction]:
        """The loss and each metric, by the names under which they are reported; where there is a `loss`."""
        assert self.loss is not None
        return {"loss": self.loss, **self.metrics}


@dataclass(frozen=True, slots=True)
class EpochAnswer:
    """Of `Workload.on_epoch`."""

    stops: bool
    values: Mapping[str, float | None]  # of each of `Workload.epoch_metrics`; None where it has told none


def answer_of(function: EpochFunction, names: Sequence[str], values: Mapping[str, Any]) -> EpochAnswer:
    """What `Workload.on_epoch` says of an epoch. names: `Workload.epoch_metrics`. Raises WorkloadError for another
    answer than it may give."""
    with within(IN_ON_EPOCH):
        answer = function(values)
    if answer is None or (isinstance(answer, str) and answer == STOP):
        return EpochAnswer(answer is not None, dict.fromkeys(names))
    if not isinstance(answer, Mapping):
        told = repr(answer) if isinstance(answer, str) else kind_of(answer)
        raise WorkloadError(
            f"Workload.on_epoch returned {told:.80}; it must return 'stop', None to go on, or a mapping with a number "
            "for each name in Workload.epoch_metrics"
        )
    stops = answer.get(STOP, False)
    if not isinstance(stops, bool):
        raise WorkloadError(f"Workload.on_epoch returned 'stop' as {kind_of(stops)}; give True or False")
    unknown, missing = ({*answer} - {STOP, *names}, {*names} - {*answer})
    if unknown or missing:
        listed = ", ".join(sorted(map(repr, unknown or missing)))
        what = f"{listed:.160}, not in" if unknown else f"no {listed:.160} of"
        raise WorkloadError(
            f"Workload.on_epoch returned {what} Workload.epoch_metrics; let these be the names that it returns"
        )
    return EpochAnswer(stops, {name: _number(answer[name], name) for name in names})


def _number(value: object, name: str) -> float:
    if not isinstance(value, numbers.Real) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else kind_of(value)
        raise WorkloadError(f"Workload.on_epoch returned {name!r:.80} as {shape}; give a number, or a tensor of one")
    return float(value)


def weight_of(batch: Any, function: WeightFunction) -> float:
    """What one microbatch counts, by `Workload.weight`: finite, 0 or more.

    batch: the microbatch, or its targets where the workload has a loss. Raises WorkloadError for what is
    no such number.
    """
    with within("in Workload.weight"):
        value = function(batch)
    if not isinstance(value, numbers.Real) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else kind_of(value)
        raise WorkloadError(f"Workload.weight returned {shape}; it must return a number, or a tensor of one")
    weight = float(value)
    if not (math.isfinite(weight) and weight >= 0):
        raise WorkloadError(f"Workload.weight returned {weight}; it must return a finite number of 0 or more")
    return weight


def make_scheduler(factory: SchedulerFactory | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The learning rate's scheduler of one optimizer, which has its first rate from now on; None without a factory.

    Raises WorkloadError if the factory's result cannot be used.
    """
    if factory is None:
        return None
    with within("in Workload.scheduler"):
        scheduler = factory(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise WorkloadError(
            f"Workload.scheduler returned {kind_of(scheduler)}; it must return a "
            "torch.optim.lr_scheduler.LRScheduler, for example CosineAnnealingLR(optimizer, T_max=100), or for rates "
            "of your own LambdaLR(optimizer, lambda step: 0.95**step)"
        )
    if scheduler.optimizer is not optimizer:
        raise WorkloadError(
            "Workload.scheduler returned a scheduler of another optimizer than it was given; build it on its argument"
        )
    # torch warns of a scheduler that is stepped before its optimizer, as it is behind a first step that was skipped, or
    # made by owners. A catch around each step would have all modules forget what they have warned of.
    vars(optimizer)["_opt_called"] = True
    return scheduler


def steps_scheduler(workload: Workload, *, ends_epoch: bool) -> bool:
    """Whether a scheduler that takes no value is stepped behind a training step."""
    return ends_epoch or workload.scheduler_every == "step"


def span_of(scheduler: LRScheduler | None) -> int | None:
    """After how many calls of `step()` it has done what its own numbers say, or begins again; None where they say no
    such thing. Of several in a row or in a chain, the longest."""
    state = vars(scheduler) if scheduler is not None else {}
    own = [state.get(name) for name in _SPANS] + [*state.get("milestones", ()), *state.get("_milestones", ())]
    inner = [span_of(each) or 0 for each in state.get("_schedulers", ()) if isinstance(each, LRScheduler)]
    return max((each for each in own + inner if isinstance(each, int)), default=0) or None


def scheduler_facts(workload: Workload, scheduler: LRScheduler | None) -> dict[str, str | int | None]:
    """What of an inspection is the scheduler's."""
    return {
        "scheduler_metric": metric_of(workload, scheduler),
        "scheduler_span": span_of(scheduler) if workload.scheduler_every == "step" else None,
    }


def metric_of(workload: Workload, scheduler: LRScheduler | None) -> str | None:
    """The value of validations that the scheduler takes; None of one that follows from the number of steps alone."""
    return workload.scheduler_metric if isinstance(scheduler, ReduceLROnPlateau) else None
