"""Embedded: a daemon for as long as a `with` block, in a temporary directory of its own. `weft run` is one of these.

    with weft.client.embedded.Daemon(workers=2) as client:
        job = client.submit(weft.JobSpec.load("digits.toml"))["job"]
        result = client.wait(job)

The daemon is a subprocess in a session of its own, so a Ctrl-C in the terminal reaches only us. On the way out, however
it is taken, it gets SIGTERM and its drain budget, then SIGKILL for its whole process group, and its directory goes.
Should we be killed, the kernel sends it SIGTERM (PR_SET_PDEATHSIG), and it removes the directory: that is tied to the
*thread* that enters the block, which must therefore live as long as the block does.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from weft.client.client import Client, DaemonUnreachable
from weft.spec.settings import load_settings
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import workers_needed
from weft.transport.wire.runtime_directory import MAX_PATH_BYTES

START_SECONDS = 60.0  # a start takes under a second; a machine that swaps takes longer
POLL_SECONDS = 0.02
TAIL_BYTES = 4096  # of the daemon's stderr, in the error that says it died
DRAIN_SECONDS = 20.0  # as in Settings
KILL_MARGIN_SECONDS = 10.0  # above the drain budget, as TimeoutStopSec is in the systemd unit
DYING_SECONDS = 2.0  # for a daemon whose connection is lost to end; it lets go of its workers first
RECONNECT_SECONDS = 1.0  # an embedded daemon that is lost does not come back
PR_SET_PDEATHSIG = 1  # linux/prctl.h

_SERVICE_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


_SAID = "weft: "  # before each line that the command has for people


class DaemonDied(DaemonUnreachable):
    """The embedded daemon ended by itself. The text is why it could not start, or ends with the last that it wrote."""

    def __init__(self, code: int, tail: str) -> None:
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        lines = tail.splitlines()
        plain = "\n".join(line.removeprefix(_SAID) for line in lines)  # whoever tells it puts that before each line
        knows_why = bool(lines) and all(line.startswith(_SAID) for line in lines)  # and nothing happened before
        told = f"the embedded daemon died ({how}); it last wrote:\n{plain or '(nothing)'}"
        Exception.__init__(self, plain if knows_why else told)


def workers_for(strategy: Strategy) -> int | None:
    """CPU workers of a daemon for this job alone; None where WEFT_WORKERS or weft.toml say how many, and for all that
    there are cores for."""
    takes_all = strategy.is_auto or strategy.threads == "all"
    if takes_all or "workers" in load_settings({}, os.environ, None).model_fields_set:
        return None
    return max(1, workers_needed(strategy).get("cpu", 0))


class Daemon:
    """A daemon of our own; the `with` block gets its client. What is None is as in WEFT_* and weft.toml.

    workers, threads: CPU workers and the compute threads of each; stand_ins: GPU workers that compute on the CPU;
    gpus: GPUs to use, by default all, or none beside stand-ins; loaders: workers that load data, where
    one for each of these is too few; runs_dir: default ./runs; metrics: HOST:PORT, or "" for none; drain_seconds:
    budget of its drain at the end; start_seconds: until its socket must answer.
    Raises SpecError for a setting that is not valid, DaemonDied, and DaemonUnreachable when the socket does not answer
    in time.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        threads: int | None = None,
        stand_ins: int | None = None,
        gpus: int | None = None,
        loaders: int | None = None,
        runs_dir: Path | str | None = None,
        metrics: str = "",
        drain_seconds: float = DRAIN_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._options = {
            "--workers": workers,
            "--threads": threads,
            "--stand-ins": stand_ins,
            "--gpus": gpus,
            "--loaders": loaders,
            "--metrics": metrics,
            "--drain-seconds": drain_seconds,
        }
        self._runs_dir = runs_dir
        self._drain_seconds = drain_seconds
        self._start_seconds = start_seconds
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes]
        self._stderr: BinaryIO

    def __enter__(self) -> Client:
        with ExitStack() as stack:
            home = stack.enter_context(_temporary_directory())
            self._stderr = stack.enter_context(open(os.path.join(home, "stderr"), "w+b"))
            self._process = stack.enter_context(self._running(Path(home)))
            client = Client(Path(home, "run", "weft.sock"), reconnect_seconds=RECONNECT_SECONDS)
            self._wait_until_it_answers(client)
            self._stack = stack.pop_all()
        return client

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        died = self._why_it_died() if isinstance(error, DaemonUnreachable) else None
        self._stack.close()
        if died is not None:
            raise died from error

    def _why_it_died(self) -> DaemonDied | None:
        """It closes its connections some time before it has ended."""
        try:
            code = self._process.wait(DYING_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        return DaemonDied(code, self._tail())

    @contextmanager
    def _running(self, home: Path) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            self._command(home),
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            env={name: value for name, value in os.environ.items() if name not in _SERVICE_VARIABLES},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            self._stop(process)

    def _command(self, home: Path) -> list[str]:
        # -P: a file in the user's directory that is called like a module of ours must not be taken for it.
        command = [sys.executable, "-P", "-m", "weft", "daemon", "--parent", str(os.getpid()), "--home", str(home)]
        command += ["--runtime-dir", str(home / "run"), "--state-dir", str(home / "state")]
        command += ["--runs-dir", str(self._runs_path())]
        for option, value in self._options.items():
            if value is not None:
                command += [option, str(value)]
        return command

    def _runs_path(self) -> Path:
        from weft.spec.settings import load_settings
        from weft.spec.source import working_directory

        flags = {option.removeprefix("--").replace("-", "_"): value for option, value in self._options.items()}
        settings = load_settings(flags, os.environ, None)  # what is wrong with one is told here, not by the daemon
        path = Path(self._runs_dir or settings.runs_dir or "runs")
        path = (path if path.is_absolute() else Path(working_directory(), path)).resolve()
        return load_settings({"runs_dir": path}, {}, None).runs_path

    def _wait_until_it_answers(self, client: Client) -> None:
        deadline = time.monotonic() + self._start_seconds
        while True:
            try:
                client.status()
                return
            except DaemonUnreachable:
                if time.monotonic() > deadline:
                    raise
            try:
                code = self._process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            raise DaemonDied(code, self._tail())

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM, the drain budget, then SIGKILL for what is left of its group; an impatient Ctrl-C skips the wait."""
        try:
            process.terminate()
            process.wait(self._drain_seconds + KILL_MARGIN_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # nothing is left, as it should be
            process.wait()

    def _tail(self) -> str:
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip()


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """In TMPDIR; in /tmp where the sockets' paths would be too long there."""
    place = tempfile.gettempdir()
    fits = len(os.fsencode(os.path.join(place, "weft-XXXXXXXX", "run"))) <= MAX_PATH_BYTES
    return tempfile.TemporaryDirectory(prefix="weft-", dir=place if fits else "/tmp", ignore_cleanup_errors=True)


@contextmanager
def ending_with(parent: int, home: Path | None) -> Iterator[None]:
    """In the daemon, by its command line: while in the block this process gets SIGTERM when `parent` ends. home: the
    directory that goes with the block where nobody else is left to remove it."""
    _end_with(parent)
    try:
        yield
    finally:
        if home is not None and os.getppid() != parent:
            shutil.rmtree(home, ignore_errors=True)


def _end_with(parent: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before we asked
        signal.raise_signal(signal.SIGTERM)
