"""Division: which samples of a batch each replica trains on, and in which microbatches. Pure, and the same everywhere.

A batch goes to the replicas by their shares, in order, and each replica's part is cut into its own microbatches:

    batch of 10, shares 0.7 and 0.3, 2 and 1 microbatches:   |0 1 2 3|4 5 6|7 8 9|
    replica                                                   0       0     1
    microbatch of the replica                                 0       1     0
    number, which keys random numbers                         0       1     2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from weft.plan.itinerary import microbatch_sizes


@dataclass(frozen=True, slots=True)
class Part:
    """One microbatch: its number in the batch over all replicas, its first sample in the batch, its samples."""

    number: int
    start: int
    size: int


def replica_sizes(size: int, shares: Sequence[float]) -> list[int]:
    """Whole samples for each replica in proportion to `shares`, which need not add up to 1 (largest remainder).

    Raises ValueError where no share is above 0 or one is below.
    """
    if not shares or min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"shares {list(shares)}: give numbers of 0 or more, at least one of them above 0")
    weights = [Fraction(share) for share in shares]
    exact = [size * weight / sum(weights) for weight in weights]
    sizes = [int(part) for part in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda r: (sizes[r] - exact[r], r))
    for replica in by_remainder[: size - sum(sizes)]:
        sizes[replica] += 1
    return sizes


def divide(size: int, shares: Sequence[float], microbatches: Sequence[int]) -> list[list[Part]]:
    """For each replica its microbatches; those that are left without samples have size 0."""
    parts: list[list[Part]] = []
    number = start = 0
    for part, count in zip(replica_sizes(size, shares), microbatches, strict=True):
        own = []
        for samples in microbatch_sizes(part, count):
            own.append(Part(number, start, samples))
            number += 1
            start += samples
        parts.append(own)
    return parts
