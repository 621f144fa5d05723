"""Top: `weft top` on a terminal, and its one snapshot elsewhere.

One coroutine draws and is woken by whatever happens; it alone writes to the terminal. Another asks the daemon, and goes
on asking while it is away. The terminal is as it was once we leave, however that happens; Ctrl-Z leaves for a while.

    poll     sample, pause, sample, ...  ┐
    stdin    keys                        ├──▶ wake ──▶ take keys, draw
    SIGWINCH, SIGTSTP, SIGQUIT, SIGTERM  ┘
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from rich.console import Console, ConsoleDimensions
from rich.control import Control
from rich.screen import Screen

from weft.cli.exits import Terminated
from weft.cli.screens.display import plain_text
from weft.cli.top.state import Keys, NewestPath, RecentSamples, Sample, View, ordered, report, selected
from weft.cli.top.view import header_text, page, screen
from weft.client.client import AsyncClient, Client, DaemonUnreachable, RequestRefused
from weft.spec.job_state import TERMINAL_STATES
from weft.transport.wire.frames import ErrorCode

TIMEOUT_SECONDS: Final = 5.0  # for an answer; a daemon that takes longer is told to be unreachable
READ_BYTES: Final = 1024  # of keys at once; more are read next
PIPE_CELLS: Final = 100  # of a snapshot that goes to no terminal: its bars end somewhere
PIPE_LINES: Final = 1000
_USUAL_SIZE: Final = ConsoleDimensions(80, 24)  # of a terminal that does not tell its own


def print_snapshot(console: Console, told: dict[str, Any]) -> None:
    """As much as there is, below one another; a terminal's width counts, its height does not."""
    width = console.width if console.is_terminal else PIPE_CELLS
    colour = console.is_terminal and not console.no_color and console.color_system is not None
    chosen = told["job"]["job"] if told["job"] else None
    console.print(plain_text(header_text(told)))
    console.print(page(told, chosen, width, PIPE_LINES, colour=colour))


def take_snapshot(client: Client, job: str | None, interval: float) -> dict[str, Any]:
    """The report of one interval; of a moment where nothing runs. Errors: DaemonUnreachable, RequestRefused."""
    history = RecentSamples()
    history.add(take_sample(client, job))
    shown = history.newest.shown if history.newest else None
    if shown is not None and shown["state"] not in TERMINAL_STATES:
        time.sleep(interval)
        history.add(take_sample(client, shown["job"]))
    return report(history)


def take_sample(client: Client, chosen: str | None) -> Sample:
    jobs = ordered(client.jobs())
    name = selected(jobs, chosen)
    shown = client.show(name, path=True) if name is not None else None
    return Sample(at=time.monotonic(), status=client.status(), jobs=jobs, shown=shown)


def run_top(first: Sample, job: str | None, interval: float) -> None:
    """Until the user leaves. first: shows that the daemon is there. Errors: KeyboardInterrupt, OSError."""
    console = Console(force_terminal=True, markup=False, highlight=False, emoji=False)
    try:
        asyncio.run(_Top(console, first, job, interval).run())
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise


class _Top:
    def __init__(self, console: Console, first: Sample, job: str | None, interval: float) -> None:
        self._console = console
        self._interval = interval
        self._client = AsyncClient(timeout=TIMEOUT_SECONDS)
        self._view = View(selected=job)
        self._history = RecentSamples()
        self._history.add(first)
        self._trouble = ""
        self._keys = Keys()
        self._typed: list[str] = []
        self._terminated = False  # we are to end
        self._leaving: signal.Signals | None = None  # by SIGTSTP (Ctrl-Z) until SIGCONT, by SIGQUIT for good
        self._path = NewestPath()
        self._wake = asyncio.Event()  # something is to be drawn
        self._ask = asyncio.Event()  # the daemon, before the interval is over

    async def run(self) -> None:
        with self._signals():
            async with asyncio.TaskGroup() as group:
                polling = group.create_task(self._poll(), name="poll")
                try:
                    while not self._view.left:
                        with self._own_screen():
                            await self._show()
                        if self._leaving:
                            self._leave_by(self._leaving)
                finally:
                    polling.cancel()

    async def _show(self) -> None:
        while not (self._view.left or self._leaving):
            self._draw()
            await self._wake.wait()
            self._wake.clear()
            self._take_keys()
            if self._terminated:
                raise Terminated

    # --- the terminal

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGWINCH: self._wake.set,
            signal.SIGTERM: self._terminate,
            signal.SIGHUP: self._terminate,
            signal.SIGTSTP: partial(self._leave, signal.SIGTSTP),
            signal.SIGQUIT: partial(self._leave, signal.SIGQUIT),
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    @contextmanager
    def _own_screen(self) -> Iterator[None]:
        """The alternate screen, and keys as they are pressed."""
        keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()
        modes = termios.tcgetattr(keyboard)
        try:
            tty.setcbreak(keyboard)
            self._console.set_alt_screen(True)
            self._console.show_cursor(False)
            loop.add_reader(keyboard, self._read_keys)
            yield
        finally:
            loop.remove_reader(keyboard)
            with suppress(termios.error):  # the terminal has gone
                termios.tcsetattr(keyboard, termios.TCSAFLUSH, modes)
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)

    def _read_keys(self) -> None:
        try:
            data = os.read(sys.stdin.fileno(), READ_BYTES)
        except OSError:
            data = b""
        if data:
            self._typed += self._keys.feed(data)
        else:
            self._terminated = True  # the terminal has gone
        self._wake.set()

    def _terminate(self) -> None:
        self._terminated = True
        self._wake.set()

    def _leave(self, number: signal.Signals) -> None:
        self._leaving = number
        self._wake.set()

    def _leave_by(self, number: signal.Signals) -> None:
        """What any program does at that signal, with the terminal as it was: stops until it is continued, or ends."""
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(number)
        signal.raise_signal(number)
        self._leaving = None
        loop.add_signal_handler(number, self._leave, number)

    # --- what is shown

    def _draw(self) -> None:
        self._console.size = _terminal_size()
        colour = not self._console.no_color and self._console.color_system is not None
        shown = screen(report(self._history), self._view, self._trouble, self._console.size, colour=colour)
        self._console.print(Control.home(), Screen(shown), sep="", end="")

    def _take_keys(self) -> None:
        newest = self._history.newest
        assert newest is not None
        before = self._view
        for key in self._typed:
            self._view = self._view.pressed(key, newest.jobs)
        self._typed.clear()
        if (before.selected, before.paused) != (self._view.selected, self._view.paused):
            self._ask.set()

    # --- the daemon

    async def _poll(self) -> None:
        while True:
            await self._pause()
            try:
                self._history.add(await self._sample())
                self._trouble = ""
            except DaemonUnreachable:
                self._trouble = "daemon unreachable, retrying"
            except RequestRefused as refusal:
                self._trouble = refusal.message
            self._wake.set()

    async def _pause(self) -> None:
        """An interval, or until a key asks for something else."""
        try:
            async with asyncio.timeout(None if self._view.paused else self._interval):
                await self._ask.wait()
        except TimeoutError:
            pass
        self._ask.clear()

    async def _sample(self) -> Sample:
        jobs = ordered(await self._client.jobs())
        name = selected(jobs, self._view.selected)
        shown = None
        if name is not None:
            try:
                shown = self._path.added(await self._client.show(name, path=self._path.is_due(name, time.monotonic())))
            except RequestRefused as refusal:
                if refusal.code != ErrorCode.NO_SUCH_JOB:
                    raise
        return Sample(at=time.monotonic(), status=await self._client.status(), jobs=jobs, shown=shown)


def _terminal_size() -> ConsoleDimensions:
    """Of the terminal itself: an exported COLUMNS knows nothing of a resize."""
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    return ConsoleDimensions(columns or _USUAL_SIZE.width, lines or _USUAL_SIZE.height)
