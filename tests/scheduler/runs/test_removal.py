"""The removal of run directories that hold whatever a job's code can make, on a real file system."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.machine.run_file import MARK, claim
from weft.scheduler.runs import removal
from weft.scheduler.runs.removal import BATCH, NotRemoved, remove

JOB = "digits-1"
DEPTH = 3000  # far above what a path, or a recursion, can hold


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """What a job's links lead to; it stays."""
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "precious").write_text("kept")
    yield directory
    assert [path.name for path in directory.iterdir()] == ["precious"]


def removed(runs: Path, job: str = JOB) -> bool:
    remove(runs / job, job, runs, threading.Event())
    return not os.path.lexists(runs / job)


def deep_tree(directory: Path, outside: Path) -> None:
    at = os.open(directory, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=at)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def special_files(directory: Path, outside: Path) -> None:
    os.mkfifo(directory / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(directory / "s"))
    (directory / "hole").touch()
    os.truncate(directory / "hole", 1 << 40)
    os.link(outside / "precious", directory / "hard link")


def links(directory: Path, outside: Path) -> None:
    (directory / "to a directory").symlink_to(outside)
    (directory / "to a file").symlink_to(outside / "precious")
    (directory / "to itself").symlink_to("to itself")
    (directory / "to nowhere").symlink_to("/nowhere")
    (directory / "up").symlink_to("..")
    (directory / "inner").mkdir()
    (directory / "inner" / "out").symlink_to(outside, target_is_directory=True)


def odd_names(directory: Path, outside: Path) -> None:
    for name in (b"\xff\xfe", b"new\nline", b" ", b"-rf", b"*", b"x" * 255):
        (directory / os.fsdecode(name)).mkdir()
        (directory / os.fsdecode(name) / os.fsdecode(name)).touch()


def many_files(directory: Path, outside: Path) -> None:
    for number in range(2 * BATCH + 1):
        (directory / str(number)).touch()


def files_of_weft_replaced(directory: Path, outside: Path) -> None:
    (directory / "job.log").mkdir()
    (directory / "metrics.jsonl").symlink_to("metrics.jsonl")
    os.mkfifo(directory / "recording.msgpack")
    (directory / "spec.json").symlink_to("/dev/zero")


HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    make.__name__.replace("_", " "): make
    for make in (deep_tree, special_files, links, odd_names, many_files, files_of_weft_replaced)
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "deep tree" else name for name in HOSTILE]
)
def test_whatever_a_job_has_made_goes_and_what_its_links_lead_to_stays(runs: Path, outside: Path, name: str) -> None:
    claim(runs / JOB, JOB)
    HOSTILE[name](runs / JOB, outside)
    before = len(os.listdir("/proc/self/fd"))
    assert removed(runs)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(runs.iterdir()) == []


UNPRIVILEGED = """
import os, sys, threading
from pathlib import Path
from weft.machine.run_file import claim
from weft.scheduler.runs.removal import remove
os.setresuid(65534, 65534, 65534)
runs = Path(sys.argv[1], "runs")
claim(runs / "a", "a")
inner = runs / "a" / "closed" / "more"
inner.mkdir(parents=True)
(inner / "file").touch()
(runs / "a" / "open").mkdir()
(runs / "a" / "open" / "unwritable").mkdir(mode=0o500)
for path in (inner, inner.parent, runs / "a"):
    path.chmod(0)
remove(runs / "a", "a", runs, threading.Event())
assert list(runs.iterdir()) == []
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="for root nothing is closed, and only root can be somebody else")
def test_directories_that_the_job_has_closed_go_too() -> None:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="wr-", dir="/tmp") as home:
        os.chmod(home, 0o777)
        done = subprocess.run([sys.executable, "-c", UNPRIVILEGED, home], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


# --- what is not removed


def test_a_directory_that_was_there_before_the_job_is_not_weft_s_to_remove(runs: Path) -> None:
    """`--runs-dir .` and `--id src`: the run directory is the user's own source."""
    (runs / "src").mkdir(parents=True)
    (runs / "src" / "work").write_text("of years")
    claim(runs / "src", "src")
    with pytest.raises(NotRemoved, match="not made for this job"):
        removed(runs, "src")
    assert (runs / "src" / "work").read_text() == "of years"


def test_a_mark_of_another_job_or_one_that_is_no_file_is_none(runs: Path) -> None:
    for make in (
        lambda mark: mark.write_text("digits-2\n"),
        lambda mark: mark.mkdir(),
        os.mkfifo,
        lambda mark: mark.symlink_to("/dev/zero"),
        lambda mark: mark.symlink_to(runs / "elsewhere"),
    ):
        directory = runs / JOB
        directory.mkdir(parents=True)
        (runs / "elsewhere").write_text(f"{JOB}\n")
        make(directory / MARK)
        with pytest.raises(NotRemoved, match="not made for this job"):
            removed(runs)
        mark = directory / MARK
        mark.rmdir() if mark.is_dir() else mark.unlink()
        directory.rmdir()


@pytest.mark.parametrize("where", ["other", "runs/inner", "runs/../other"])
def test_a_directory_outside_the_runs_directory_stays(tmp_path: Path, runs: Path, where: str) -> None:
    claim(runs / "digits-2", "digits-2")
    directory = tmp_path / where / JOB
    claim(directory, JOB)
    with pytest.raises(NotRemoved, match="is not in this daemon's runs_dir"):
        remove(directory, JOB, runs, threading.Event())
    assert (directory / MARK).exists()


@pytest.mark.parametrize("kind", ["a symlink", "a file", "a FIFO", "a dangling symlink"])
def test_what_stands_in_the_place_of_a_run_directory_stays(runs: Path, outside: Path, kind: str) -> None:
    runs.mkdir()
    path = runs / JOB
    match kind:
        case "a symlink":
            claim(outside.parent / "target", JOB)
            path.symlink_to(outside.parent / "target")
        case "a file":
            path.touch()
        case "a FIFO":
            os.mkfifo(path)
        case _:
            path.symlink_to("/nowhere")
    with pytest.raises(NotRemoved, match="remove it yourself"):
        removed(runs)
    assert os.path.lexists(path)
    assert kind != "a symlink" or (outside.parent / "target" / MARK).exists()


@pytest.mark.parametrize("gone", ["the directory", "all of them", "replaced by a file"])
def test_a_run_directory_that_has_gone_already_is_removed(runs: Path, gone: str) -> None:
    if gone == "the directory":
        runs.mkdir()
    elif gone == "replaced by a file":
        runs.touch()
    remove(runs / JOB, JOB, runs, threading.Event())


def test_what_could_not_be_removed_is_told_and_can_be_tried_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(runs / JOB, JOB)
    (runs / JOB / "a" / "stuck").mkdir(parents=True)
    (runs / JOB / "a" / "file").touch()
    rmdir = os.rmdir

    def failing(path: str, *, dir_fd: int | None = None) -> None:
        raise OSError(16, "Device or resource busy", path)

    monkeypatch.setattr(removal.os, "rmdir", failing)
    with pytest.raises(NotRemoved, match="cannot be removed whole: Device or resource busy"):
        removed(runs)
    monkeypatch.setattr(removal.os, "rmdir", rmdir)
    assert (runs / JOB / MARK).exists()
    assert removed(runs)


def test_a_removal_stops_when_the_daemon_ends_and_can_be_tried_again(runs: Path) -> None:
    claim(runs / JOB, JOB)
    (runs / JOB / "file").touch()
    stop = threading.Event()
    stop.set()
    with pytest.raises(NotRemoved, match="the daemon ends"):
        remove(runs / JOB, JOB, runs, stop)
    assert removed(runs)


def test_a_directory_that_is_written_to_all_the_time_is_given_up(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(runs / JOB, JOB)
    (runs / JOB / "file").touch()
    monkeypatch.setattr(removal, "REMOVE_SECONDS", -1.0)
    with pytest.raises(NotRemoved, match="does a process of the job still write there"):
        removed(runs)
