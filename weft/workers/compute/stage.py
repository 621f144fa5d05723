"""A stage: what one worker computes of the model, one microbatch at a time, whatever kind of model that is.

Stages meet at detached tensors. FORWARD(s, m) starts from leaves that are views of other stages' slots, and
BACKWARD(s, m) ends at those leaves' gradients, which go back through slots. In between autograd does what it would do
in the whole model, so the numbers are the plain loop's, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from weft.plan.plan import SlotValue
from weft.workers.devices.device import Device
from weft.workers.snapshots.attributes import TORCHS
from weft.workload.cutting.leaves import tensors_in

Tensors = Sequence[torch.Tensor | None]  # None: a value that is not there
_AS_IT_IS = contextlib.nullcontext()


class Stage(Protocol):
    """What a stage's tasks ask of it. microbatch: by its number in the batch. received, sent: the values that come from
    other stages and those that go there, in the order of StageParcels. batch: what `read_batch` has made of the
    microbatch's data."""

    @property
    def num_in_flight(self) -> int:
        """Microbatches whose forward has run and whose backward has not begun."""

    def span(self) -> str:
        """From where to where in the model it goes, for people: "between unit 1 (Linear) and unit 3 (ReLU)"."""

    def maker(self) -> str:
        """What makes the values that it sends, for people: "unit 3 (ReLU)"."""

    def train(self, training: bool) -> None: ...

    def go_on(self, training: bool) -> None:
        """All modules are in that mode, and none is told."""

    def forward(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Tensors:
        """What goes to other stages, with its graph or, under recompute, without. What backward needs is kept. received
        may be in slots: they are read in place until the microbatch's backward is done."""

    def lose(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Mapping[str, torch.Tensor]:
        """The last stage's forward: the loss, as "loss", and what is reported beside it; scalars."""

    def evaluate(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Tensors:
        """As forward, without gradients and keeping nothing; of the last stage too, where its loss is not asked for."""

    def measure(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Mapping[str, torch.Tensor]:
        """What validation reports of the last stage; scalars."""

    def measures(self) -> Sequence[str]:
        """Their names."""

    def check_sent(self, sent: Tensors, places: Sequence[SlotValue], size: int) -> None:
        """Raises WorkloadError for what cannot go to other stages, of a microbatch of `size` samples."""

    def take(self, microbatch: int) -> tuple[Tensors, Tensors]:
        """(leaves of what was received, what was sent with its graph) of a microbatch whose forward has run; of the
        last stage its loss is what was sent. Under recompute the forward runs again."""

    def again(self) -> Callable[[], None]:
        """To be called before a later part of the backward of the microbatch that was taken last."""
        return lambda: None

    def drop(self, microbatch: int) -> None:
        """Forgets a microbatch whose forward has run and that gets no backward."""

    def rewind(self) -> None:
        """Forgets all of them; each module trains, or does not, as it was given."""

    def close(self) -> None:
        """For good: lets go of what runs have left, in the modules too."""


def forget_results(modules: Iterable[nn.Module]) -> None:
    """That modules keep in attributes. Where torch.utils.checkpoint has packed what a graph saves, the graph refers to
    the modules again, and Python's collector does not see through it: a worker would keep them for all its life."""
    own = ((vars(each), name) for each in modules for name in vars(each).keys() - TORCHS)
    for attributes, name in own:
        value = attributes[name]
        with contextlib.suppress(Exception):  # whatever an object of the user's raises that is looked into
            if all(tensor.grad_fn is None for tensor in tensors_in(value)):
                continue
            if isinstance(value, (list, dict)):
                value.clear()
            else:
                attributes[name] = None


class GivenModes:
    """Whether each of these modules, and of those within them, trains: as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._given = [(each, each.training) for module in modules for each in module.modules()]

    @property
    def modules(self) -> list[nn.Module]:
        return [each for each, _ in self._given]

    def restore(self) -> None:
        for module, training in self._given:
            module.training = training


def computing_in(precision: str, device: Device) -> contextlib.AbstractContextManager[object]:
    """precision: "bf16" is autocast, whose copies of parameters live until its end: for one forward at a time."""
    if precision != "bf16":
        return _AS_IT_IS
    return torch.autocast(device.torch.type, dtype=torch.bfloat16)


def leaf_of(tensor: torch.Tensor | None, is_differentiable: bool) -> torch.Tensor | None:
    """Where a stage's graph begins, of a tensor that comes from another."""
    if tensor is None:
        return None
    has_gradient = is_differentiable and (tensor.is_floating_point() or tensor.is_complex())
    return tensor.detach().requires_grad_(has_gradient)  # another call may have been given one that has none


def no_leaf(leaf: torch.Tensor) -> torch.Tensor:
    """The same tensor, as a result: autocast would take a leaf for a parameter and keep one rounded copy of it, whose
    gradients it sums in bfloat16."""
    return leaf[...] if leaf.requires_grad else leaf  # strides are its own, and its gradient's
