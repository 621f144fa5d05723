"""Schedule text: what `strategy.schedule` may be: a name, or the grid that a file had whose name stood there."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from weft.spec.field_errors import SpecError

MEASURED = "measured"
DYNAMIC = "dynamic"
SCHEDULE_NAMES = (
    "model-parallel",
    "gpipe",
    "1f1b",
    "last-stage",
    "interleaved",
    "zero-bubble",
    "zero-bubble-v",
    MEASURED,  # made by the planner of what the passes of this model take
    DYNAMIC,  # by what is there as the job runs
)
STAGES_PER_WORKER = {"interleaved": 2, "zero-bubble-v": 2}  # 1 of other names; of the first another number may be given
SPLITTING = frozenset({"zero-bubble", "zero-bubble-v"})  # backwards in two parts, where there are several stages
GRID_SUFFIX = ".grid"  # of a file with a schedule, which is read where the spec is
GRID_FILE = "schedule.grid"  # in the run directory of a job whose order no name says
MAX_GRID_CHARS = 1 << 20  # as many as the largest plan's schedule has

_MAX_TITLE_CHARS = 80
_FROM_FILE = "# file: "  # the start of the last line of a grid that was read from one: lines keep their numbers


def is_grid(text: str) -> bool:
    """Whether it is a schedule as it stands in a file, and no name; then it has its own stages and microbatches."""
    return "\n" in text


def known_schedule(text: str) -> str:
    """As it is. Errors: ValueError, for what is neither."""
    if text in SCHEDULE_NAMES:
        return text
    if is_grid(text):
        if len(text) > MAX_GRID_CHARS:
            raise ValueError(f"a grid of {len(text)} characters is too long; write one of at most {MAX_GRID_CHARS}")
        return text
    if text.endswith(GRID_SUFFIX):
        raise ValueError(
            f"{text!r:.80} has not been read; give it in a job's TOML file, with --set or to weft.run, which read it"
        )
    close = difflib.get_close_matches(text.lower(), SCHEDULE_NAMES, n=1)
    known = f"did you mean {close[0]}?" if close else f"write {', '.join(SCHEDULE_NAMES)}, or a file NAME{GRID_SUFFIX}"
    raise ValueError(f"{text!r:.80} is no schedule; {known}")


def num_lines(text: str, num_stages: int, stages_per_worker: int | None) -> int:
    """How many workers have the stages of one replica. stages_per_worker: as given. A grid has a line for each."""
    if is_grid(text):
        return max(1, sum(bool(line.partition("#")[0].strip()) for line in text.splitlines()))
    return max(1, num_stages // (stages_per_worker or STAGES_PER_WORKER.get(text, 1)))


def why_not_stages(text: str, num_stages: int, stages_per_worker: int | None) -> str | None:
    """Why a named schedule has no grid of so many stages; None where it has. stages_per_worker: as given."""
    if stages_per_worker is not None and text != "interleaved":
        own = "a grid has its own" if is_grid(text) else f"{text!r} has {STAGES_PER_WORKER.get(text, 1)}"
        return f"stages_per_worker = {stages_per_worker} is of schedule = 'interleaved', and {own}; leave it out"
    each = stages_per_worker or STAGES_PER_WORKER.get(text, 1)
    if num_stages == 1 or num_stages % each == 0:
        return None
    other = f", or stages_per_worker = {num_stages}" if text == "interleaved" else ""
    return (
        f"schedule = {text!r} has {each} stages in each worker, and {num_stages} are no multiple of that; use stages = "
        f"{-(-num_stages // each) * each}{other}"
    )


def grid_file(text: str) -> str | None:
    """The name of the file that a grid was read from; None of one that was given as it is."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return last.removeprefix(_FROM_FILE) if last.startswith(_FROM_FILE) else None


def schedule_title(text: str) -> str:
    """For people: of a grid its file; of one from no file its first line, where that is a comment."""
    first, newline, _ = text.partition("\n")
    if not newline:
        return first
    if (file := grid_file(text)) is not None:
        return file[-_MAX_TITLE_CHARS:]
    return first.removeprefix("#").strip()[:_MAX_TITLE_CHARS] if first.startswith("#") else "a grid"


def read_grid_file(tables: dict[str, Any]) -> None:
    """Puts the text of the file that `strategy.schedule` names, if it names one, in its place, with the name behind it
    as a comment: whoever runs the job, now or again, needs no file. tables: of a spec; without its directory a path is
    relative to the working directory. Errors: SpecError, for one that cannot be read."""
    strategy = tables.get("strategy")
    name = strategy.get("schedule") if isinstance(strategy, dict) else None
    if not isinstance(strategy, dict) or not isinstance(name, str) or "\n" in name or not name.endswith(GRID_SUFFIX):
        return
    directory = str(tables.get("directory", ""))
    path, whose = Path(directory, name), "spec's" if directory else "working"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SpecError(
            f"strategy.schedule: {str(path)!r} cannot be read ({error.strerror}); the path is relative to the {whose} "
            "directory, and `weft schedule 1f1b --stages 2 --microbatches 4` prints a grid to begin with"
        ) from error
    except ValueError as error:  # not UTF-8; a NUL in the path
        raise SpecError(f"strategy.schedule: {str(path)!r} cannot be read ({error}); give a text file") from error
    shown = name if name.isprintable() else ascii(name)
    tables["strategy"] = strategy | {"schedule": f"{text.rstrip()}\n{_FROM_FILE}{shown}\n"}
