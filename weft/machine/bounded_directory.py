"""Bounded directory: a cache of files that any process may add to, and whose oldest go where they are too many."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

YOUNG_SECONDS: Final = 3600.0  # arbitrary: a file that somebody may be about to read or to replace


def shrink(directory: Path, max_bytes: int) -> None:
    """Removes files, those that were written longest ago first, until the rest have at most so many bytes; never young
    ones. Several processes may do so at once."""
    files = sorted(_files(directory))
    surplus = sum(num_bytes for _, num_bytes, _ in files) - max_bytes
    youngest = time.time() - YOUNG_SECONDS
    for written, num_bytes, path in files:
        if surplus <= 0 or written > youngest:
            return
        with suppress(OSError):
            os.unlink(path)
        surplus -= num_bytes


def _files(directory: Path) -> list[tuple[float, int, str]]:
    """(when it was written, its bytes, its path)"""
    found = []
    for parent, _, names in os.walk(directory):
        for path in (os.path.join(parent, name) for name in names):
            with suppress(OSError):  # gone meanwhile
                status = os.lstat(path)
                found.append((status.st_mtime, status.st_size, path))
    return found
