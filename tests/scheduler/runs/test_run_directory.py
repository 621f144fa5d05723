"""A run directory on a disk that fails: nothing is raised, and what was to be written is there once it can be."""

from __future__ import annotations

import asyncio
import errno
import os
import runpy
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weft.machine import run_file
from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.runs import run_directory
from weft.scheduler.runs.removal import MARK, remove
from weft.scheduler.runs.run_directory import CODE, RunDirectory, read_code, read_log, tidy
from weft.scheduler.runs.run_writer import RunWriter

WriteAtOnce = runpy.run_path(str(Path(__file__).parents[2] / "write_at_once.py"))["WriteAtOnce"]
FaultyOs = runpy.run_path(str(Path(__file__).parents[2] / "faulty_os.py"))["FaultyOs"]
NUMBERS = (errno.ENOSPC, errno.EIO, errno.EMFILE)
REASONS = {errno.ENOSPC: "no-space", errno.EIO: "io", errno.EMFILE: "descriptors"}


@pytest.fixture(autouse=True)
def no_descriptor_stays_open() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def train(directory: RunDirectory) -> None:
    """All that the daemon writes of a job with two attempts."""
    directory.keep("spec.json", "{}\n")
    directory.log_output("queued\n")
    for attempt in (1, 2):
        directory.start_over()
        directory.keep("plan.json", f"plan {attempt}\n")
        for step in range(3):
            directory.step(f"step {step} of {attempt}\n")
            directory.log_output(f"the job's own {attempt} {step}\n")
        directory.flush()
        try:
            directory.save("recording.msgpack", f"recording {attempt}".encode)
        except OSError:
            pass  # told to whoever asked for it
    directory.log_output("completed\n")


WHOLE = {
    "spec.json": "{}\n",
    "plan.json": "plan 2\n",
    "job.log": "queued\n" + "".join(f"the job's own {a} {s}\n" for a in (1, 2) for s in range(3)) + "completed\n",
    "metrics.jsonl": "".join(f"step {s} of 2\n" for s in range(3)),
}


def files_in(path: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in path.iterdir() if each.name not in ("recording.msgpack", MARK)}


def counted(writer: RunWriter, name: str, label: str) -> dict[str, float]:
    exporter = Exporter()
    writer.troubles.publish(exporter)
    families = text_string_to_metric_families(exporter.render().decode())
    return {s.labels[label]: s.value for family in families for s in family.samples if s.name == name}


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
def test_whichever_call_fails_all_is_there_once_the_disk_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, lasts: bool
) -> None:
    """Each call of the disk in turn, until none is left to fail."""
    at = 0
    while True:
        faulty = FaultyOs(lambda call, at=at: number if (call >= at if lasts else call == at) else 0)
        monkeypatch.setattr(run_file, "os", faulty)
        writer = WriteAtOnce()
        directory = RunDirectory("digits-1", tmp_path / str(at) / "digits-1", writer)
        train(directory)
        faulty.is_mended = True
        directory.flush()
        assert files_in(directory.path) == WHOLE, (at, faulty.num_failed)
        assert counted(writer, "weft_run_directory_lost_lines_total", "file") == {}
        if not faulty.num_failed:
            break
        told = counted(writer, "weft_run_directory_errors_total", "reason")
        assert told.keys() <= {REASONS[number]}, told  # half a write is no error: the rest goes on
        at += 1
    assert at >= 100


def test_what_no_disk_takes_is_bounded_and_its_loss_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = FaultyOs(lambda call: errno.ENOSPC)
    monkeypatch.setattr(run_file, "os", faulty)
    monkeypatch.setattr(run_directory, "MAX_WAITING_BYTES", 100)
    writer = WriteAtOnce()
    directory = RunDirectory("digits-1", tmp_path / "digits-1", writer)
    for number in range(1000):
        directory.log_output(f"{number:09}\n")
        directory.step(f"{number:09}\n")
    faulty.is_mended = True
    directory.flush()
    kept = [f"{number:09}" for number in range(10)]
    lost = "990 lines of {} are lost: they could not be written in time"
    assert (tmp_path / "digits-1" / "metrics.jsonl").read_text().split() == kept
    log = (tmp_path / "digits-1" / "job.log").read_text().splitlines()
    assert log == [*kept, lost.format("metrics.jsonl"), lost.format("this log")]
    assert counted(writer, "weft_run_directory_lost_lines_total", "file") == {"job.log": 990, "metrics.jsonl": 990}
    directory.log_output("and on\n")
    assert (tmp_path / "digits-1" / "job.log").read_text().endswith("\nand on\n")


@pytest.mark.parametrize("write", ["log", "step", "keep", "save", "begin"])
async def test_a_directory_that_was_removed_meanwhile_is_made_anew_with_its_mark(tmp_path: Path, write: str) -> None:
    """Without it `weft rm` would not remove it."""
    writer = RunWriter()
    directory = RunDirectory("digits-1", tmp_path / "digits-1", writer)
    directory.log("queued")
    await directory.written()
    shutil.rmtree(directory.path)
    match write:
        case "log":
            directory.log("running")
        case "step":
            directory.step("{}\n")
        case "keep":
            directory.keep(CODE, "{}")
        case "save":
            directory.save("recording.msgpack", lambda: b"rows")
        case "begin":
            assert await writer.make_directory(directory.path) is None
    await directory.written()
    assert (directory.path / MARK).read_text() == "digits-1\n"
    remove(directory.path, "digits-1", tmp_path, threading.Event())
    assert not directory.path.exists()
    await writer.close()


def test_what_still_waits_at_the_end_is_counted_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_file, "os", FaultyOs(lambda call: errno.EIO))
    writer = WriteAtOnce()
    directory = RunDirectory("digits-1", tmp_path / "digits-1", writer)
    train(directory)
    directory.close()
    lost = counted(writer, "weft_run_directory_lost_lines_total", "file")
    assert lost == {"job.log": WHOLE["job.log"].count("\n"), "metrics.jsonl": 3}
    assert files_in(tmp_path / "digits-1") == {}


def test_the_step_log_has_a_bound_and_the_log_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "MAX_METRICS_BYTES", 100)
    directory = RunDirectory("digits-1", tmp_path, WriteAtOnce())
    for number in range(100):
        directory.step(f"{number:09}\n")
        directory.flush()
    assert len((tmp_path / "metrics.jsonl").read_text().split()) == 10
    assert (tmp_path / "job.log").read_text().count("metrics.jsonl is full") == 1
    directory.start_over()
    directory.step("anew\n")
    directory.flush()
    assert (tmp_path / "metrics.jsonl").read_text() == "anew\n"


def test_a_follower_reads_no_more_than_a_log_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's code may make its log as long as it likes."""
    monkeypatch.setattr(run_directory, "MAX_LOG_BYTES", 1000)
    (tmp_path / "job.log").touch()
    os.truncate(tmp_path / "job.log", 1 << 40)
    offset = 0
    while data := read_log(tmp_path, offset):
        offset += len(data)
    assert 1000 < offset < 1100
    assert read_log(tmp_path, 2**44) == read_log(tmp_path, 2**63 - 1) == b""


async def test_a_writer_keeps_the_order_and_is_no_thread_of_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    def note(call: int) -> int:
        threads.add(threading.current_thread().name)
        return 0

    monkeypatch.setattr(run_file, "os", FaultyOs(note))
    writer = RunWriter()
    directories = [RunDirectory(f"job-{n}", tmp_path / f"job-{n}", writer) for n in range(20)]
    for directory in directories:
        train(directory) if directory is directories[0] else directory.log_output("one\n")
    for number in range(5000):
        directories[1].log_output(f"{number}\n")
        if number % 500 == 0:
            await asyncio.sleep(0)
    await directories[1].written()
    assert (tmp_path / "job-1" / "job.log").read_text().split() == ["one", *map(str, range(5000))]
    for directory in directories:
        directory.close()
    await writer.close()
    assert all(name.startswith("run-writer") or name == "MainThread" for name in threads)  # main: what `save` is given
    assert files_in(directories[0].path) == WHOLE
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("run-writer")]


def test_a_job_that_is_taken_up_has_no_half_checkpoint_of_a_killed_daemon(tmp_path: Path) -> None:
    half, whole = (tmp_path / "line-1" / "checkpoints" / name for name in (".step-00000080", "step-00000060"))
    for each in (half, whole):
        each.mkdir(parents=True)
    (tmp_path / "line-1" / ".model.safetensors.partial").touch()
    theirs = tmp_path / "line-1" / ".download.partial"
    theirs.touch()
    tidy([tmp_path / "line-1", tmp_path / "line-2"])
    assert list(whole.parent.iterdir()) == [whole]
    assert set((tmp_path / "line-1").iterdir()) == {whole.parent, theirs}, "what the job's code has there stays"


async def test_a_job_that_ends_leaves_no_half_model_of_a_killed_worker(tmp_path: Path) -> None:
    """It was cancelled while it was saved, and its worker did not let go in time."""
    writer = RunWriter()
    files = RunDirectory("line-1", tmp_path / "line-1", writer)
    files.log("cancelled")
    await files.written()
    (tmp_path / "line-1" / ".model.safetensors.partial").touch()
    files.close()
    await writer.close()
    assert {path.name for path in (tmp_path / "line-1").iterdir()} == {"job.log", MARK}


@pytest.mark.parametrize("write", ["log", "step", "keep"])
def test_what_comes_after_the_end_is_dropped(tmp_path: Path, write: str) -> None:
    """The directory may be gone by then, and is not made again."""
    writer = WriteAtOnce()
    directory = RunDirectory("digits-1", tmp_path / "digits-1", writer)
    directory.close()
    late: Callable[..., None] = getattr(directory, write)
    late(*(["plan.json"] if write == "keep" else []), "late\n")
    directory.flush()
    assert not (tmp_path / "digits-1").exists()


@pytest.mark.parametrize("data", ["", "[]", '{"line.py": 1}', "[" * 100_000, "\udcff"])
def test_digests_of_code_that_nobody_can_read_are_none(tmp_path: Path, data: str) -> None:
    assert read_code(tmp_path) == {}
    (tmp_path / CODE).write_bytes(data.encode(errors="surrogateescape"))
    assert read_code(tmp_path) == {}
