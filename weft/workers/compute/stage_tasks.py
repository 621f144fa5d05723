"""The compute tasks of one stage of one replica: FORWARD, BACKWARD, and GRAD after the last of them.

    FORWARD(r,s,m)    data and activation slots   → activation slot, or the loss on the last stage
    BACKWARD(r,s,m)   gradient slots or the loss  → gradient slots of stages before
    INPUT, WEIGHT     the same in two parts: the first for the stages before, the second for the stage's own update
    GRAD(r,s,b)       what backward's hooks have not posted yet

A microbatch without samples (a ragged last batch, a replica without a share) passes through every one of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from weft.plan.course import Course
from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.workers.compute.backward.freezing import Freezing
from weft.workers.compute.backward.hand_back import HandBack
from weft.workers.compute.backward.own_gradients import OwnGradients
from weft.workers.compute.backward.split import SplitBackward
from weft.workers.compute.forward_parts import ForwardParts
from weft.workers.compute.gradients import StageGradients
from weft.workers.compute.handover import described
from weft.workers.compute.measured import Measured
from weft.workers.compute.stage import Stage, Tensors
from weft.workers.compute.stage_parcels import StageParcels
from weft.workers.compute.weights import Weights
from weft.workers.devices.device import Accelerator, Device
from weft.workers.memory.parcels import DoesNotFit
from weft.workers.snapshots.attributes import Attributes, Modes
from weft.workload.faults import NonFiniteLoss
from weft.workload.workload import WorkloadError

ReadBatch = Callable[[Iteration, int, Part], Any]


class StageTasks:
    """parcels: what the stage receives and sends. read_batch: what it reads of a microbatch's data, as it takes it.
    gradients: in buckets, or those that the stage's own optimizer takes; None where nobody learns. before_evaluation:
    called before the first validation after training. publish: called behind the last training pass before something
    else, where others read or save what the device keeps for itself. skips_nonfinite: a loss that is nan or inf is no
    error. samples_of: which samples of the training data a microbatch has. parts: the stage's, of its first forward.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        replica: int,
        is_last: bool,
        course: Course,
        weights: Weights,
        parcels: StageParcels,
        read_batch: ReadBatch,
        gradients: StageGradients | OwnGradients | None,
        before_evaluation: Callable[[], None],
        device: Device,
        publish: Callable[[], None] | None = None,
        skips_nonfinite: bool,
        samples_of: Callable[[Iteration, Part], Sequence[int]],
        parts: ForwardParts | None = None,
    ) -> None:
        self._stage = stage
        self._replica = replica
        self._is_last = is_last
        self._course = course
        self._weights = weights
        self._parcels = parcels
        self._read_batch = read_batch
        self._gradients = gradients
        self._freezing = Freezing([]) if gradients is None else gradients.freezing
        self._before_evaluation = before_evaluation
        self._publish = publish
        self._device = device
        self._hands_back_at_once = not isinstance(device, Accelerator)
        self._skips_nonfinite = skips_nonfinite
        self._samples_of = samples_of
        self._parts = parts or ForwardParts.whole()
        self._phase: tuple[int, bool] | None = None  # epoch, and whether it learns: of what ran last
        # By microbatch, from the first part of its backward to the second, with what is to be called before that, and
        # what stands in slots.
        self._split: dict[int, tuple[SplitBackward, Callable[[], None], Tensors, Callable[[], None]]] = {}
        self._counting: tuple[int, Sequence[Part]] = (-1, ())  # iteration, its parts known to have a backward

    def rewind(self) -> None:
        """To the attempt's first iteration: nothing is on its way. What others read of the stage is as it is now."""
        self._stage.rewind()
        self._parts.end()
        self._split.clear()
        self._phase, self._counting = None, (-1, ())
        if self._publish is not None:
            self._publish()

    def go_on(self, attributes: Attributes, modes: Modes | None) -> None:
        """From what was saved. In the middle of an epoch, or of its validation, the model has been told of it before,
        and is not again: what its `train()` counts would count twice. modes: None where an older release has saved."""
        if modes is None:
            return
        first, before = (self._course.iteration(max(0, self._course.begins - back)) for back in (0, 1))
        phase = (first.epoch, first.learns)
        if first is not before and phase == (before.epoch, before.learns):
            self._phase = phase
            self._stage.go_on(first.learns)
            if not first.learns:
                self._before_evaluation()
        attributes.restore_modes(modes)

    def close(self) -> None:
        """For good."""
        self._split.clear()
        self._stage.close()

    def forward(self, iteration: Iteration, microbatch: int, measured: Measured) -> None:
        part = self._course.part(iteration, self._replica, microbatch)
        if part.size:
            if microbatch == 0:
                self._parts.begin()
            self._enter((iteration.epoch, iteration.learns))
            with self._freezing.forward(microbatch) if iteration.learns else contextlib.nullcontext():
                self._run(iteration, microbatch, part, measured)
            self._parts.end()
        self._publish_behind(iteration, microbatch)
        if self._is_last and microbatch == self._course.microbatches[self._replica] - 1:
            self._device.after(lambda: measured.complete(iteration.index))

    def _publish_behind(self, iteration: Iteration, microbatch: int) -> None:
        """Other replicas validate with what training has left, and what a lone one's validation leaves is saved. Behind
        a job's first one too: what cannot be saved ends it there, not behind its last."""
        if self._publish is None or microbatch < self._course.microbatches[self._replica] - 1:
            return
        is_alone = len(self._course.microbatches) == 1
        if (
            iteration.index == 0
            or self._course.ends_training(iteration)
            or (is_alone and self._course.may_be_last(iteration))
        ):
            self._publish()

    def _run(self, iteration: Iteration, microbatch: int, part: Part, measured: Measured) -> None:
        received = self._parcels.receive(iteration.index, microbatch)
        batch = self._read_batch(iteration, microbatch, part)
        if not self._is_last:
            run = self._stage.forward if iteration.learns else self._stage.evaluate
            self._send(run(part.number, iteration.step, received, batch), iteration, microbatch, part)
        elif iteration.learns:
            self._lose(iteration, part, received, batch, measured)
        else:
            self._measure(iteration, part, received, batch, measured)

    def _enter(self, phase: tuple[int, bool]) -> None:
        """An epoch, or its validation, of which the model is told where the plain loop tells it: what it makes of
        `train()` is its own affair, and a step may have changed it since."""
        if phase == self._phase:
            return
        learned = self._phase is None or self._phase[1]
        self._phase = phase
        self._stage.train(phase[1])
        if learned and not phase[1]:
            self._before_evaluation()

    def _send(self, sent: Tensors, iteration: Iteration, microbatch: int, part: Part) -> None:
        self._stage.check_sent(sent, self._parcels.sent, part.size)
        try:
            self._parcels.send(iteration.index, microbatch, sent)
        except DoesNotFit as error:
            raise WorkloadError(
                f"{self._stage.maker()} passes on, for a microbatch of {part.size} samples, "
                f"{described(sent[error.number])}, which has {error.what}; reshape it, or leave this place out of "
                "strategy.split (stages = 1 cuts nowhere)"
            ) from error

    def _lose(self, iteration: Iteration, part: Part, received: Tensors, batch: Any, measured: Measured) -> None:
        fraction = self._weights.fraction(iteration, part)
        if fraction == 0:  # nothing in it counts: a mean over nothing is nan
            self._stage.evaluate(part.number, iteration.step, received, batch)
            return
        for name, value in self._stage.lose(part.number, iteration.step, received, batch).items():
            self._device.tell(value, functools.partial(self._use, measured, iteration, part, name, fraction))
        self._tell_weight(iteration, measured)

    def _use(
        self, measured: Measured, iteration: Iteration, part: Part, name: str, fraction: float, value: float
    ) -> None:
        if name == "loss" and not (math.isfinite(value) or self._skips_nonfinite):
            raise NonFiniteLoss(iteration.step, value, part.number, self._samples_of(iteration, part))
        measured.add(iteration.index, name, value, fraction)

    def _measure(self, iteration: Iteration, part: Part, received: Tensors, batch: Any, measured: Measured) -> None:
        fraction = self._weights.fraction(iteration, part)
        if fraction:
            for name, value in self._stage.measure(part.number, iteration.step, received, batch).items():
                self._device.tell(value, functools.partial(_add, measured, iteration, name, fraction))
        else:  # nothing in it counts; where nothing does the mean is 0
            self._stage.evaluate(part.number, iteration.step, received, batch)
            for name in self._stage.measures():
                self._device.after(functools.partial(_add, measured, iteration, name, 0.0, 0.0))
        self._tell_weight(iteration, measured)

    def _tell_weight(self, iteration: Iteration, measured: Measured) -> None:
        """What the whole batch counts in a mean over several of them, and how many samples it is."""
        if self._weights.weighs:
            total, samples = self._weights.total(iteration), self._weights.samples(iteration)
            self._device.after(lambda: measured.of(iteration.index).facts.update(weight=total, samples=samples))

    def backward(self, iteration: Iteration, microbatch: int) -> None:
        with self._freezing.backward(microbatch):
            self._backward(iteration, microbatch)

    def _backward(self, iteration: Iteration, microbatch: int) -> None:
        if (taken := self._take(iteration, microbatch)) is None:
            return
        received, sent = taken
        hand_backs = [
            (received[number], self._hand_back(received[number], iteration, microbatch, number))
            for number in self._parcels.returned
        ]
        with self._device.drawing:  # torch.utils.checkpoint sets the generators, and runs a part of forward again
            roots, gradients = self._roots(iteration, microbatch, received, sent)
            if roots:
                with self._telling():
                    torch.autograd.backward(roots, gradients)
                self._keep_gradients([*received, *gradients])
        for leaf, hand_back in hand_backs:
            hand_back.finish(leaf)
        self._parcels.hand_back_tied(iteration.index, microbatch)
        self._publish_behind(iteration, microbatch)  # what has computed a forward again may have changed buffers again

    def backward_input(self, iteration: Iteration, microbatch: int) -> None:
        """What the stages before wait for."""
        with self._freezing.backward(microbatch):
            self._backward_input(iteration, microbatch)

    def _backward_input(self, iteration: Iteration, microbatch: int) -> None:
        if (taken := self._take(iteration, microbatch)) is None:
            return
        received, sent = taken
        wanted = ((number, received[number]) for number in self._parcels.returned)
        leaves = {number: leaf for number, leaf in wanted if leaf is not None and leaf.requires_grad}
        with self._device.drawing:
            roots, gradients = self._roots(iteration, microbatch, received, sent)
            with self._telling():
                split = SplitBackward(roots, gradients, leaves, self._parcels.handed_on)
        begin = self._beginning(iteration, self._course.part(iteration, self._replica, microbatch))
        self._split[microbatch] = split, self._stage.again(), [*received, *gradients], begin
        for number in self._parcels.returned:
            self._parcels.hand_back(iteration.index, microbatch, number, split.received.get(number))
        self._parcels.hand_back_tied(iteration.index, microbatch)

    def backward_weight(self, iteration: Iteration, microbatch: int) -> None:
        """The rest."""
        if microbatch not in self._split:
            return
        split, begin_again, lent, begin = self._split.pop(microbatch)
        begin()
        self._device.launching()
        begin_again()
        with self._freezing.backward(microbatch), self._device.drawing, self._telling():
            self._freezing.taken(microbatch)
            split.finish()
        self._keep_gradients(lent)

    def _take(self, iteration: Iteration, microbatch: int) -> tuple[Tensors, Tensors] | None:
        """(leaves of what was received, what was sent with its graph); None where there is no backward."""
        part = self._course.part(iteration, self._replica, microbatch)
        self._beginning(iteration, part)()
        if not self._has_backward(iteration, part):
            self._stage.drop(part.number)
            return None
        taken = self._stage.take(part.number)
        self._freezing.taken(microbatch)
        self._device.launching()
        return taken

    def _beginning(self, iteration: Iteration, part: Part) -> Callable[[], None]:
        """Of a backward. What counts in the batch is read now: nobody waits for a second part where the stage has no
        parameters, and the loader may have gone on by then."""
        counting = self._parts_with_backward(iteration)
        if not (isinstance(self._gradients, StageGradients) and self._has_backward(iteration, part)):
            return _nothing
        how = {"is_last": part == self._last_part(iteration), "is_only": len(counting) == 1}
        return functools.partial(self._gradients.next_backward, **how)

    def _keep_gradients(self, lent: Tensors) -> None:
        if isinstance(self._gradients, OwnGradients):
            self._gradients.keep(lent)

    def _roots(
        self, iteration: Iteration, microbatch: int, received: Tensors, sent: Tensors
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where a backward begins, with what."""
        if not self._is_last:
            self._check_awaited(sent)
            return self._parcels.roots(iteration.index, microbatch, received, sent)
        (loss,) = sent
        assert loss is not None
        part = self._course.part(iteration, self._replica, microbatch)
        # What autograd would make of the product of both, without the product.
        return [loss], [torch.full_like(loss, self._weights.fraction(iteration, part))]

    def _check_awaited(self, sent: Tensors) -> None:
        for number, tensor in enumerate(sent):
            if tensor is not None and tensor.requires_grad and number not in self._parcels.awaited:
                raise WorkloadError(
                    f"{self._stage.maker()} passes on a tensor that parameters have a part in, and had none when "
                    "the step was tried before training (a layer is trained since, or something was left out at "
                    "random), so no gradient comes back; let them have one always, or leave this place out of "
                    "strategy.split (stages = 1 cuts nowhere)"
                )

    def _hand_back(self, leaf: torch.Tensor | None, iteration: Iteration, microbatch: int, number: int) -> HandBack:
        use = functools.partial(self._parcels.hand_back, iteration.index, microbatch, number)
        return HandBack(leaf, use, at_once=self._hands_back_at_once)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """What autograd says, so that the user can do something about it."""
        try:
            yield
        except RuntimeError as error:
            if "use_reentrant=True" in str(error):
                raise WorkloadError(
                    f"{self._stage.span()} torch.utils.checkpoint runs a backward of its own, and the schedule splits "
                    'backwards in two; give it use_reentrant=False, or use strategy.schedule = "1f1b"'
                ) from error
            if "modified by an inplace operation" not in str(error) or not (self._stage.num_in_flight or self._split):
                raise
            raise WorkloadError(
                f"{self._stage.span()} a forward changes in place what an earlier microbatch's backward needs (a "
                "buffer, most likely), and the stage has several on their way; use strategy.recompute = true, or give "
                f"the buffer a new tensor (self.mean = ..., not self.mean.mul_(...)). autograd says: {error}"
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

    def sent(self, iteration: Iteration, microbatch: int) -> Tensors:
        """What a forward has made for later stages."""
        has_samples = self._course.part(iteration, self._replica, microbatch).size > 0
        return self._parcels.sent_now(iteration.index, microbatch) if has_samples else []

    def handed_back(self, iteration: Iteration, microbatch: int) -> Tensors:
        """What a backward has made for the stages before."""
        part = self._course.part(iteration, self._replica, microbatch)
        has_backward = self._has_backward(iteration, part)
        return self._parcels.handed_back_now(iteration.index, microbatch) if has_backward else []

    def finish_gradient(self, iteration: Iteration, bucket: int) -> None:
        """After the last backward: the bucket is complete. Of a replica without samples nobody reads it."""
        assert isinstance(self._gradients, StageGradients)
        if self._course.contributes(iteration, self._replica):
            self._gradients.finish(bucket, iteration.step)


def _add(measured: Measured, iteration: Iteration, name: str, fraction: float, value: float) -> None:
    measured.add(iteration.index, name, value, fraction)


def _nothing() -> None: ...
