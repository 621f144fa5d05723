"""Calls: random numbers of a model that is cut by its own forward, keyed by the calls of its opaque modules.

    the step begins                 number 0
    the n-th call, from 0           number 2n + 1 before it, 2n + 2 after it

A stage that skips a call still counts it, so what any operation draws depends neither on the cut nor on what else a
process runs. `torch.utils.checkpoint` around a call runs it again during backward, the step's own backward for a
penalty on gradients as well: then the number is the same again.
Of several calls of a module it is the one whose turn it was: before it runs anything again, a checkpoint puts torch's
generator back to where it stood, and a generator tells what it was last seeded with, whatever it has drawn since.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from weft.workload.cutting.visible import CallKind, Forward, Visible, listening, visible_modules
from weft.workload.randomness import generator_states, generators_kept
from weft.workload.workload import WorkloadError

Seed = Callable[[int], None]
Made = dict[Visible, list[int]]  # numbers of calls


def unseeded(number: int) -> None:
    """The Seed of a run that draws nothing."""


class CallNumbers:
    """Which number each call has; `seed` is called with those of the points above."""

    def __init__(self) -> None:
        self._seed: Seed | None = None
        self._is_running = False
        self.made: Made = {}  # by the last run
        self.seed: Seed = unseeded  # of the last run
        self.count = 0  # of calls in it

    @property
    def is_running(self) -> bool:
        """Forward, and no backward inside of it: the step's own, as of a penalty on gradients (torch.autograd.grad)."""
        return self._is_running and torch._C._current_graph_task_id() == -1

    @contextlib.contextmanager
    def running(self, seed: Seed) -> Iterator[None]:
        """One run of the step."""
        self.begin(seed)
        try:
            yield
        finally:
            self.end()

    def begin(self, seed: Seed) -> None:
        self._seed, self.seed, self.count = seed, seed, 0
        self._is_running = True
        self.made = {}
        seed(0)

    def end(self) -> None:
        self._seed, self._is_running = None, False

    @contextlib.contextmanager
    def running_again(self, seed: Seed) -> Iterator[None]:
        """The backward of such a run."""
        self.run_again(seed)
        try:
            yield
        finally:
            self.end()

    def run_again(self, seed: Seed, made: Made | None = None) -> None:
        """What is called from now on, until the next run, is called by a backward. made: by the run that it is of;
        that of the last one."""
        self._seed, self._is_running = seed, False
        if made is not None:
            self.made = made

    def skip(self, visible: Visible) -> None:
        """A call that is not run."""
        assert self._seed is not None
        self._seed(2 * self._next(visible) + 2)

    def run(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._seed is None:
            return forward(*args, **kwargs)
        seed = self._seed
        number = self._next(visible) if self.is_running else self._number_again(visible)
        if number is None:
            return self._run_without(visible, forward, args, kwargs)
        seed(2 * number + 1)
        result = forward(*args, **kwargs)
        seed(2 * number + 2)
        return result

    def _next(self, visible: Visible) -> int:
        number, self.count = self.count, self.count + 1
        if visible in self.made:
            self.made[visible].append(number)
        else:
            self.made[visible] = [number]
        return number

    def _number_again(self, visible: Visible) -> int | None:
        """None where nobody knows."""
        numbers = self.made.get(visible, [])
        if len(numbers) == 1:
            return numbers[0]
        assert self._seed is not None
        before = torch.default_generator.initial_seed()
        with generators_kept():
            for number in numbers:
                self._seed(2 * number)
                if torch.default_generator.initial_seed() == before:
                    return number
        return None

    def _run_without(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that an autograd.Function makes in its backward (an adjoint), which is none that the forward has made.
        Which number it has only matters if somebody draws: it itself, or what a checkpoint has behind it."""
        if not _is_by_checkpoint():
            before = generator_states()
            result = forward(*args, **kwargs)
            if generator_states() == before:
                return result
        raise WorkloadError(
            f"{visible} is called {len(self.made.get(visible, []))} times in a step, and again in backward, where it "
            "draws, or may: by an autograd.Function, or under torch.utils.checkpoint with preserve_rng_state=False or "
            "between seeds of its own, so nobody knows which call runs again; leave preserve_rng_state as it is and "
            "seed nothing, use strategy.recompute = true in its place, or draw outside of it"
        )


def _is_by_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


class SeededCalls:
    """The uncut model."""

    def __init__(self, model: nn.Module) -> None:
        self._visible = visible_modules(model)
        self.numbers = CallNumbers()

    @contextlib.contextmanager
    def installed(self) -> Iterator[CallNumbers]:
        with listening(self._visible, self):
            yield self.numbers

    def call(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if visible.kind is not CallKind.OPAQUE:
            return forward(*args, **kwargs)
        return self.numbers.run(visible, forward, args, kwargs)
