"""A daemon that cannot start says why in one line: what is in its way, the setting that names it, what to do."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 180.0
RealDaemon: Any = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))["RealDaemon"]
Prepare = Callable[[Path, socket.socket], list[str]]

WORKLOAD = """
import torch, weft

def workload():
    data = (torch.zeros(4, 1), torch.zeros(4, 1))
    return weft.Workload(model=torch.nn.Linear(1, 1), loss=torch.nn.functional.mse_loss, train=data,
                         optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ws-", dir="/tmp") as directory:  # short: a Unix socket's path
        Path(directory, "line.py").write_text(WORKLOAD)
        Path(directory, "line.toml").write_text('[job]\nentry = "line.py:workload"\nsteps = 1\nbatch_size = 4\n')
        yield Path(directory)


@pytest.fixture
def busy() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def in_the_way(*parts: str, option: str) -> Prepare:
    """A file where the option's directory should be, or above it."""

    def prepare(home: Path, busy: socket.socket) -> list[str]:
        (home / parts[0]).write_text("a file")
        return [option, str(home.joinpath(*parts))]

    return prepare


def given(*arguments: str) -> Prepare:
    return lambda home, busy: list(arguments)


def directory_for_the_log(home: Path, busy: socket.socket) -> list[str]:
    (home / "s" / "workers.log").mkdir(parents=True)
    return []


def written(text: str) -> Prepare:
    def prepare(home: Path, busy: socket.socket) -> list[str]:
        (home / "weft.toml").write_text(text)
        return []

    return prepare


CASES: dict[str, tuple[Prepare, str, str]] = {  # what is in the way, the setting that is named, part of the sentence
    "the port is busy": (
        lambda home, busy: ["--metrics", f"127.0.0.1:{busy.getsockname()[1]}"],
        "metrics",
        "is in use by another process; give another HOST:PORT",
    ),
    "the address is another machine's": (
        given("--metrics", "203.0.113.1:9464"),
        "metrics",
        "203.0.113.1:9464 cannot be bound",
    ),
    "the host is nobody": (given("--metrics", "no-such-host.invalid:1"), "metrics", "cannot be bound"),
    "run directories in /proc": (
        given("--runs-dir", "/proc/nope"),
        "--runs-dir",
        "/proc/nope: run directories cannot be made there (No such file or directory)",
    ),
    "run directories in a file": (in_the_way("file", option="--runs-dir"), "--runs-dir", "run directories cannot"),
    "the state in /proc": (given("--state-dir", "/proc/nope"), "state_dir", "/proc/nope/ledger.sqlite: cannot be"),
    "the state below a file": (in_the_way("file", "s", option="--state-dir"), "state_dir", "cannot be opened"),
    "a directory for the workers' log": (directory_for_the_log, "--state-dir", "workers.log: cannot be opened"),
    "the socket in /proc": (given("--runtime-dir", "/proc/nope"), "runtime_dir", "/proc/nope: cannot be made"),
    "a settings file that is gone": (given("--config", "/nowhere/weft.toml"), "--config", "cannot be read (No such"),
    "a settings file that is no TOML": (written("workers = = 3"), "weft.toml", "cannot be read as TOML"),
    "a setting of the wrong kind": (written("[daemon]\nworkers = []"), "workers", "[] is no whole number; write one"),
}


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "XDG_"))}
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        cwd=home,
        env=environment | {"XDG_RUNTIME_DIR": str(home / "x")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def assert_one_sentence(done: subprocess.CompletedProcess[str], setting: str, told: str) -> None:
    assert done.returncode in (1, 2, 69, 74)
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("weft: ")
    assert setting in line
    assert told in line
    assert "; " in line  # and what to do
    assert "Errno" not in line


@pytest.mark.slow
@pytest.mark.pairs(3, name=CASES)
def test_a_daemon_that_cannot_start_says_why_in_one_line(home: Path, busy: socket.socket, name: str) -> None:
    prepare, setting, told = CASES[name]
    options = {"--runtime-dir": str(home / "r"), "--state-dir": str(home / "s"), "--metrics": "", "--workers": "1"}
    extra = prepare(home, busy)
    options |= dict(zip(extra[::2], extra[1::2], strict=True))
    if name == "a setting of the wrong kind":
        del options["--workers"]
    flat = [part for option in options.items() for part in option]
    assert_one_sentence(run(home, "daemon", *flat), setting, told)


@pytest.mark.days(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["the port is busy", "run directories in /proc", "a setting of the wrong kind"])
def test_a_run_that_cannot_start_says_why_in_one_line(home: Path, busy: socket.socket, name: str) -> None:
    prepare, setting, told = CASES[name]
    assert_one_sentence(run(home, "run", "line.toml", *prepare(home, busy)), setting, told)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--workers", "--threads", "--stand-ins", "--gpus"])
def test_a_flag_that_a_run_cannot_take_is_a_mistake_of_usage(home: Path, flag: str) -> None:
    done = run(home, "run", "line.toml", f"{flag}=-1")
    assert_one_sentence(done, flag, "-1 is too small; write ")
    assert done.returncode == 2


@pytest.mark.slow
def test_a_reference_run_without_a_place_for_its_files_says_so_in_one_line(home: Path) -> None:
    done = run(home, "run", "line.toml", "--reference", "--runs-dir", "/proc/nope")
    assert_one_sentence(done, "/proc/nope", "No such file or directory; check the path")


class OfRelativeDirectories(RealDaemon):  # type: ignore[misc]  # a class that runpy has loaded
    """All that it is given of its home is written from there."""

    def command(self, **changes: object) -> list[str]:
        parts = [part.removeprefix(f"{self.home}/") for part in super().command(**changes)]
        return ["env", "-C", str(self.home), *parts, "--runs-dir", "runs"]


@pytest.mark.days(3)
@pytest.mark.slow(seconds=8)
def test_directories_may_be_written_from_where_it_is_started() -> None:
    """Workers go to the directories of their jobs. From there they looked for the directory's socket, and every job
    waited half a minute for it, again and again."""
    with OfRelativeDirectories(workers=1).serving() as daemon:
        result = daemon.run(daemon.spec(WORKLOAD, steps=1))
        assert result["state"] == "completed", daemon.log_of(result["job"])
        assert Path(result["model"]).parent.parent == daemon.home / "runs"


class OfClosedStreams(RealDaemon):  # type: ignore[misc]  # a class that runpy has loaded
    def command(self, **changes: object) -> list[str]:
        return ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *super().command(**changes)]


@pytest.mark.days(3)
@pytest.mark.slow(seconds=5)
def test_a_daemon_serves_though_it_was_started_without_standard_streams() -> None:
    """Its sockets had their numbers, and libuv aborted it when one of those closed."""
    with OfClosedStreams(workers=1).serving() as daemon:
        for _ in range(4):
            assert daemon.client.jobs() == []


class OfAGoneDirectory(RealDaemon):  # type: ignore[misc]  # a class that runpy has loaded
    def command(self, **changes: object) -> list[str]:
        gone = self.home / "gone"
        return [
            "sh",
            "-c",
            f'mkdir {gone} && cd {gone} && rmdir {gone} && exec "$@"',
            "sh",
            *super().command(**changes),
        ]


@pytest.mark.days(3)
@pytest.mark.slow(seconds=8)
def test_the_directory_where_it_was_started_may_be_removed() -> None:
    """torch could not be loaded there: the daemon ended as soon as it served."""
    with OfAGoneDirectory(workers=1).serving() as daemon:
        result = daemon.run(daemon.spec(WORKLOAD, steps=1))
        assert result["state"] == "completed", daemon.log_of(result["job"])
