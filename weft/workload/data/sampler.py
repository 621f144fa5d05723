"""Samplers of the user's: whether one is needed, how many samples it gives, and what it gave for an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from weft.workload.workload import WorkloadError, kind_of


def is_plain(sampler: object, num_items: int) -> bool:
    """Whether it takes every sample once, as the data stand or shuffled."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == num_items
    return type(sampler) is SequentialSampler


def length_of(sampler: Any, field: str) -> int | None:
    """Samples of an epoch; None of a sampler that has no length. Raises WorkloadError, with the workload's field, for
    one that leaves all but a share of the data to other processes."""
    processes = getattr(sampler, "num_replicas", 1)
    if hasattr(sampler, "rank") and isinstance(processes, int) and processes > 1:
        raise WorkloadError(
            f"Workload.{field}: its sampler, a {kind_of(sampler)}, gives 1/{processes} of the data, as for one of "
            f"{processes} processes; leave it out (shuffle=True does the rest): here every replica gets its own part "
            "of each batch, and to train on less, give a torch.utils.data.Subset"
        )
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def lasting(sampler: Any, field: str, needed: int | None, *, of_what: str = "samples") -> int:
    """Samples of an epoch of one without a length: what the job needs in all. of_what: it gives, for errors. Raises
    WorkloadError where that is not known."""
    if needed is None:
        raise WorkloadError(
            f"Workload.{field}: its sampler, a {kind_of(sampler)}, has no length; give it a __len__ that tells the "
            f"{of_what} of an epoch{', or job.steps' * (field == 'train')}"
        )
    return needed


def checked_order(numbers: list[Any], field: str, epoch: int, length: int, *, is_endless: bool = False) -> torch.Tensor:
    """int64 of the length. Raises WorkloadError for numbers that are none, or of another length."""
    odd = next((number for number in numbers if not hasattr(number, "__index__")), None)
    if odd is not None:
        raise WorkloadError(
            f"Workload.{field}: its sampler gives {kind_of(odd)}; let it give the numbers of single samples"
        )
    if len(numbers) < length and is_endless:
        raise WorkloadError(
            f"Workload.{field}: its sampler ended after {len(numbers)} samples, and {length} are needed; give it a "
            "__len__ that tells the samples of an epoch, or train fewer steps"
        )
    if len(numbers) != length:
        raise WorkloadError(
            f"Workload.{field}: its sampler has length {length}, and gave {len(numbers)} samples for epoch {epoch}; "
            "both must be equal"
        )
    return torch.tensor([int(number) for number in numbers], dtype=torch.int64)


def checked_rows(numbers: torch.Tensor, num_rows: int | None, what: str) -> torch.Tensor:
    """The same rows, counted from 0: -1 is the last. num_rows: of the tensors that are the data; None of a dataset, for
    which a number may be anything. what: gives the numbers. Raises WorkloadError for one that is no row."""
    if num_rows is None:
        return numbers
    odd = numbers[(numbers < -num_rows) | (numbers >= num_rows)]
    if len(odd):
        raise WorkloadError(
            f"{what} gives the sample number {int(odd[0])}, and the data has {num_rows} samples; let it give numbers "
            "of these, counted from 0: was it made for other data, or before a part of these was taken?"
        )
    return numbers % num_rows
