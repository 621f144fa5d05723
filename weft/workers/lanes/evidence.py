"""Evidence: what the tasks of an iteration have made, digested, to be compared with another run of it.

    LOAD               the microbatch              FORWARD           what goes to later stages
    BACKWARD, INPUT    what goes to stages before  SYNC              each replica's gradient, as it has found it
    SNAPSHOT           parameters, optimizer state and buffers behind the updates

A digest is cryptographic: equal ones are equal bits. Of most iterations nothing is digested, which costs a comparison.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch

from weft.plan.course import Course
from weft.plan.graph import Task
from weft.plan.itinerary import Iteration
from weft.plan.kinds import Kind
from weft.transport.wire.worker_messages import DIGEST_BYTES
from weft.workers.lanes.loaded import Loaded
from weft.workers.lanes.model_parts import ModelParts
from weft.workers.lanes.operation import Run

Tensors = Iterable[torch.Tensor | None]


class Tell(Protocol):
    """what: the message's type, as weft.transport.wire.worker_messages has it."""

    def __call__(self, what: str, /, **about: Any) -> None: ...


class Evidence:
    """Of one worker's tasks. tell: the daemon."""

    def __init__(self, course: Course, loaded: Loaded, parts: ModelParts, tell: Tell) -> None:
        self._course, self._loaded, self._parts, self._tell = course, loaded, parts, tell

    def around(self, task: Task, run: Run) -> Run:
        """The same, and what it has made is told where that is compared."""
        if task.kind is Kind.SYNC:
            return partial(self._sync, task, run)
        made = self._made(task)
        return run if made is None else partial(self._run, task, run, made)

    def _run(self, task: Task, run: Run, made: Callable[[Iteration], Tensors], iteration: Iteration) -> None:
        run(iteration)
        if self._course.is_compared(iteration):
            self._add(task, iteration, None, made(iteration))

    def _sync(self, task: Task, run: Run, iteration: Iteration) -> None:
        """Before it runs: the sum takes the place of one of them."""
        if self._course.is_compared(iteration):
            updates = self._parts.updates
            assert updates is not None
            for replica, gradient in updates.gradients(task, iteration):
                self._add(task, iteration, replica, [gradient])
        run(iteration)

    def _add(self, task: Task, iteration: Iteration, replica: int | None, made: Tensors) -> None:
        self._tell("digest", iteration=iteration.index, task=task.id, replica=replica, digest=digest_of(made))

    def _made(self, task: Task) -> Callable[[Iteration], Tensors] | None:
        match task.kind, task.microbatch:
            case Kind.LOAD, int(m):
                r = task.holder.replica
                return lambda iteration: self._loaded.loaded(iteration, r, m)
            case Kind.FORWARD, int(m):
                sent = self._parts.stages[task.holder].sent
                return lambda iteration: sent(iteration, m)
            case ((Kind.BACKWARD | Kind.INPUT), int(m)):
                handed_back = self._parts.stages[task.holder].handed_back
                return lambda iteration: handed_back(iteration, m)
            case Kind.SNAPSHOT, None:
                return lambda iteration: self._parts.hold(task, iteration).tensors()
            case _:
                return None


def digest_of(made: Tensors) -> bytes:
    """Of the elements' bits in the order of their indices, however they lie in memory; and of dtypes and shapes."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in _parts(made):
        found.update(part)
    return found.digest()


def _parts(made: Tensors) -> Iterator[bytes | memoryview]:
    for tensor in made:
        if tensor is None:
            yield b"-"
            continue
        data = tensor.detach().resolve_conj().resolve_neg().contiguous()
        yield f"{data.dtype} {tuple(data.shape)}".encode()
        flat = data.as_strided((data.numel(),), (1,))  # the stride of a single element may be any other
        yield flat.view(torch.uint8).numpy().data
