"""Freezing: parameters that a step freezes or thaws while backwards of earlier microbatches are still to come.

In the plain loop a backward follows its forward at once. autograd adds nothing to a parameter that requires no gradient
by then, and a forward that runs again for its backward goes by what does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

_Flags = list[bool]


class Freezing:
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._before: dict[int, _Flags] = {}  # by microbatch, which require a gradient before its forward
        self._behind: dict[int, _Flags] = {}
        self._moves = False  # whether any of them has, since before the forward of this backward

    @contextlib.contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        self._before[microbatch] = self._now()
        yield
        self._behind[microbatch] = self._now()

    @contextlib.contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """They are as before the forward, and behind it they are as now again."""
        now = self._now()
        before = self._before.get(microbatch, now)
        self._moves = not before == self._behind.get(microbatch, now) == now
        if not self._moves:
            yield
            return
        self._set(before)
        try:
            yield
        finally:
            self._set(now)

    def taken(self, microbatch: int) -> None:
        """In a backward: its forward has run, or has run again."""
        if self._moves and (flags := self._behind.get(microbatch)) is not None:
            self._set(flags)

    def _now(self) -> _Flags:
        return [each.requires_grad for each in self._parameters]

    def _set(self, flags: _Flags) -> None:
        for parameter, flag in zip(self._parameters, flags, strict=True):
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
