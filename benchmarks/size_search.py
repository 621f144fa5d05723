"""The largest size that fits, by doubling and then bisection, in a bounded number of tries. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """size: the largest one that was seen to fit, 0 where none was. too_large: the smallest one that was seen not to,
    or lies above the limit. is_settled: there is no size between the two."""

    size: int
    too_large: int
    is_settled: bool


def largest(
    fits: Callable[[int], bool],
    *,
    first: int,
    step: int,
    limit: int,
    max_tries: int,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Found:
    """Among the multiples of `step` up to `limit`; whatever lies above is known to be too large.

    Tries `first`, then doubles while sizes fit or halves until one does, then bisects. may_go_on: asked before each try
    but the first, for a search that is bounded by time.
    """
    top = limit // step * step
    low, high, size = 0, top + step, min(max(first // step * step, step), top)
    for number in range(max_tries):
        if size <= low or (number and not may_go_on()):
            break
        if fits(size):
            low = size
        else:
            high = size
        size = _next(low, high, step, top)
    return Found(low, high, is_settled=high - low <= step)


def _next(low: int, high: int, step: int, top: int) -> int:
    if high > top:  # nothing has been too large so far
        return min(2 * low, top)
    return (low + high) // 2 // step * step
