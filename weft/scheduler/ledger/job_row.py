"""A job's row in the ledger, what may change in it, and how it is read: what makes no sense is told by its column."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import msgpack

from weft.spec.job_state import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as the ledger has it. Times are unix seconds."""

    seq: int
    job: str
    spec: dict[str, Any]  # as of `JobSpec.to_wire`
    uid: int
    priority: int
    state: JobState
    reason: str | None
    error: str | None
    exit_code: int | None
    attempt: int
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    step: int
    loss: float | None  # None before the first step, and where it was not a number (SQLite has no NaN)
    result: dict[str, Any] | None
    run_dir: str


class JobChanges(TypedDict, total=False):
    """What `record` may change."""

    priority: int
    state: JobState
    reason: str | None
    error: str | None
    exit_code: int | None
    attempt: int
    started_at: float | None
    ended_at: float | None
    step: int
    loss: float | None
    result: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Submission:
    """What `add` did: the job's row, and whether it is a new one."""

    row: JobRow
    is_new: bool


_TEXT, _NUMBER = (str,), (int, float)
_OPTIONAL_TEXT, _OPTIONAL_NUMBER = (str, type(None)), (int, float, type(None))
_KINDS: dict[str, tuple[type, ...]] = {  # SQLite keeps what it is given, whatever the column's type
    "seq": (int,),
    "job": _TEXT,
    "spec": (dict,),
    "uid": (int,),
    "priority": (int,),
    "state": _TEXT,
    "reason": _OPTIONAL_TEXT,
    "error": _OPTIONAL_TEXT,
    "exit_code": (int, type(None)),
    "attempt": (int,),
    "submitted_at": _NUMBER,
    "started_at": _OPTIONAL_NUMBER,
    "ended_at": _OPTIONAL_NUMBER,
    "step": (int,),
    "loss": _OPTIONAL_NUMBER,
    "result": (dict, type(None)),
    "run_dir": _TEXT,
}
_STORED: dict[str, Callable[[Any], Any]] = {
    "spec": msgpack.unpackb,
    "state": JobState,
    "result": lambda text: None if text is None else json.loads(text),
}


def job_row(row: sqlite3.Row) -> JobRow:
    """Raises ValueError, which names the column, for what no Ledger has written."""
    columns = dict(row)
    for name, kinds in _KINDS.items():
        try:
            value = columns[name] = _STORED.get(name, _as_it_is)(columns[name])
        except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise ValueError(f"{name}: {str(error) or type(error).__name__}") from None
        if not isinstance(value, kinds):
            raise ValueError(f"{name}: {type(value).__name__} stands there")
    return JobRow(**columns)


def _as_it_is(value: Any) -> Any:
    if isinstance(value, str) and not value.isascii():
        value.encode()  # raises ValueError for bytes that were no text
    return value
