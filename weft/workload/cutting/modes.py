"""Modes: what looks at every operation of a step.

What has numbers must not see it. Modules of torch ask whether somebody looks (`has_torch_function`), and compute in
another way then: an encoder layer leaves its fused kernel in evaluation, and its numbers are others in their last bits.

So none looks at a whole stage. Of `tensor.data = other` torch then tells nobody but the class of `tensor`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.workload.cutting.leaves import tensors_in
from weft.workload.cutting.tape import Renewed

_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}  # past all operations
_BY_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_BY_LENGTHS = {torch.ops.aten._pack_padded_sequence.default, torch.ops.aten._pad_packed_sequence.default}
_INDEXES = {torch.ops.aten.index.Tensor}  # by numbers where an index is a mask
_MASKS = {torch.bool, torch.uint8}
_DATA: Any = torch.Tensor.data
_REAL = {torch.Tensor, torch.nn.Parameter}


@contextlib.contextmanager
def aside(mode: TorchFunctionMode) -> Iterator[None]:
    """Without the mode, for as long as a module runs. Where the user's own mode is within it, that is seen anyway."""
    if _get_current_function_mode() is not mode:  # type: ignore[no-untyped-call]
        yield
        return
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


class _AssignedData:
    """In the place of torch's own, which is still what the class gives, and what is told of."""

    def __get__(self, tensor: torch.Tensor | None, kind: type | None = None) -> Any:
        return _DATA if tensor is None else _DATA.__get__(tensor, kind)

    def __set__(self, tensor: torch.Tensor, value: Any) -> None:
        if isinstance(value, Renewed) and not isinstance(tensor, Renewed):
            type(value).__torch_function__(_DATA.__set__, (type(value),), (tensor, value))  # type: ignore[no-untyped-call]
        else:
            _DATA.__set__(tensor, value)


def look_at_assigned_data() -> None:
    """For good: a real tensor that is assigned what has no numbers would be one without memory, and whoever reads it
    would end the process."""
    if not isinstance(vars(torch.Tensor).get("data"), _AssignedData):
        torch.Tensor.data = _AssignedData()  # type: ignore[assignment]


class NumbersRead:
    """Whether, within `looking`, numbers of a real tensor were read, or have told a shape."""

    def __init__(self) -> None:
        self.any = False

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield

    def saw(self, values: Any) -> None:
        found = tensors_in(values)
        self.any = self.any or (bool(found) and all(type(each) in _REAL for each in found))


class _Functions(TorchFunctionMode):
    def __init__(self, read: NumbersRead) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READS:
            self._read.saw(args)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, read: NumbersRead) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._read = read

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _BY_LENGTHS or (_BY_NUMBERS & {*func.tags} and not (func in _INDEXES and _by_places(args[1]))):
            self._read.saw(args)
        return func(*args, **(kwargs or {}))


def _by_places(indices: Any) -> bool:
    return all(each.dtype not in _MASKS for each in tensors_in(indices))
