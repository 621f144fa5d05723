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

    @contextlib.contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        self._before[microbatch] = self._now()
        yield
        self._behind[microbatch] = self._now()

    @contextlib.contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """They are as before the forward, and behind it they are as now again."""
        now = self._now()
        self._set(self._before.get(microbatch, now))
        try:
            yield
        finally:
            self._set(now)

    def taken(self, microbatch: int) -> None:
        """In a backward: its forward has run, or has run again."""
        if (flags := self._behind.get(microbatch)) is not None:
            self._set(flags)

    def _now(self) -> _Flags:
        return [each.requires_grad for each in self._parameters]

    def _set(self, flags: _Flags) -> None:
        now = self._now()
        if flags != now:
            for parameter, was, flag in zip(self._parameters, now, flags, strict=True):
                if was is not flag:
                    parameter.requires_grad_(flag)
