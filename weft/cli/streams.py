"""The three standard streams, as every verb expects them: there, and stdout takes any text.

Whoever starts the command may have closed any of them (`weft daemon >&-`). The next thing that the process opened would
have its descriptor: what libraries print there would go into a socket, and libuv aborts a process that closes one.
And the locale, or PYTHONIOENCODING, may give stdout an encoding that lacks characters of our pages or of a job's log.
"""

from __future__ import annotations

import io
import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by descriptor


def prepare_streams() -> None:
    """Opens what is closed on nowhere, before anything else is opened. What stdout cannot encode is `?` there."""
    for descriptor, (name, mode) in enumerate(_STREAMS):
        _open_nowhere_if_closed(descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="replace", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # as stderr, which has an escape for each


def _open_nowhere_if_closed(descriptor: int) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        os.open(os.devnull, os.O_RDWR)  # at the lowest number that is free, which is this one
        os.set_inheritable(descriptor, True)  # as those that one is started with
