"""Event files: a job's numbers as TensorBoard reads them, from its `metrics.jsonl`. Needs the package tensorboard.

    DIR/JOB/events.out.tfevents.0.JOB.weft    one file for a job, written anew each time: nothing is there twice

The times of the events are reckoned back from the newest line, since lines say how long each step took, not when.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.exits import NO_SUCH_JOB, USAGE, leave
from weft.cli.recordings.recorded_job import RecordedJob, until
from weft.cli.recordings.whole_file import write_whole
from weft.metrics.recording.step_log import Step, StepLogError, StepLogReader, Validation

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

Entry = Step | Validation
FILE_VERSION = "brain.Event:2"  # what the first event of a file must say


def write_events(recorded: RecordedJob, directory: Path, *, follow: bool = False) -> Path:
    """The file. follow: go on until the job has ended. Leaves with a sentence where the package is not installed, or
    there is no step yet to write. Errors: OSError."""
    _check_installed()
    path = directory / recorded.job / f"events.out.tfevents.0.{recorded.job}.weft"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path.parent} cannot be made: {error.strerror}; give another --tensorboard DIR") from error
    try:
        if follow:
            _follow(recorded, path)
        else:
            entries = _read(StepLogReader(recorded.step_log_path))
            if not entries:
                leave(
                    NO_SUCH_JOB, f"{recorded.job} has no step in {recorded.step_log_path} yet; try again, or --follow"
                )
            buffer = io.BytesIO()
            _EventFile(buffer).add(entries, until(recorded))
            write_whole(path, [buffer.getvalue()])
    except StepLogError as error:
        leave(USAGE, str(error))
    return path


def _check_installed() -> None:
    try:
        import tensorboard  # noqa: F401
    except ModuleNotFoundError:
        leave(USAGE, "--tensorboard needs the package tensorboard; it comes with: pip install 'weft[tensorboard]'")


def _read(reader: StepLogReader) -> list[Entry] | None:
    """None where training has started over. Nothing where there is no file yet."""
    try:
        return reader.read()
    except FileNotFoundError:
        return []


def _follow(recorded: RecordedJob, path: Path) -> None:
    """Writes what is new at each of the daemon's progress events, and the rest at the job's end."""
    assert recorded.client is not None, "a job that is followed has a daemon"
    reader = StepLogReader(recorded.step_log_path)
    file = path.open("wb")
    try:
        events = _EventFile(file)
        for event in recorded.client.follow(recorded.job):
            if "progress" not in event and "result" not in event:
                continue
            entries = _read(reader)
            if entries is None:  # the job has begun again
                file.close()
                file = path.open("wb")
                events = _EventFile(file)
                entries = _read(reader) or []
            events.add(entries, until(recorded))
            file.flush()
    finally:
        file.close()


class _EventFile:
    def __init__(self, stream: BinaryIO) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Callable[..., Any] = Event
        self._summary: Any = Summary
        self._writer = RecordWriter(stream)
        self._begun = False

    def add(self, entries: Iterable[Entry], until_unix_seconds: float) -> None:
        """The last of the entries came at that time."""
        timed = _timed(list(entries), until_unix_seconds)
        for when, entry in timed:
            if not self._begun:
                self._begun = True
                self._writer.write(self._event(wall_time=when, file_version=FILE_VERSION).SerializeToString())
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in _scalars(entry)]
            event = self._event(wall_time=when, step=entry.step, summary=self._summary(value=values))
            self._writer.write(event.SerializeToString())


def _timed(entries: list[Entry], until_unix_seconds: float) -> list[tuple[float, Entry]]:
    timed = []
    when = until_unix_seconds
    for entry in reversed(entries):
        timed.append((when, entry))
        when -= entry.seconds or 0.0 if isinstance(entry, Step) else 0.0
    return timed[::-1]


def _scalars(entry: Entry) -> Iterator[tuple[str, float]]:
    if isinstance(entry, Validation):
        yield from ((f"validation/{name}", value) for name, value in entry.values.items() if value is not None)
        return
    found = {
        **entry.measured,
        "loss": entry.loss,
        "learning_rate": entry.lr,
        "grad_norm": entry.grad_norm,
        "iteration_seconds": entry.seconds,
        "samples_per_second": entry.samples / entry.seconds if entry.seconds else None,
        "epoch": float(entry.epoch),
    }
    yield from ((f"train/{name}", value) for name, value in found.items() if value is not None)
