"""The oracle's update: what happens to the model once the gradient of a step is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from weft.plan.error_places import step_place, within
from weft.spec.job_spec import Strategy
from weft.workload.optimizer import learning_rate_of, make_optimizer, nothing_to_train, without_closure
from weft.workload.workload import Workload, WorkloadError, make_scheduler, metric_of, steps_scheduler


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """What `ReferenceResult` has of the updates, so far."""

    learning_rates: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


class Update:
    """Raises WorkloadError, when built, if there is nothing to train or the workload's optimizer or scheduler is not
    what it should be."""

    def __init__(self, strategy: Strategy, workload: Workload, seed: Callable[[int], None]) -> None:
        """seed: called with the number of each step, before it is made."""
        self.record = UpdateRecord()
        self._seed = seed
        self._clip_norm = strategy.clip_norm
        self._skip_nonfinite = strategy.skip_nonfinite
        self._optimizer = _optimizer(workload)
        updated = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        self._parameters = [each for each in workload.model.parameters() if id(each) in updated]
        self._workload = workload
        self._scheduler = make_scheduler(workload.scheduler, self._optimizer)
        self.metric = metric_of(workload, self._scheduler)  # of validations, that the scheduler takes

    def apply(self, step: int, *, ends_epoch: bool) -> None:
        """Takes the gradients that stand in the parameters' `grad`, and clears them.

        A batch that counts nothing has left none; the optimizer's step then changes nothing.
        """
        self.record.learning_rates.append(learning_rate_of(self._optimizer))
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self._clip_norm is not None or self._skip_nonfinite:
            self.record.grad_norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        if self._skip_nonfinite and not all(gradient.isfinite().all() for gradient in gradients):
            self.record.skipped.append(step)
        else:
            if self._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
            self._seed(step)
            with without_closure(self._optimizer), within(step_place(self._optimizer)):
                self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        steps = self.metric is None and steps_scheduler(self._workload, ends_epoch=ends_epoch)
        if self._scheduler is not None and steps:
            self._step_scheduler(self._scheduler)

    def validated(self, value: float) -> None:
        """After an epoch's validation, of whose values the scheduler takes one."""
        assert self._scheduler is not None
        self._step_scheduler(self._scheduler, value)

    @staticmethod
    def _step_scheduler(scheduler: LRScheduler, *value: Any) -> None:
        with within(step_place(scheduler)):
            scheduler.step(*value)


def _optimizer(workload: Workload) -> torch.optim.Optimizer:
    parameters = list(workload.model.parameters())
    optimizer = make_optimizer(workload.optimizer, parameters)
    if optimizer is None or not any(parameter.requires_grad for parameter in parameters):
        raise WorkloadError(nothing_to_train(workload.model))
    return optimizer
