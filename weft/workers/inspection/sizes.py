"""Sizes: of the microbatches that are looked at; and where a strategy is to be chosen, which of them have room.

A look runs the whole model with the largest microbatch of all. Where that has no room, whoever runs it is killed, and
with it a job that would fit in parts. So the smallest is run forward first, for the bytes that it keeps for a backward;
they grow with the samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from weft.machine.free_memory import free_memory
from weft.plan.division import sizes_that_occur
from weft.plan.itinerary import Itinerary
from weft.quantities import size as in_units
from weft.spec.job_spec import JobSpec
from weft.workers.compute.backward.saved import SavedBytes
from weft.workers.compute.stage import computing_in
from weft.workers.devices.device import Accelerator, Device
from weft.workers.inspection.ran import first_batch, put_back
from weft.workload.code.first_epoch import set_mode
from weft.workload.cutting.names import named_tensors
from weft.workload.data.batches import Batches
from weft.workload.data.tree import Skeleton, build, flatten
from weft.workload.randomness import seed_others
from weft.workload.step import training_step
from weft.workload.units import is_cut_by_calls
from weft.workload.workload import Workload

MORE: Final = 1.3  # times what is kept: a backward has gradients beside it; of 1.75 GiB told, 2.1 were used
COPIES: Final = 4  # of the parameters: gradients, two copies of them to compare, what an optimizer keeps


def sizes_of(specs: Sequence[JobSpec], batches: Batches) -> list[int]:
    """Of each microbatch that will occur, or may, ascending."""
    return sorted(set[int]().union(*(_of(each, batches.num_train, batches.num_validation) for each in specs)))


def sizes_of_training(specs: Sequence[JobSpec], num_train: int) -> list[int]:
    """That are known to occur, ascending."""
    return sorted({size for each in specs for size in _occurring(each, num_train, 0)})


def largest_of_training(spec: JobSpec, num_train: int) -> int:
    return max({*_occurring(spec, num_train, 0), *_at_any_share(spec, num_train)})


def most_with_room(
    workload: Workload, spec: JobSpec, batches: Batches, largest: Sequence[int], device: Device
) -> tuple[int, str | None]:
    """The size of the largest microbatch that there is room for, and why it is none of the larger ones, as a reason.

    largest: sizes of microbatches of training, ascending; the first is taken in any case. Of an `nn.Sequential` on a
    device all are: there one unit is looked at after the other.
    """
    learns = spec.job.mode == "train" and not spec.strategy.compile
    if len(largest) < 2 or not learns or (isinstance(device, Accelerator) and not is_cut_by_calls(workload)):
        return largest[-1], None
    tried = ((size, _kept_bytes(workload, spec, batches, size, device)) for size in largest[:-1])
    size_of_try, kept = next((each for each in tried if each[1]), (1, 0))  # a norm may refuse a single sample
    free = free_memory().host if (free_there := device.capacity_bytes()) is None else free_there
    copies = COPIES * sum(parameter.nbytes for parameter in workload.model.parameters())
    needed = {size: copies + MORE * kept * size / size_of_try for size in largest}
    fitting = [size for size in largest if needed[size] <= free] or [largest[0]]
    if fitting[-1] == largest[-1]:
        return largest[-1], None
    return fitting[-1], (
        f"to try a microbatch of {largest[-1]} samples takes some {in_units(needed[largest[-1]])}, and "
        f"{in_units(free)} are free"
    )


def with_room(specs: Sequence[JobSpec], facts: Mapping[str, Any]) -> list[JobSpec]:
    """Those that were looked at, by what was found out."""
    return [each for each in specs if largest_of_training(each, facts["num_train"]) <= facts["most_samples"]]


def without_refused(specs: Sequence[JobSpec], facts: Mapping[str, Any]) -> list[JobSpec]:
    """Those with no size of microbatch that the user's code has refused, by what was found out."""
    refused = {size for size, _ in facts.get("refused_sizes", ())}
    return [each for each in specs if refused.isdisjoint(_of(each, facts["num_train"], facts["num_validation"]))]


def those_left(
    workload: Workload, spec: JobSpec, specs: Sequence[JobSpec], device: Device
) -> tuple[list[list[Any]], list[JobSpec]]:
    """Sizes of microbatch that the user's code refuses, each with what a forward raises; and the specs that have none
    of these, none where the job's own strategy has. workload: a new one, nobody can use it afterwards."""
    batches = Batches.of_job(workload, spec.job)
    if batches.streams:
        return [], []
    with device.computing() if isinstance(device, Accelerator) else contextlib.nullcontext():
        refused = list(_refused(workload, spec, specs, batches, device))
    counts = {"num_train": batches.num_train, "num_validation": batches.num_validation}
    facts: dict[str, Any] = counts | {"refused_sizes": refused}
    is_refused = not (spec.strategy.is_auto or without_refused([spec], facts))
    return refused, [] if is_refused else without_refused(specs, facts)


def _refused(
    workload: Workload, spec: JobSpec, specs: Sequence[JobSpec], batches: Batches, device: Device
) -> Iterator[list[Any]]:
    """Of those that there is room for: a larger one is not looked at in any case."""
    trained = sizes_of_training(specs, batches.num_train)
    largest = sorted({largest_of_training(each, batches.num_train) for each in specs})
    most = most_with_room(workload, spec, batches, largest, device)[0] if spec.strategy.is_auto else largest[-1]
    device.adopt(workload.model)
    for size in sorted(sizes_of(specs, batches), key=lambda size: (size not in trained, size)):
        try:
            set_mode(workload.model, size in trained)
            if size <= most:
                _forward(workload, spec, *_batch(workload, batches, size, device), device)
        except Exception as error:  # whatever it is
            yield [size, f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"]


def computes_on(specs: Sequence[JobSpec], kind: str) -> bool:
    return any(replica.device == kind for spec in specs for replica in spec.strategy.replica_list)


def _kept_bytes(workload: Workload, spec: JobSpec, batches: Batches, size: int, device: Device) -> int:
    """Of a microbatch, for its backward; 0 where nobody can tell. Buffers are as before."""
    model = workload.model
    before: Mapping[str, torch.Tensor] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    device.adopt(model)
    try:
        own, skeleton = _batch(workload, batches, size, device)
        saved = SavedBytes([*own, *(tensor for _, tensor in named_tensors(model))])
        set_mode(model)
        with saved.noting():
            _forward(workload, spec, own, skeleton, device)
        return saved.num_bytes
    except Exception:  # whatever the user's code raises is told where it is looked at
        return 0
    finally:
        device.give_back(model)
        put_back(model, before)


def _batch(workload: Workload, batches: Batches, size: int, device: Device) -> tuple[list[torch.Tensor], Skeleton]:
    first = first_batch(min(size, batches.num_train), training=True)
    tensors, skeleton = batches.batch(*first) if is_cut_by_calls(workload) else flatten(batches.load(*first))
    return [device.put(tensor) for tensor in tensors], skeleton


def _forward(
    workload: Workload, spec: JobSpec, own: Sequence[torch.Tensor], skeleton: Skeleton, device: Device
) -> None:
    device.seed(0)
    seed_others(0)
    with device.drawing, computing_in(spec.strategy.precision, device):
        training_step(workload)(workload.model, build(skeleton, own))


def _of(spec: JobSpec, num_train: int, num_validation: int) -> set[int]:
    return _occurring(spec, num_train, num_validation) | _at_any_share(spec, max(num_train, num_validation))


def _occurring(spec: JobSpec, num_train: int, num_validation: int) -> set[int]:
    itinerary = Itinerary.of_job(spec.job, num_train, num_validation)
    return sizes_that_occur(itinerary.batch_sizes(), *spec.strategy.division)


def _at_any_share(spec: JobSpec, num_samples: int) -> set[int]:
    """The largest microbatch that a replica may get, and two on the way there: they show how shapes grow."""
    if spec.strategy.share != "adaptive":
        return set()
    batch_size = min(spec.job.batch_size, num_samples)
    largest = max(-(-batch_size // count) for count in spec.strategy.microbatch_counts)
    return {largest, -(-largest // 2), -(-largest // 3)}
