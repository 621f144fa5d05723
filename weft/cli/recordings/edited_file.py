"""Edited file: a recording that its user has named by a path, and that is not, or no more, as Weft has written it."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from weft.cli.exits import USAGE, leave
from weft.spec.field_errors import SpecError

P = ParamSpec("P")
R = TypeVar("R")

_RAISED = (  # wherever a value is of another kind than it was, or does not fit the others
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
    struct.error,
)


def reads_recording(verb: Callable[P, R]) -> Callable[P, R]:
    """The verb, which leaves with a sentence where what it makes of a recording fails. job: among its arguments by
    name. Of one that it has by a job's id, and the daemon has just written, that is a fault of ours and stays one."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from weft.cli.recordings.recorded_job import file_of

        try:
            return verb(*args, **kwargs)
        except SpecError:  # of what is asked about it
            raise
        except _RAISED as error:
            file = file_of(str(kwargs["job"]))
            if file is None:
                raise
            why = f"{type(error).__name__}: {error!s:.200}"
            leave(USAGE, f"{file} is no recording as Weft writes them ({why}); give one that nobody has edited")

    return run
