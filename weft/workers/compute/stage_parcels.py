"""Stage parcels: what one stage receives from others and sends there, and the gradients that go the other way.

    FORWARD    receive ▸ leaves ──── the stage ────▸ sent ▸ send
    BACKWARD   hand_back ◂ gradients of leaves ◂──── the stage ◂──── roots: sent, and leaves that later stages read too

A gradient comes to a stage from one other stage alone, which has summed what came to it with its own part. So of a
value that a later stage reads too, the gradient from there begins this stage's own sum: it is a root on the leaf. Of a
parameter that several stages use it is the same (`weft.workers.compute.backward.tied_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from weft.plan.plan import Ring, Role, SlotValue
from weft.workers.compute.backward.tied_gradients import TiedGradients
from weft.workers.compute.stage import Tensors
from weft.workers.memory.parcels import ParcelRing


class StageParcels:
    """received: the names of what the stage receives, in order: by the stage that makes it, and as in its ring. sent:
    the places of what it sends. returned: which of what is received has a gradient to hand back. awaited: to which of
    what is sent one comes back."""

    def __init__(
        self, rings: Sequence[tuple[Ring, ParcelRing]], stage: int, parameters: Sequence[nn.Parameter] = ()
    ) -> None:
        """rings: of the replica, those that the stage writes or reads among them. parameters: the model's, by number,
        as the stage has them."""
        activations, gradients = _of_role(rings, Role.ACTIVATION), _of_role(rings, Role.GRADIENT)
        came = [(made, _read_by(stage, ring), ring) for ring, made in activations if stage in ring.stages]
        self._sources = [(made, None if len(read) == len(ring.values) else read) for made, read, ring in came]
        self.received = tuple(ring.values[number].name for _, read, ring in came for number in read)
        own = [(ring, made) for ring, made in activations if ring.writer == stage]
        self._out = own[0][1] if own else None
        self.sent: tuple[SlotValue, ...] = own[0][0].values if own else ()
        of_received = {name: number for number, name in enumerate(self.received)}
        of_sent = {value.name: number for number, value in enumerate(self.sent)}
        self._gradients = [
            (made, number, value.name in of_sent, (of_sent | of_received)[value.name])
            for ring, made in gradients
            if stage in ring.stages
            for number, value in enumerate(ring.values)
        ]
        self.awaited = frozenset(at for _, _, is_sent, at in self._gradients if is_sent)
        self._back = {
            of_received[value.name]: (made, number)
            for ring, made in gradients
            if ring.writer == stage
            for number, value in enumerate(ring.values)
        }
        self.returned = tuple(self._back)
        self._tied = TiedGradients(rings, stage, parameters)

    def receive(self, iteration: int, microbatch: int) -> Tensors:
        if len(self._sources) == 1:
            ring, numbers = self._sources[0]
            return ring.read(iteration, microbatch, numbers)
        return [tensor for ring, numbers in self._sources for tensor in ring.read(iteration, microbatch, numbers)]

    def send(self, iteration: int, microbatch: int, tensors: Tensors) -> None:
        """tensors: as many as `sent`. Errors: DoesNotFit."""
        if self._out is not None:
            self._out.write(iteration, microbatch, [None if each is None else each.detach() for each in tensors])

    def sent_now(self, iteration: int, microbatch: int) -> Tensors:
        """As others find it."""
        return [] if self._out is None else self._out.read(iteration, microbatch)

    def handed_back_now(self, iteration: int, microbatch: int) -> Tensors:
        """The same of gradients."""
        own = [ring.get(iteration, microbatch, place) for ring, place in self._back.values()]
        return [*own, *self._tied.handed_back_now(iteration, microbatch)]

    def roots(
        self, iteration: int, microbatch: int, received: Tensors, sent: Tensors
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where a backward begins, with what: what was sent, or received and read by later stages too, or a parameter
        that they use too, whose gradient has come. received, sent: as `take` gives them."""
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for ring, number, is_sent, at in self._gradients:
            root = sent[at] if is_sent else received[at]
            if root is None or not root.requires_grad:
                continue
            gradient = ring.get(iteration, microbatch, number)
            if gradient is not None:
                roots.append(root)
                gradients.append(gradient)
        for parameter, gradient in self._tied.roots(iteration, microbatch):
            roots.append(parameter)
            gradients.append(gradient)
        return roots, gradients

    def hand_back(self, iteration: int, microbatch: int, number: int, gradient: torch.Tensor | None) -> None:
        """number: of the value, in `received`."""
        ring, place = self._back[number]
        ring.put(iteration, microbatch, place, gradient)

    @property
    def handed_on(self) -> Sequence[nn.Parameter]:
        """Parameters whose gradients go on to earlier stages."""
        return self._tied.handed_on

    def hand_back_tied(self, iteration: int, microbatch: int) -> None:
        """After a backward: the gradients of parameters that earlier stages use too."""
        self._tied.hand_back(iteration, microbatch)


def _of_role(rings: Iterable[tuple[Ring, ParcelRing]], role: Role) -> list[tuple[Ring, ParcelRing]]:
    """By the stages that write them."""
    return sorted(((ring, made) for ring, made in rings if ring.role is role), key=lambda pair: pair[0].writer or 0)


def _read_by(stage: int, ring: Ring) -> list[int]:
    """The numbers of its values that a stage reads."""
    return [number for number, value in enumerate(ring.values) if stage in value.stages]
