"""Bucket memory: where parameters and gradients in buckets lie, and how a worker sees them. Mapped once, at set-up.

    parameters        every bucket, one after another           what owners update and what is saved
    versions          depth × the same                          what stale replicas read; version v in v % depth
    bucket-gradient-R-S  depth × the buckets of a holder           what owners reduce; step i's in i % depth
    sums              every bucket, where gradients have depth  otherwise the sum stands in the first holder's gradient
    norms             float64, 2 × buckets × owners             sums of squares; step i's in i % 2
    missing           int32, depth × holders × (buckets + parameters)   step in which a parameter got no gradient

A device keeps its own parameters and gradients beside these. Step numbers count training iterations, from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.transport.memory.arena import Entry, Layout, typed
from weft.transport.memory.directory import Directory

# An owner may be at the next step's SYNC while another still validates this one; never further, since each waits for
# the other's last SYNC in between.
NORMS_DEPTH = 2

Holder = tuple[int, int]
StateEntry = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    """A bucket of the plan. places: parameter index -> first element. ranges: owner -> (start, stop). device_owner: who
    updates all of it, of the route "either" and with one holder, where the device does. state: of the same route, the
    entries (name, kind, dtype) of each parameter's optimizer state."""

    index: int
    dtype: str
    itemsize: int
    offset: int
    num_elements: int
    places: Mapping[int, tuple[int, int]]
    holders: tuple[Holder, ...]
    ranges: Mapping[int, tuple[int, int]]
    route: str
    device_owner: int | None = None
    state: Mapping[int, tuple[StateEntry, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, part: Mapping[str, Any]) -> BucketView:
        return cls(
            **{key: part[key] for key in ("index", "dtype", "itemsize", "offset", "num_elements")},
            places={p["parameter"]: (p["offset"], p["num_elements"]) for p in part["places"]},
            holders=tuple((r, s) for r, s in part["holders"]),
            ranges={owned["owner"]: (owned["start"], owned["stop"]) for owned in part["ranges"]},
            route=str(part["route"]),
            device_owner=next((owned["owner"] for owned in part["device_ranges"]), None),
            state={
                place["parameter"]: tuple((entry["name"], entry["kind"], entry["dtype"]) for entry in entries)
                for place, entries in zip(part["places"], part["state"], strict=False)
            },
        )

    def range_of(self, owner: int) -> tuple[int, int]:
        return (0, self.num_elements) if owner == self.device_owner else self.ranges[owner]

    @property
    def owners(self) -> frozenset[int]:
        own = frozenset() if self.device_owner is None else frozenset({self.device_owner})
        return frozenset(self.ranges) | own

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize


class BucketMemory:
    """The shared blocks of one job's buckets. staleness: of each replica."""

    def __init__(self, directory: Directory, synchronisation: Mapping[str, Any], staleness: Sequence[int]) -> None:
        self.buckets = [BucketView.of(part) for part in synchronisation["buckets"]]
        self.num_owners = len(synchronisation["owners"])
        self.holders = sorted({holder for bucket in self.buckets for holder in bucket.holders})
        self._directory = directory
        self._depths = [1 + number for number in staleness]
        self.num_versions = max(self._depths) if max(self._depths) > 1 else 0
        self._num_bytes = sum(bucket.num_bytes for bucket in self.buckets)
        self._num_parameters = 1 + max((index for bucket in self.buckets for index in bucket.places), default=-1)
        self._parameters = directory.block("parameters", max(1, self._num_bytes))
        self._versions = directory.block("versions", self.num_versions * self._num_bytes) if self.num_versions else None
        self._sums = directory.block("sums", self._num_bytes) if self.num_versions else None
        norms = directory.block("norms", 8 * NORMS_DEPTH * max(1, len(self.buckets) * self.num_owners))
        self._norms = norms.view(torch.float64).view(NORMS_DEPTH, -1, max(1, self.num_owners))
        words = len(self.holders) * (len(self.buckets) + self._num_parameters)
        # A stale holder marks steps that owners come to later; any other one may mark the next step while the last
        # update of this one is still made.
        depth = 2 + max(staleness)
        missing = directory.block("missing", 4 * max(1, depth * words), 0xFF)
        self.missing = missing.view(torch.int32).view(depth, len(self.holders), -1)
        self._gradients: dict[Holder, torch.Tensor] = {}

    def norms(self, step: int) -> torch.Tensor:
        """Sums of squares of a step's gradient, shape (buckets, owners); 0 where an owner has no range."""
        return self._norms[step % NORMS_DEPTH]

    def held(self, holder: Holder) -> list[BucketView]:
        return [bucket for bucket in self.buckets if holder in bucket.holders]

    def parameters(self, bucket: BucketView) -> torch.Tensor:
        """Flat, shared."""
        return _flat(self._parameters, bucket.offset, bucket)

    def version(self, bucket: BucketView, version: int) -> torch.Tensor:
        """The bucket's parameters after `version` updates; flat, shared."""
        assert self._versions is not None
        return _flat(self._versions, version % self.num_versions * self._num_bytes + bucket.offset, bucket)

    def gradient(self, holder: Holder, bucket: BucketView, step: int) -> torch.Tensor:
        """A holder's gradient of a step; flat, shared."""
        held = self.held(holder)
        size, depth = sum(each.num_bytes for each in held), self._depths[holder[0]]
        if holder not in self._gradients:
            name = f"bucket-gradient-{holder[0]}-{holder[1]}"
            self._gradients[holder] = self._directory.block(name, max(1, depth * size))
        before = sum(each.num_bytes for each in held[: held.index(bucket)])
        return _flat(self._gradients[holder], step % depth * size + before, bucket)

    def gradient_depth(self, holder: Holder) -> int:
        return self._depths[holder[0]]

    def sum(self, bucket: BucketView) -> torch.Tensor:
        """Where owners leave the sum over all holders; flat, shared."""
        if self._sums is None:
            return self.gradient(bucket.holders[0], bucket, 0)
        return _flat(self._sums, bucket.offset, bucket)

    # --- parameters that got no gradient

    def mark_missing(self, holder: Holder, bucket: BucketView, parameters: Sequence[int], step: int) -> None:
        """Before the bucket's milestone is posted."""
        row = self._missing_row(holder, step)
        row[bucket.index] = step
        for parameter in parameters:
            row[len(self.buckets) + parameter] = step

    def missing_in(self, bucket: BucketView, holders: Sequence[Holder], step: int) -> frozenset[int]:
        """Parameters of the bucket that none of these holders has a gradient for."""
        rows = [self._missing_row(holder, step) for holder in holders]
        if not all(int(row[bucket.index]) == step for row in rows):
            return frozenset()
        first = len(self.buckets)
        return frozenset(index for index in bucket.places if all(int(row[first + index]) == step for row in rows))

    def _missing_row(self, holder: Holder, step: int) -> torch.Tensor:
        return self.missing[step % len(self.missing), self.holders.index(holder)]

    def publish_layout(self, names: Sequence[tuple[str, torch.Tensor]], parameters: Sequence[nn.Parameter]) -> None:
        """Tells where each name of the model's state dict lies in "parameters", for whoever saves it."""
        offsets = {
            id(parameters[index]): bucket.offset + start * bucket.itemsize
            for bucket in self.buckets
            for index, (start, _) in bucket.places.items()
        }
        entries = []
        for name, tensor in names:
            if id(tensor) in offsets:
                like = Layout.of([(name, tensor)]).entries[0]
                entries.append(Entry(name, offsets[id(tensor)], like.shape, like.strides, like.dtype))
        self._directory.create("parameters", Layout(tuple(entries), max(1, self._num_bytes)))


def shaped_like(parameter: torch.Tensor, flat: torch.Tensor, start: int) -> torch.Tensor:
    """A view of the flat bucket with the parameter's shape and strides, its first element at `start`."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat[start : start + parameter.numel()].as_strided(parameter.shape, strides, flat.storage_offset() + start)


def _flat(block: torch.Tensor, offset: int, bucket: BucketView) -> torch.Tensor:
    return typed(block, offset, (bucket.num_elements,), bucket.dtype)
