"""The oracle: what a job means, as one plain PyTorch loop.

Weft trains the same job in stages, in other processes and in another order, and must end with the same bits (one
replica, the same microbatches and thread count), or with several replicas with the same numbers but for rounding. So
this file is written to be read and shares no training code with the workers.

A step of a job with two replicas:

    the batch     │ replica 0: microbatches 0 1 2 │ replica 1: 3 4 │     by the replicas' shares (`weft.plan.division`)
    the gradient  = Σ gradient of microbatch m, with the parameters that its replica sees · weight(m) / Σ weight
    the update    clip; the optimizer's step on the newest parameters, or none; the scheduler's step
    the epoch     validation; the step of a scheduler that takes a value of it
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.plan.division import divide
from weft.reference.data import Batch, Data, Microbatch, split
from weft.reference.lines import LineFunction, ReferenceLines
from weft.reference.passes import Seed, modules_of, passes_of
from weft.reference.replicas import Replicas
from weft.reference.update import Update, UpdateRecord
from weft.spec.candidates import with_units
from weft.spec.job_spec import JobSpec
from weft.spec.presets import AUTO
from weft.spec.stopping import ON_EPOCH, Rule, Training, value_for_scheduler
from weft.workload.compiling.compiler import compiling
from weft.workload.data.tree import with_tensors
from weft.workload.entry import load_workload, unload
from weft.workload.faults import NonFiniteLoss
from weft.workload.randomness import seed_loading, seed_others, unit_key, update_key
from weft.workload.units import Unit, enter_mode, named_state
from weft.workload.workload import EpochAnswer, Workload, WorkloadError, answer_of, weight_of

StepFunction = Callable[[int, float], object]
SharesFunction = Callable[[int], Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceResult:
    losses: list[float]  # of each step
    validations: list[dict[str, float]]  # "loss" and each metric, of each epoch
    measured: list[dict[str, float]]  # the same of each step, where it only runs forward, or is the user's own
    learning_rates: list[float]  # of the optimizer's first group, as each training step used it
    grad_norms: list[float]  # of each step's whole gradient, unclipped; empty where the job neither clips nor skips
    skipped: list[int]  # the steps without an update, because their gradient was not finite
    state: dict[str, torch.Tensor]  # the model's at the end, its own copy
    stopped: str | None = None  # why it has ended before its last step
    best: dict[str, torch.Tensor] | None = None  # the model's behind the best validation, where `[checkpoint]` keeps it


def train(
    spec: JobSpec,
    *,
    threads: int = 1,
    on_step: StepFunction | None = None,
    on_line: LineFunction | None = None,
    shares: SharesFunction | None = None,
    device: str = "cpu",
    compiled: Path | None = None,
) -> ReferenceResult:
    """Runs the job in this process; `on_step` is called with (step, loss) after each step, and `on_line` with each
    line of metrics.jsonl.

    shares: the replicas' shares of a step's batch, for a job whose shares changed as it ran; unset, the strategy's.
    device: what computes, such as "cuda:0"; all replicas do on the same.
    compiled: the directory of what is compiled; unset, torch's own. Where it is left open whether units are, none is.
    Raises WorkloadError (NonFiniteLoss among them) with what to change; the user's own exceptions pass unchanged.
    """
    _check_microbatches(spec)
    if spec.strategy.compile == AUTO:
        spec = with_units(spec, compiled=False)
    threads_before = torch.get_num_threads()
    modules_before = set(sys.modules)
    torch.set_num_threads(threads)
    try:
        given = shares or (lambda step: spec.strategy.division[0])
        with compiling(compiled) if spec.strategy.compile else contextlib.nullcontext():
            return _Loop(spec, load_workload(spec), given, torch.device(device)).run(on_step, ReferenceLines(on_line))
    finally:
        torch.set_num_threads(threads_before)
        unload(spec, modules_before)


def _check_microbatches(spec: JobSpec) -> None:
    counts = spec.strategy.division[1]
    if spec.job.batch_size < sum(counts):
        what = "strategy.microbatches is" if len(counts) == 1 else "the sum of all replicas' microbatches is"
        raise WorkloadError(
            f"{what} {sum(counts)}, but job.batch_size is {spec.job.batch_size}; "
            "give each microbatch at least one sample"
        )


class _Loop:
    """One job's model, data and settings, and the loop over them."""

    def __init__(self, spec: JobSpec, workload: Workload, shares: SharesFunction, device: torch.device) -> None:
        for module in modules_of(workload):
            module.to(device)
        self._device = device
        self._job = spec.job
        self._strategy = spec.strategy
        self._workload = workload
        self._shares = shares
        self._trains = spec.job.mode == "train"
        self._passes = passes_of(workload)
        self._data = Data.of(workload, "train", spec.job)
        self._steps_per_epoch = math.ceil(self._data.size / self._job.batch_size)
        self._held_out = None
        if self._trains and workload.validation is not None:
            self._held_out = Data.of(workload, "validation", spec.job)
        self._replicas = Replicas(workload.model, spec.strategy.staleness_list, spec.strategy.staleness_warmup)
        self._update = Update(spec.strategy, workload, self._seed_update) if self._trains else None
        self._measured: list[dict[str, float]] = []
        self._training = Training(Rule.of(spec))
        self._metric = None if self._update is None else self._update.metric
        if self._held_out is None:
            self._training.rule.check(workload.epoch_metrics, self._metric)
        self._counted, self._num_samples = 0.0, 0  # in the newest batch
        self._stopped: str | None = None
        self._best: dict[str, torch.Tensor] | None = None

    def run(self, on_step: StepFunction | None, lines: ReferenceLines) -> ReferenceResult:
        losses: list[float] = []
        validations: list[dict[str, float]] = []
        steps = self._job.steps or (self._job.epochs or 0) * self._steps_per_epoch
        epoch = 0
        self._training.start(time.monotonic())
        while len(losses) < steps and self._stopped is None:
            enter_mode(self._workload.model, self._trains)
            for number, indices in enumerate(self._batches_of_epoch(epoch)[: steps - len(losses)]):
                losses.append(self._run_batch(len(losses), indices))
                means = self._measured[-1] if self._measured else {"loss": losses[-1]}
                lines.step(len(losses), epoch, self._num_samples, means, self._update.record if self._update else None)
                if on_step is not None:
                    on_step(len(losses) - 1, losses[-1])
                self._training.step(losses[-1], self._counted, begins_epoch=number == 0, now=time.monotonic())
                if len(losses) < steps and (told := self._training.time_up()) is not None:
                    self._stopped = told
                    break
            if self._stopped is None:
                before = self._state() if self._training.rule.keeps_best else None
                if self._held_out is not None:
                    validations.append(self._validate(len(losses), epoch, self._held_out))
                validated = validations[-1] if self._held_out is not None else {}
                answer = self._ask(epoch, len(losses), validated)
                own = {name: value for name, value in answer.values.items() if value is not None}
                lines.epoch(len(losses), epoch, validated, own)
                if own:
                    validations[len(validations) - bool(validated) :] = [validated | own]
                values = {**validated, **answer.values}
                stop = self._training.validated(epoch, values) if values else None
                self._stopped = stop or (ON_EPOCH if answer.stops else None)
                if before is not None and self._training.take_best(values):
                    self._best = before
                self._step_scheduler(values)
            epoch += 1
        record = UpdateRecord() if self._update is None else self._update.record
        return ReferenceResult(
            losses=losses,
            validations=validations,
            measured=self._measured,
            learning_rates=record.learning_rates,
            grad_norms=record.grad_norms,
            skipped=record.skipped,
            stopped=self._stopped if len(losses) < steps else None,
            best=self._best,
            state=self._state(),
        )

    def _step_scheduler(self, values: Mapping[str, float | None]) -> None:
        """One that takes a value of each epoch's validation."""
        value = value_for_scheduler(self._metric, values)
        if self._update is not None and value is not None:
            self._update.validated(value)

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone().cpu() for name, each in named_state([Unit(0, "", self._workload.model)])}

    def _ask(self, epoch: int, step: int, values: dict[str, float]) -> EpochAnswer:
        """The user's own function about the epoch."""
        function, names = self._workload.on_epoch, self._workload.epoch_metrics
        if not self._trains or function is None:
            return EpochAnswer(stops=False, values={})
        told = {"epoch": epoch, "step": step, "loss": self._training.now.mean_loss, "validation": values}
        answer = answer_of(function, names, told)
        for parameter in self._workload.model.parameters():
            parameter.grad = None  # as the loop's `zero_grad()` does it before each backward
        return answer

    def _batches_of_epoch(self, epoch: int) -> tuple[torch.Tensor, ...]:
        return split(self._data.source.order(epoch, self._job.seed), self._job.batch_size)

    def _run_batch(self, step: int, indices: torch.Tensor) -> float:
        batch = self._batch(step, self._data, indices, self._shares(step))
        self._counted, self._num_samples = batch.weight, batch.count
        if self._update is None:
            self._measured.append(self._measure(step, batch))
            return self._measured[-1]["loss"]
        self._replicas.begin_step()
        means = {"loss": 0.0}
        for microbatch in batch.microbatches:
            with self._replicas.model_as_seen_by(microbatch.replica, step):
                _add(means, self._add_gradient(step, microbatch, batch.fraction(microbatch)))
        self._update.apply(step, ends_epoch=(step + 1) % self._steps_per_epoch == 0)
        if self._workload.step is not None:
            self._measured.append(means)
        return means["loss"]

    def _add_gradient(self, step: int, microbatch: Microbatch, fraction: float) -> dict[str, float]:
        """Adds a microbatch's part to the batch's gradient; returns its part of the batch's loss, and of what else the
        user's step reports."""
        seed = self._seeds(step, microbatch)
        with self._autocast():
            values = self._passes.forward(microbatch.batch, seed, learns=True, counts=fraction > 0)
        if fraction == 0:  # nothing in it counts: a mean over nothing is nan
            return {}
        told = {name: float(value.detach()) for name, value in values.items()}
        if not (math.isfinite(told["loss"]) or self._strategy.skip_nonfinite):
            raise NonFiniteLoss(step, told["loss"], microbatch.number, microbatch.samples.tolist())
        self._passes.backward(values["loss"] * fraction, seed)
        return {name: value * fraction for name, value in told.items()}

    def _validate(self, step: int, epoch: int, data: Data) -> dict[str, float]:
        """Means over all the data; `step` is the number of steps done: it keys random numbers, should there be any."""
        self._workload.model.eval()
        weights, measured = [], []
        for indices in split(data.source.order(epoch, self._job.seed), self._job.batch_size):
            batch = self._batch(step, data, indices, self._strategy.division[0])
            weights.append(batch.weight)
            measured.append(self._measure(step, batch))
        return _means(measured, weights)

    @torch.no_grad()
    def _measure(self, step: int, batch: Batch) -> dict[str, float]:
        """Means over the batch of the loss and each metric."""
        means = dict.fromkeys(["loss", *self._workload.metrics], 0.0)
        for microbatch in batch.microbatches:
            fraction, seed = batch.fraction(microbatch), self._seeds(step, microbatch)
            with self._autocast():
                values = self._passes.forward(microbatch.batch, seed, learns=False, counts=fraction > 0)
            _add(means, {name: float(value) * fraction for name, value in values.items()})
        return means

    def _seeds(self, step: int, microbatch: Microbatch) -> Seed:
        def seed(number: int) -> None:
            self._seed(unit_key(self._job.seed, step, microbatch.number, number))

        return seed

    def _seed_update(self, step: int) -> None:
        self._seed(update_key(self._job.seed, step, 0))

    def _seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key)
        seed_others(key)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index].manual_seed(key)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._strategy.precision != "bf16":  # one that is off keeps copies of those inside of it until its end
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    def _batch(self, step: int, data: Data, indices: torch.Tensor, shares: Sequence[float]) -> Batch:
        microbatches = []
        _, counts, share = self._strategy.division
        for replica, parts in enumerate(divide(len(indices), shares, counts, share)):
            for part in parts:
                if part.size == 0:
                    continue
                number = 0 if data.source.is_ready else part.number
                seed_loading(self._job.seed, step, number)  # for a dataset that draws: augmentation
                order = indices[part.start : part.start + part.size]
                batch, counting, count = data.batch(order)
                microbatches.append(
                    Microbatch(
                        replica=replica,
                        number=part.number,
                        weight=self._weight(batch, counting),
                        count=count,
                        batch=with_tensors(batch, lambda tensor: tensor.to(self._device)),
                        samples=data.source.samples(order),
                    )
                )
        return Batch(microbatches, sum(microbatch.weight for microbatch in microbatches))

    def _weight(self, batch: Any, num_samples: int) -> float:
        if self._workload.weight is None or not num_samples:
            return num_samples
        return weight_of(batch if self._workload.step is not None else batch[1], self._workload.weight)


def _add(means: dict[str, float], part: dict[str, float]) -> None:
    for name, value in part.items():
        means[name] = means.get(name, 0.0) + value


def _means(measured: list[dict[str, float]], weights: list[float]) -> dict[str, float]:
    """Over batches, from the means within each and what each counts; 0 where nothing counts."""
    means: dict[str, float] = {}
    total = sum(weights)
    for batch_means, weight in zip(measured, weights, strict=True):
        _add(means, {name: value * (weight / total) if weight else 0.0 for name, value in batch_means.items()})
    return means
