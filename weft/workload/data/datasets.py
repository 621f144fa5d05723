"""Datasets: what a user gives as data, as a sized map-style dataset of samples."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, TensorDataset

from weft.workload.data.tree import Skeleton, build, flatten
from weft.workload.workload import Workload, WorkloadError, kind_of

Field = Literal["train", "validation"]
Whole = tuple[list[torch.Tensor], Skeleton]  # the samples along the first dimension of each


class Tensors(Dataset[Any]):
    """A tree of tensors, the samples along the first dimension of each."""

    def __init__(self, tree: Any) -> None:
        self._tensors, self._skeleton = flatten(tree)

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Any:
        return build(self._skeleton, [tensor[index] for tensor in self._tensors])

    @property
    def whole(self) -> Whole:
        return list(self._tensors), self._skeleton

    def rows(self, indices: torch.Tensor) -> Any:
        return build(self._skeleton, [tensor.index_select(0, indices) for tensor in self._tensors])


_LOADERS: dict[Field, tuple[str, str]] = {  # methods of what has both kinds of data
    "train": ("train_dataloader", "get_train_dataloader"),
    "validation": ("val_dataloader", "get_eval_dataloader"),
}


def dataset_of(data: Any, field: Field, workload: Workload) -> Dataset[Any]:
    """A sized map-style dataset from what the user gave. Raises WorkloadError that names the field."""
    data = _with_tensors(data)
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data):
        inputs, targets = data
        if inputs.shape[:1] != targets.shape[:1]:
            raise WorkloadError(
                f"Workload.{field}: {tuple(inputs.shape)} inputs and {tuple(targets.shape)} targets; "
                "the first dimensions must be equal"
            )
        return TensorDataset(inputs, targets) if workload.step is None else Tensors(data)
    if workload.step is not None and (tree := _tensors(data, field)) is not None:
        return tree
    if isinstance(data, type):  # it has the methods, too
        raise WorkloadError(f"Workload.{field} is {kind_of(data)}; give an object of it, {data.__name__}(...)")
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, (list, tuple)) else ()
    if isinstance(next(iter(parts), None), DataLoader):
        raise WorkloadError(
            f"Workload.{field} is a {kind_of(data)} of DataLoaders; give one, of an IterableDataset that goes through "
            "them and yields what a step takes of each: DataLoader(dataset, batch_size=None)"
        )
    is_sized = (hasattr(data, "__getitem__") or gives_several(data)) and hasattr(data, "__len__")
    if not is_sized or isinstance(data, (str, bytes, nn.Module)):
        made = next((name for name in _LOADERS[field] if callable(getattr(data, name, None))), None)
        if made is not None:  # of a LightningDataModule, or a Trainer of Hugging Face
            raise WorkloadError(f"Workload.{field} is {kind_of(data)}; give the DataLoader that its {made}() makes")
        raise WorkloadError(
            f"Workload.{field} is {kind_of(data)}; give a map-style dataset with __len__ and __getitem__, "
            "an IterableDataset, a DataLoader of one of these, or a pair of tensors (inputs, targets)"
        )
    if type(data) is dict and data and not all(number in data for number in range(len(data))):
        kinds = {kind_of(value) for value in data.values()}
        raise WorkloadError(
            f"Workload.{field} is a dict of {' and '.join(sorted(kinds))}; give a dict of tensors or "
            "of arrays of numbers, or a list of items"
        )
    dataset: Dataset[Any] = data
    return dataset


def _with_tensors(data: Any) -> Any:
    """A pair, a tuple or a dict of tensors and arrays, with tensors alone; anything else as it is."""
    if type(data) is dict and all(map(_has_rows, data.values())):
        return {name: _as_tensor(part) for name, part in data.items()}
    if (type(data) is tuple or (type(data) is list and len(data) == 2)) and all(map(_has_rows, data)):
        return type(data)(map(_as_tensor, data))
    return data


def _as_tensor(part: Any) -> torch.Tensor:
    """Of an array the same memory, but where no tensor can have its byte order or its strides."""
    if isinstance(part, np.ndarray) and not (part.dtype.isnative and min(part.strides, default=0) >= 0):
        part = np.ascontiguousarray(part, part.dtype.newbyteorder("="))
    with warnings.catch_warnings():  # of a memory map that is only read, which nothing of ours writes to
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.as_tensor(part)


def _has_rows(part: object) -> bool:
    return isinstance(part, torch.Tensor) or (isinstance(part, np.ndarray) and part.dtype.kind in "biufc")


def _tensors(data: Any, field: Field) -> Tensors | None:
    """Of a tuple or a dict that has tensors alone; None of anything else."""
    parts = list(data.values()) if type(data) is dict else list(data) if type(data) is tuple else []
    if not parts or not all(isinstance(part, torch.Tensor) for part in parts):
        return None
    shapes = [tuple(part.shape) for part in parts]
    if len({shape[:1] for shape in shapes}) > 1 or not all(shapes):
        raise WorkloadError(
            f"Workload.{field}: tensors of shapes {', '.join(map(str, shapes))}; the first dimensions must be equal"
        )
    return Tensors(data)


def gives_several(dataset: Any) -> bool:
    """torch's own classes hand on what they are asked for, and ask one by one where there is nobody to hand it to."""
    if type(dataset) is Subset:
        return gives_several(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(gives_several, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))
