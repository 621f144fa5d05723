"""Pairs: what is found out about a job whose batches are pairs of tensors, and whose model is cut between its units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn

from weft.spec.job_spec import JobSpec
from weft.workers.compute.handover import described
from weft.workers.devices.device import Device
from weft.workers.inspection.ran import Ran, first_batch, tensor_facts
from weft.workers.inspection.times import loaded
from weft.workers.inspection.unit_facts import Pair, inspect_units
from weft.workload.data.batches import Batches
from weft.workload.randomness import OtherGenerators
from weft.workload.units import units
from weft.workload.workload import Workload, WorkloadError


def inspect_pairs(
    workload: Workload,
    spec: JobSpec,
    batches: Batches,
    sizes: Sequence[int],
    *,
    trained: Sequence[int],
    device: Device,
    leave: Callable[[nn.Module], None],
) -> Ran:
    """sizes: of microbatches. trained, leave: as of `inspect_units`."""
    samples: dict[int, Pair] = {}
    load_seconds = 0.0
    for size in sizes:
        iteration, part = first_batch(size, training=size <= batches.num_train)
        samples[size], seconds = loaded(batches.anew(partial(batches.load, iteration, part)), again=not batches.streams)
        load_seconds += seconds * batches.part_of_loaded(iteration, part) / len(sizes)
    held_out = _held_out(batches, samples)
    others = OtherGenerators()
    others.seed(spec.job.seed)
    ran = inspect_units(
        workload,
        spec,
        samples,
        held_out if workload.metrics else None,
        trained=trained,
        device=device,
        others=others,
        leave=leave,
    )
    return Ran(
        units=ran.units,
        values=ran.values,
        cut_problems=ran.cut_problems,
        small_size=ran.small_size,
        input=tensor_facts({size: inputs for size, (inputs, _) in samples.items()}),
        target=tensor_facts({size: targets for size, (_, targets) in samples.items()}),
        load_seconds=load_seconds,
        metrics=list(workload.metrics),
        users=_users(workload.model),
        seeds_others=others.look(),
    )


def _held_out(batches: Batches, samples: Mapping[int, Pair]) -> Pair | None:
    """A microbatch of validation, of the largest size that training has, too; None where there is none. Errors:
    WorkloadError where it is no such microbatch as training's: found out now, not after an epoch."""
    fitting = [size for size in samples if size <= min(batches.num_train, batches.num_validation)]
    if not fitting:
        return None
    size = max(fitting)
    held_out = batches.load(*first_batch(size, training=False))
    for name, value, trained in zip(("input", "target"), held_out, samples[size], strict=True):
        if value.shape != trained.shape or value.dtype is not trained.dtype:
            raise WorkloadError(
                f"Workload.validation: {size} {name}s are {described(value)}, and of Workload.train "
                f"{described(trained)}; both must have the same shape and dtype"
            )
    return held_out


def _users(model: nn.Module) -> dict[int, list[int]]:
    users: dict[int, list[int]] = {}
    for number, (_, module) in enumerate(units(model)):
        for parameter in module.parameters():
            users.setdefault(id(parameter), []).append(number)
    return users
