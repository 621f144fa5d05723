"""A stage: a contiguous run of the model's units that one worker trains, one microbatch at a time.

Stages meet at detached tensors. FORWARD(s, m) starts from a leaf that is a view of the previous stage's slot, and
BACKWARD(s, m) ends at that leaf's gradient, which goes back through a slot. In between autograd does what it would do
in the whole model, so the numbers are the plain loop's, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from weft.plan.error_places import unit_place, within
from weft.transport.memory.arena import Arena
from weft.workers.compute.forward_buffers import Began, ForwardBuffers
from weft.workers.compute.handover import can_have_gradient, check_fits
from weft.workers.devices.device import Accelerator, Device, Memory
from weft.workload.randomness import unit_key
from weft.workload.units import Unit, named_state

Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Saved:
    step: int
    x: torch.Tensor  # the input leaf
    y: torch.Tensor | None  # the output with its graph, unless it is recomputed
    head: Head | None  # what ran on top: the loss
    began: Began  # where it is recomputed, the buffers that forward changes, as they were before


class Stage:
    """Runs units forward and backward and keeps, between the two, what backward needs of each microbatch."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        seed: int,
        recompute: bool,
        device: Device,
        copies_input: bool = False,
        precision: str = "fp32",
        heads: Sequence[nn.Module] = (),
    ) -> None:
        """copies_input: the first unit writes to its input, which neither a slot nor an autograd leaf allows.
        precision: "bf16" runs units and heads under autocast. device: which has the units. heads:
        those that are modules."""
        self.units = tuple(units)
        self._places = [within(unit_place(unit.index, unit.prefix, unit.module)) for unit in units]
        self._is_first = units[0].index == 0
        self._copies_input = copies_input
        self._seed = seed
        self._recompute = recompute
        self._autocasts = precision == "bf16"
        self._device = device
        self._buffers = ForwardBuffers(
            [*(unit.module for unit in units), *heads], can_compare=not isinstance(device, Accelerator)
        )
        self._saved: dict[int, _Saved] = {}

    @property
    def seed(self) -> int:
        return self._seed

    def train(self, training: bool) -> None:
        for unit in self.units:
            unit.module.train(training)

    @property
    def num_in_flight(self) -> int:
        """Microbatches whose forward has run and whose backward has not begun."""
        return len(self._saved)

    def parameters(self) -> list[nn.Parameter]:
        """Each parameter once, in the order of the model."""
        return list({id(p): p for unit in self.units for p in unit.module.parameters()}.values())

    def forward(self, microbatch: int, step: int, x: torch.Tensor, head: Head | None = None) -> torch.Tensor:
        """The output (after `head`, the loss on the last stage) of a microbatch in training.

        x may be a slot: it is read in place until the microbatch's backward is done.
        """
        x = x.detach().requires_grad_(can_have_gradient(x) and not self._is_first)  # nobody wants the data's gradient
        if not self._recompute:
            y = self._run(x, step, microbatch, head)
            self._saved[microbatch] = _Saved(step, x, y, head, [])
            return y
        self._buffers.begin()
        with torch.no_grad():
            y = self._run(x, step, microbatch, head)
        self._saved[microbatch] = _Saved(step, x, None, head, self._buffers.end())
        return y

    def evaluate(self, microbatch: int, step: int, x: torch.Tensor) -> torch.Tensor:
        """The stage's output without gradients; nothing is kept."""
        with torch.no_grad():
            return self._run(x, step, microbatch, None)

    def measure(self, microbatch: int, step: int, x: torch.Tensor, heads: Sequence[Head]) -> list[torch.Tensor]:
        """What each head makes of the output, without gradients."""
        with torch.no_grad(), self._precision():
            y = self._run(x, step, microbatch, None)
            return [head(y) for head in heads]

    def drop(self, microbatch: int) -> None:
        """Forgets a microbatch whose forward has run and that gets no backward."""
        self._saved.pop(microbatch, None)

    def take(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input leaf, output with its graph) of a microbatch whose forward has run; under recompute it runs again."""
        saved = self._saved.pop(microbatch)
        if saved.y is not None:
            return saved.x, saved.y
        with self._buffers.as_they_were(saved.began):
            return saved.x, self._run(saved.x, saved.step, microbatch, saved.head)

    def _run(self, x: torch.Tensor, step: int, microbatch: int, head: Head | None) -> torch.Tensor:
        if self._copies_input:
            x = x.clone()
        with self._device.drawing, self._precision():  # autocast's cache is the process's, too
            for unit, place in zip(self.units, self._places, strict=True):
                self._device.seed(unit_key(self._seed, step, microbatch, unit.index))
                self._device.launching()
                with place:
                    x = unit.module(x)
            return x if head is None else head(x)

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if not self._autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self._device.torch.type, dtype=torch.bfloat16)


class HandBack:
    """Calls `use`, once for each backward, with the gradient of a stage's input as autograd makes it.

    `x.grad` would do but for its strides, which are x's own: the stage before would sum in another order than it does
    in the whole model. at_once: from inside backward, where autograd then need not copy what it accumulates.
    """

    def __init__(self, x: torch.Tensor, use: Callable[[torch.Tensor], None], *, at_once: bool) -> None:
        self._use = use
        self._at_once = at_once
        self._num_parts = 0
        self._last: torch.Tensor | None = None
        if x.requires_grad:
            x.register_hook(self._came)  # type: ignore[no-untyped-call]

    def _came(self, gradient: torch.Tensor) -> None:
        self._num_parts += 1
        if self._at_once and self._num_parts == 1:
            self._use(gradient)
        else:
            self._last = gradient

    def finish(self, x: torch.Tensor) -> None:
        """After backward."""
        if self._num_parts != 1:  # none, or several, which autograd has summed
            self._use(input_gradient(x))
        elif self._last is not None:
            self._use(self._last)


def input_gradient(x: torch.Tensor) -> torch.Tensor:
    """The gradient to hand to the previous stage: zeros where the stage does not depend on its input."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def move_state(state: Sequence[tuple[str, torch.Tensor]], arena: Arena) -> None:
    """Puts every tensor into the place of its name, so that the module works on the place from now on."""
    for tensor, name in {id(tensor): (tensor, name) for name, tensor in state}.values():
        place = arena[name]
        place.copy_(tensor.data)
        tensor.data = place


def keep_state(units: Sequence[Unit], names: Collection[str], arena: Arena, device: Memory) -> Callable[[], None]:
    """Leaves tensors of the units' state where they are, and their values in the places of their names.

    What is returned does so again for what training changes beside parameters: running statistics and their like. A
    module may have put other tensors in the place of its buffers since.
    """
    changing = []
    for name, tensor in named_state(units):
        if name in names:
            arena[name].copy_(tensor.data)
            changing += [] if isinstance(tensor, nn.Parameter) else [name]

    def publish() -> None:
        now = dict(named_state(units))
        for name in changing:
            copy_buffer(name, arena[name], now[name], device)

    return publish


def copy_buffer(name: str, place: torch.Tensor, value: torch.Tensor, device: Memory) -> None:
    """Between a module and shared memory. Raises WorkloadError where training has changed its shape or dtype."""
    check_fits(
        value,
        place,
        what=f"the buffer {name!r} of Workload.model has become",
        remedy="give it in __init__ the shape and dtype that it will have, or register it with persistent=False",
    )
    device.copy(place, value.data)
