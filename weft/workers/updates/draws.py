"""Draws: the random numbers of an optimizer whose step has been seen to draw, keyed as all others are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

from weft.plan.worker_view import WorkerView
from weft.workers.devices.device import Device
from weft.workload.randomness import seed_others, update_key

Drawing = Callable[[int, int], AbstractContextManager[None]]  # of a step, by its number and its first parameter's


def drawing_of(view: WorkerView, device: Device, seed: int) -> Drawing:
    return partial(_by_key, device, seed) if view.optimizer_draws else draws_nothing


def draws_nothing(step: int, parameter: int) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def _by_key(device: Device, seed: int, step: int, parameter: int) -> Iterator[None]:
    """The plain loop's, where one step has all parameters. Nobody else draws meanwhile: lanes share generators."""
    key = update_key(seed, step, parameter)
    with device.drawing:
        device.seed(key)
        seed_others(key)
        yield
