"""Division: which samples of a batch each replica trains on, and in which microbatches. Pure, and the same everywhere.

A batch goes to the replicas by their shares, in order, and each replica's part is cut into its own microbatches:

    batch of 10, shares 0.7 and 0.3, 2 and 1 microbatches:   |0 1 2 3|4 5 6|7 8 9|
    replica                                                   0       0     1
    microbatch of the replica                                 0       1     0
    number, which keys random numbers                         0       1     2

Where shares follow measured speed (`share = "adaptive"`), no microbatch of a batch that has two samples for each is cut
down to one: a user's model may need more, as batch normalisation does, and nobody chose that number. What a part of one
lacks comes from the largest part; a part of three in two microbatches is one microbatch of three.

And which loader loads which of them: loaders take turns. Of all microbatches of the run, in the order in which one
loader would load them, each has every N-th. Three microbatches and two loaders:

    iteration      0     1     2     3
    loader 0      0 2    1    0 2    1
    loader 1       1    0 2    1    0 2

A microbatch's LOAD stands in the lane of each loader that ever has it, and passes where it is another's turn. Where the
number of microbatches is a multiple of the loaders' each has the same ones in every iteration, and nothing passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from weft.plan.itinerary import microbatch_sizes
from weft.spec.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Part:
    """One microbatch: its number in the batch over all replicas, its first sample in the batch, its samples."""

    number: int
    start: int
    size: int


def least_samples(size: int, microbatches: Sequence[int], share: str) -> int:
    """Of a microbatch that has any, in a batch of `size`. microbatches: of each replica. share: a strategy's."""
    return 2 if share == "adaptive" and size >= 2 * sum(microbatches) else 1


def replica_sizes(size: int, shares: Sequence[float], least: int = 1) -> list[int]:
    """Whole samples for each replica in proportion to `shares`, which need not add up to 1 (largest remainder).

    least: samples of a replica that has any; `size` has as many for each.
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
    for replica in range(len(sizes)):
        while 0 < sizes[replica] < least < max(sizes):
            sizes[sizes.index(max(sizes))] -= 1
            sizes[replica] += 1
    return sizes


def divide(size: int, shares: Sequence[float], microbatches: Sequence[int], share: str = "fixed") -> list[list[Part]]:
    """For each replica its microbatches; those that are left without samples have size 0. share: a strategy's."""
    least = least_samples(size, microbatches, share)
    parts: list[list[Part]] = []
    number = start = 0
    for part, count in zip(replica_sizes(size, shares, least), microbatches, strict=True):
        filled = max(1, min(count, part // least))
        own = []
        for samples in [*microbatch_sizes(part, filled), *[0] * (count - filled)]:
            own.append(Part(number, start, samples))
            number += 1
            start += samples
        parts.append(own)
    return parts


def sizes_that_occur(
    batches: Iterable[int], shares: Sequence[float], microbatches: Sequence[int], share: str
) -> set[int]:
    """Of microbatches with samples. batches: sizes of batches. The others: as `divide` takes them."""
    found = {part.size for size in batches for parts in divide(size, shares, microbatches, share) for part in parts}
    return found - {0}


@dataclass(frozen=True, slots=True)
class Turns:
    loaders: int
    counts: tuple[int, ...]  # microbatches of each replica; where replicas steal, of the batch

    @classmethod
    def of(cls, strategy: Strategy) -> Turns:
        return cls.among(strategy.loaders, strategy.microbatch_counts, steals=strategy.steals)

    @classmethod
    def among(cls, loaders: int, microbatches: Sequence[int], *, steals: bool) -> Turns:
        """microbatches: of each replica."""
        return cls(loaders, tuple(microbatches[:1] if steals else microbatches))

    def order(self) -> list[tuple[int, int]]:
        """(replica, microbatch) of each LOAD of an iteration, as one loader has them: first ones first."""
        places = ((r, m) for r, count in enumerate(self.counts) for m in range(count))
        return sorted(places, key=lambda place: place[::-1])

    @property
    def takers(self) -> int:
        """How many loaders a microbatch goes round."""
        return self.loaders // self._common

    def takers_of(self, position: int) -> range:
        """The loaders that ever have the microbatch at this position of the order."""
        return range(position % self._common, self.loaders, self._common)

    def has(self, loader: int, position: int, iteration: int) -> bool:
        return (iteration * sum(self.counts) + position) % self.loaders == loader

    def batches_ahead(self, prefetch: int) -> int:
        """For how many batches there are slots, those included that are being loaded and computed: prefetch, and what
        the other loaders load meanwhile."""
        return prefetch + -(-self.loaders // sum(self.counts)) - 1

    @property
    def _common(self) -> int:
        return math.gcd(self.loaders, sum(self.counts))
