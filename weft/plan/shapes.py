"""Shapes: what shape a tensor has for a microbatch of any size, from the sizes that an inspection has run. Pure.

Where shares follow measured speed nobody knows beforehand which microbatch sizes will occur. Each dimension is taken to
be a fixed number, or one that grows evenly with the microbatch (samples, or samples × tokens):

    inspected   6 → (6, 128)    12 → (12, 128)    24 → (24, 128)       hence   7 → (7, 128)
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

Shape = tuple[int, ...]


class ShapeError(ValueError):
    """The shapes of different microbatch sizes follow no common rule."""


def shape_of(size: int, known: Mapping[int, Shape]) -> Shape:
    """The shape for a microbatch of `size` samples. known: microbatch size -> shape.

    Raises KeyError for a size above all that are known, or where only one is; ShapeError where no rule gives whole
    numbers.
    """
    if size in known:
        return tuple(known[size])
    low, high = min(known), max(known)
    if not 0 < size <= high or low == high:
        raise KeyError(size)
    return _between(size, (low, known[low]), (high, known[high]))


def check_affine(known: Mapping[int, Shape]) -> None:
    """Raises ShapeError unless one rule gives all the shapes."""
    ends = [(size, known[size]) for size in (min(known), max(known))]
    for size, shape in known.items():
        if len(known) > 1 and _between(size, *ends) != tuple(shape):
            raise ShapeError(
                f"microbatches of {', '.join(f'{n} samples have {tuple(known[n])}' for n in sorted(known))}"
            )


def _between(size: int, low: tuple[int, Shape], high: tuple[int, Shape]) -> Shape:
    """On the line through two sizes."""
    if len(low[1]) != len(high[1]):
        raise ShapeError(f"{low[0]} samples have the shape {low[1]} and {high[0]} have {high[1]}")
    per_sample = [Fraction(b - a, high[0] - low[0]) for a, b in zip(low[1], high[1], strict=True)]
    extents = [a + (size - low[0]) * each for a, each in zip(low[1], per_sample, strict=True)]
    if any(each.denominator != 1 for each in per_sample) or min(extents, default=0) < 0:
        raise ShapeError(f"between {low[1]} for {low[0]} samples and {high[1]} for {high[0]} no shape fits {size}")
    return tuple(int(extent) for extent in extents)
