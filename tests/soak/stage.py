"""The stage: a daemon that is lent to one try after another, and what must hold after each.

Daemons are real, in directories of their own, on loopback. One is used for many tries, since to start it takes longer
than most of them; a try that misses has its daemon's directory kept, and the next gets a new one.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jobs import KNOWN
from safetensors.torch import load_file

from weft.client.client import Client
from weft.spec.job_spec import JobSpec

_REAL = runpy.run_path(str(Path(__file__).resolve().parents[1] / "integration" / "real_daemon.py"))
RealDaemon, until, SECONDS, metrics_rows = (_REAL[name] for name in ("RealDaemon", "until", "SECONDS", "metrics_rows"))

MAX_TRIES = 60  # with one daemon: what leaks a little each time shows, and its ledger stays small
ORPHAN_SECONDS = 5.0  # the promises' own: nothing of a daemon that is gone lives longer
CLIENT_SECONDS = 60.0  # for an answer: others work on this machine
CREW = {"workers": 2, "stand_ins": 2, "drain_seconds": 0.5}
GONE_LIMIT = 1 << 20  # bytes of a file that is kept of a miss
TERMINAL = {"completed", "failed", "cancelled"}
AT_REST = TERMINAL | {"paused"}


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a job comes to where nothing happens to it."""

    model: dict[str, torch.Tensor]
    lines: list[dict[str, Any]]  # of metrics.jsonl, without times
    seconds: float  # from submit to end
    run_dir: Path


class Results:
    """Of the jobs undisturbed, for all stages: each is run once in a soak."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._known: dict[str, Undisturbed] = {}

    def of(self, name: str, run: Callable[[str], Undisturbed]) -> Undisturbed:
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._known:
                self._known[name] = run(name)
            return self._known[name]


class Stage:
    """misses: the folder for what they leave. results: those of other stages, too."""

    def __init__(self, misses: Path, results: Results) -> None:
        self._misses = misses
        self._results = results
        self._daemon: Any = None
        self._tries = 0
        self._before: Counter[str] = Counter()
        self._is_closed = False
        self.process: subprocess.Popen[Any] | None = None  # of a row that another program plays

    # --- the daemon

    @property
    def daemon(self) -> Any:
        assert self._daemon is not None, "a try is being played"
        return self._daemon

    def begin_try(self) -> None:
        assert not self._is_closed, "the soak is over"
        if self._tries >= MAX_TRIES:
            self.renew()
        if self._daemon is None:
            self._daemon = RealDaemon(**CREW)
            self._daemon.client = Client(self._daemon.socket, timeout=CLIENT_SECONDS)
            self._daemon.start()
        self._tries += 1
        self._before = self._daemon.footprint()

    def end_try(self) -> None:
        """Every worker is free and nothing more is open or mapped than before. Errors: AssertionError."""
        daemon = self.daemon
        daemon.until_idle()
        if self._before:
            grown = lambda: daemon.footprint() - self._before  # noqa: E731
            until(lambda: not grown(), f"the descriptors and mappings of before, {grown()}", 30.0)
        assert not daemon.names_in_shared_memory(), daemon.names_in_shared_memory()

    def is_another(self) -> None:
        """The try has put another daemon's process in the place of the one before: it holds what it holds."""
        self._before = Counter()

    def renew(self) -> None:
        """The next try has a new daemon; of this one nothing is left. Errors: AssertionError; then it is not closed."""
        daemon = self._daemon
        if daemon is None:
            return
        assert daemon.stop() == 0
        daemon.until_nothing_lives(ORPHAN_SECONDS)
        assert list(daemon.runtime.iterdir()) == []
        assert "Traceback" not in (daemon.home / "daemon.log").read_text()
        daemon.close()
        self._daemon, self._tries = None, 0

    def close(self) -> None:
        """Whatever state it is in, from any thread: a try that is being played fails."""
        self._is_closed = True
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
        if hasattr(self._daemon, "process"):
            self._daemon.close()

    def keep(self, card: str, error: BaseException, command: str) -> Path:
        """All that tells of a try that missed, in a folder; the daemon goes."""
        folder = self._misses / card.replace(":", "-")
        folder.mkdir(parents=True, exist_ok=True)
        told = "".join(traceback.format_exception(error))
        (folder / "miss.txt").write_text(f"{card}\nonce more: {command}\n\n{told}")
        if self._daemon is not None:
            with suppress(Exception):
                (folder / "jobs.json").write_text(json.dumps(self._daemon.client.listing(), indent=1, default=str))
            (folder / "processes.txt").write_text(held_by(self._daemon))
            shutil.copytree(self._daemon.home, folder / "home", ignore=_large_or_no_file, dirs_exist_ok=True)
            self._daemon.close()
        self._daemon, self._tries = None, 0
        return folder

    # --- jobs

    def undisturbed(self, name: str) -> Undisturbed:
        return self._results.of(name, self._run_undisturbed)

    def _run_undisturbed(self, name: str) -> Undisturbed:
        result = self.daemon.run(KNOWN[name].spec(self.daemon))
        assert result["state"] == "completed", self.daemon.log_of(result["job"])
        shown = self.daemon.client.show(result["job"])
        self.daemon.until_idle()
        until(lambda: not self.daemon.savers(), "the last checkpoint")
        kept = self._misses / "undisturbed" / name.replace(" ", "-")
        shutil.copytree(result["run_dir"], kept, symlinks=True)  # its checkpoints are for those who damage some
        self._before = self.daemon.footprint()  # a first job of its kind may leave something for the next
        seconds = shown["ended_at"] - shown["submitted_at"]
        return Undisturbed(load_file(result["model"]), lines_of(Path(result["run_dir"])), seconds, kept)

    def submit(self, name: str, **options: Any) -> str:
        spec: JobSpec = KNOWN[name].spec(self.daemon)
        job: str = self.daemon.submit(spec, **options)
        return job

    def check(self, job: str, name: str) -> None:
        """It has completed, with the bits of the undisturbed one and each step once. Errors: AssertionError."""
        result = self.check_model(job, name)
        lines, expected = lines_of(Path(result["run_dir"])), self.undisturbed(name).lines
        if lines != expected:
            pairs = enumerate(zip(lines, expected, strict=False), 1)
            first = next(((number, pair) for number, pair in pairs if pair[0] != pair[1]), None)
            raise AssertionError(
                f"{name} as {job}: {len(lines)} lines of metrics for {len(expected)}, which differ first at {first}\n"
                f"{self.daemon.log_of(job)}"
            )

    def check_model(self, job: str, name: str) -> dict[str, Any]:
        """It has completed, with the bits of the undisturbed one; its result. Errors: AssertionError."""
        result: dict[str, Any] = self.daemon.client.wait(job, SECONDS)
        log = self.daemon.log_of(job)
        assert result["state"] == "completed", f"{name} as {job}: {result['state']}, {result['error']}\n{log}"
        model, expected = load_file(result["model"]), self.undisturbed(name).model
        assert model.keys() == expected.keys(), f"{name} as {job}"
        differ = [key for key in model if not torch.equal(model[key], expected[key])]
        assert not differ, f"{name} as {job} has other bits in {differ}\n{log}"
        return result

    def state_of(self, job: str) -> str:
        state: str = self.daemon.client.show(job)["state"]
        return state

    def has_ended(self, job: str) -> bool:
        return self.state_of(job) in TERMINAL

    def is_at_rest(self, job: str) -> bool:
        return self.state_of(job) in AT_REST


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, without times."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in metrics_rows(str(run_dir))]


def held_by(daemon: Any) -> str:
    """Each process of the daemon's, with what it has open and which shared memory it maps."""
    workers = {pid: name for name, pid in daemon.worker_pids().items()} if daemon.process.poll() is None else {}
    told = []
    for process in daemon.processes():
        told.append(f"{process.pid} {workers.get(process.pid, '')} {process}")
        with suppress(OSError):
            told += [os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()]
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            told += [line for line in maps if "/dev/shm/" in line or "/memfd:" in line]
    return "\n".join(told)


def _large_or_no_file(folder: str, names: list[str]) -> set[str]:
    """Of a home that is kept: no sockets, no checkpoints, nothing large."""
    paths = {name: Path(folder, name) for name in names}
    return {
        name
        for name, path in paths.items()
        if name == "checkpoints"
        or not (path.is_dir() or path.is_file())
        or (path.is_file() and path.stat().st_size > GONE_LIMIT)
    }
