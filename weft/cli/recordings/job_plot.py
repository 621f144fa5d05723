"""The picture of a job: what `weft plot` draws, and where it puts it."""

from __future__ import annotations

from pathlib import Path

from weft.cli.exits import NO_SUCH_JOB, USAGE, leave
from weft.cli.recordings.recorded_job import RecordedJob, step_log, step_numbers
from weft.cli.recordings.whole_file import write_whole


def write_plot(recorded: RecordedJob, output: Path) -> Path:
    """Leaves with a sentence without matplotlib, or without a step. Errors: OSError."""
    try:
        from weft.metrics.views.plot import StepStalls, plot
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        leave(USAGE, "weft plot needs matplotlib, which is not installed; it comes with: pip install 'weft[plots]'")
    from weft.metrics.recording.stall_shares import stall_shares

    log = step_log(recorded.directory)
    if not log.steps:
        leave(NO_SUCH_JOB, f"{recorded.job} has no training step in {recorded.step_log_path}; there is nothing to plot")
    stalls = []
    if recorded.recording is not None:
        numbers = step_numbers(recorded.recording)
        stalls = [
            StepStalls(step=numbers[each.iteration], seconds=each.seconds, shares=each.shares)
            for each in stall_shares(recorded.recording)
            if each.iteration in numbers
        ]
    picture = plot(
        log,
        title=recorded.job,
        limit_seconds=recorded.limit_seconds,
        stalls=stalls,
        picture_format=output.suffix.removeprefix("."),
    )
    write_whole(output, [picture])
    return output
