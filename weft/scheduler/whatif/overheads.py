"""What-if overheads: what a recorded job's lanes lose beside their tasks and their inputs, from their rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from weft.metrics.accounts.accounting import NANOSECONDS
from weft.metrics.recording.recording import Recording
from weft.plan.graph import Lane
from weft.plan.kinds import FIRST_STALL, MODES, is_compute_lane
from weft.plan.placement import COMPUTE
from weft.plan.rows import Row

DISPATCH: Final = MODES.index("stall_dispatch")
FEW: Final = 8  # waits: of fewer the median may be what another program on the core has made of one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    wake_seconds: float  # from the end of what a lane waits for to the end of its wait, the median
    by_lane: Mapping[str, float]  # seconds of reports and dispatches for each task, by the name of the lane

    @property
    def dispatch_seconds(self) -> float:
        return self.by_lane.get(COMPUTE, 0.0)

    def of(self, lane: Lane) -> float:
        return self.by_lane.get(lane.name, 0.0)


def overheads_of(recording: Recording) -> Overheads:
    shares: dict[str, list[float]] = {}
    for lane, rows in recording.rows.items():
        num_tasks = sum(row[0] < FIRST_STALL for row in rows)
        if num_tasks:
            lost = sum(row[5] - row[4] for row in rows if row[0] == DISPATCH)
            shares.setdefault(lane.rpartition("/")[2], []).append(lost / num_tasks / NANOSECONDS)
    wakes = wake_latencies(recording, filter(is_compute_lane, recording.rows))
    if len(wakes) < FEW:
        wakes = wake_latencies(recording, recording.rows)
    return Overheads(
        wake_seconds=median(wakes) if wakes else 0.0,
        by_lane={name: fmean(parts) for name, parts in shares.items()},
    )


def wake_latencies(recording: Recording, lanes: Iterable[str]) -> list[float]:
    """Seconds from the end of a task to the end of the wait for it, of every wait of these lanes that it ended."""
    distances = {(edge.source, edge.target): edge.distance for edge in recording.edges}
    ends = {
        (row[1], row[2]): row[5]
        for rows in recording.rows.values()
        for row in rows
        if row[0] < FIRST_STALL and row[1] >= 0
    }
    found = []
    for lane in lanes:
        for row in recording.rows[lane]:
            latency = _latency(row, distances, ends)
            if latency is not None:
                found.append(latency / NANOSECONDS)
    return found


def _latency(row: Row, distances: Mapping[tuple[int, int], int], ends: Mapping[tuple[int, int], int]) -> int | None:
    """A task posts its end shortly before it stamps it, so a lane that spins may be found awake before: that is 0."""
    mode, task, iteration, source, start, end = row
    if mode < FIRST_STALL or source < 0:
        return None
    came = ends.get((source, iteration - distances.get((source, task), 0)))
    return max(0, end - came) if came is not None and came > start else None
