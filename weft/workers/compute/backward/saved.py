"""Saved: what autograd keeps of a forward for its backward, in bytes of memory that is not there anyway."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from weft.workload.aliases import has_memory
from weft.workload.cutting.placeholder import PlaceholderError

_REFUSED = "support saved tensor hooks"  # in what torch.func raises


def refuses_to_be_noted(error: BaseException | None) -> bool:
    """Whether a step may have raised it only since it was noted what it keeps: functions of torch.func do; and what a
    hook has seen is copied where it is used, which a tensor without numbers refuses."""
    return isinstance(error, PlaceholderError) or (isinstance(error, RuntimeError) and _REFUSED in str(error))


class SavedBytes:
    """Of one forward: what its operations save, each block of memory once, and what comes out of it, as long as nobody
    lets go of it. What `torch.utils.checkpoint` makes again is not saved. besides: tensors whose memory is there in any
    case, parameters and what the forward is given."""

    def __init__(self, besides: Iterable[torch.Tensor]) -> None:
        self._there = {_block(tensor) for tensor in besides}
        self._bytes: dict[int, int] = {}  # of each block, by its address

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """While the forward runs. Errors: see `refuses_to_be_noted`."""
        with torch.autograd.graph.saved_tensors_hooks(self._saved, _as_it_is):
            yield

    def note(self, made: Iterable[torch.Tensor]) -> None:
        for tensor in made:
            if (block := _block(tensor)) is not None and block not in self._there:
                self._bytes[block] = tensor.untyped_storage().nbytes()

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """As it is, an output would keep its own graph. No operation, which whoever listens to them would take for the
        step's."""
        self.note([tensor])
        return tensor.data if has_memory(tensor) else tensor


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _block(tensor: torch.Tensor) -> int | None:
    """None where it has no memory of its own, as what a transform of torch.func hands about."""
    try:
        return tensor.untyped_storage().data_ptr() if has_memory(tensor) else None
    except RuntimeError:
        return None
