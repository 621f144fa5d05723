"""The os module as `weft.machine.run_file` has it, some of whose calls fail as a disk's do. Taken with `runpy`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

CALLS = frozenset({"open", "fstat", "write", "ftruncate", "rename", "mkdir", "lstat", "pread"})


class FaultyOs:
    """fails: says, of the number of a call (from 0), the errno that it fails with, or 0. Half of a write that fails is
    written. is_mended: no call fails any more."""

    def __init__(self, fails: Callable[[int], int]) -> None:
        self._fails = fails
        self.is_mended = False
        self.num_calls = 0
        self.num_failed = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return real if name not in CALLS else lambda *args, **options: self._call(name, real, *args, **options)

    def _call(self, name: str, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        number = 0 if self.is_mended else self._fails(self.num_calls)
        self.num_calls += 1
        if not number:
            return real(*args, **options)
        self.num_failed += 1
        if name == "write" and len(args[1]) > 1:
            return real(args[0], args[1][: len(args[1]) // 2])
        raise OSError(number, os.strerror(number))
