"""A window of a recording as a timeline: what happened, what was planned, the critical path underlined. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.metrics.accounts.accounting import NANOSECONDS
from weft.metrics.recording.critical_path import critical_path
from weft.metrics.recording.recording import RecordedTask, Recording
from weft.metrics.recording.window import Window, planned_runs
from weft.metrics.views.timeline import STALL, Bar, bar_label, timeline_svg
from weft.metrics.views.trace import in_order
from weft.plan.kinds import BUSY_MODES, FIRST_STALL, MODES, Kind
from weft.plan.rows import Row
from weft.quantities import duration


def window_svg(recording: Recording, window: Window) -> str:
    return _Picture(recording, window).svg()


class _Picture:
    def __init__(self, recording: Recording, window: Window) -> None:
        self._recording, self._window = recording, window
        self._mode_of_task = {
            row[1]: row[0] for rows in recording.rows.values() for row in rows if row[0] < FIRST_STALL
        }
        self._critical = {
            (step.lane, step.task, step.iteration) for step in critical_path(recording, window.start_ns, window.end_ns)
        }

    def svg(self) -> str:
        window = self._window
        rows = self._recording.rows_within(window.start_ns, window.end_ns)
        planned = planned_runs(self._recording, window)
        return timeline_svg(
            {lane: list(self._bars(lane, rows[lane])) for lane in in_order(list(rows))},
            title=self._title(),
            seconds=(0.0, (window.end_ns - window.start_ns) / NANOSECONDS),
            planned={
                lane: [
                    self._task_bar(self._recording.tasks[run.task], run.iteration, run.start_ns, run.end_ns)
                    for run in runs
                ]
                for lane, runs in planned.items()
            },
        )

    def _title(self) -> str:
        window, facts = self._window, self._recording.facts
        mean = (window.end_ns - window.start_ns) / window.num_iterations / 1e9
        title = f"{self._recording.job}: {duration(mean)} for an iteration"
        predicted = facts.get("predicted_iteration_seconds")
        return title + (f", {duration(predicted)} planned" if predicted else "")

    def _bars(self, lane: str, rows: Sequence[Row]) -> Iterator[Bar]:
        begin, tasks = self._window.start_ns, self._recording.tasks
        for mode, number, iteration, waited_for, start, end in rows:
            if mode < FIRST_STALL and number >= 0:
                critical = (lane, number, iteration) in self._critical
                yield self._task_bar(tasks[number], iteration, start - begin, end - begin, critical=critical)
            else:
                cause = f"stall for {MODES[mode].removeprefix('stall_')}"
                if waited_for >= 0:
                    cause += f": waits for {tasks[waited_for].name} on {tasks[waited_for].lane}"
                yield Bar(
                    start=(start - begin) / NANOSECONDS,
                    end=(end - begin) / NANOSECONDS,
                    kind=STALL,
                    label="",
                    iteration=iteration,
                    detail=cause,
                    moment=self._recording.label(iteration),
                )

    def _task_bar(
        self, task: RecordedTask, iteration: int, start_ns: int, end_ns: int, *, critical: bool = False
    ) -> Bar:
        return Bar(
            start=start_ns / NANOSECONDS,
            end=end_ns / NANOSECONDS,
            kind=BUSY_MODES[self._mode_of_task.get(task.id, 0)],
            label=bar_label(Kind(task.kind), task.microbatch, task.bucket),
            iteration=iteration,
            detail=task.name,
            moment=self._recording.label(iteration),
            critical=critical,
        )
