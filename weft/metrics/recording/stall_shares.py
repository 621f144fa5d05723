"""Stall shares: of the compute lanes' time in each recorded iteration, the part in each stall. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from weft.metrics.recording.recording import Recording
from weft.metrics.recording.window import begin_of_first
from weft.plan.kinds import FIRST_STALL, MODES, is_compute_lane


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStalls:
    iteration: int
    seconds: float  # from the end of the iteration before to its own
    shares: Mapping[str, float]  # 0 to 1, by cause; busy is the rest


def stall_shares(recording: Recording) -> list[IterationStalls]:
    """Of the complete iterations of which it is known when they began, in order. A stall that spans the end of an
    iteration is divided there."""
    ends = recording.iteration_ends
    begun = {iteration + 1: end for iteration, end in ends.items()}
    if 0 in ends:
        begun[0] = begin_of_first(recording)
    wanted = [iteration for iteration in ends if iteration in begun]
    starts = [begun[iteration] for iteration in wanted]
    stops = [ends[iteration] for iteration in wanted]
    lanes = [rows for lane, rows in recording.rows.items() if is_compute_lane(lane)]
    sums: list[dict[str, int]] = [{} for _ in wanted]
    for rows in lanes:
        for mode, _, _, _, start, end in rows:
            if mode < FIRST_STALL:
                continue
            cause = MODES[mode].removeprefix("stall_")
            place = bisect_left(stops, start)
            while place < len(wanted) and starts[place] < end:
                within = min(end, stops[place]) - max(start, starts[place])
                if within > 0:
                    sums[place][cause] = sums[place].get(cause, 0) + within
                place += 1
    return [
        IterationStalls(
            iteration=iteration,
            seconds=(stop - start) / 1e9,
            shares={cause: ns / ((stop - start) * len(lanes)) for cause, ns in sums[place].items()},
        )
        for place, (iteration, start, stop) in enumerate(zip(wanted, starts, stops, strict=True))
        if stop > start
    ]
