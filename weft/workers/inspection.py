"""Inspection: what the planner has to know about a workload, found out by running it once on one worker.

Sends each microbatch size once through the units for shapes, then the largest one forward and backward for times, each
unit alone. Works on a model of its own, which is thrown away.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.division import Part, divide
from weft.itinerary import Iteration, Itinerary
from weft.spec import JobSpec
from weft.transport.arena import dtype_name
from weft.workers.data import Batches
from weft.workers.optimizer import make_optimizer
from weft.workers.sharded_optimizer import is_elementwise
from weft.workers.state_facts import optimizer_memory, state_facts
from weft.workers.updates import group_of
from weft.workload import Workload, WorkloadError, units

COPIED_BYTES = 16 << 20  # beyond the caches of a core
TIMED_RUNS = 3  # after one that warms up; the fastest counts
SMALL_RUNS = 2
SMALLER = 4  # times, the second size that units are timed with: far enough for a slope, and an eighth of the time more


def inspect(workload: Workload, spec: JobSpec) -> dict[str, Any]:
    """The wire form of weft.scheduler.plan.Inspection. Errors: WorkloadError, and whatever the user's code raises."""
    batches = Batches(workload, seed=spec.job.seed)
    if batches.num_train == 0:
        raise WorkloadError("Workload.train has length 0; give at least one sample")
    learns = spec.job.mode == "train"
    if learns and not any(parameter.requires_grad for parameter in workload.model.parameters()):
        raise WorkloadError("Workload.model has no parameter that requires a gradient; there is nothing to train")
    model = nn.ModuleList(module for _, module in units(workload.model))
    started = time.perf_counter()
    trained = _microbatch_sizes(spec, batches.num_train, 0)
    sizes = _microbatch_sizes(spec, batches.num_train, batches.num_validation)
    sizes = sorted({*sizes, *_sizes_at_any_share(spec, max(batches.num_train, batches.num_validation))})
    samples = {
        size: batches.load(_batch_of(size, training=size <= batches.num_train), Part(0, 0, size)) for size in sizes
    }
    load_seconds = (time.perf_counter() - started) / len(samples)
    largest = max(samples)
    facts = [_unit_facts(name, module) for name, module in units(workload.model)]
    with _precision(spec):
        _record_shapes(model, facts, samples, trained)
        _measure(model, facts, workload, samples[largest])
        small_size = _measure_small(model, facts, samples[largest][0])
    _record_ties(model, facts)
    optimizer = make_optimizer(workload.optimizer, list(workload.model.parameters())) if learns else None
    update_seconds, moves = _measure_update(optimizer) if optimizer is not None else (0.0, False)
    return {
        "units": facts,
        "input": _tensor_facts({size: inputs for size, (inputs, _) in samples.items()}),
        "target": _tensor_facts({size: targets for size, (_, targets) in samples.items()}),
        "num_train": batches.num_train,
        "num_validation": batches.num_validation,
        "load_seconds": load_seconds,
        "update_seconds": update_seconds,
        "metrics": list(workload.metrics),
        "parameters": _parameter_facts(workload.model, optimizer, moves=moves),
        "elementwise": optimizer is None or is_elementwise(optimizer),
        "weighted": workload.weight is not None,
        "copy_bytes_per_second": _copy_bytes_per_second(),
        "small_size": small_size,
    }


def _microbatch_sizes(spec: JobSpec, num_train: int, num_validation: int) -> list[int]:
    itinerary = Itinerary.of(
        num_train=num_train,
        num_validation=num_validation,
        batch_size=spec.job.batch_size,
        epochs=spec.job.epochs,
        steps=spec.job.steps,
        forward_only=spec.job.mode == "forward",
    )
    shares, counts = spec.strategy.division
    sizes = {part.size for size in itinerary.batch_sizes() for parts in divide(size, shares, counts) for part in parts}
    return sorted(sizes - {0})


def _sizes_at_any_share(spec: JobSpec, num_samples: int) -> set[int]:
    """The largest microbatch that a replica may get, and two on the way there: they show how shapes grow."""
    if spec.strategy.share != "adaptive":
        return set()
    batch_size = min(spec.job.batch_size, num_samples)
    largest = max(-(-batch_size // count) for count in spec.strategy.microbatch_counts)
    return {largest, -(-largest // 2), -(-largest // 3)}


def _batch_of(size: int, *, training: bool) -> Iteration:
    return Iteration(index=0, training=training, epoch=0, step=0, start=0, size=size)


def _unit_facts(name: str, module: nn.Module) -> dict[str, Any]:
    return {
        "name": name,
        "parameter_bytes": sum(p.numel() * p.element_size() for p in module.parameters()),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in module.buffers()),
        "forward_seconds": 0.0,
        "backward_seconds": 0.0,
        "dtype": None,
        "itemsize": 0,
        "shapes": [],
        "tied_to": [],
        "in_place": False,
        "small_forward_seconds": 0.0,
        "small_backward_seconds": 0.0,
    }


def _record_shapes(
    model: nn.ModuleList,
    facts: list[dict[str, Any]],
    samples: dict[int, tuple[torch.Tensor, torch.Tensor]],
    trained: list[int],
) -> None:
    """Sizes that no batch is known to have in training go through in validation's mode: batch norm trains on no batch
    of one."""
    with torch.no_grad():
        for size, (x, _) in samples.items():
            model.train(size in trained)
            value: Any = x
            for module, fact in zip(model, facts, strict=True):
                value = module(value)
                if isinstance(value, torch.Tensor):
                    fact["dtype"], fact["itemsize"] = dtype_name(value.dtype), value.element_size()
                    fact["shapes"].append([size, list(value.shape)])
    model.train()


def _measure(
    model: nn.ModuleList, facts: list[dict[str, Any]], workload: Workload, sample: tuple[torch.Tensor, torch.Tensor]
) -> None:
    value: Any = sample[0]
    for number, (module, fact) in enumerate(zip(model, facts, strict=True)):

        def run(x: Any, module: nn.Module = module, last: bool = number == len(facts) - 1) -> Any:
            y = module(x)
            if not last:
                return y
            loss = workload.loss(y, sample[1])
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise WorkloadError("Workload.loss returned no scalar tensor; it must return the mean over the samples")
            return loss

        fact["in_place"] = _writes_to(run, value)
        fact["forward_seconds"], fact["backward_seconds"], value = _times(run, value)


def _measure_small(model: nn.ModuleList, facts: list[dict[str, Any]], inputs: torch.Tensor) -> int:
    """Times units with a part of the sample; its size, 0 where there is none or the model takes no other size.

    Without the loss: a count that the user keeps of its calls is none of a quarter microbatch's business, and what it
    costs goes with the samples, as it does in a head of many classes.
    """
    if len(inputs) < 2:
        return 0
    size = max(1, len(inputs) // SMALLER)
    value: Any = inputs[:size]
    times = []
    try:
        for module in model:
            forward, backward, value = _times(module, value, SMALL_RUNS)
            times.append((forward, backward))
    except Exception:  # the user's code, given a size that the job has no use for: batch norm refuses one sample
        return 0
    for fact, (forward, backward) in zip(facts, times, strict=True):
        fact["small_forward_seconds"], fact["small_backward_seconds"] = forward, backward
    return size


def _writes_to(run: Callable[[Any], Any], x: Any) -> bool:
    """Whether the unit changes its input, by autograd's own count of changes."""
    given = _copy(x)
    if not isinstance(given, torch.Tensor):
        return False
    before = given._version
    run(given)
    return given._version != before


def _times(run: Callable[[Any], Any], x: Any, runs: int = TIMED_RUNS) -> tuple[float, float, Any]:
    """(forward seconds, backward seconds, detached output) of one unit, the fastest of the runs after the first."""
    forward, backward = [], []
    for _ in range(1 + runs):
        given = _copy(x := _leaf(x))  # a unit may work in place, which autograd forbids on a leaf
        started = time.perf_counter()
        y = run(given)
        forward.append(time.perf_counter() - started)
        started = time.perf_counter()
        if isinstance(y, torch.Tensor) and y.requires_grad:
            torch.autograd.backward(y, torch.ones_like(y))
        backward.append(time.perf_counter() - started)
    return min(forward[1:]), min(backward[1:]), y


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    if isinstance(value, (tuple, list)):
        return type(value)(_leaf(part) for part in value)
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (tuple, list)):
        return type(value)(_copy(part) for part in value)
    return value


def _record_ties(model: nn.ModuleList, facts: list[dict[str, Any]]) -> None:
    owner: dict[int, int] = {}
    for number, (module, fact) in enumerate(zip(model, facts, strict=True)):
        # Two copies of a running mean would drift apart; a parameter may be in two stages, its gradients are summed.
        tied = {owner.setdefault(id(buffer), number) for buffer in module.buffers()} - {number}
        fact["tied_to"] = sorted(tied)


def _parameter_facts(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, moves: bool) -> list[dict[str, Any]]:
    """Of each parameter, in the order of `model.parameters()`. moves: the optimizer's state can."""
    using: dict[int, list[int]] = {}
    for number, (_, module) in enumerate(units(model)):
        for parameter in module.parameters():
            using.setdefault(id(parameter), []).append(number)
    parameters = list(model.parameters())
    groups = group_of(optimizer, parameters) if optimizer is not None else {}
    return [
        {
            "units": using[id(parameter)],
            "num_elements": parameter.numel(),
            "dtype": dtype_name(parameter.dtype),
            "itemsize": parameter.element_size(),
            "trained": parameter.requires_grad and index in groups,
            "group": groups.get(index, 0),
            "state": state_facts(optimizer, parameter) if moves and optimizer is not None else None,
        }
        for index, parameter in enumerate(parameters)
    ]


def _precision(spec: JobSpec) -> contextlib.AbstractContextManager[object]:
    if spec.strategy.precision == "bf16":
        return torch.autocast("cpu", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _copy_bytes_per_second() -> float:
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return COPIED_BYTES / min(seconds)


def _measure_update(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Seconds of one step on the whole model, gradients as `_measure` left them; and whether whatever it changes beside
    the parameters stands in `optimizer.state`."""
    optimizer.step()  # makes the optimizer's state
    before = optimizer_memory(optimizer)
    seconds = []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return min(seconds), optimizer_memory(optimizer) == before


def _tensor_facts(tensors: dict[int, torch.Tensor]) -> dict[str, Any]:
    first = next(iter(tensors.values()))
    return {
        "dtype": dtype_name(first.dtype),
        "itemsize": first.element_size(),
        "shapes": [[size, list(tensor.shape)] for size, tensor in tensors.items()],
    }
