"""JobSpec: what a user submits, validated, and the sentences that say what is wrong with it.

A spec is a TOML file, a Python file with the rest beside it, or the same structure in Python. It is frozen once built,
and it is plain data: it travels over the socket as the mapping that `JobSpec.to_wire` returns and is built again on the
other side, by the same rules.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from weft.spec.field_errors import SpecError as SpecError
from weft.spec.field_errors import explain, shown, shown_key
from weft.spec.schedule_text import read_grid_file
from weft.spec.section import MAX_COUNT, Section
from weft.spec.source import MAX_ARGS_DEPTH as MAX_ARGS_DEPTH
from weft.spec.source import check_utf8, read_source, working_directory
from weft.spec.strategy import TRAINED_AXES
from weft.spec.strategy import Strategy as Strategy

MAX_ARGS_INTEGER = 2**63  # what msgpack and SQLite carry
MAX_HANG_SECONDS = 1e6  # some eleven days; arbitrary
MAX_KEPT = 1000  # checkpoints; arbitrary
_UNITS = {  # names of units -> (how many, of which)
    ("step", "steps"): (1.0, "steps"),
    ("epoch", "epochs"): (1.0, "epochs"),
    ("s", "sec", "second", "seconds"): (1.0, "seconds"),
    ("min", "minute", "minutes"): (60.0, "seconds"),
    ("h", "hour", "hours"): (3600.0, "seconds"),
}
Mode = Literal["min", "max"]
MAX_PROFILED_ITERATIONS = 100  # each event of theirs is in a worker's memory until the last one is over


class JobSection(Section):
    """What to train: the entry point, its arguments and how long."""

    entry: str = Field(
        description="FILE.py:FUNCTION, the file relative to the spec's own directory", examples=["digits.py:workload"]
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the entry function")
    epochs: int | None = Field(
        default=None, ge=1, le=MAX_COUNT, description="passes over the training data; or give steps"
    )
    steps: int | None = Field(default=None, ge=1, le=MAX_COUNT, description="training iterations; or give epochs")
    steps_per_epoch: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="what an epoch is in place of one pass over the training data: so many steps, pass after pass",
    )
    batch_size: int = Field(ge=1, le=MAX_COUNT, description="samples in one global batch", examples=[100])
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the model, the data order and dropout")
    resume_from: str | None = Field(
        default=None,
        description="a checkpoint to go on from, or a run directory, whose newest it is then; relative to the spec's "
        "own directory",
    )
    priority: int = Field(default=0, ge=-1000, le=1000, description="higher runs first; equal ones in submit order")
    mode: Literal["train", "forward"] = Field(
        default="train", description="forward only runs the model over the data: no gradients, no updates"
    )

    on_hang: Literal["restart", "notify"] = Field(
        default="restart",
        description="where a worker hangs: restart replaces it, and the job goes on from its newest snapshot; notify "
        "tells it in the log and by a metric, and does nothing",
    )
    hang_seconds: float = Field(
        default=60.0,
        ge=1.0,
        le=MAX_HANG_SECONDS,
        description="the least that nothing of the job comes to an end before it is said to hang; ten times that for "
        "what it does for the first time, and ten times the slowest of its kind more for everything else",
    )

    @field_validator("entry")
    @classmethod
    def _entry_has_two_parts(cls, value: str) -> str:
        path, colon, function = check_utf8(value).rpartition(":")
        if not colon or not path.endswith(".py") or not function.isidentifier() or not value.isprintable():
            raise ValueError(f"{value!r} is not FILE.py:FUNCTION; write for example 'digits.py:workload'")
        return value

    @field_validator("resume_from")
    @classmethod
    def _resume_from_is_a_path(cls, value: str | None) -> str | None:
        if value is not None and (not check_utf8(value) or "\0" in value):
            raise ValueError(f"{value!r:.80} is no path; give a checkpoint, or the run directory of a job that has one")
        return value

    @field_validator("args")
    @classmethod
    def _args_are_plain_data(cls, value: dict[str, Any]) -> dict[str, Any]:
        _check_plain(value, "args", MAX_ARGS_DEPTH)
        return value

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs is None and self.steps is None:
            raise ValueError("neither epochs nor steps is given; write one of them, for example epochs = 10")
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs = {self.epochs} and steps = {self.steps} are both given; leave one of them out")
        return self

    @property
    def given_steps(self) -> int | None:
        """How many the job has, where that follows from the spec alone."""
        by_epochs = None if self.steps_per_epoch is None else (self.epochs or 0) * self.steps_per_epoch
        return self.steps or by_epochs


class ProfileSection(Section):
    """Kernels and copies, or operators, of some iterations: torch.profiler beside the lanes in `weft trace`."""

    first: int = Field(default=10, ge=0, le=MAX_COUNT, description="the iteration that it begins with, from 0")
    iterations: int = Field(default=3, ge=1, le=MAX_PROFILED_ITERATIONS, description="how many")


class CheckpointSection(Section):
    """Checkpoints on the disk, written beside training into the run directory."""

    every: str | None = Field(
        default=None,
        description="the time between two: a number of steps, epochs, s, min or h; or give keep_best alone",
        examples=["500 steps", "10 min"],
    )
    keep: int = Field(default=2, ge=1, le=MAX_KEPT, description="how many stay, the newest")
    keep_best: str | None = Field(
        default=None, description="a value that validations report: the checkpoint with the best one stays, too"
    )
    best: Mode | None = Field(default=None, description="which is better; unset: min of loss, max of any other")

    @field_validator("every")
    @classmethod
    def _every_is_an_interval(cls, value: str | None) -> str | None:
        if value is not None:
            _interval(value)
        return value

    @field_validator("keep_best")
    @classmethod
    def _keep_best_is_a_name(cls, value: str | None) -> str | None:
        return _name_of_metric(value)

    @model_validator(mode="after")
    def _has_an_occasion(self) -> Self:
        if self.every is None and self.keep_best is None:
            raise ValueError('neither every nor keep_best is given; write one of them, for example every = "1 epoch"')
        return self

    @property
    def interval(self) -> tuple[float, str] | None:
        """(how many, of "steps", "epochs" or "seconds")"""
        return None if self.every is None else _interval(self.every)


class StopSection(Section):
    """When training ends before its last step: a value no longer improves, or it has had its time."""

    metric: str | None = Field(
        default=None, description="a value that epochs report, such as loss or accuracy; or give max_time alone"
    )
    mode: Mode | None = Field(default=None, description="which is better; unset: min of loss, max of any other")
    patience: int = Field(default=3, ge=1, le=MAX_COUNT, description="epochs in a row without an improvement")
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="by how much it has to be better")
    max_time: str | None = Field(
        default=None, description="of training; then it is given no further step: s, min or h", examples=["2 h"]
    )

    @field_validator("metric")
    @classmethod
    def _metric_is_a_name(cls, value: str | None) -> str | None:
        return _name_of_metric(value)

    @field_validator("max_time")
    @classmethod
    def _max_time_is_a_time(cls, value: str | None) -> str | None:
        if value is not None and _interval(value)[1] != "seconds":
            raise ValueError(f"{value!r:.80} is no time; write for example '30 s', '10 min' or '2 h'")
        return value

    @model_validator(mode="after")
    def _has_a_reason(self) -> Self:
        if self.metric is None and self.max_time is None:
            raise ValueError('neither metric nor max_time is given; write one of them, for example metric = "loss"')
        return self

    @property
    def max_seconds(self) -> float:
        return math.inf if self.max_time is None else _interval(self.max_time)[0]


def mode_of(metric: str, given: Mode | None) -> Mode:
    """Which of its values is better."""
    return given or ("min" if metric == "loss" else "max")


def _name_of_metric(value: str | None) -> str | None:
    if value is not None and not (value and value.isprintable() and is_unicode(value)):
        raise ValueError(f"{value!r:.80} is no name; write for example 'accuracy' or 'loss'")
    return value


def _interval(text: str) -> tuple[float, str]:
    number, _, unit = text.strip().partition(" ")
    found = next((found for names, found in _UNITS.items() if unit.strip() in names), None)
    try:
        count = float(number)
    except ValueError:
        count = 0.0
    if found is None or not 0 < count <= MAX_COUNT or (found[1] != "seconds" and count != int(count)):
        raise ValueError(
            f"{text!r:.80} is no interval; write for example '500 steps', '1 epoch', '30 s', '10 min' or '1 h'"
        )
    return count * found[0], found[1]


class JobSpec(Section):
    """One training run: tables `[job]`, `[strategy]`, `[profile]`, `[checkpoint]`, `[stop]`, and the directory that
    `entry` is relative to.

    Errors: `SpecError`, from the constructor as from `load` and `parse`.
    """

    job: JobSection
    strategy: Strategy = Field(default_factory=Strategy)
    profile: ProfileSection | None = Field(default=None, description="unset: nothing is profiled")
    checkpoint: CheckpointSection | None = Field(
        default=None, description="unset: none while the job runs; one when it is cancelled or the daemon stops"
    )
    stop: StopSection | None = Field(default=None, description="unset: training goes on to its last step")
    plan_for: Literal["time", "memory"] | None = Field(
        default=None, description="of weft plan: the job is planned for one of both, and ends; unset: it is trained"
    )
    by_default: bool | None = Field(
        default=None, description="of weft run: the spec has no [strategy], so preset = 'auto' is nobody's wish"
    )
    directory: str = Field(default_factory=working_directory, description="absolute; in a file: relative to it")

    @field_validator("directory")
    @classmethod
    def _directory_is_absolute(cls, value: str) -> str:
        if not check_utf8(value).startswith("/") or "\0" in value:
            raise ValueError(f"{value!r:.80} is not absolute; leave it out, and load sets it to the spec's own")
        return value

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
        """Reads what `weft.spec.source` can: a TOML spec, or a function of a Python file with the rest as overrides.

        overrides: `key.path=value` with a TOML value (a bare word is taken as a string). A preset among them replaces
        the file's strategy, see `load_replacing`; steps or epochs among them replace the file's length.
        """
        return cls.load_replacing(path, overrides)[0]

    @classmethod
    def load_replacing(cls, path: str | Path, overrides: Sequence[str] = ()) -> tuple[JobSpec, tuple[str, ...]]:
        """As `load`, and the axes of the file that a preset among the overrides has replaced by other values.

        It replaces all but TRAINED_AXES: a file's `stages` belong to the strategy that the file had in mind, and many
        a preset could not be beside them. Axes among the overrides count before the preset's row.
        """
        tables = read_source(path)
        replaced = _take_strategy(tables) if any(key_of(each) == _PRESET for each in overrides) else {}
        _take_length(tables, overrides)
        for override in overrides:
            apply_override(tables, override)
        read_grid_file(tables)
        spec = cls.parse(tables, source=str(path))
        now = spec.to_wire()["strategy"]
        given = {key[1] for key in map(key_of, overrides) if key[0] == "strategy" and len(key) > 1} - {"preset"}
        return spec, tuple(axis for axis, value in replaced.items() if axis not in given and now.get(axis) != value)

    @classmethod
    def parse(cls, tables: Mapping[str, Any], source: str = "job spec") -> JobSpec:
        """Validates a nested mapping; `source` names it in errors."""
        if not isinstance(tables, Mapping):
            raise SpecError(f"{source}: {shown(tables)} is no table of keys and values; give the [job] table at least")
        try:
            return cls.model_validate(dict(tables))
        except ValidationError as error:
            raise SpecError(explain(error, cls, source)) from None

    def to_wire(self) -> dict[str, Any]:
        """The spec as plain data, without unset fields."""
        return self.model_dump(mode="python", exclude_none=True)

    def on(self, num_gpus: int) -> Self:
        """On a machine with so many GPUs, see `Strategy.on`."""
        return self.model_copy(update={"strategy": self.strategy.on(num_gpus)})

    @property
    def entry_file(self) -> Path:
        """Absolute path of the Python file that `entry` names."""
        return Path(self.directory, self.job.entry.rpartition(":")[0])

    @property
    def entry_function(self) -> str:
        return self.job.entry.rpartition(":")[2]

    def check_files(self) -> None:
        """Raises SpecError if the entry's file is not there: cheap, so the client does it before submitting."""
        if not _is_file(self.entry_file):
            raise SpecError(
                f"job.entry: {str(self.entry_file)!r} is not a file; "
                "the path in entry is relative to the spec's directory"
            )


_PRESET = ("strategy", "preset")
_LENGTHS = {("job", "epochs"), ("job", "steps")}


def key_of(override: str) -> tuple[str, ...]:
    """What an override sets: the names of the tables, then of the key."""
    return tuple(part.strip() for part in override.partition("=")[0].split("."))


def _take_strategy(tables: dict[str, Any]) -> dict[str, Any]:
    """Takes the strategy out of a file's tables, and returns it; what it says of what is trained stays."""
    table = tables.get("strategy")
    if not isinstance(table, dict):
        return {}
    tables["strategy"] = {axis: value for axis, value in table.items() if axis in TRAINED_AXES}
    return {axis: value for axis, value in table.items() if axis not in TRAINED_AXES}


def _take_length(tables: dict[str, Any], overrides: Sequence[str]) -> None:
    """Takes a file's length out of its tables where an override gives one: epochs beside the file's steps are no way
    to say both."""
    table = tables.get("job")
    if isinstance(table, dict) and not _LENGTHS.isdisjoint(map(key_of, overrides)):
        tables["job"] = {key: value for key, value in table.items() if ("job", key) not in _LENGTHS}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a directory that may not be searched
        return False


def is_unicode(text: str) -> bool:
    """No lone surrogates, which no encoding takes."""
    return text.isascii() or text == text.encode("utf-8", "replace").decode()


def _check_plain(value: Any, where: str, deeper: int) -> None:
    """Raises ValueError for what JSON and msgpack would not bring to the worker as it is."""
    match value:
        case None | bool() | float():
            return
        case int() if -MAX_ARGS_INTEGER <= value < MAX_ARGS_INTEGER:
            return
        case str() if is_unicode(value):
            return
        case dict() | list() if deeper == 0:
            raise ValueError(f"{where} is nested too deep; at most {MAX_ARGS_DEPTH} levels are taken")
        case dict():
            for key, part in value.items():
                if not isinstance(key, str):
                    raise ValueError(f"{where}: the key {shown(key)} is no text; write it in quotes")
                _check_plain(key, f"{where}'s key {key!r:.80}", deeper)
                _check_plain(part, f"{where}.{shown_key(key)}", deeper - 1)
        case list():
            for number, part in enumerate(value):
                _check_plain(part, f"{where}.{number}", deeper - 1)
        case int():
            raise ValueError(f"{where} does not fit 64 bits; write it as a string or a float")
        case _:
            raise ValueError(
                f"{where} = {shown(value)} cannot be handed on; write text, numbers, booleans, lists and tables, "
                "a date as text"
            )


def apply_override(tables: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise SpecError(f"--set {override!r}: write key.path=value, for example strategy.stages=2")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError:
        raise SpecError(f"--set {key}: nested too deep; at most {MAX_ARGS_DEPTH} levels are taken") from None
    table = tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise SpecError(f"--set {override!r:.80}: {part} is no table; give a key that stands in a table")
    table[parts[-1]] = value
