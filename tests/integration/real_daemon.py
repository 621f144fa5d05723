"""A real daemon for tests: `weft daemon` as a subprocess, in a directory of its own, and what there is of it to see.

Modules of this directory take it with `runpy`, since tests are no package.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from weft.client.client import Client, DaemonUnreachable, RequestRefused
from weft.spec.job_spec import JobSpec
from weft.transport.wire.frames import PROTOCOL

RawClient = runpy.run_path(str(Path(__file__).parents[1] / "raw_client.py"))["RawClient"]
SECONDS = 180.0  # for anything that is awaited: far above what it takes on a machine with much else to do
POLL_SECONDS = 0.02
WORKERS = 3
KEY = b"k" * 32  # of a directory that a test asks
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# Holds a job at a gate: a file that is looked for until it is gone, since to open a FIFO that is going waits for ever.
PASS_GATE = """
import os, time

def pass_gate(gate, where):
    if gate and os.path.exists(gate):
        print("at the gate", where, flush=True)
        while os.path.exists(gate):
            time.sleep(0.005)
        print("through the gate", where, flush=True)

"""

# A job that is over in a moment, or held at a gate. gate_at numbers the calls of the loss; an inspection makes 4,
# and up to 9 where a batch has parts.
LINE = (
    PASS_GATE
    + """
import torch, weft

calls = 0

def workload(width=8, gate="", gate_at=0, marker="unchanged", planning_gate="", learning_rate=0.05):
    pass_gate(planning_gate, "of planning")
    print("this is", marker)

    def loss(output, target):
        global calls
        calls += 1
        if calls == gate_at:
            pass_gate(gate, "of training")
        return torch.nn.functional.mse_loss(output, target)

    inputs = torch.linspace(-1, 1, 48).reshape(48, 1)
    layers = [torch.nn.Linear(1, width), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(width, width),
              torch.nn.Tanh(), torch.nn.Linear(width, 1)]
    return weft.Workload(model=torch.nn.Sequential(*layers), loss=loss, train=(inputs, inputs.sin()),
                         validation=(inputs, inputs.sin()),
                         optimizer=lambda params: torch.optim.Adam(params, lr=learning_rate))
"""
)


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """The condition's first true value; for what no event tells of, such as another process's end."""
    deadline = time.monotonic() + seconds
    never = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        never.wait(POLL_SECONDS)
    return value


def num_connections(process: psutil.Process, stem: Path) -> int:
    """That a server has which listens at a socket whose path begins so."""
    sockets = [each for each in process.net_connections("unix") if each.laddr.startswith(str(stem))]
    return max(0, len(sockets) - 1)


class Gate:
    """Holds a job at a point of its code until it is opened. Opened twice is opened once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def open(self) -> None:
        """Lets whoever waits pass, and whoever comes later."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """For whoever comes from now on."""
        self.path.touch()

    def __str__(self) -> str:
        return str(self.path)


class RealDaemon:
    """home: holds its runtime directory, its state, its jobs. client: of its socket. Start it, then stop or kill it."""

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({}), **options: object) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="wi-", dir="/tmp"))  # short: a Unix socket's path has 107 bytes
        self.runtime = self.home / "r"
        self.state = self.home / "s"
        self.socket = self.runtime / "weft.sock"
        self.client = Client(self.socket)
        self.process: subprocess.Popen[bytes]
        self.seen: dict[int, psutil.Process] = {}
        self.options = {"workers": WORKERS, "gpus": 0, "metrics": "127.0.0.1:0", "drain-seconds": 20.0} | {
            name.replace("_", "-"): value for name, value in options.items()
        }
        self.environment: dict[str, str] = {
            name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "XDG_"))
        }
        self.environment |= {"WEFT_RUNTIME_DIR": str(self.runtime), "NO_COLOR": "1", "COLUMNS": "200"}
        self.environment |= {"WEFT_KEEP_INSPECTIONS": "false", **environment}
        self._num_files = 0

    # --- the process

    def command(self, **changes: object) -> list[str]:
        options = self.options | changes
        command = [sys.executable, "-m", "weft", "daemon"]
        command += ["--runtime-dir", str(self.runtime), "--state-dir", str(self.state)]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        return command

    def start(self, seconds: float = SECONDS) -> RealDaemon:
        """Errors: AssertionError where it is not idle in time; it runs on."""
        with (self.home / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        self.until_idle(seconds)
        return self

    @contextmanager
    def serving(self) -> Iterator[RealDaemon]:
        """From its start to a stop of which nothing is wrong; whatever comes, it does not outlive this."""
        try:
            yield self.start()
            assert self.stop() == 0
        finally:
            self.close()

    def until_idle(self, seconds: float = SECONDS) -> None:
        """Every worker is up and free, and no job is unfinished, unless it is paused."""
        until(self._is_idle, "every worker up and free", seconds)
        self.processes()

    def cancel_all(self) -> None:
        """Whatever a test that failed has left: it is not to hold up those after it."""
        with suppress(DaemonUnreachable):  # then `until_idle` says so
            for each in self.client.jobs():
                if each["state"] not in TERMINAL:
                    with suppress(RequestRefused):  # it has ended
                        self.client.cancel(each["job"], discard=True)

    def _is_idle(self) -> bool:
        assert self.process.poll() is None, f"the daemon died:\n{self.log()}"
        try:
            status = self.client.status()
        except DaemonUnreachable:
            return False
        unfinished = [state for state, count in status["jobs"].items() if count and state not in {*TERMINAL, "paused"}]
        return not unfinished and all(worker["state"] == "free" for worker in status["workers"])

    def processes(self) -> list[psutil.Process]:
        """The daemon and everything below it that lives."""
        with suppress(psutil.NoSuchProcess):
            daemon = psutil.Process(self.process.pid)
            found = [daemon, *daemon.children(recursive=True)]
            self.seen |= {process.pid: process for process in found}
        return [process for process in self.seen.values() if _lives(process)]

    def names_in_shared_memory(self) -> list[str]:
        """Those that a process of its own has made: torch's names have its pid, and others make some, too."""
        mine = tuple(f"torch_{pid}_" for pid in self.seen)
        return [name for name in os.listdir("/dev/shm") if name.startswith(mine)]

    def fork_server(self) -> psutil.Process:
        (server,) = psutil.Process(self.process.pid).children()
        return server

    def directory(self) -> psutil.Process:
        """The directory's process, also while others write checkpoints. Errors: IndexError, psutil.NoSuchProcess while
        it is being replaced."""
        return self._helpers()[0]

    def savers(self) -> list[psutil.Process]:
        """The processes that write checkpoints."""
        with suppress(psutil.NoSuchProcess):
            return self._helpers()[1:]
        return []

    def _helpers(self) -> list[psutil.Process]:
        """The fork server's children that are no workers: the directory first, then those that give way to others."""
        workers = set(self.worker_pids().values())
        others = [child for child in self.fork_server().children() if child.pid not in workers]
        return sorted(others, key=lambda child: (child.nice(), child.create_time()))

    def worker_pids(self, job: str | None = None) -> dict[str, int]:
        """Of all workers, or of those that hold the job and live."""
        workers = self.client.status()["workers"]
        return {each["worker"]: each["pid"] for each in workers if job is None or (each["job"] == job and each["pid"])}

    def signal(self, number: int) -> None:
        self.processes()
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(SECONDS)

    def until_nothing_lives(self, seconds: float = SECONDS) -> None:
        until(lambda: not self.processes(), f"the end of {self.processes()}", seconds)

    def close(self) -> None:
        """Ends whatever is left, and removes the directory."""
        if self.process.poll() is None:
            self.kill()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def log(self) -> str:
        files = (self.home / "daemon.log", self.state / "workers.log")
        return "".join(path.read_text() for path in files if path.exists())

    def footprint(self) -> Counter[str]:
        """What the idle daemon holds: descriptors of it and its helpers, shared mappings of its workers, sockets. A
        worker that has had a job keeps one connection to the directory."""
        held: Counter[str] = Counter()
        workers = {pid: name for name, pid in self.worker_pids().items()}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                name = workers.get(process.pid, "daemon" if process.pid == self.process.pid else "helper")
                if name in ("daemon", "helper"):
                    held[f"descriptors of {name}"] += process.num_fds()
                if name == "helper":
                    connections = num_connections(process, self.runtime / "directory")
                    held["descriptors of helper"] -= min(connections, len(workers))
                held[f"shared mappings of {name}"] += num_shared_mappings(process.pid)
        held["files of the runtime directory"] = len(list(self.runtime.iterdir()))
        return held

    # --- jobs

    def spec(self, source: str = LINE, *, strategy: Mapping[str, Any] | None = None, **job: Any) -> JobSpec:
        """A spec of a job file with this source; 24 samples in a batch, 2 epochs, unless `job` says otherwise."""
        self._num_files += 1
        directory = self.home / "jobs" / str(self._num_files)
        directory.mkdir(parents=True)
        (directory / "line.py").write_text(source)
        tables = {"entry": "line.py:workload", "batch_size": 24, "seed": 3} | job
        if not {"steps", "epochs"} & job.keys():
            tables["epochs"] = 2
        return JobSpec.parse({"job": tables, "strategy": dict(strategy or {}), "directory": str(directory)})

    def spec_file(self, spec: JobSpec) -> Path:
        """The spec as a user has it: TOML beside its job file."""
        tables = spec.to_wire()
        lines = []
        for section in ("job", "strategy"):
            lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in tables[section].items())]
        path = Path(spec.directory, "line.toml")
        path.write_text("\n".join(lines) + "\n")
        return path

    def gate(self) -> Gate:
        self._num_files += 1
        return Gate(self.home / f"gate-{self._num_files}")

    def submit(self, spec: JobSpec, **options: Any) -> str:
        job: str = self.client.submit(spec, **options)["job"]
        return job

    def run(self, spec: JobSpec) -> dict[str, Any]:
        """The job's result. Of one that has failed the log is printed, for a test that did not expect it."""
        result = self.client.wait(self.submit(spec), timeout=SECONDS)
        if result["state"] == "failed":
            with suppress(RequestRefused):
                print(self.log_of(result["job"]))
        return dict(result)

    def until_logged(self, job: str, text: str) -> str:
        """Follows the job until its log has the text; returns the log so far."""
        log = ""
        for event in self.client.follow(job, progress=False):
            log += event.get("log", "")
            if text in log:
                return log
        raise AssertionError(f"{job} ended and never said {text!r}:\n{log}")

    def log_of(self, job: str) -> str:
        return "".join(self.client.log(job))

    # --- the command

    def weft(self, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "weft", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=SECONDS,
            check=False,
            cwd=self.home,
            **options,
        )

    @contextmanager
    def weft_running(self, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
        """The command while it runs; it is killed at the end if it still does."""
        with subprocess.Popen(
            [sys.executable, "-m", "weft", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.home,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    # --- the socket

    @contextmanager
    def connected(self, *, hello: bool = True) -> Iterator[Any]:
        """A connection on which a test sends what it likes."""
        with RawClient(self.socket) as client:
            if hello:
                client.send({"hello": {"protocol": PROTOCOL, "version": "0"}})
                assert "hello" in client.receive()
            yield client


class KnownKeyDaemon(RealDaemon):
    """Whose directory a test may ask, as one of its workers does."""

    def command(self, **changes: object) -> list[str]:
        ours = super().command(**changes)
        known = f"import secrets, sys; secrets.token_bytes = lambda n: {KEY!r}; from weft.cli.main import main; main()"
        return [sys.executable, "-c", known, *ours[3:]]

    def directory(self) -> Any:
        from weft.transport.memory.directory import Directory  # only these tests need torch

        return Directory(self.runtime / "directory.sock", KEY, "nobody")


TERMINAL = ("completed", "failed", "cancelled")


def num_shared_mappings(pid: int) -> int:
    """Mappings of shared memory, torch's and others'."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(map(_is_shared_memory, maps.splitlines()))


def num_held_blocks(pid: int) -> int:
    """Of shared memory, mapped or open."""
    opened = 0
    with suppress(OSError):  # closed meanwhile
        opened = sum(_is_shared_memory(os.readlink(each)) for each in Path(f"/proc/{pid}/fd").iterdir())
    return opened + num_shared_mappings(pid)


def _is_shared_memory(line: str) -> bool:
    return "/dev/shm/" in line or "/memfd:" in line


def metrics_rows(run_dir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)
