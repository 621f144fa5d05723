"""The oracle: what a job means, as one plain PyTorch loop.

Weft trains the same job in stages, in other processes and in another order, and must end with the same bits (one
replica, the same microbatches and thread count). So this file is written to be read and shares no training code with
the workers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from weft.spec import JobSpec
from weft.workers.data import LOADING
from weft.workers.entry import load_workload, unload
from weft.workers.errors import NonFiniteLoss
from weft.workers.optimizer import make_optimizer
from weft.workers.randomness import seed_unit
from weft.workload import BatchFunction, Workload, WorkloadError, as_dataset, units

StepFunction = Callable[[int, float], object]
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceResult:
    """losses: one for each training step. validations: "loss" and each metric, one mapping for each epoch.
    state: the model's state dict at the end, its own copy."""

    losses: list[float]
    validations: list[dict[str, float]]
    state: dict[str, torch.Tensor]


def train(spec: JobSpec, *, threads: int = 1, on_step: StepFunction | None = None) -> ReferenceResult:
    """Trains the job in this process, on the CPU; `on_step` is called with (step, loss) after each update.

    Raises WorkloadError (NonFiniteLoss among them) with what to change; the user's own exceptions pass unchanged.
    """
    if spec.job.batch_size < spec.strategy.microbatches:
        raise WorkloadError(
            f"strategy.microbatches is {spec.strategy.microbatches}, but job.batch_size is {spec.job.batch_size}; "
            "give each microbatch at least one sample"
        )
    threads_before = torch.get_num_threads()
    modules_before = set(sys.modules)
    torch.set_num_threads(threads)
    try:
        return _Loop(spec, load_workload(spec)).run(on_step)
    finally:
        torch.set_num_threads(threads_before)
        unload(spec, modules_before)


class _Loop:
    """One job's model, data and settings, and the loop over them."""

    def __init__(self, spec: JobSpec, workload: Workload) -> None:
        self._job = spec.job
        self._num_microbatches = spec.strategy.microbatches
        self._workload = workload
        self._units = [module for _, module in units(workload.model)]
        self._data = _Data.of(workload.train, "train")
        self._held_out = None if workload.validation is None else _Data.of(workload.validation, "validation")
        self._optimizer = _optimizer(workload)

    def run(self, on_step: StepFunction | None) -> ReferenceResult:
        losses: list[float] = []
        validations: list[dict[str, float]] = []
        steps = self._job.steps or (self._job.epochs or 0) * math.ceil(self._data.size / self._job.batch_size)
        epoch = 0
        while len(losses) < steps:
            self._workload.model.train()
            for indices in self._batches_of_epoch(epoch)[: steps - len(losses)]:
                losses.append(self._train_batch(len(losses), indices))
                if on_step is not None:
                    on_step(len(losses) - 1, losses[-1])
            if self._held_out is not None:
                validations.append(self._validate(len(losses), self._held_out))
            epoch += 1
        state = {name: tensor.detach().clone() for name, tensor in self._workload.model.state_dict().items()}
        return ReferenceResult(losses=losses, validations=validations, state=state)

    def _batches_of_epoch(self, epoch: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(self._job.seed + epoch)
        return _split(torch.randperm(self._data.size, generator=generator), self._job.batch_size)

    def _train_batch(self, step: int, indices: torch.Tensor) -> float:
        batch_loss = 0.0
        for microbatch, inputs, targets in self._microbatches(step, self._data, indices):
            loss = self._workload.loss(self._forward(step, microbatch, inputs), targets)
            value = _number(loss, "loss")
            if not math.isfinite(value):
                raise NonFiniteLoss(step, value, microbatch)
            weight = len(inputs) / len(indices)
            (loss * weight).backward()  # type: ignore[no-untyped-call]  # torch leaves backward without annotations
            batch_loss += value * weight
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return batch_loss

    @torch.no_grad()
    def _validate(self, step: int, data: _Data) -> dict[str, float]:
        """Means over all samples; `step` is the number of steps done: it keys random numbers, should there be any."""
        self._workload.model.eval()
        functions: dict[str, BatchFunction] = {"loss": self._workload.loss, **self._workload.metrics}
        means = dict.fromkeys(functions, 0.0)
        for indices in _split(torch.arange(data.size), self._job.batch_size):
            batch_means = dict.fromkeys(functions, 0.0)
            for microbatch, inputs, targets in self._microbatches(step, data, indices):
                output = self._forward(step, microbatch, inputs)
                for name, function in functions.items():
                    batch_means[name] += _number(function(output, targets), name) * (len(inputs) / len(indices))
            for name in functions:
                means[name] += batch_means[name] * (len(indices) / data.size)
        return means

    def _forward(self, step: int, microbatch: int, inputs: torch.Tensor) -> torch.Tensor:
        value = inputs
        for index, unit in enumerate(self._units):
            seed_unit(self._job.seed, step, microbatch, index)
            value = unit(value)
        return value

    def _microbatches(
        self, step: int, data: _Data, indices: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for microbatch, part in enumerate(indices.tensor_split(self._num_microbatches)):
            if len(part):
                seed_unit(self._job.seed, step, microbatch, LOADING)  # for a dataset that draws: augmentation
                yield microbatch, *data.batch(part)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    """The user's training or validation data. size: samples, at least one. field_name: the Workload's, for errors."""

    dataset: Dataset[Any]
    size: int
    field_name: str

    @classmethod
    def of(cls, data: Any, field_name: str) -> _Data:
        dataset: Any = as_dataset(data, field_name)
        if len(dataset) == 0:
            raise WorkloadError(f"Workload.{field_name} has no samples; give a dataset of at least one")
        return cls(dataset=dataset, size=len(dataset), field_name=field_name)

    def batch(self, indices: torch.Tensor) -> Batch:
        """(inputs, targets) with the samples along the first dimension."""
        if type(self.dataset) is TensorDataset:
            parts: Any = [tensor[indices] for tensor in self.dataset.tensors]
        else:
            parts = default_collate([self.dataset[index] for index in indices.tolist()])
        if not (isinstance(parts, (list, tuple)) and len(parts) == 2 and all(map(torch.is_tensor, parts))):
            raise WorkloadError(
                f"Workload.{self.field_name}: its items are not (input, target) pairs of tensors or numbers; "
                "return exactly these two from __getitem__"
            )
        return parts[0], parts[1]


def _optimizer(workload: Workload) -> torch.optim.Optimizer:
    parameters = list(workload.model.parameters())
    optimizer = make_optimizer(workload.optimizer, parameters)
    if optimizer is None or not any(parameter.requires_grad for parameter in parameters):
        raise WorkloadError("Workload.model has no parameter that requires a gradient; there is nothing to train")
    return optimizer


def _split(indices: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    return tuple(indices[start : start + size] for start in range(0, len(indices), size))


def _number(value: object, name: str) -> float:
    """The value of the loss, or of the metric of that name."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    source = "Workload.loss" if name == "loss" else f"Workload.metrics {name!r}"
    shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise WorkloadError(f"{source} returned {shape}; it must return a scalar tensor, the mean over the samples given")
