"""Errors that the caller's own signal handler has raised while a call waited: none of the connection's."""

from __future__ import annotations

import signal
import traceback
from types import CodeType


def is_of_handler(error: BaseException) -> bool:
    """Such as the TimeoutError of a handler of SIGALRM, which is an OSError, as a socket's own are."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: object) -> CodeType | None:
    """Of a function or a method, else of what an object's class has for its calls."""
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        code = getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
