"""Standard output and error of the job's code: text streams whose whole lines go to the job's log.

    print ──▶ io.TextIOWrapper ──▶ _Lines (sys.stdout.buffer) ──▶ send(text), whole lines of at most MAX_LINE_BYTES

What is no line yet is kept until it is one, until it is too long, or until the job's code returns. There is no
descriptor below: what a process that the job starts writes to its own goes to the daemon's workers.log.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_LINE_BYTES = 1 << 16  # a longer line is cut; a message to the daemon has no more either

Send = Callable[[str], None]


class _Lines(io.BufferedIOBase):
    """Bytes in, text out. Any thread may write; what it writes in one call stays together."""

    def __init__(self, name: str, send: Send) -> None:
        self.name = name
        self._send = send
        self._lock = threading.Lock()
        self._rest = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        given = memoryview(data).cast("B")
        with self._lock:
            for start in range(0, len(given), MAX_LINE_BYTES):
                self._add(given[start : start + MAX_LINE_BYTES].tobytes())
        return len(given)

    def _add(self, data: bytes) -> None:
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            self._tell(bytes(self._rest) + whole + newline)
            self._rest.clear()
        self._rest += rest
        while len(self._rest) > MAX_LINE_BYTES:
            self._cut(_end_of_character(self._rest, MAX_LINE_BYTES))

    def _cut(self, length: int) -> None:
        """Makes a line of so many bytes."""
        self._tell(bytes(self._rest[:length]) + b"\n")
        del self._rest[:length]

    def _tell(self, data: bytes) -> None:
        self._send(data.decode("utf-8", "replace"))

    def end(self) -> None:
        """What has no end of a line gets one."""
        with self._lock:
            if self._rest:
                self._cut(len(self._rest))


def _end_of_character(data: bytearray, at: int) -> int:
    """The last place up to `at` that is not inside a UTF-8 character."""
    return next((place for place in range(at, at - 4, -1) if data[place] & 0xC0 != 0x80), at)


@contextlib.contextmanager
def job_output(send: Send) -> Iterator[None]:
    """While it lasts, what Python code of any thread prints is sent. The streams are open afterwards, too: a logging
    handler may keep one."""
    lines = _Lines("<stdout>", send), _Lines("<stderr>", send)
    output, errors = (
        io.TextIOWrapper(each, encoding="utf-8", errors="replace", newline="\n", write_through=True) for each in lines
    )
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            yield
        finally:
            for each in lines:
                each.end()
