"""Faults of the disk for a real daemon: what `fault_layer.c` makes fail, and how a test says so.

Modules of this directory take it with `runpy`, since tests are no package.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("fault_layer.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")
FOR_EVER = 1 << 30
_HEAD = struct.Struct("6i")  # pid, error, first, count, seen, failed


class FaultLayer:
    """environment: what the process that shall have faults is started with."""

    def __init__(self, directory: Path) -> None:
        library, orders = directory / "fault_layer.so", directory / "orders"
        assert COMPILER is not None
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
        orders.write_bytes(bytes(_HEAD.size + 4096))
        with orders.open("r+b") as file:
            self._orders = mmap.mmap(file.fileno(), 0)
        self.environment = {"LD_PRELOAD": str(library), "WEFT_TEST_FAULTS": str(orders)}

    @contextmanager
    def failing(self, pid: int, error: int, below: Path, *, first: int = 0, count: int = FOR_EVER) -> Iterator[None]:
        """From the first-th call of this process at a file below the path, so many calls fail. count=0 only counts."""
        path = os.fsencode(below)
        self._orders[_HEAD.size : _HEAD.size + len(path) + 1] = path + b"\0"
        self._orders[: _HEAD.size] = _HEAD.pack(0, error, first, count, 0, 0)
        self._orders[:4] = struct.pack("i", pid)
        try:
            yield
        finally:
            self._orders[:4] = bytes(4)

    @property
    def seen(self) -> int:
        """Calls so far that could have failed."""
        return int(_HEAD.unpack_from(self._orders)[4])

    @property
    def failed(self) -> int:
        return int(_HEAD.unpack_from(self._orders)[5])

    def close(self) -> None:
        self._orders.close()
