"""A terminal for tests: a command on a pseudo-terminal of its own, what stands on its screen, its keys and its size.

    with TerminalCommand([...], environment) as terminal:
        terminal.until("cpu-0/compute")
        terminal.press("q")
        assert terminal.wait() == 0

Modules take it with `runpy`, since tests are no package. It knows the few sequences that a full-screen program of rich
sends: each frame begins in the upper left corner and draws every line.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

SECONDS = 180.0  # for anything that is awaited: far above what it takes
HOME = "\x1b[H"
ALTERNATE_SCREEN, USUAL_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

# The pseudo-terminal becomes the controlling one, so that Ctrl-C and a resize reach the command as signals.
_ADOPT = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


class TerminalCommand:
    """arguments: of Python. written: everything that came so far."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        columns: int = 120,
        lines: int = 40,
        elsewhere: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """elsewhere: of "stdin", "stdout" and "stderr" those that are no terminal, as subprocess takes them."""
        self._ours, self._theirs = self._open = list(pty.openpty())
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(self._theirs)
        self.written = ""
        variables = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ADOPT, *arguments],
            **{name: elsewhere.get(name, self._theirs) for name in ("stdin", "stdout", "stderr")},
            env={"TERM": "xterm-256color", **variables},
            start_new_session=True,
        )

    def __enter__(self) -> TerminalCommand:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        self._close()

    def hang_up(self) -> int:
        """Closes the terminal, as its window does; the exit code."""
        self._close()
        return self.process.wait(SECONDS)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def screen(self) -> list[str]:
        """The lines of the newest frame, without colours; the last one may be on its way."""
        return plain(self.written.rpartition(HOME)[2]).splitlines()

    def until(self, condition: str | Callable[[list[str]], object], seconds: float = SECONDS) -> list[str]:
        """Reads until the screen has the text, or the condition is true of its lines; returns them."""
        holds = condition if callable(condition) else lambda lines: condition in "\n".join(lines)
        deadline = time.monotonic() + seconds
        while not holds(lines := self.screen()):
            assert time.monotonic() < deadline, f"not within {seconds} s; on the screen:\n" + "\n".join(lines)
            assert self._read(deadline) or self.process.poll() is None, "it has ended:\n" + plain(self.written[-4000:])
        return lines

    def wait(self, seconds: float = SECONDS) -> int:
        """The exit code; everything that it has written is read then."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it has not ended within {seconds} s:\n" + "\n".join(self.screen())
            self._read(time.monotonic() + 0.1)
        while self._read(time.monotonic()):
            pass
        return self.process.returncode

    def is_restored(self) -> bool:
        """The modes are those from before, the usual screen is back, and the cursor is there."""
        return (
            termios.tcgetattr(self._theirs) == self.modes
            and self.written.rfind(USUAL_SCREEN) > self.written.rfind(ALTERNATE_SCREEN) >= 0
            and self.written.rfind(SHOW_CURSOR) > self.written.rfind(HIDE_CURSOR) >= 0
        )

    def _close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def _read(self, deadline: float) -> bool:
        """Takes what is there, or comes until the deadline (half a second at most); whether there was anything."""
        ready, _, _ = select.select([self._ours], [], [], min(0.5, max(0.0, deadline - time.monotonic())))
        if ready:
            self.written += os.read(self._ours, 1 << 16).decode(errors="replace")
        return bool(ready)


def plain(text: str) -> str:
    """Without escape sequences."""
    return _SEQUENCE.sub("", text)
