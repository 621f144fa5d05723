"""The verbs that make files of what a job has recorded: `trace` and `plot`."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.exits import USAGE, guarded, leave
from weft.cli.recordings.edited_file import reads_recording
from weft.cli.verbs.completion import complete_job
from weft.cli.verbs.options import STDOUT
from weft.client.result import to_json
from weft.transport.wire.frames import Message

if TYPE_CHECKING:
    from weft.metrics.recording.recording import Recording
    from weft.metrics.recording.window import Window
    from weft.plan.worker_profile import WorkerProfile

SVG_ITERATIONS = 2
GZIP_WBITS = 31  # zlib's number for the format of gzip
PICTURES = (".png", ".svg", ".pdf")

Json = Annotated[bool, typer.Option("--json", help="Say in JSON, on stdout, what has been written.")]
Source = Annotated[
    str,
    typer.Argument(
        metavar="JOB", autocompletion=complete_job, help="The job's id, or the path of a recording.msgpack."
    ),
]


@guarded
@reads_recording
def trace(
    job: Source,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Chrome trace events; - is stdout; FILE.gz: compressed."),
    ] = None,
    svg: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="A picture of the last iterations.")] = None,
    iterations: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The last N. Unset: all that are recorded, and 2 in the picture."),
    ] = None,
    profiled: Annotated[
        bool, typer.Option("--profiled", help="The iterations that were profiled, however long ago they ran.")
    ] = False,
    json: Json = False,
) -> None:
    """Write what each lane did when, beside what was planned, for Perfetto (ui.perfetto.dev) or as a picture.

    Works while the job runs and after its end; of a long job the newest iterations are recorded. Kernels and operators
    of a job that was asked to profile some iterations stand beside its lanes. JOB may also be the path of a
    recording.msgpack, with a slash in it or in this directory: then no daemon is needed.
    """
    if output is None and svg is None:
        leave(USAGE, "nothing to write: give -o trace.json (- is stdout), or --svg FILE, or both")
    if [output, svg, STDOUT if json else None].count(STDOUT) > 1:
        leave(USAGE, "only one of -o -, --svg - and --json can have stdout; give the others a file")
    if profiled and iterations is not None:
        leave(USAGE, "--profiled takes the iterations that were profiled; leave --iterations out")
    from weft.cli.recordings.recorded_job import find_recording, profiles_of, with_profiled

    recording, directory = find_recording(job)
    profiles = profiles_of(recording, directory)
    window = None
    if profiled:
        recording, window = with_profiled(recording, directory, profiles)
    written = {
        "trace": None if output is None else _write_trace(recording, directory, window, iterations, output, profiles),
        "svg": None if svg is None else _write_svg(recording, window, iterations or SVG_ITERATIONS, svg),
    }
    summary = {"job": recording.job, "attempt": recording.attempt, **written}
    if json:
        print(to_json(summary))
        return
    for name, file in written.items():
        if file is not None:
            where = "stdout" if file["path"] == STDOUT else file["path"]
            what = recording.span_label(*file["iterations"])
            print(f"{name}: {what} of {recording.job} in {where}", file=sys.stderr)


@guarded
@reads_recording
def plot(
    job: Source,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A .png, .svg or .pdf. Unset: JOB.png."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            "--tensorboard", metavar="DIR", help="Write event files to DIR/JOB instead (or as well, with -o)."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="With --tensorboard: until the job ends; Ctrl-C stops.")
    ] = False,
    json: Json = False,
) -> None:
    """Plot a job's loss, throughput, iteration time and stalls, or hand its numbers to TensorBoard.

    Needs an extra: weft[plots] for the picture, weft[tensorboard] for event files. JOB may also be the path of a
    recording.msgpack beside its metrics.jsonl: then no daemon is needed.
    """
    if follow and tensorboard is None:
        leave(USAGE, "--follow goes with --tensorboard DIR: a picture is drawn once")
    if output is not None and output.suffix not in PICTURES:
        leave(USAGE, f"-o {output}: the name must end in one of {', '.join(PICTURES)}")
    from weft.cli.recordings.recorded_job import find_job

    recorded = find_job(job)
    if follow and recorded.client is None:
        leave(USAGE, f"--follow needs a job's id, and {job} is a file")
    files: dict[str, Path | None] = {"picture": None, "events": None}
    if output is not None or tensorboard is None:
        from weft.cli.recordings.job_plot import write_plot

        files["picture"] = write_plot(recorded, output or Path(f"{recorded.job}.png"))
        if not json:
            print(f"picture: {files['picture']}", file=sys.stderr)
    if tensorboard is not None:
        from weft.cli.recordings.event_files import write_events

        files["events"] = write_events(recorded, tensorboard, follow=follow)
        if not json:
            print(f"events: {files['events']}; look at them with tensorboard --logdir {tensorboard}", file=sys.stderr)
    if json:
        print(to_json({"job": recorded.job, **{name: path and str(path) for name, path in files.items()}}))


def _write_trace(
    recording: Recording,
    directory: Path,
    window: Window | None,
    iterations: int | None,
    output: str,
    profiles: Sequence[WorkerProfile],
) -> Message:
    from weft.cli.recordings.recorded_job import step_facts, window_of
    from weft.metrics.views.trace import trace_json

    window = window or window_of(recording, iterations)
    _warn_of_profiles_before(recording, window, profiles)
    text = trace_json(recording, window, step_facts(recording, directory), profiles)
    parts: Iterable[bytes] = (part.encode() for part in text)
    return _written(window, output, _compressed(parts) if output.endswith(".gz") else parts)


def _warn_of_profiles_before(recording: Recording, window: Window, profiles: Sequence[WorkerProfile]) -> None:
    last = max((profile.last for profile in profiles), default=window.first)
    if last < window.first:
        text = f"iterations up to {recording.label(last)} were profiled, before these begin; --profiled shows them"
        print(text, file=sys.stderr)


def _write_svg(recording: Recording, window: Window | None, iterations: int, output: str) -> Message:
    from weft.cli.recordings.recorded_job import window_of
    from weft.metrics.views.window_svg import window_svg

    window = window or window_of(recording, iterations)
    return _written(window, output, [window_svg(recording, window).encode()])


def _written(window: Window, output: str, parts: Iterable[bytes]) -> Message:
    from weft.cli.recordings.whole_file import write_whole

    if output == STDOUT:
        num_bytes = sum(sys.stdout.buffer.write(part) for part in parts)
    else:
        num_bytes = write_whole(Path(output), parts)
    return {
        "path": output,
        "bytes": num_bytes,
        "iterations": [window.first, window.last],
        "seconds": (window.end_ns - window.start_ns) / 1e9,
    }


def _compressed(parts: Iterable[bytes]) -> Iterator[bytes]:
    compressor = zlib.compressobj(wbits=GZIP_WBITS)
    for part in parts:
        yield compressor.compress(part)
    yield compressor.flush()
