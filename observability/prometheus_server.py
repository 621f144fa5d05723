"""A real Prometheus on a loopback port, in a directory of its own, with the configuration that is shipped here."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SHIPPED = Path(__file__).resolve().parent / "prometheus"
SHIPPED_TARGET, SHIPPED_INTERVAL = "127.0.0.1:9464", "15s"
START_SECONDS = 20.0
STOP_SECONDS = 10.0  # it writes its head block; then it is killed
POLL_SECONDS = 0.05
QUERY_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LISTENING = re.compile(r'msg="Listening on" address=(\S+)')


class PrometheusError(RuntimeError):
    """Prometheus is missing, does not start or refuses a query. The text says what to do."""


def _end_with_parent() -> None:
    """Called in the new process: however we end, nothing of ours goes on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def tool(name: str) -> str:
    """The path of prometheus or promtool. Errors: PrometheusError."""
    path = shutil.which(name)
    if path is None:
        raise PrometheusError(f"{name} is not installed; Debian has it: apt-get install prometheus")
    return path


def until(condition: Callable[[], Any], what: str, seconds: float) -> Any:
    """The condition's first true value. Errors: PrometheusError where there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise PrometheusError(f"not within {seconds:.0f} s: {what}")
        time.sleep(POLL_SECONDS)
    return value


class PrometheusServer:
    """Runs while its context is open. target: HOST:PORT of a daemon's metrics. port 0: a free one is picked.

    interval: of scrapes and rules, instead of the shipped one.
    """

    def __init__(self, home: Path, target: str, *, port: int = 0, interval: str = SHIPPED_INTERVAL) -> None:
        self._home = home
        self._target = target
        self._port = port
        self._interval = interval
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        """Errors: PrometheusError."""
        config = self._home / "config"
        config.mkdir()
        for path in SHIPPED.glob("*.yml"):
            text = path.read_text(encoding="utf-8").replace(SHIPPED_TARGET, self._target)
            text = text.replace(f"interval: {SHIPPED_INTERVAL}", f"interval: {self._interval}")
            (config / path.name).write_text(text, encoding="utf-8")
        command = [tool("prometheus"), f"--config.file={config / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={self._home / 'data'}", f"--web.listen-address=127.0.0.1:{self._port}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_end_with_parent
            )
        try:
            self.url = f"http://{until(self._address, 'the address of Prometheus', START_SECONDS)}"
            until(self._is_ready, "Prometheus ready", START_SECONDS)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    @property
    def _log(self) -> Path:
        return self._home / "prometheus.log"

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> int:
        """Until it ends by itself; its exit code."""
        assert self._process is not None
        return self._process.wait()

    def _address(self) -> str | None:
        assert self._process is not None
        log = self._log.read_text(encoding="utf-8", errors="replace")
        if self._process.poll() is not None:
            raise PrometheusError(f"prometheus ended with exit code {self._process.returncode}:\n{log[-2000:]}")
        found = _LISTENING.search(log)
        return found[1] if found else None

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=QUERY_SECONDS):
                return True
        except (urllib.error.URLError, OSError):
            return False

    # --- questions

    def query(self, expression: str, at: float) -> list[dict[str, Any]]:
        """The series at a moment: each with `metric` and `value`."""
        answer: list[dict[str, Any]] = self._ask("query", {"query": expression, "time": f"{at:.3f}"})["result"]
        return answer

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series over a time: each with `metric` and `values`, pairs of a time and a number as text."""
        fields = {"query": expression, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        answer: list[dict[str, Any]] = self._ask("query_range", fields)["result"]
        return answer

    def label_values(self, label: str, series: str) -> list[str]:
        answer: list[str] = self._ask(f"label/{label}/values", {"match[]": series})
        return answer

    def _ask(self, path: str, fields: Mapping[str, str]) -> Any:
        """Errors: PrometheusError, with what Prometheus says of the query."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=QUERY_SECONDS) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{dict(fields)}: {error.read().decode(errors='replace')}") from None
