"""The compute tasks of one stage of one replica: FORWARD, BACKWARD, and GRAD after the last of them.

    FORWARD(r,s,m)    input or activation slot   → activation slot, or the loss on the last stage
    BACKWARD(r,s,m)   gradient slot or the loss  → gradient slot of the stage before
    GRAD(r,s,b)       what backward's hooks have not posted yet

A microbatch without samples (a ragged last batch, a replica without a share) passes through every one of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from weft.plan.course import Course
from weft.plan.division import Part
from weft.plan.error_places import function_place, within
from weft.plan.itinerary import Iteration
from weft.plan.plan import Role
from weft.workers.compute.gradients import StageGradients
from weft.workers.compute.handover import check_fits, scalar
from weft.workers.compute.measured import Measured
from weft.workers.compute.stage import HandBack, Stage
from weft.workers.compute.weights import Weights
from weft.workers.devices.device import Accelerator, Device
from weft.workers.memory.slots import SlotRing
from weft.workload.faults import NonFiniteLoss
from weft.workload.workload import BatchFunction, WorkloadError


class StageTasks:
    """rings: of the replica, by role, and stage of what crosses. functions: the loss and the metrics, of
    the last stage. gradients: None where the stage's own optimizer takes p.grad as it is. before_evaluation: called
    before the first validation after training. publish: called after the last training forward before something else,
    where others read or save what the device keeps for itself. skips_nonfinite: a loss that is nan or inf is no error.
    samples_of: which samples of the training data a microbatch has.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        replica: int,
        number: int,
        num_stages: int,
        course: Course,
        weights: Weights,
        rings: Mapping[tuple[Role, int | None], SlotRing],
        functions: Mapping[str, BatchFunction],
        gradients: StageGradients | None,
        before_evaluation: Callable[[], None],
        device: Device,
        publish: Callable[[], None] | None = None,
        skips_nonfinite: bool,
        samples_of: Callable[[Iteration, Part], Sequence[int]],
    ) -> None:
        self._stage = stage
        self._replica = replica
        self._number = number
        self._is_last = number == num_stages - 1
        self._course = course
        self._weights = weights
        self._source = rings[(Role.ACTIVATION, number - 1) if number else (Role.INPUT, None)]
        self._target = rings.get((Role.TARGET, None))  # of the last stage
        self._output = rings.get((Role.ACTIVATION, number))  # of all others, as the next
        self._output_gradient = rings.get((Role.GRADIENT, number))
        self._source_gradient = rings.get((Role.GRADIENT, number - 1))  # of all but the first
        self._functions = functions
        self._gradients = gradients
        self._before_evaluation = before_evaluation
        self._publish = publish
        self._device = device
        self._hands_back_at_once = not isinstance(device, Accelerator)
        self._skips_nonfinite = skips_nonfinite
        self._samples_of = samples_of
        self._learning = True
        self._counting: tuple[int, Sequence[Part]] = (-1, ())  # iteration, its parts known to have a backward

    def forward(self, iteration: Iteration, microbatch: int, measured: Measured) -> None:
        part = self._course.part(iteration, self._replica, microbatch)
        if part.size:
            self._run(iteration, microbatch, part, measured)
        if microbatch < self._course.microbatches[self._replica] - 1:
            return
        if self._publish is not None and self._is_read_after(iteration):
            self._publish()
        if self._is_last:
            self._device.after(lambda: measured.complete(iteration.index))

    def _is_read_after(self, iteration: Iteration) -> bool:
        """Other replicas validate with what training has left, and what a lone one's validation leaves is saved."""
        is_last = iteration.index + 1 == self._course.itinerary.num_iterations
        return self._course.ends_training(iteration) or (is_last and len(self._course.microbatches) == 1)

    def _run(self, iteration: Iteration, microbatch: int, part: Part, measured: Measured) -> None:
        if iteration.learns is not self._learning:
            self._learning = iteration.learns
            self._stage.train(iteration.learns)
            if not iteration.learns:
                self._before_evaluation()
        x = self._read(self._source, iteration, microbatch, part)
        if not self._is_last:
            run = self._stage.forward if iteration.learns else self._stage.evaluate
            y = run(part.number, iteration.step, x)
            self._pass_on(y, iteration, microbatch, part)
            return
        assert self._target is not None
        number = part.number if self._target.by_number else microbatch
        target = self._target.slot(iteration.index, number, part.size)
        if iteration.learns:
            self._lose(iteration, part, x, target, measured)
        else:
            self._measure(iteration, part, x, target, measured)

    def _pass_on(self, y: object, iteration: Iteration, microbatch: int, part: Part) -> None:
        unit, ring = self._stage.units[-1], self._output
        assert ring is not None
        check_fits(
            y,
            ring.slot(iteration.index, microbatch, part.size),
            what=f"{unit} passes on, for a microbatch of {part.size} samples,",
            remedy="between two stages a unit's output has one shape and dtype for all microbatches of a size, in "
            "training and in validation; pad it, or leave this place out of strategy.split (stages = 1 cuts nowhere)",
        )
        assert isinstance(y, torch.Tensor)
        ring.write(iteration.index, microbatch, y.detach(), part.size)

    def _lose(
        self, iteration: Iteration, part: Part, x: torch.Tensor, target: torch.Tensor, measured: Measured
    ) -> None:
        fraction = self._weights.fraction(iteration, part)
        if fraction == 0:  # nothing in it counts: a mean over nothing is nan
            self._stage.evaluate(part.number, iteration.step, x)
            return
        loss = self._stage.forward(
            part.number, iteration.step, x, functools.partial(_head, "loss", self._functions["loss"], target)
        )

        def use(value: float) -> None:
            if not (math.isfinite(value) or self._skips_nonfinite):
                raise NonFiniteLoss(iteration.step, value, part.number, self._samples_of(iteration, part))
            measured.add(iteration.index, "loss", value, fraction)

        self._device.tell(scalar(loss, "Workload.loss"), use)

    def _measure(
        self, iteration: Iteration, part: Part, x: torch.Tensor, target: torch.Tensor, measured: Measured
    ) -> None:
        fraction = self._weights.fraction(iteration, part)
        heads = [functools.partial(_head, name, own, target) for name, own in self._functions.items() if fraction]
        values = self._stage.measure(part.number, iteration.step, x, heads)
        for name, value in zip(self._functions, values, strict=False):
            add = functools.partial(_add, measured, iteration, name, fraction)
            self._device.tell(scalar(value, f"Workload's {name}"), add)
        for name in self._functions if not fraction else ():  # nothing in it counts; where nothing does the mean is 0
            self._device.after(functools.partial(_add, measured, iteration, name, 0.0, 0.0))
        if self._weights.weighs:
            total = self._weights.total(iteration)
            self._device.after(lambda: measured.of(iteration.index).facts.update(weight=total))

    def backward(self, iteration: Iteration, microbatch: int) -> None:
        part = self._course.part(iteration, self._replica, microbatch)
        counting = self._parts_with_backward(iteration)
        if not self._has_backward(iteration, part):
            self._stage.drop(part.number)
            return
        if self._gradients is not None:
            self._gradients.next_backward(is_last=part == self._last_part(iteration), is_only=len(counting) == 1)
        x, y = self._stage.take(part.number)
        self._device.launching()
        hand_back = self._hand_back(x, iteration, microbatch, part)
        with self._device.drawing:  # torch.utils.checkpoint sets the generators, and runs a part of forward again
            if self._is_last:
                self._differentiate(y * self._weights.fraction(iteration, part), None)
            elif y.requires_grad and self._output_gradient is not None:
                self._differentiate(y, self._read(self._output_gradient, iteration, microbatch, part))
        if hand_back is not None:
            hand_back.finish(x)

    def _hand_back(self, x: torch.Tensor, iteration: Iteration, microbatch: int, part: Part) -> HandBack | None:
        ring = self._source_gradient
        if ring is None:
            return None

        def use(gradient: torch.Tensor) -> None:
            ring.write(iteration.index, microbatch, gradient, part.size)

        return HandBack(x, use, at_once=self._hands_back_at_once)

    def _differentiate(self, y: torch.Tensor, gradient: torch.Tensor | None) -> None:
        try:
            torch.autograd.backward(y, gradient)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error) or not self._stage.num_in_flight:
                raise
            raise WorkloadError(
                f"between {self._stage.units[0]} and {self._stage.units[-1]} a forward changes in place what an "
                "earlier microbatch's backward needs (a buffer, most likely), and the stage has several on their "
                "way; use strategy.recompute = true, or give the buffer a new tensor (self.mean = ..., not "
                f"self.mean.mul_(...)). autograd says: {error}"
            ) from error

    def _parts_with_backward(self, iteration: Iteration) -> Sequence[Part]:
        """Those with samples that count; found, and gradients begun, at the first backward of an iteration.

        None where replicas steal, since nobody knows yet which will come.
        """
        if self._counting[0] != iteration.index:
            parts = [] if self._course.steals else self._course.parts(iteration)[self._replica]
            self._counting = (iteration.index, [part for part in parts if self._has_backward(iteration, part)])
            if self._gradients is not None:
                self._gradients.begin(iteration.step)
        return self._counting[1]

    def _last_part(self, iteration: Iteration) -> Part | None:
        """The last one with samples, even if it does not count: until its forward has read the parameters, no milestone
        may let an owner update them. GRAD posts those that no hook does, all of them where nobody knows the last part.
        """
        if self._course.steals:
            return None
        return next(part for part in reversed(self._course.parts(iteration)[self._replica]) if part.size)

    def _has_backward(self, iteration: Iteration, part: Part) -> bool:
        return bool(part.size and self._weights.fraction(iteration, part))

    def finish_gradient(self, iteration: Iteration, bucket: int) -> None:
        """After the last backward: the bucket is complete. Of a replica without samples nobody reads it."""
        assert self._gradients is not None
        if self._course.contributes(iteration, self._replica):
            self._gradients.finish(bucket, iteration.step)

    @staticmethod
    def _read(ring: SlotRing | None, iteration: Iteration, microbatch: int, part: Part) -> torch.Tensor:
        assert ring is not None
        return ring.read(iteration.index, part.number if ring.by_number else microbatch, part.size)


def _head(name: str, function: BatchFunction, target: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    with within(function_place(name)):
        return function(output, target)


def _add(measured: Measured, iteration: Iteration, name: str, fraction: float, value: float) -> None:
    measured.add(iteration.index, name, value, fraction)
