"""Unit stage: a contiguous run of the children of an `nn.Sequential`, each of which gets what the one before passes on.

The first stage begins with the inputs, any other one with the one value that the stage before sends. The last one has
the loss and the metrics on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from weft.plan.error_places import function_place, unit_place, within
from weft.plan.plan import SlotValue
from weft.plan.shapes import ShapeError, shape_of
from weft.transport.memory.arena import dtype_of
from weft.workers.compute.forward_buffers import Began, ForwardBuffers
from weft.workers.compute.forward_parts import ForwardParts
from weft.workers.compute.handover import can_have_gradient, check_fits, is_plain
from weft.workers.compute.pairs import DataPair
from weft.workers.compute.stage import GivenModes, Stage, Tensors, computing_in, forget_results, no_leaf
from weft.workers.devices.device import Accelerator, Device
from weft.workload.randomness import seed_others, unit_key
from weft.workload.step import function_value
from weft.workload.units import Unit
from weft.workload.workload import MetricFunction

Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Saved:
    """Of a microbatch, from its forward to its backward."""

    step: int
    x: torch.Tensor  # the leaf that the units begin with
    was_received: bool  # x came from the stage before
    y: torch.Tensor | None  # the output with its graph, unless it is recomputed
    head: Head | None  # what ran on top: the loss
    began: Began  # where it is recomputed


class UnitStage(Stage):
    """Runs units forward and backward and keeps, between the two, what backward needs of each microbatch."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        seed: int,
        recompute: bool,
        device: Device,
        functions: Mapping[str, MetricFunction],
        copies_input: bool = False,
        precision: str = "fp32",
        seeds_others: bool = False,
        parts: ForwardParts | None = None,
    ) -> None:
        """functions: the loss and the metrics, of (output, target). copies_input: the first unit writes to its input,
        which neither a slot nor an autograd leaf allows. precision: "bf16" runs units and functions under autocast.
        device: which has the units. seeds_others: they draw from Python's or numpy's generators, too. parts: where the
        first forward may still have to wait; unset, nowhere."""
        self.units = tuple(units)
        self._parts = parts or ForwardParts.whole()
        self._needs = [self._parts.needed_by(unit.module.parameters()) for unit in units]
        for unit in units:
            self._parts.watch(unit.module)
        self._places = [within(unit_place(unit.index, unit.prefix, unit.module)) for unit in units]
        self._copies_input = copies_input
        self._seed = seed
        self._seeds_others = seeds_others
        self._recompute = recompute
        self._precision = partial(computing_in, precision, device)
        self._device = device
        self._functions = functions
        heads = [function for function in functions.values() if isinstance(function, nn.Module)]
        self._buffers = ForwardBuffers(
            [*(unit.module for unit in units), *heads], can_compare=not isinstance(device, Accelerator)
        )
        self._modes = GivenModes(unit.module for unit in units)
        self._saved: dict[int, _Saved] = {}
        self._planned: dict[int, torch.Tensor | None] = {}  # what it sends, by the microbatch's size

    @property
    def num_in_flight(self) -> int:
        return len(self._saved)

    def span(self) -> str:
        return f"between {self.units[0]} and {self.units[-1]}"

    def maker(self) -> str:
        return str(self.units[-1])

    def train(self, training: bool) -> None:
        for unit in self.units:
            unit.module.train(training)

    def go_on(self, training: bool) -> None:
        for module in (each for unit in self.units for each in unit.module.modules()):
            module.training = training

    def forward(self, microbatch: int, step: int, received: Tensors, batch: DataPair) -> Tensors:
        return [self._forward(microbatch, step, received, batch, None)]

    def lose(self, microbatch: int, step: int, received: Tensors, batch: DataPair) -> Mapping[str, torch.Tensor]:
        loss = self._forward(microbatch, step, received, batch, self._head("loss", batch))
        return {"loss": loss}

    def evaluate(self, microbatch: int, step: int, received: Tensors, batch: DataPair) -> Tensors:
        with torch.no_grad():
            return [self._run(_begin(received, batch), step, microbatch, None)]

    def measure(self, microbatch: int, step: int, received: Tensors, batch: DataPair) -> Mapping[str, torch.Tensor]:
        with torch.no_grad(), self._precision():
            y = self._run(_begin(received, batch), step, microbatch, None)
            return {name: self._head(name, batch)(y) for name in self._functions}

    def measures(self) -> Sequence[str]:
        return list(self._functions)

    def check_sent(self, sent: Tensors, places: Sequence[SlotValue], size: int) -> None:
        for y, place in zip(sent, places, strict=True):
            planned = self._planned_for(size, place)
            if planned is not None and is_plain(y) and y.shape == planned.shape and y.dtype is planned.dtype:
                continue  # before anything is made for the text
            check_fits(
                y,
                planned,
                what=f"{self.maker()} passes on, for a microbatch of {size} samples,",
                remedy="between two stages a unit's output has one shape and dtype for all microbatches of a size, in "
                "training and in validation; pad it, or leave this place out of strategy.split (stages = 1 cuts "
                "nowhere)",
            )

    def take(self, microbatch: int) -> tuple[Tensors, Tensors]:
        saved = self._saved.pop(microbatch)
        y = saved.y
        if y is None:
            with self._buffers.as_they_were(saved.began):
                y = self._run(saved.x, saved.step, microbatch, saved.head)
        return [saved.x] if saved.was_received else [], [y]

    def drop(self, microbatch: int) -> None:
        self._saved.pop(microbatch, None)

    def rewind(self) -> None:
        self._saved.clear()
        self._modes.restore()

    def close(self) -> None:
        self.rewind()
        forget_results(self._modes.modules)

    def _forward(
        self, microbatch: int, step: int, received: Tensors, batch: DataPair, head: Head | None
    ) -> torch.Tensor:
        x, was_received = _begin(received, batch).detach(), bool(received)
        x.requires_grad_(was_received and can_have_gradient(x))  # nobody wants the data's gradient
        if not self._recompute:
            y = self._run(x, step, microbatch, head)
            self._saved[microbatch] = _Saved(step, x, was_received, y, head, Began())
            return y
        self._buffers.begin()
        y = self._buffers.forgetting(lambda: self._run(x, step, microbatch, head)).detach()
        self._saved[microbatch] = _Saved(step, x, was_received, None, head, self._buffers.end())
        return y

    def _run(self, x: torch.Tensor, step: int, microbatch: int, head: Head | None) -> torch.Tensor:
        x = x.clone() if self._copies_input else no_leaf(x)
        with self._device.drawing, self._parts.seeing_reads(), self._precision():  # autocast's cache is everybody's
            for unit, place, part in zip(self.units, self._places, self._needs, strict=True):
                self._parts.reach(part)
                key = unit_key(self._seed, step, microbatch, unit.index)
                self._device.seed(key)
                if self._seeds_others:
                    seed_others(key)
                self._device.launching()
                with place:
                    x = unit.module(x)
            return x if head is None else head(x)

    def _head(self, name: str, batch: DataPair) -> Head:
        function, target = self._functions[name], batch.target
        assert target is not None

        def head(output: torch.Tensor) -> torch.Tensor:
            with within(function_place(name)):
                value = function(output, target)
            return function_value(value, name)

        return head

    def _planned_for(self, size: int, place: SlotValue) -> torch.Tensor | None:
        """None for a size that was not inspected and that no rule tells of."""
        if size not in self._planned:
            try:
                shape = shape_of(size, place.shapes)
            except (KeyError, ShapeError):
                self._planned[size] = None
            else:
                self._planned[size] = torch.empty(shape, dtype=dtype_of(place.dtype), device="meta")
        return self._planned[size]


def _begin(received: Tensors, batch: DataPair) -> torch.Tensor:
    """What the first of the units gets."""
    x = received[0] if received else batch.input
    assert x is not None
    return x
