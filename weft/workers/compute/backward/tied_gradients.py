"""Tied gradients: of parameters that several stages of a replica use, from the last of these down to the first.

    BACKWARD(late, m)    own parts ──▶ p.grad ──▶ ring                        p.grad = None
    BACKWARD(early, m)                            ring ──▶ p, a root ─┐
                                                  own parts ──────────┴──▶ p.grad += all of them

In the whole model autograd adds up a microbatch's parts, those of later uses first, and then the sum to what earlier
microbatches have left. A gradient that begins a stage's backward as a root is the first that autograd adds to. So the
first stage's `p.grad` has the bits of the whole model's, and no other stage keeps any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from weft.plan.plan import Ring, Role
from weft.workers.compute.gradients import dense
from weft.workers.memory.parcels import ParcelRing


class TiedGradients:
    def __init__(
        self, rings: Sequence[tuple[Ring, ParcelRing]], stage: int, parameters: Sequence[nn.Parameter]
    ) -> None:
        """rings: of the replica, those that the stage writes or reads among them. parameters: the model's, by number,
        as the stage has them."""
        places = [
            (ring, made, number, parameters[value.parameter])
            for ring, made in rings
            if ring.role is Role.TIED
            for number, value in enumerate(ring.values)
            if value.parameter is not None
        ]
        self._came = [(made, number, own) for ring, made, number, own in places if stage in ring.stages]
        self._handed = [(made, number, own) for ring, made, number, own in places if ring.writer == stage]
        for _, _, parameter in self._handed:
            parameter.grad = None
            _without_hooks(parameter)

    @property
    def handed_on(self) -> list[nn.Parameter]:
        """Those whose gradients go on to earlier stages."""
        return [parameter for _, _, parameter in self._handed]

    def roots(self, iteration: int, microbatch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters, with what later stages have made of their gradients."""
        came = ((own, ring.get(iteration, microbatch, number)) for ring, number, own in self._came)
        return [(own, gradient) for own, gradient in came if gradient is not None]

    def handed_back_now(self, iteration: int, microbatch: int) -> list[torch.Tensor | None]:
        return [ring.get(iteration, microbatch, number) for ring, number, _ in self._handed]

    def hand_back(self, iteration: int, microbatch: int) -> None:
        """After backward."""
        for ring, number, parameter in self._handed:
            gradient = parameter.grad
            ring.put(iteration, microbatch, number, None if gradient is None else dense(gradient))
            parameter.grad = None


def _without_hooks(parameter: nn.Parameter) -> None:
    """The user's run once on the whole gradient, where that is: in the first of the stages."""
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        if hooks:
            hooks.clear()
