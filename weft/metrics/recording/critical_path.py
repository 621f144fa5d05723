"""The critical path of a recorded window: the chain of tasks and waits that its length is made of. Pure.

Followed backwards from the task that ended last. Before a task its lane either was busy, with the task before it, or
waited for another lane's, which then goes on:

    cpu-1   ▕ F0 ▏░░ gradient ░░▕ B0 ▏▕ U ▏          path: ... F0 (cpu-0), F0 (cpu-1), B1 → B0 → U
    cpu-0   ▕ F0 ▏▕ F1 ▏...            ▲ from B(1,0)

What lies between the end of one step and the beginning of the next (a wake-up, a dispatch) is the later one's `gap`.
Every instant of the window is in exactly one step or gap, so their sum is the window.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from weft.metrics.recording.recording import Recording
from weft.plan.kinds import FIRST_STALL
from weft.plan.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStep:
    """One task on the path; the part of it that is on the path, and the nanoseconds that passed before it began."""

    task: int
    iteration: int
    lane: str
    mode: int
    start_ns: int
    end_ns: int
    gap_ns: int


def critical_path(recording: Recording, start_ns: int, end_ns: int) -> list[PathStep]:
    """The steps in order of time, from a window of the recording; [] where nothing ran in it."""
    return _Walk(recording, start_ns, end_ns).steps()


class _Walk:
    def __init__(self, recording: Recording, start_ns: int, end_ns: int) -> None:
        self._start, self._end = start_ns, end_ns
        self._lane_of = {task.id: task.lane for task in recording.tasks}
        self._rows = recording.rows
        self._ends = {lane: [row[5] for row in rows] for lane, rows in self._rows.items()}
        self._distances: dict[tuple[int, int], set[int]] = {}
        for edge in recording.edges:
            self._distances.setdefault((edge.source, edge.target), set()).add(edge.distance)

    def steps(self) -> list[PathStep]:
        steps: list[PathStep] = []
        at, time = self._last(), self._end
        while at is not None and time > self._start:
            lane, index = at
            mode, task, iteration, _, start, end = self._rows[lane][index]
            end = max(min(end, time), self._start)
            if steps:
                steps[-1] = replace(steps[-1], gap_ns=time - end)
            time = max(min(start, end), self._start)
            if end == self._start:
                break
            step = PathStep(task=task, iteration=iteration, lane=lane, mode=mode, start_ns=time, end_ns=end, gap_ns=0)
            steps.append(step)
            at = self._before(lane, index)
        if steps and time > self._start:
            steps[-1] = replace(steps[-1], gap_ns=time - self._start)
        return steps[::-1]

    def _last(self) -> tuple[str, int] | None:
        """The task that ends last within the window."""
        found: list[tuple[int, str, int]] = []
        for lane, rows in self._rows.items():
            index = self._busy_before(rows, bisect_right(self._ends[lane], self._end))
            if index is not None and rows[index][5] > self._start:
                found.append((rows[index][5], lane, index))
        return max(found)[1:] if found else None

    def _before(self, lane: str, index: int) -> tuple[str, int] | None:
        """What the task had to wait for last: another lane's task, or the one before it in its own lane."""
        rows = self._rows[lane]
        for before in range(index - 1, -1, -1):
            if rows[before][0] < FIRST_STALL:
                return lane, before
            source = rows[before][3]
            if source >= 0 and (found := self._run_of(source, rows[before])) is not None:
                return found
        return None

    def _run_of(self, source: int, stall: Row) -> tuple[str, int] | None:
        """The run of a task that ended a stall. A milestone is posted from inside another task: then that one's.

        So while a lane waits for a milestone, the milestone's own run of the iteration before may lie in between.
        """
        lane = self._lane_of[source]
        rows = self._rows[lane]
        _, target, iteration, _, began, ended = stall
        wanted = {iteration - distance for distance in self._distances.get((source, target), ())}
        inside = None
        for index in range(bisect_right(self._ends[lane], began), len(rows)):
            mode, task, of, _, start, _ = rows[index]
            if start >= ended:
                break
            if mode < FIRST_STALL:
                if task == source and of in wanted:
                    return lane, index
                inside = lane, index
        return inside

    @staticmethod
    def _busy_before(rows: list[Row], stop: int) -> int | None:
        return next((index for index in range(stop - 1, -1, -1) if rows[index][0] < FIRST_STALL), None)
