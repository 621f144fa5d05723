"""The oracle's replicas: one model that is, for each replica in turn, in the state in which that replica sees it.

Parameters. Replica r with staleness k computes the gradient of step i with the parameters as they were k updates ago.
The update itself is always made to the newest ones:

    step                              0    1    2    3    4    5        number of updates applied to
    staleness 2                       0    0    0    1    2    3        the parameters that the step uses
    staleness 2 after a warm-up of 3  0    1    2    3    3    3

Buffers (the running statistics of batch normalisation) are changed by replica 0 alone, whose buffers are the model's.
Each microbatch of another replica starts from the buffers as they were when the step began, and what it changes in
them is dropped. So it is in torch's DistributedDataParallel, which sends out rank 0's before a forward.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import nn

Buffers = list[dict[str, torch.Tensor | None]]


def updates_seen(step: int, staleness: int, warmup: int) -> int:
    """How many updates have been applied to the parameters that a training step uses; steps count from 0."""
    return step if step < warmup else max(warmup, step - staleness)


class Replicas:
    """staleness: of each replica, in updates. warmup: the steps at the beginning that use the newest parameters."""

    def __init__(self, model: nn.Module, staleness: Sequence[int], warmup: int) -> None:
        self._parameters = list(model.parameters())
        self._modules = list(model.modules())
        self._staleness = staleness
        self._warmup = warmup
        self._versions: deque[list[torch.Tensor]] = deque(maxlen=max(staleness) + 1)  # the newest is the last
        self._buffers: Buffers = []

    def begin_step(self) -> None:
        """Keeps what this step and later ones may have to go back to."""
        if max(self._staleness) > 0:
            self._versions.append([parameter.detach().clone() for parameter in self._parameters])
        if len(self._staleness) > 1:
            self._buffers = _copied([module._buffers for module in self._modules])

    @contextlib.contextmanager
    def model_as_seen_by(self, replica: int, step: int) -> Iterator[None]:
        """Forward and backward of a microbatch belong inside: autograd reads the parameters once more."""
        updates_late = step - updates_seen(step, self._staleness[replica], self._warmup)
        with contextlib.ExitStack() as states:
            if updates_late:
                states.enter_context(self._with_parameters(self._versions[-1 - updates_late]))
            if replica:
                states.enter_context(self._with_buffers(_copied(self._buffers)))
            yield

    @contextlib.contextmanager
    def _with_parameters(self, version: list[torch.Tensor]) -> Iterator[None]:
        newest = [parameter.data for parameter in self._parameters]
        _set_data(self._parameters, version)
        try:
            yield
        finally:
            _set_data(self._parameters, newest)

    @contextlib.contextmanager
    def _with_buffers(self, buffers: Buffers) -> Iterator[None]:
        own = [dict(module._buffers) for module in self._modules]
        self._set_buffers(buffers)
        try:
            yield
        finally:
            self._set_buffers(own)

    def _set_buffers(self, buffers: Buffers) -> None:
        for module, named in zip(self._modules, buffers, strict=True):
            module._buffers.update(named)


def _copied(buffers: Buffers) -> Buffers:
    """Views of one memory are so in the copy. Python's deepcopy does not take all sparse layouts."""
    tensors = (each for named in buffers for each in named.values() if each is not None)
    return copy.deepcopy(buffers, {id(each): each.clone() for each in tensors if each.layout is not torch.strided})


def _set_data(parameters: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
