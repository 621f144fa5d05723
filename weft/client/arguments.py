"""Arguments of a client, looked at before anything is sent. Without pydantic, as clients are."""

from __future__ import annotations

import math
from numbers import Real
from pathlib import Path


def check_arguments(socket: object, timeout: object, reconnect_seconds: object) -> None:
    """Of `Client` and `AsyncClient`. Errors: SpecError, whose import takes 0.1 s."""
    if not isinstance(socket, str | Path | None) or "\0" in str(socket):
        problem = f"socket: {socket!r:.80} is no path; give a str or a pathlib.Path, or leave it out"
    elif not 0 <= _seconds(timeout) < math.inf:
        problem = f"timeout: {timeout!r:.80} is no number of seconds; write for example 10.0"
    elif not _seconds(reconnect_seconds) >= 0:
        problem = f"reconnect_seconds: {reconnect_seconds!r:.80} is no number of seconds; write for example 60.0"
    else:
        return
    from weft.spec.field_errors import SpecError

    raise SpecError(f"weft.Client: {problem}")


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, Real) else math.nan
