"""One worker's part in one attempt of a job: what its lane's tasks do, from slots to slots.

Built by Prepare, dropped by Release. `operations` are the lane's tasks of one iteration as callables; the lane decides
when each runs, they only do the work:

    LOAD(m)         samples                    → input and target slots
    FORWARD(s,m)    input or activation slot   → activation slot, or the loss on the last stage
    BACKWARD(s,m)   gradient slot or the loss  → gradient slot of the stage before
    UPDATE(s)       the optimizer's step       → parameters, in place in the shared arena
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.itinerary import Iteration, Itinerary, microbatch_sizes
from weft.spec import JobSpec
from weft.transport.arena import Layout
from weft.transport.board import INITIAL_BYTE, Board, num_words
from weft.transport.directory import Directory
from weft.workers.data import Batches
from weft.workers.errors import NonFiniteLoss
from weft.workers.optimizer import make_optimizer
from weft.workers.slots import SlotRing
from weft.workers.stage import Stage, Unit, input_gradient, move_state, named_state
from weft.workload import BatchFunction, Workload, WorkloadError, units

_KEPT_ITERATIONS = 64  # of the itinerary's answers; a lane asks for few different ones in a row


@dataclass(frozen=True, slots=True)
class Operation:
    """One task of the lane. waits: (task, distance, cause) of inputs from other lanes. passes: does nothing, and waits
    for nothing, in validation iterations. wakes: a task of another lane waits for it."""

    task: int
    kind: str
    waits: tuple[tuple[int, int, str], ...]
    wakes: bool
    passes: bool
    run: Callable[[Iteration], None]


@dataclass(slots=True)
class Values:
    """What one iteration measured on the last stage, as means over its samples."""

    iteration: int
    means: dict[str, float] = field(default_factory=dict)
    complete: bool = False

    def add(self, name: str, value: float, weight: float) -> None:
        self.means[name] = self.means.get(name, 0.0) + value * weight


class Attempt:
    """The shared parts: board, slots, itinerary; and the operations of the lanes that this worker holds."""

    def __init__(
        self, spec: JobSpec, plan: Mapping[str, Any], workload: Workload, directory: Directory, spin_seconds: float
    ) -> None:
        self.itinerary = Itinerary(**plan["itinerary"])
        self.microbatches: int = plan["microbatches"]
        self._values: list[Values] = []
        words = directory.block("board", 4 * num_words(plan["num_tasks"]), INITIAL_BYTE)
        self.board = Board(words.view(torch.int32), spin_seconds)
        self._rings = {ring["name"]: SlotRing(directory, ring, self.microbatches) for ring in plan["rings"]}
        self._last_stage: int = plan["num_stages"] - 1
        self._iterations: dict[int, Iteration] = {}
        self._sizes: dict[int, list[int]] = {}
        self._training = True
        loads = any(task["kind"] == "load" for program in plan["lanes"].values() for task in program)
        self._batches = Batches(workload, seed=spec.job.seed, microbatches=self.microbatches) if loads else None
        self._functions: dict[str, BatchFunction] = {"loss": workload.loss, **workload.metrics}
        self._stages = {
            part["stage"]: _make_stage(spec, plan, part, workload.model, directory) for part in plan["stages"]
        }
        self._optimizers = {
            number: make_optimizer(workload.optimizer, stage.parameters()) for number, stage in self._stages.items()
        }

    def operations(self, program: list[dict[str, Any]]) -> dict[int, Operation]:
        """The operations of a lane's tasks as the plan's worker view describes them, by task id."""
        runs = {"load": self._load, "forward": self._forward, "backward": self._backward, "update": self._update}

        def bind(task: Mapping[str, Any]) -> Callable[[Iteration], None]:
            run, stage, microbatch = runs[task["kind"]], task["stage"], task["microbatch"]
            return lambda iteration: run(iteration, stage, microbatch)

        return {
            task["id"]: Operation(
                task=task["id"],
                kind=task["kind"],
                waits=tuple((source, distance, cause) for source, distance, cause in task["waits"]),
                wakes=task["wakes"],
                passes=task["kind"] in ("backward", "update"),
                run=bind(task),
            )
            for task in program
        }

    def iteration(self, index: int) -> Iteration:
        if index not in self._iterations:
            if len(self._iterations) >= _KEPT_ITERATIONS:
                self._iterations.clear()
            self._iterations[index] = self.itinerary.at(index)
        return self._iterations[index]

    def _size(self, iteration: Iteration, microbatch: int) -> int:
        if iteration.size not in self._sizes:
            self._sizes[iteration.size] = microbatch_sizes(iteration.size, self.microbatches)
        return self._sizes[iteration.size][microbatch]

    def _slot(self, ring: str, iteration: Iteration, microbatch: int, size: int) -> torch.Tensor:
        return self._rings[ring].slot(iteration.index, microbatch, size)

    def take_values(self) -> list[Values]:
        """The values of the iterations that were completed since the last call."""
        done = [values for values in self._values if values.complete]
        self._values = [values for values in self._values if not values.complete]
        return done

    # --- the tasks; a microbatch without samples (a ragged last batch) passes through every one of them

    def _load(self, iteration: Iteration, stage: int, microbatch: int) -> None:
        del stage
        if size := self._size(iteration, microbatch):
            slots = [self._slot(name, iteration, microbatch, size) for name in ("input", "target")]
            assert self._batches is not None
            self._batches.load(iteration, microbatch, (slots[0], slots[1]))

    def _forward(self, iteration: Iteration, number: int, microbatch: int) -> None:
        size = self._size(iteration, microbatch)
        if size:
            self._forward_samples(iteration, number, microbatch, size)
        if number == self._last_stage and not iteration.training and microbatch == self.microbatches - 1:
            self._values_of(iteration.index).complete = True

    def _forward_samples(self, iteration: Iteration, number: int, microbatch: int, size: int) -> None:
        stage = self._stages[number]
        if iteration.training is not self._training:
            self._training = iteration.training
            for each in self._stages.values():
                each.train(iteration.training)
        source = f"activation-{number - 1}" if number else "input"
        x = self._slot(source, iteration, microbatch, size)
        if number < self._last_stage:
            y = (stage.forward if iteration.training else stage.evaluate)(microbatch, iteration.step, x)
            self._slot(f"activation-{number}", iteration, microbatch, size).copy_(y.detach())
        elif iteration.training:
            self._train_head(iteration, stage, microbatch, x)
        else:
            self._measure(iteration, microbatch, stage.evaluate(microbatch, iteration.step, x))

    def _train_head(self, iteration: Iteration, stage: Stage, microbatch: int, x: torch.Tensor) -> None:
        size = self._size(iteration, microbatch)
        target = self._slot("target", iteration, microbatch, size)
        loss = stage.forward(microbatch, iteration.step, x, lambda y: self._functions["loss"](y, target))
        value = _number(loss, "Workload.loss")
        if not math.isfinite(value):
            raise NonFiniteLoss(iteration.step, value, microbatch)
        self._values_of(iteration.index).add("loss", value, size / iteration.size)

    def _measure(self, iteration: Iteration, microbatch: int, output: torch.Tensor) -> None:
        size = self._size(iteration, microbatch)
        target = self._slot("target", iteration, microbatch, size)
        with torch.no_grad():
            for name, function in self._functions.items():
                value = _number(function(output, target), f"Workload's {name}")
                self._values_of(iteration.index).add(name, value, size / iteration.size)

    def _backward(self, iteration: Iteration, number: int, microbatch: int) -> None:
        size = self._size(iteration, microbatch)
        if size == 0:
            return
        x, y = self._stages[number].take(microbatch)
        if number == self._last_stage:
            (y * (size / iteration.size)).backward()  # type: ignore[no-untyped-call]
        elif y.requires_grad:
            torch.autograd.backward(y, self._slot(f"gradient-{number}", iteration, microbatch, size))
        if number:
            self._slot(f"gradient-{number - 1}", iteration, microbatch, size).copy_(input_gradient(x))

    def _update(self, iteration: Iteration, number: int, microbatch: int) -> None:
        del microbatch
        optimizer = self._optimizers[number]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if number == self._last_stage:
            values = self._values_of(iteration.index)
            values.means["lr"] = float(optimizer.param_groups[0].get("lr", 0.0)) if optimizer else 0.0
            values.complete = True

    def _values_of(self, index: int) -> Values:
        if not self._values or self._values[-1].iteration != index:
            self._values.append(Values(index))
        return self._values[-1]


def _make_stage(
    spec: JobSpec, plan: Mapping[str, Any], part: Mapping[str, Any], model: nn.Module, directory: Directory
) -> Stage:
    """The units of one stage, their state moved into an arena that peers find as "state-STAGE"."""
    own = [
        Unit(index, prefix, module)
        for index, (prefix, module) in enumerate(units(model))
        if part["first"] <= index < part["last"]
    ]
    arena = directory.create(f"state-{part['stage']}", Layout.of(named_state(own)))
    move_state(own, arena)
    return Stage(own, seed=spec.job.seed, recompute=plan["recompute"], copies_input=part["copies_input"])


def _number(value: Any, source: str) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    raise WorkloadError(f"{source} returned no scalar tensor; it must return the mean over the samples given")
