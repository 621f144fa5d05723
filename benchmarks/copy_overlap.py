"""Copies of a link in both directions, from their intervals: how fast each was alone, and both at once. Pure.

    down   ▕═══a═══▏▕═══b═══▏▕═══c═══▏                    a, e: alone
    up                   ▕═══d═══▏         ▕═══e═══▏      b, c, d: beside another for a part of their time

A direction's rate alone is that of the copies that ran alone. Of the others, what they moved while they were alone they
moved at that rate; the rest of their bytes over the rest of their time is the rate beside the other direction. Where no
bytes rest, copies are too short to be told apart so: what a copy costs beside its bytes is all of their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALONE = 0.01  # of a copy's time beside others, at most; arbitrary: it moves a rate by less than we look for


@dataclass(frozen=True, slots=True)
class Copy:
    """Nanoseconds of one clock."""

    start: int
    end: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second. None where no copy ran so. both: the sum of the two directions', each beside the other."""

    down: float | None
    up: float | None
    both: float | None


def rates(downs: Sequence[Copy], ups: Sequence[Copy]) -> Rates:
    """Each direction's copies in order and without overlap among themselves."""
    down, down_beside = _direction(downs, ups)
    up, up_beside = _direction(ups, downs)
    both = None if down_beside is None or up_beside is None else down_beside + up_beside
    return Rates(down=down, up=up, both=both)


def _direction(copies: Sequence[Copy], others: Sequence[Copy]) -> tuple[float | None, float | None]:
    """The rate alone, and the one beside the others."""
    shared = _shared_times(copies, others)
    alone: list[tuple[Copy, int]] = []
    mixed: list[tuple[Copy, int]] = []
    for copy, beside in zip(copies, shared, strict=True):
        (alone if beside <= ALONE * (copy.end - copy.start) else mixed).append((copy, beside))
    rate = _rate(sum(copy.num_bytes for copy, _ in alone), sum(copy.end - copy.start for copy, _ in alone))
    apart = sum(copy.end - copy.start - beside for copy, beside in mixed)
    if apart and rate is None:  # nobody knows what they moved in that time
        return None, None
    rest = sum(copy.num_bytes for copy, _ in mixed) - (rate or 0.0) * apart / 1e9
    return rate, _rate(rest, sum(beside for _, beside in mixed)) if rest > 0 else None


def _shared_times(copies: Sequence[Copy], others: Sequence[Copy]) -> list[int]:
    """Nanoseconds of each copy in which one of the others ran, too."""
    times = []
    first = 0
    for copy in copies:
        while first < len(others) and others[first].end <= copy.start:
            first += 1
        total, number = 0, first
        while number < len(others) and others[number].start < copy.end:
            total += min(copy.end, others[number].end) - max(copy.start, others[number].start)
            number += 1
        times.append(total)
    return times


def _rate(num_bytes: float, nanoseconds: int) -> float | None:
    return num_bytes / nanoseconds * 1e9 if nanoseconds else None
