"""Saved: what training had come to after an iteration, put together from what each task held, by the user's own names.

It does not depend on the plan: pieces that one plan's owners held make whole parameters, of which another plan's take
theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.workers.snapshots.attributes import Kept, Modes
from weft.workers.snapshots.held import VALUES, Extent, Held, Name
from weft.workload.workload import WorkloadError


class Saved:
    """Errors: WorkloadError where the model is another than the one that was saved."""

    def __init__(self, parts: Iterable[Held], place: int | None = None) -> None:
        """place: of the snapshot whose shared memory this maps; None of one that lies elsewhere."""
        self.place = place
        self._pieces: dict[str, dict[str, list[tuple[Extent, Tensor]]]] = {}  # by parameter and entry
        self._buffers: dict[int, dict[str, Tensor]] = {}  # by replica
        self._attributes: dict[int, Kept] = {}  # by replica
        self._modes: dict[int, Modes] = {}  # by replica
        self._states: dict[str, dict[str, Any]] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self.scheduler: dict[str, Any] | None = None
        self.kinds: dict[str, str] = {}
        self.fixed: dict[str, Tensor] = {}
        self.names: list[Name] = []
        for held in parts:
            self._add(held)

    def _add(self, held: Held) -> None:
        for piece in held.pieces:
            for extent in piece.extents:
                tensor = piece.tensor[extent.start : extent.stop] if extent.stop else piece.tensor
                self._pieces.setdefault(extent.parameter, {}).setdefault(piece.entry, []).append((extent, tensor))
        self.fixed |= held.fixed
        self.names += held.names
        if held.replica is not None:
            self._buffers.setdefault(held.replica, {}).update(held.buffers)
            self._modes.setdefault(held.replica, {}).update(held.modes)
            self._add_attributes(held, self._attributes.setdefault(held.replica, {}))
        self._states |= held.states
        self._options |= held.options
        self.scheduler = held.scheduler or self.scheduler
        self.kinds |= held.kinds

    def _add_attributes(self, held: Held, known: Kept) -> None:
        """A module may be in several stages, of which one has changed what others still have as it was restored."""
        restored = set(held.restored)
        for module, values in held.attributes.items():
            own = known.setdefault(module, {})
            own.update((key, value) for key, value in values.items() if key not in own or (module, key) not in restored)

    def check_model(self, parameters: Mapping[str, Tensor]) -> None:
        """parameters: by name, of a model that is to go on. A job's own snapshots are of its own model."""

    def options(self, parameter: str) -> dict[str, Any] | None:
        """Those of its group in the optimizer; None of one that it does not have."""
        return self._options.get(parameter)

    def plain(self) -> dict[str, Any]:
        """All that is neither elements nor buffers."""
        rest = {"states": self._states, "options": self._options, "scheduler": self.scheduler}
        return rest | {"kinds": self.kinds, "attributes": self._attributes, "modes": self._modes}

    def all_buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        """By replica and name."""
        return self._buffers

    def entries(self, parameter: str) -> Iterable[str]:
        """What there is of each of its elements: VALUES, where it was trained, and names of the optimizer's."""
        return self._pieces.get(parameter, ())

    def buffers(self, replica: int) -> Mapping[str, Tensor]:
        """Of a replica; of one that there was none of, the first one's."""
        return self._buffers.get(replica) or self._buffers.get(0, {})

    def attributes(self, replica: int) -> Kept:
        """As buffers."""
        return self._attributes.get(replica) or self._attributes.get(0, {})

    def modes(self, replica: int) -> Modes | None:
        """As buffers; None where nothing is known of any."""
        return self._modes.get(replica, self._modes.get(0))

    def values(self, parameter: str, like: Tensor) -> Tensor | None:
        """Its elements, in its shape; None of one that nobody has."""
        if VALUES not in self.entries(parameter):
            return self.fixed.get(parameter)
        return shaped(self.flat(parameter, VALUES, like), like)

    def elements(self, parameter: str, like: Tensor) -> dict[str, Tensor]:
        """What the optimizer kept of each of its elements, by name, flat in the order of its memory."""
        return {entry: self.flat(parameter, entry, like) for entry in self.entries(parameter) if entry != VALUES}

    def rest(self, parameter: str) -> dict[str, Any]:
        """What else the optimizer kept of it, by name."""
        return self._states.get(parameter, {})

    def flat(self, parameter: str, entry: str, like: Tensor) -> Tensor:
        """One entry's elements in the order of the parameter's memory; where they lie like that, these, which are to be
        read only."""
        pieces = self._pieces[parameter][entry]
        extent, first = pieces[0]
        if not extent.stop:
            return in_memory_order(parameter, first, like)
        if len(pieces) == 1 and extent.offset == 0 and first.numel() == like.numel():
            return first
        flat = torch.empty(like.numel(), dtype=pieces[0][1].dtype)
        ends = [extent.offset + tensor.numel() for extent, tensor in pieces]
        if max(ends) != like.numel() or sum(tensor.numel() for _, tensor in pieces) < like.numel():
            raise _of_another_shape(parameter, f"{max(ends)} elements", like)
        for (extent, tensor), end in zip(pieces, ends, strict=True):
            flat[extent.offset : end].copy_(tensor)
        return flat


def in_memory_order(parameter: str, value: Tensor, like: Tensor) -> Tensor:
    """Flat, in the order of the parameter's memory; no copy where it has that. Errors: WorkloadError for another
    shape."""
    if value.shape != like.shape:
        raise _of_another_shape(parameter, f"the shape {tuple(value.shape)}", like)
    if value.stride() == torch.empty_like(like, device="meta").stride():
        return value.as_strided((value.numel(),), (1,))
    flat = torch.empty(like.numel(), dtype=value.dtype)
    shaped(flat, like).copy_(value)
    return flat


def _of_another_shape(parameter: str, what: str, like: Tensor) -> WorkloadError:
    return WorkloadError(
        f"Workload.model: {parameter!r:.80} has the shape {tuple(like.shape)}, and had {what} when it was saved; build "
        "the model as it was then"
    )


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Flat in the order of memory, as the dense tensor that it is."""
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())
