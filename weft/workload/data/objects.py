"""Objects of any class in a batch, by their own way to be pickled, without their tensors.

Classes and functions of the job's file stand beside the packet: a worker of several stages has run the file for each of
them, and pickle would know those of the last run alone.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch

from weft.spec.source import ENTRY_MODULE


def packet_of(value: object, number_of: Callable[[torch.Tensor], int]) -> tuple[bytes, tuple[Any, ...]]:
    """And what stands beside it. number_of: of a tensor, from 0. Errors: those of pickle."""
    packet = io.BytesIO()
    writing = _Writing(packet, number_of)
    writing.dump(value)
    return packet.getvalue(), tuple(writing.own)


def object_of(packet: bytes, own: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Any:
    return _Reading(packet, own, tensors).load()


class _Writing(pickle.Pickler):
    """Numbers stand in for tensors, negative ones for what is of the job's file."""

    def __init__(self, packet: io.BytesIO, number_of: Callable[[torch.Tensor], int]) -> None:
        super().__init__(packet, pickle.HIGHEST_PROTOCOL)
        self._number_of = number_of
        self.own: dict[Any, int] = {}

    def persistent_id(self, value: object) -> int | None:
        if isinstance(value, torch.Tensor):
            return self._number_of(value)
        if isinstance(value, (type, FunctionType)) and _is_found_in_entry(value):
            return -1 - self.own.setdefault(value, len(self.own))
        return None


class _Reading(pickle.Unpickler):
    def __init__(self, packet: bytes, own: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(packet))
        self._own, self._tensors = own, tensors

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number] if number >= 0 else self._own[-1 - number]


def _is_found_in_entry(value: type | FunctionType) -> bool:
    return str(value.__module__).startswith(ENTRY_MODULE) and "<" not in value.__qualname__
