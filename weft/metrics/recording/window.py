"""A window of a recording: some whole iterations at its end, and what was planned for as many. Pure.

actual    ▕ ... 375 ▏ 376 ▏ 377 ▏
window              ├───────────┤      from the end of the iteration before to the end of the last one
planned             ▕ 376 ▏377▏        from the same start, one predicted iteration after another
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.metrics.accounts.accounting import NANOSECONDS
from weft.metrics.recording.recording import PlannedSpan, Recording
from weft.plan.kinds import FIRST_STALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Iterations first to last, both whole, from start_ns to end_ns of CLOCK_MONOTONIC."""

    first: int
    last: int
    start_ns: int
    end_ns: int

    @property
    def num_iterations(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A task of an iteration as the plan has it, in nanoseconds from the window's start."""

    task: int
    iteration: int
    start_ns: int
    end_ns: int


def last_iterations(recording: Recording, iterations: int | None = None) -> Window | None:
    """All complete iterations, or at most so many up to the last one that trains. None where there is none."""
    ends = recording.iteration_ends
    if not ends:
        return None
    last = max(ends) if iterations is None else max(recording.training, default=max(ends))
    first = last
    while first - 1 in ends and (iterations is None or last - first + 1 < iterations):
        first -= 1
    if first == 0:
        start = begin_of_first(recording)
    elif first - 1 in ends:
        start = ends[first - 1]
    elif first < last:
        first += 1
        start = ends[first - 1]
    else:
        return None
    return Window(first=first, last=last, start_ns=start, end_ns=ends[last])


def iterations_between(recording: Recording, first: int, last: int) -> Window | None:
    """Those of them that are complete, if they follow one another and the first one's beginning is known."""
    ends = recording.iteration_ends
    known = [number for number in range(first, last + 1) if number in ends and (number == 0 or number - 1 in ends)]
    if not known or len(known) != known[-1] - known[0] + 1:
        return None
    start = ends[known[0] - 1] if known[0] else begin_of_first(recording)
    return Window(first=known[0], last=known[-1], start_ns=start, end_ns=ends[known[-1]])


def planned_runs(recording: Recording, window: Window) -> dict[str, list[PlannedRun]]:
    """By lane, without overlap: the plan's last simulated iteration, repeated for each of the window's."""
    ends: dict[int, float] = {}
    for span in recording.planned:
        ends[span.iteration] = max(ends.get(span.iteration, 0.0), span.end)
    if len(ends) < 2:
        return {}
    last = max(ends)
    period = (ends[last] - ends[min(ends)]) / (len(ends) - 1)
    pattern = [span for span in recording.planned if span.iteration == last]
    runs: dict[str, list[PlannedRun]] = {lane: [] for lane in recording.programs}
    begin = ends[sorted(ends)[-2]]
    ahead = -min(int((span.start - begin) // period) for span in pattern) if period > 0 else 0
    for number in range(window.num_iterations + ahead):
        _place(recording, pattern, number * period - begin, window, number, runs)
    length = round(period * window.num_iterations * NANOSECONDS)
    return {lane: _in_order(each, length) for lane, each in runs.items()}


def begin_of_first(recording: Recording) -> int:
    """When iteration 0, which must be recorded, began its first task. Before it lanes waited for others' set-up."""
    starts = [row[4] for rows in recording.rows.values() for row in rows if row[0] < FIRST_STALL and row[2] == 0]
    return min(starts)


def _place(
    recording: Recording,
    pattern: list[PlannedSpan],
    shift: float,
    window: Window,
    number: int,
    runs: dict[str, list[PlannedRun]],
) -> None:
    for span in pattern:
        runs[recording.tasks[span.task].lane].append(
            PlannedRun(
                task=span.task,
                iteration=window.first + number,
                start_ns=round((span.start + shift) * NANOSECONDS),
                end_ns=round((span.end + shift) * NANOSECONDS),
            )
        )


def _in_order(runs: list[PlannedRun], length_ns: int) -> list[PlannedRun]:
    """Cut at both ends, and where rounding made neighbours overlap."""
    placed: list[PlannedRun] = []
    before = 0
    for run in sorted(runs, key=lambda run: (run.start_ns, run.end_ns)):
        start, end = max(run.start_ns, before), min(run.end_ns, length_ns)
        if start > end or run.end_ns < 0 or (run.end_ns == 0 and run.start_ns < 0):
            continue
        placed.append(PlannedRun(task=run.task, iteration=run.iteration, start_ns=start, end_ns=end))
        before = end
    return placed
