"""Random numbers keyed by what they are for: (seed, step, microbatch, unit), never by who ran what when.

Before a unit of the model runs forward (or forward again, under recompute), torch's default CPU generator is seeded
with its key. So dropout masks are the same for any number of stages, any schedule and any order of execution.

Python's `random` and numpy's global generator take ten times as long to seed. They are seeded for each microbatch that
is loaded, and at the calls of a model where its inspection has seen one of them draw.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

LOADING = -1  # stands for the unit in the key of random numbers that a dataset draws (augmentation)
UPDATING = -2  # the same of an optimizer's step

KEY_MASK = (1 << 64) - 1


def unit_key(seed: int, step: int, microbatch: int, unit: int) -> int:
    """A 64-bit key from the four numbers (the finalizer of SplitMix64; Steele, Lea and Flood, OOPSLA 2014, fig. 17)."""
    return mixed(mixed(mixed(seed & KEY_MASK, step), microbatch), unit)


def mixed(key: int, part: int) -> int:
    """A key with one more number."""
    key = (key + part + 1) * 0x9E3779B97F4A7C15 & KEY_MASK
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & KEY_MASK
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & KEY_MASK
    return key ^ (key >> 31)


def update_key(seed: int, step: int, parameter: int) -> int:
    """Of an optimizer's step on some parameters of a model, of which that is the first, by its place."""
    return unit_key(seed, step, parameter, UPDATING)


def seed_others(key: int) -> None:
    """Seeds Python's and numpy's global generators, in about 20 microseconds."""
    random.seed(key & KEY_MASK)
    np.random.seed(key & 0xFFFFFFFF)


def seed_all(seed: int) -> None:
    """For code that runs once."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # the other one notes who has called, for devices that may come
    Movements.forget()
    seed_others(seed & KEY_MASK)


def seed_loading(seed: int, step: int, microbatch: int) -> None:
    """For a dataset and its collate function, which may draw."""
    seed_unit(seed, step, microbatch, LOADING)
    seed_others(unit_key(seed, step, microbatch, LOADING))


def generator_states() -> list[object]:
    """Of this process, all of them, to be compared."""
    generators = (torch.default_generator, *torch.cuda.default_generators)
    of_numpy: Any = np.random.get_state()
    own = (each.get_state().numpy().tobytes() for each in generators)
    return [*own, random.getstate(), of_numpy[1].tobytes(), of_numpy[2:]]


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Of this process: at the end all of them are as they were, whoever has drawn."""
    generators = (torch.default_generator, *torch.cuda.default_generators)
    states, of_python, of_numpy = [each.get_state() for each in generators], random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class Movements:
    """Of torch's default CPU generator in a run that nobody seeds: what it draws would be other numbers each time."""

    _num_restored = 0  # by whoever, in this process
    _seen: torch.Tensor | None = None  # its state at the last look, in this process, unless it was seeded since

    def __init__(self) -> None:
        """Once the process watches."""
        self._before = torch.default_generator.get_state()
        # Since the run before, by whoever has told nobody: a backward, or what is asked after an epoch.
        self.were_before = Movements._seen is not None and not torch.equal(self._before, Movements._seen)
        self._restored_before = Movements._num_restored

    def are_there(self) -> bool:
        """Whether it has moved, or been put back (torch.random.fork_rng), perhaps to where it was."""
        Movements._seen = torch.default_generator.get_state()
        was_restored = Movements._num_restored != self._restored_before
        return was_restored or not torch.equal(self._before, Movements._seen)

    @staticmethod
    def forget() -> None:
        """It has been seeded."""
        Movements._seen = None

    @staticmethod
    def watch() -> None:
        """From now on, whoever puts the generator back by torch's function is counted."""
        set_state: Any = torch.set_rng_state
        if hasattr(set_state, "__wrapped__"):
            return

        @functools.wraps(set_state)
        def counting(new_state: torch.Tensor) -> None:
            Movements._num_restored += 1
            set_state(new_state)

        replacement: Any = counting
        torch.set_rng_state = torch.random.set_rng_state = replacement


class Draws:
    """From torch's default CPU generator, between a seed and the next."""

    def __init__(self) -> None:
        self.were_there = False
        self._since: Movements | None = None
        Movements.watch()

    def begin(self) -> None:
        """Behind a seed."""
        self._since = Movements()

    def look(self) -> None:
        """Before the next, or at the end."""
        if self._since is not None:
            self.were_there |= self._since.are_there()
            self._since = None

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Some draw there where no forward has (gradients that are rounded at random). torch.utils.checkpoint puts the
        generator back: what it runs again has been looked at."""
        before = torch.default_generator.get_state()
        yield
        self.were_there |= not torch.equal(torch.default_generator.get_state(), before)


class OtherGenerators:
    """Python's and numpy's, seeded in such a way that one sees whether they have drawn since."""

    def __init__(self) -> None:
        self.have_drawn = False
        self._next: tuple[float, float] | None = None  # number of each, if nobody else draws

    def seed(self, key: int) -> None:
        self.look()
        seed_others(key)
        self._next = (random.random(), float(np.random.random()))
        seed_others(key)

    def look(self) -> bool:
        """Whether they have drawn since the last seed, or ever before."""
        if self._next is not None:
            self.have_drawn |= self._next != (random.random(), float(np.random.random()))
            self._next = None
        return self.have_drawn


def seed_unit(seed: int, step: int, microbatch: int, unit: int) -> None:
    """Seeds torch's default CPU generator for one unit of the model, in about 2 microseconds."""
    torch.default_generator.manual_seed(unit_key(seed, step, microbatch, unit))
    Movements.forget()
