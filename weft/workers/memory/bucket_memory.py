"""Bucket memory: where parameters and gradients in buckets lie, and how a worker sees them. Mapped once, at set-up.

    parameters        every bucket, one after another           what owners update and what is saved
    versions          depth × the same                          what stale replicas read; version v in v % depth
    bucket-gradient-R-S  depth × those of a holder with gradient   what owners reduce; step i's in i % depth
    sums              every bucket, where gradients have depth  otherwise the sum stands in the first holder's gradient
    norms             float64, 2 × buckets × owners             sums of squares; step i's in i % 2
    missing           int32, depth × holders × (buckets + parameters)   step in which a parameter got no gradient

A device keeps its own parameters and gradients beside these. Step numbers count training iterations, from 0.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import accumulate

import torch
from torch import nn

from weft.plan.buckets import Bucket, Holder
from weft.plan.plan import ReplicaPlan, Synchronisation
from weft.transport.memory.arena import Entry, Layout, typed
from weft.transport.memory.blocks import Wanted
from weft.transport.memory.directory import Directory

# An owner may be at the next step's SYNC while another still validates this one; never further, since each waits for
# the other's last SYNC in between.
NORMS_DEPTH = 2


class BucketMemory:
    """The shared blocks of one job's buckets."""

    def __init__(self, directory: Directory, sync: Synchronisation, replicas: Sequence[ReplicaPlan]) -> None:
        self.buckets = sync.buckets
        self.num_owners = len(sync.owners)
        self.holders = _holders(sync)
        self._directory = directory
        self._depths = _depths(replicas)
        self.num_versions = _num_versions(replicas)
        self._num_bytes = _num_bytes(sync)
        blocks = {wanted.name: directory.block(*wanted) for wanted in self.wants(sync, replicas)}
        self._parameters, self._versions, self._sums = blocks["parameters"], blocks.get("versions"), blocks.get("sums")
        self._norms = blocks["norms"].view(torch.float64).view(NORMS_DEPTH, -1, max(1, self.num_owners))
        self.missing = blocks["missing"].view(torch.int32).view(_missing_depth(replicas), len(self.holders), -1)
        self.rewind()  # others may have gone before
        self._gradients: dict[Holder, torch.Tensor] = {}
        self._gradient_offsets = {holder: _offsets(self.with_gradient(holder)) for holder in self.holders}

    @staticmethod
    def wants(sync: Synchronisation, replicas: Sequence[ReplicaPlan]) -> Iterator[Wanted]:
        """Of the directory, as soon as it is made; gradients when they are first asked for."""
        num_bytes, num_versions = _num_bytes(sync), _num_versions(replicas)
        yield Wanted("parameters", max(1, num_bytes))
        if num_versions:
            yield Wanted("versions", num_versions * num_bytes)
            yield Wanted("sums", num_bytes)
        yield Wanted("norms", 8 * NORMS_DEPTH * max(1, len(sync.buckets) * len(sync.owners)))
        words = len(_holders(sync)) * (len(sync.buckets) + _num_parameters(sync))
        yield Wanted("missing", 4 * max(1, _missing_depth(replicas) * words), -1)

    def rewind(self) -> None:
        """No parameter has been without a gradient: a step that is made again may find others. While no lane of any
        worker runs; what else there is of a step is written before it is read."""
        self.missing.fill_(-1)

    def norms(self, step: int) -> torch.Tensor:
        """Sums of squares of a step's gradient, shape (buckets, owners); 0 where an owner has no range."""
        return self._norms[step % NORMS_DEPTH]

    def held(self, holder: Holder) -> list[Bucket]:
        return [bucket for bucket in self.buckets if holder in bucket.holders]

    def with_gradient(self, holder: Holder) -> list[Bucket]:
        """Of those that it holds; what an earlier stage of the replica holds, too, has its gradient there."""
        return [bucket for bucket in self.buckets if holder in bucket.gradient_holders]

    def parameters(self, bucket: Bucket) -> torch.Tensor:
        """Flat, shared."""
        return _flat(self._parameters, bucket.offset, bucket)

    def share(self, parameters: Sequence[nn.Parameter], *, apart: Container[int]) -> None:
        """What no stage of a worker has is kept as long as the optimizer that the user built on it: here, where it is
        anyway, and not in a copy of the model for each worker. apart: ids of what its stages have."""
        for bucket in self.buckets:
            for place in bucket.places:
                parameter = parameters[place.parameter]
                if id(parameter) not in apart:
                    parameter.data = shaped_like(parameter, self.parameters(bucket), place.offset)

    def version(self, bucket: Bucket, version: int) -> torch.Tensor:
        """The bucket's parameters after `version` updates; flat, shared."""
        assert self._versions is not None
        return _flat(self._versions, version % self.num_versions * self._num_bytes + bucket.offset, bucket)

    def gradient(self, holder: Holder, bucket: Bucket, step: int) -> torch.Tensor:
        """A holder's gradient of a step; flat, shared."""
        (offsets, size), depth = self._gradient_offsets[holder], self._depths[holder[0]]
        if holder not in self._gradients:
            name = f"bucket-gradient-{holder[0]}-{holder[1]}"
            self._gradients[holder] = self._directory.block(name, max(1, depth * size))
        return _flat(self._gradients[holder], step % depth * size + offsets[bucket.index], bucket)

    def gradient_depth(self, holder: Holder) -> int:
        return self._depths[holder[0]]

    def sum(self, bucket: Bucket) -> torch.Tensor:
        """Where owners leave the sum over all holders; flat, shared."""
        if self._sums is None:
            return self.gradient(bucket.holders[0], bucket, 0)
        return _flat(self._sums, bucket.offset, bucket)

    # --- parameters that got no gradient

    def mark_missing(self, holder: Holder, bucket: Bucket, parameters: Sequence[int], step: int) -> None:
        """Before the bucket's milestone is posted."""
        row = self._missing_row(holder, step)
        row[bucket.index] = step
        for parameter in parameters:
            row[len(self.buckets) + parameter] = step

    def missing_in(self, bucket: Bucket, holders: Sequence[Holder], step: int) -> frozenset[int]:
        """Parameters of the bucket that none of these holders has a gradient for."""
        rows = [self._missing_row(holder, step) for holder in holders]
        if not all(int(row[bucket.index]) == step for row in rows):
            return frozenset()
        first = len(self.buckets)
        parameters = (place.parameter for place in bucket.places)
        return frozenset(index for index in parameters if all(int(row[first + index]) == step for row in rows))

    def _missing_row(self, holder: Holder, step: int) -> torch.Tensor:
        return self.missing[step % len(self.missing), self.holders.index(holder)]

    def publish_layout(self, names: Sequence[tuple[str, torch.Tensor]], parameters: Sequence[nn.Parameter]) -> None:
        """Tells where each name of the model's state dict lies in "parameters", for whoever saves it."""
        offsets = {
            id(parameters[place.parameter]): bucket.offset + place.offset * bucket.itemsize
            for bucket in self.buckets
            for place in bucket.places
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


def _offsets(buckets: Sequence[Bucket]) -> tuple[dict[int, int], int]:
    """(by number, where each begins if one lies behind the other; the bytes of all of them)"""
    ends = list(accumulate((bucket.num_bytes for bucket in buckets), initial=0))
    return {bucket.index: start for bucket, start in zip(buckets, ends, strict=False)}, ends[-1]


def _flat(block: torch.Tensor, offset: int, bucket: Bucket) -> torch.Tensor:
    return typed(block, offset, (bucket.num_elements,), bucket.dtype)


def _holders(sync: Synchronisation) -> list[Holder]:
    return sorted({holder for bucket in sync.buckets for holder in bucket.holders})


def _num_bytes(sync: Synchronisation) -> int:
    return sum(bucket.num_bytes for bucket in sync.buckets)


def _num_parameters(sync: Synchronisation) -> int:
    return 1 + max((place.parameter for bucket in sync.buckets for place in bucket.places), default=-1)


def _depths(replicas: Sequence[ReplicaPlan]) -> list[int]:
    return [1 + replica.staleness for replica in replicas]


def _num_versions(replicas: Sequence[ReplicaPlan]) -> int:
    return max(_depths(replicas)) if max(_depths(replicas)) > 1 else 0


def _missing_depth(replicas: Sequence[ReplicaPlan]) -> int:
    """A stale holder marks steps that owners come to later; any other one may mark the next step while the last update
    of this one is still made."""
    return 1 + max(_depths(replicas))
