"""What a worker says: each message, its fields, their types and their bounds. Pure.

A worker's process runs the job's code, which shares its end of the link and may write there whatever it likes. So what
comes from there is a stranger's, though it is ours that should speak: it is checked here, once, before any part of the
daemon looks at it. What is not as it stands below is `Garbled`. What a field may mean, such as the name of a job, is
the business of weft/scheduler/daemon/hearing.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import AllowInfNan, ConfigDict, Field, Strict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from weft.transport.wire.frames import Message

MAX_WHOLE = 1 << 53  # of counts and bytes: what a float holds exactly, and above all that any machine has
MAX_SECONDS = 1e9  # some thirty years
DIGEST_BYTES = 16  # of what a task has made: no two things have the same
MAX_FILES = 1 << 16  # of a job's code; arbitrary: many times what any library has
MAX_DIMENSIONS = 64  # of a tensor: torch's own limit

_MESSAGE = ConfigDict(strict=True, extra="forbid")

_Whole = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS), AllowInfNan(False)]
_Rate = Annotated[float, Field(gt=0), AllowInfNan(False)]
_Attempt = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
_ExitCode = Annotated[int, Field(ge=1, le=255)]
_Dimensions = Annotated[list[_Whole], Field(max_length=MAX_DIMENSIONS)]
_Shapes = list[Annotated[tuple[_Whole, _Dimensions], Strict(False)]]  # msgpack makes lists of tuples
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_CutProblem = Annotated[tuple[_Whole, str], Strict(False)]
_Given = Annotated[tuple[_Whole, str], Strict(False)]
_Names = Annotated[tuple[str, str], Strict(False)]
_UnitSeconds = Annotated[tuple[_Seconds, _Seconds, _Seconds, _Seconds], Strict(False)]
_StateEntry = Annotated[
    tuple[str, Literal["elements", "tensor", "int", "float", "bool"], str, _Whole],
    Strict(False),
]
_Reason = Literal[
    "code-changed",
    "corrupted",
    "internal",
    "invalid-plan",
    "invalid-workload",
    "non-finite-loss",
    "out-of-memory",
    "run-directory",
    "shared-memory",
    "user-error",
]


class Garbled(Exception):
    """What no worker sends. The text says what is wrong with it."""


@with_config(_MESSAGE)
class _Joined(TypedDict):
    type: str
    link_bytes_per_second: _Rate | None
    device_bytes: _Whole | None
    probe_seconds: _Seconds | None


@with_config(_MESSAGE)
class _OfJob(TypedDict):
    type: str
    job: str
    attempt: _Attempt


@with_config(_MESSAGE)
class _Unit(TypedDict):
    name: str
    parameter_bytes: _Whole
    buffer_bytes: _Whole
    forward_seconds: _Seconds
    backward_seconds: _Seconds
    tied_to: list[_Whole]
    tied_by: NotRequired[list[str]]
    kind: str
    in_place: bool
    state: NotRequired[list[str]]
    counts: NotRequired[list[str]]
    repeated: NotRequired[list[str]]
    given: NotRequired[list[_Given]]
    ends: NotRequired[list[str]]
    late: NotRequired[list[str]]
    instead: NotRequired[list[_Names]]
    carries_state: bool
    backward_changes: NotRequired[str | None]
    kept_bytes: NotRequired[_Whole]
    small_forward_seconds: _Seconds
    small_backward_seconds: _Seconds
    input_part: NotRequired[_Seconds | None]
    weight_part: NotRequired[_Seconds | None]
    around_forward_seconds: NotRequired[_Seconds]
    around_backward_seconds: NotRequired[_Seconds]
    around_input_seconds: NotRequired[_Seconds]
    around_weight_seconds: NotRequired[_Seconds]


@with_config(_MESSAGE)
class _Value(TypedDict):
    name: str
    maker: _Whole
    readers: list[_Whole]
    dtype: str
    itemsize: _Whole
    shapes: _Shapes
    differentiable: bool


@with_config(_MESSAGE)
class _Parameter(TypedDict):
    units: list[_Whole]
    num_elements: _Whole
    dtype: str
    itemsize: _Whole
    trained: bool
    group: _Whole
    changed_as: NotRequired[str | None]
    hooked_as: NotRequired[str | None]
    sparse_as: NotRequired[str | None]
    state: list[_StateEntry] | None
    number: _Whole | None
    digest: _Whole | None


@with_config(_MESSAGE)
class _Tensor(TypedDict):
    dtype: str
    itemsize: _Whole
    shapes: _Shapes


@with_config(_MESSAGE)
class _Threaded(TypedDict):
    threads: _Whole
    seconds: list[_UnitSeconds]
    update_seconds: _Seconds
    copy_bytes_per_second: _Rate


@with_config(_MESSAGE)
class _Facts(TypedDict):
    """As weft.workers.inspection.inspection makes it; see weft.plan.inspection.Inspection."""

    units: list[_Unit]
    values: list[_Value]
    cut_problems: list[_CutProblem]
    input: _Tensor
    target: _Tensor | None
    skipped_calls: NotRequired[str]
    compiled: NotRequired[list[str]]
    compiled_calls: NotRequired[str]
    draws: NotRequired[bool]
    seeds_others: NotRequired[bool]
    joint_optimizer: NotRequired[bool]
    optimizer_draws: NotRequired[bool]
    varying_shapes: NotRequired[list[_Dimensions]]
    num_train: _Whole
    num_validation: _Whole
    load_seconds: _Seconds
    update_seconds: _Seconds
    device_update_seconds: _Seconds | None
    metrics: list[str]
    parameters: list[_Parameter]
    elementwise: bool
    weighted: bool
    streams: list[str]
    data_bytes: _Whole | None
    batch_modules: list[str]
    lost_attributes: NotRequired[list[str]]
    lost_beside: NotRequired[dict[str, list[str]]]
    written: NotRequired[list[str]]
    keeps_elsewhere: NotRequired[bool]
    keeps_numbers: NotRequired[bool]
    mixes_microbatches: NotRequired[bool]
    loss_in_parts: NotRequired[Annotated[list[float], Field(min_length=2, max_length=2)] | None]
    loose_parameter: NotRequired[str | None]
    set_by_step: NotRequired[str | None]
    step_hook: NotRequired[str | None]
    unchosen: NotRequired[str | None]
    undivided: NotRequired[str | None]
    without_gpus: NotRequired[str | None]
    unsaved: str | None
    on_epoch: bool
    epoch_metrics: NotRequired[list[str]]
    endless: NotRequired[bool]
    scheduler_metric: str | None
    scheduler_span: NotRequired[_Whole | None]
    copy_bytes_per_second: _Rate
    small_size: _Whole
    timed_size: NotRequired[_Whole]
    most_samples: NotRequired[_Whole]
    crowded: NotRequired[str | None]
    refused_sizes: NotRequired[list[_CutProblem]]
    threaded: NotRequired[_Threaded | None]
    device_units: NotRequired[list[_Unit]]
    device_values: NotRequired[list[_Value]]


class _CompiledFacts(_Facts):
    ready_seconds: _Seconds


class _Inspection(_Facts):
    """As weft.workers.process.looks makes it."""

    compiled_too: NotRequired[_CompiledFacts]
    uncompiled: NotRequired[str]


class _Inspected(_OfJob):
    inspection: _Inspection
    code: Annotated[dict[str, _Sha256], Field(max_length=MAX_FILES)]  # digests, by file


class _Released(_OfJob):
    clean: bool
    peak_bytes: _Whole | None
    device_peak_bytes: _Whole | None


class _Fault(_OfJob):
    reason: _Reason
    message: str
    exit_code: _ExitCode
    exception: str


class _DirectoryMissed(_OfJob):
    message: str


class _Epoch(_OfJob):
    """What the job's function says of the epoch that it was asked about."""

    stop: bool
    values: dict[str, float | None]
    changes: bytes


class _Text(_OfJob):
    text: str


@with_config(_MESSAGE)
class _Values(TypedDict):
    """What an iteration measured; a mean may be infinite, or no number."""

    iteration: _Whole
    means: dict[str, float]
    facts: dict[str, float]


class _Report(_OfJob):
    lane: str
    count: _Whole
    records: bytes
    values: list[_Values]


class _Digest(_OfJob):
    """Of what a task has made, or of the gradient of a replica that it has found."""

    iteration: _Whole
    task: _Whole
    replica: _Whole | None
    digest: Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class _Uncopied(_OfJob):
    """Its part of the snapshot of an iteration is not there."""

    iteration: _Whole


class _Copying(_OfJob):
    """It goes on with its part of the snapshot of an iteration beside the next one."""

    iteration: _Whole


class _Copied(_OfJob):
    """It is there."""

    iteration: _Whole
    seconds: _Seconds  # of a core


@with_config(_MESSAGE)
class _Lane(TypedDict):
    lane: str
    done: _Whole
    taken: _Whole
    seconds: _Seconds
    task: NotRequired[_Whole | None]  # an older worker, under a daemon that was replaced, has it follow from `done`
    waits_for: _Whole | None


class _Progress(_OfJob):
    lanes: list[_Lane]


_MESSAGES: Final[Mapping[str, type]] = {
    "report": _Report,
    "progress": _Progress,
    "joined": _Joined,
    "inspected": _Inspected,
    "prepared": _OfJob,
    "saved": _OfJob,
    "released": _Released,
    "fault": _Fault,
    "directory-missed": _DirectoryMissed,
    "epoch": _Epoch,
    "digest": _Digest,
    "uncopied": _Uncopied,
    "copying": _Copying,
    "copied": _Copied,
    "output": _Text,
    "profiled": _Text,
}


@functools.cache
def _adapter(message: type) -> TypeAdapter[Any]:
    """Made when one first comes: all of them take 40 ms, an eighth of the daemon's start."""
    return TypeAdapter(message)


def checked(message: Message) -> Message:
    """The same message, which has all its fields and no other. Errors: Garbled."""
    kind = message.get("type")
    known = _MESSAGES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise Garbled(f"a message of the type {kind!r:.80}")
    try:
        _adapter(known).validate_python(message)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(step)[:80] for step in wrong["loc"])
        raise Garbled(f"{kind}: {place}: {wrong['msg']}") from None
    return message
