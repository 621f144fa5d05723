"""Follower: shows a job's log and its progress as they come, and gives back its result.

On a terminal the progress is one bar that is drawn again with each event, with as much beside it as fits; in a notebook
one line that is written over; elsewhere one line for each interval. The log is passed on unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from weft.client.console import make_console, metrics, progress_line, reported, whole_stream
from weft.quantities import duration, number, percent
from weft.transport.wire.frames import Message

MAX_PARTIAL_CHARS = 8192  # arbitrary: some hundred terminal lines
MIN_BAR_CELLS = 12  # a bar that is shorter shows no progress
NOTEBOOK = "ipykernel"  # the package of the streams that a notebook shows
NOTEBOOK_CELLS = 100  # of a line in a notebook; arbitrary, one that is longer is broken in two
BAR_CELLS = 24  # arbitrary, of the bar in that line


def follow(events: Iterable[Message], log: TextIO, progress: TextIO | None = None) -> Message:
    """Shows events until the last one, which is the result. log, progress: where each of the two goes; unset: stderr.

    The result has `error_told` where the log has told its `error`: nobody wants to read a traceback twice.
    """
    result: Message = {}
    validation: Message | None = None
    told_last = ""
    with _view(whole_stream(log), whole_stream(progress or sys.stderr)) as view:
        for event in events:
            if "log" in event:
                view.write(event["log"])
                told_last = (told_last + event["log"])[-MAX_PARTIAL_CHARS:]
            elif "notice" in event:
                view.note(event["notice"])
            elif "progress" in event:
                before, validation = validation, event["progress"]["validation"]
                view.advance(event["progress"] | {"validation": None if validation == before else validation})
            elif "result" in event:
                result = event["result"]
                view.end(result)
    lines = (result.get("error") or "").rstrip().splitlines()
    return result | {"error_told": True} if lines and lines[-1][-MAX_PARTIAL_CHARS // 2 :] in told_last else result


def _view(log: TextIO, progress: TextIO) -> _Lines | _Bar:
    if type(progress).__module__.startswith(NOTEBOOK):
        return _OneLine(log, progress)
    console = make_console(progress)
    return _Lines(log, progress) if not console.is_terminal or console.is_dumb_terminal else _Bar(console, log)


class _Lines:
    """One line for each interval."""

    def __init__(self, log: TextIO, progress: TextIO) -> None:
        self._log = log
        self._progress = progress

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, text: str) -> None:
        self._log.write(text)
        self._log.flush()

    def note(self, text: str) -> None:
        print(f"weft: {text}", file=self._progress, flush=True)

    def advance(self, progress: Message) -> None:
        print(progress_line(progress), file=self._progress, flush=True)

    def end(self, result: Message) -> None:
        """What stays of it is of the job's end, and not of a second before."""


class _OneLine(_Lines):
    """A line that is written over with each interval: a notebook keeps everything else. The log is above it."""

    _cells = 0  # of the line as it stands
    _steps = 0  # of the job

    def __exit__(self, *_: object) -> None:
        if self._cells:
            print(file=self._progress, flush=True)

    def write(self, text: str) -> None:
        self._over("")
        super().write(text)

    def note(self, text: str) -> None:
        self._over("")
        super().note(text)

    def advance(self, progress: Message) -> None:
        self._steps = progress["steps"]
        bar = self._bar(progress["step"])
        self._over(f"{bar} {bar_text(progress, NOTEBOOK_CELLS - len(bar) - 1)}")

    def end(self, result: Message) -> None:
        if self._steps and result.get("steps") is not None:
            self._over(f"{self._bar(result['steps'])} loss {number(result['loss'])}")

    def _bar(self, step: int) -> str:
        done = round(BAR_CELLS * step / max(1, self._steps))
        return f"step {step}/{self._steps} {'━' * done}{' ' * (BAR_CELLS - done)}"

    def _over(self, text: str) -> None:
        """Writes text in the line's place, and leaves the cursor behind it; at its begin where that is empty."""
        before, self._cells = self._cells, len(text)
        blank = "\r" + " " * before + "\r" if before else ""
        self._progress.write(blank + text)
        self._progress.flush()


class _Bar:
    """A bar at the foot of the terminal, with the log above it."""

    def __init__(self, console: Console, log: TextIO) -> None:
        self._log = log
        self._partial = ""  # of the log: a line that has not ended yet would be drawn over by the bar
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> _Bar:
        self._bar.start()
        self._bar.console.show_cursor(True)  # rich hides it, and who is stopped, killed or quit leaves it so
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._log.write(self._partial)

    def write(self, text: str) -> None:
        if not self._log.isatty():
            self._log.write(text)
            self._log.flush()
            return
        lines, newline, self._partial = (self._partial + text).rpartition("\n")
        if len(self._partial) > MAX_PARTIAL_CHARS:
            lines, newline, self._partial = lines + newline + self._partial, "\n", ""
        if newline:
            self._bar.console.print(Text.from_ansi(lines))

    def note(self, text: str) -> None:
        self._bar.console.print(Text(f"weft: {text}"))

    def advance(self, progress: Message) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=progress["steps"], text="")
        if progress["validation"] and not self._log.isatty():  # otherwise the log has said so above the bar
            self._bar.console.print(f"validation {metrics(progress['validation'])}")
        cells = self._bar.console.width - len(f"step {progress['step']}/{progress['steps']}") - MIN_BAR_CELLS - 2
        self._bar.update(self._task, completed=progress["step"], text=bar_text(progress, cells), refresh=True)

    def end(self, result: Message) -> None:
        if self._task is not None and result.get("steps") is not None:
            self._bar.update(self._task, completed=result["steps"], text=f"loss {number(result['loss'])}", refresh=True)


def bar_text(progress: Message, cells: int) -> str:
    """What stands beside the bar: of what a line of progress tells, as much as fits into so many cells."""
    parts = [
        f"ETA {duration(progress['eta_seconds'])}",
        f"loss {number(progress['loss'])}",
        *reported(progress),
        f"{number(progress['samples_per_second'])} samples/s",
        f"stall {percent(progress['stall_percent'])}",
        f"data {percent(progress['data_percent'])}",
        f"overlap {percent(progress['overlap_percent'])}",
        f"lr {number(progress['lr'])}",
        f"grad norm {number(progress['grad_norm'])}",
    ]
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 2 + len(part) > cells:
            break
        text = f"{text}  {part}"
    return text
