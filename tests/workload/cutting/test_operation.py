"""Operations: the line that a sentence names is the user's."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import weft
from weft.workload.cutting.operation import user_line

_SOURCE = "def of_weft(function):\n    return function()\n"
_OWN: dict[str, Any] = {}
exec(compile(_SOURCE, os.path.join(os.path.dirname(weft.__file__), "any.py"), "exec"), _OWN)


def test_a_line_of_weft_is_never_the_users() -> None:
    """A hook that Weft puts on what the user's code has, and a gradient without numbers that came to torch's backward,
    were told with lines of Weft."""
    assert Path(__file__).name in _OWN["of_weft"](user_line)


def test_where_nobody_but_weft_and_torch_has_called_there_is_no_line() -> None:
    found = Future[str]()
    own = {**_OWN, "user_line": user_line, "found": found}
    source = "def begin():\n    found.set_result(user_line())\n"
    exec(compile(source, os.path.join(os.path.dirname(weft.__file__), "any.py"), "exec"), own)
    thread = Thread(target=own["begin"])
    thread.start()
    thread.join()
    assert found.result() == "an unknown line"
