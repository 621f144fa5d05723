"""Kept inspections: what was found out about jobs, in a directory, for whoever submits the same job once more.

    DIRECTORY/<digest of the job's entry>-<key>.json    what was found, and the files of the job's code that it is of

A key stands for all that the finding depends on but for these files, which are compared. What is older than a day is
found out anew; so is what a job had that failed (`forget`), whatever the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weft.machine.bounded_directory import shrink
from weft.machine.run_file import load, make_directory, replace

MAX_BYTES: Final = 64 << 20  # of the directory; one has some ten to a thousand kB
MAX_FOUND_BYTES: Final = 16 << 20
MAX_SECONDS: Final = 86400.0


@dataclass(frozen=True, slots=True)
class KeptInspections:
    """Whatever is wrong with the directory or a file, nothing is known."""

    directory: Path

    def find(self, entry: Path, key: str) -> Any | None:
        path = self._path(entry, key)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if not 0 <= time.time() - os.lstat(path).st_mtime <= MAX_SECONDS:
                return None
            kept = json.loads(load(path, MAX_FOUND_BYTES, owner=os.geteuid()))
            if all(_digest(Path(file)) == digest for file, digest in kept["files"].items()):
                return kept["found"]
        return None

    def keep(self, entry: Path, key: str, found: Any, files: Iterable[Path]) -> None:
        """files: of the job's code."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            data = json.dumps({"files": {str(file): _digest(file) for file in files}, "found": found}).encode()
            if len(data) <= MAX_FOUND_BYTES:
                make_directory(self.directory)
                replace(self._path(entry, key), data)
                shrink(self.directory, MAX_BYTES)

    def forget(self, entry: Path) -> None:
        """All of a job's."""
        for path in self.directory.glob(self._path(entry, "*").name):
            with contextlib.suppress(OSError):  # another worker of the job was first
                path.unlink()

    def _path(self, entry: Path, key: str) -> Path:
        return self.directory / f"{hashlib.sha256(os.fsencode(entry)).hexdigest()[:32]}-{key}.json"


def _digest(file: Path) -> str:
    return hashlib.sha256(load(file, MAX_FOUND_BYTES)).hexdigest()
