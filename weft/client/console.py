"""Console: what is told of a job while its user looks on, in numbers and sentences for people.

Colour and bars are for terminals only (and NO_COLOR stops colour there too); what goes into a pipe or a file is plain
text of full width. Nothing that comes from a job is read as markup.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, TextIO, cast

from rich.console import Console

from weft.quantities import duration, number, percent
from weft.transport.wire.frames import Message

PIPE_WIDTH = 10_000  # columns; a table in a pipe is as wide as it needs to be, and never cut


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Called while the stream's BrokenPipeError is handled. It passes, where rich would end the process with 1."""
        raise


class _Written(io.TextIOBase):
    """On what a script has put in the place of a stream, and which may have no more than `write`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if hasattr(self._stream, "flush"):
            self._stream.flush()


def whole_stream(stream: TextIO) -> TextIO:
    """The same where it has all that is asked of a stream here; else one on it, that is no terminal."""
    return stream if hasattr(stream, "isatty") and hasattr(stream, "flush") else cast("TextIO", _Written(stream))


def make_console(stream: TextIO) -> Console:
    """A console on the stream: a terminal's features only on a terminal. Errors: those of the stream."""
    stream = whole_stream(stream)
    terminal = stream.isatty()
    return _Console(
        file=stream,
        force_terminal=terminal,
        width=None if terminal else PIPE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
    )


def metrics(values: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in (values or {}).items())


def reported(progress: Message) -> list[str]:
    """What the step tells beside the loss."""
    return [f"{name} {number(value)}" for name, value in progress.get("measured", {}).items()]


def progress_line(progress: Message) -> str:
    """One interval of training: the line that a follower prints where there is no terminal."""
    parts = [
        f"step {progress['step']}/{progress['steps']}",
        f"epoch {progress['epoch'] + 1}",
        f"loss {number(progress['loss'])}",
        *reported(progress),
        f"lr {number(progress['lr'])}",
        f"grad norm {number(progress['grad_norm'])}",
        f"{number(progress['samples_per_second'])} samples/s",
        f"data {percent(progress['data_percent'])}",
        f"stall {percent(progress['stall_percent'])}",
        f"overlap {percent(progress['overlap_percent'])}",
        f"ETA {duration(progress['eta_seconds'])}",
    ]
    if progress["validation"]:
        parts.append(f"validation {metrics(progress['validation'])}")
    return "  ".join(parts)


def reason_text(job: Message) -> str:
    """Why it ended as it did: the reason, and the name of the exception that the user's code raised."""
    reason = None if job["reason"] == job["state"] else job["reason"]  # "cancelled" says all
    return " ".join(filter(None, (reason, job.get("exception"))))


def ended_sentence(result: Message) -> str:
    """How a job ended, as `weft run` and `weft.run` say it: digits-1 failed (user-error ValueError) after 3.2 s."""
    reason = f" ({told})" if (told := reason_text(result)) else ""
    stopped = f"; {result['stopped']}" if result.get("stopped") else ""
    return f"{result['job']} {result['state']}{reason} after {duration(result['seconds'])}{stopped}"
