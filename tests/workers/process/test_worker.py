"""What a worker tells the daemon while it sets a job up, in this process and over a real socket."""

from __future__ import annotations

import errno
import os
import queue
import resource
import runpy
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.transport.memory.directory import SharedMemoryGone, _asking
from weft.transport.wire.frames import LINK_GONE_EXIT, MAX_WORKER_FRAME_BYTES, FrameReader
from weft.workers.devices.stand_in import StandIn
from weft.workers.process import worker as process
from weft.workers.process.footprint import Footprint
from weft.workers.process.spare import Spares
from weft.workers.process.worker_config import WorkerConfig

_ATTEMPT = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "test_attempt.py"))
planned_workload, SOURCE = _ATTEMPT["planned_workload"], _ATTEMPT["SOURCE"]
NOTICE = "no memory can be page-locked"
CONFIG = WorkerConfig(
    compiled="/nowhere",
    worker="gpu-0",
    lane="compute",
    device="stand-in",
    threads=1,
    cores=(),
    spin_seconds=0.0,
    unlike=False,
    stamps=True,
    directory="",
    authkey=b"",
)


class Refusing(StandIn):
    """Its memory is like that of a GPU whose driver page-locks none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refused = 0

    def pin(self, block: torch.Tensor) -> None:
        self.num_refused += 1

    def notice(self) -> str | None:
        return NOTICE if self.num_refused else None


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(("device", "said"), [(Refusing(), f"gpu-0: {NOTICE}\n"), (StandIn(), None)])
def test_a_worker_says_once_in_the_jobs_log_that_memory_cannot_be_page_locked(
    ends: tuple[socket.socket, socket.socket],
    planned: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: StandIn,
    said: str | None,
) -> None:
    (tmp_path / "job.py").write_text(SOURCE)
    gpu = {"replicas": [{"device": "gpu"}], "update": "local"}
    plan = planned(planned_workload(tmp_path), directory=str(tmp_path), batch_size=9, **gpu)
    view = plan.views[plan.plan.workers.index("gpu")]
    directory = plan.new_directory()
    directory._opened = device.pin
    monkeypatch.chdir(tmp_path)
    for name in ("WEFT_JOB_ID", "WEFT_RUN_DIR"):  # which it sets
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(process._Worker, "_directory", lambda worker, job: directory)
    worker = process._Worker(ends[1], CONFIG, device, Footprint.now({}), Spares(ends[0], os.getpid()))
    inboxes: dict[str, queue.SimpleQueue[None]] = {lane: queue.SimpleQueue() for lane in view.programs}
    for inbox in inboxes.values():
        inbox.put(None)
    message = {
        "job": "digits",
        "attempt": 1,
        "arenas": "digits-1",
        "snapshots": "digits-snapshots",
        "snapshot": None,
        "code": {},
        "run_dir": str(tmp_path),
        "spec": plan.spec.to_wire(),
        "plan": view,
        "inboxes": inboxes,
        "cores": (),
        "threads": None,
        "spare": False,
    }
    worker._prepare(message)
    told = FrameReader(MAX_WORKER_FRAME_BYTES).feed(ends[0].recv(1 << 16))
    assert all((each["job"], each["attempt"]) == ("digits", 1) for each in told)
    assert [each["text"] for each in told if each["type"] == "output"] == ([] if said is None else [said])
    assert told[-1]["type"] == "prepared"


def test_a_worker_that_misses_shared_memory_says_so_and_blames_nobody(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """It was the user's error: the job failed, and its owner read of an EOFError in the scheduler's own files."""

    def handle(message: Any) -> None:
        print("half a line", end="")
        raise SharedMemoryGone("the directory process does not have board")

    worker = process._Worker(ends[1], CONFIG, StandIn(), Footprint.now({}), Spares(ends[0], os.getpid()))
    worker._guarded(handle, {"job": "digits", "attempt": 2})
    told = FrameReader(MAX_WORKER_FRAME_BYTES).feed(ends[0].recv(1 << 16))
    of_job = {"job": "digits", "attempt": 2}
    missed = "gpu-0: the directory process does not have board"
    assert told == [
        {"type": "output", **of_job, "text": "half a line\n"},
        {"type": "directory-missed", **of_job, "message": missed},
    ]


def test_a_worker_whose_job_has_closed_its_connection_to_the_directory_leaves_with_the_jobs_fault(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was `directory-lost`, a fault of ours, told after eleven attempts that all did the same."""

    class LeftError(BaseException):
        pass

    def leave(code: int) -> None:
        raise LeftError(code)

    def handle(message: Any) -> None:
        with _asking("board"):
            os.write(-1, b"")

    monkeypatch.setattr(process.os, "_exit", leave)
    worker = process._Worker(ends[1], CONFIG, StandIn(), Footprint.now({}), Spares(ends[0], os.getpid()))
    with pytest.raises(LeftError) as left:
        worker._guarded(handle, {"job": "digits", "attempt": 2})
    assert left.value.args == (LINK_GONE_EXIT,)


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), RuntimeError("Too many open files")]
)
def test_a_worker_whose_job_has_left_no_descriptor_tells_the_jobs_fault(
    ends: tuple[socket.socket, socket.socket], error: Exception
) -> None:
    """It was `directory-lost`, told after eleven attempts that all did the same, or `shared-memory`."""

    asked: Future[None] = Future()
    asked.set_exception(error)
    worker = process._Worker(ends[1], CONFIG, StandIn(), Footprint.now({}), Spares(ends[0], os.getpid()))
    worker._guarded(_asking("board")(asked.result), {"job": "digits", "attempt": 2})  # no line of a user's is in it
    (told,) = FrameReader(MAX_WORKER_FRAME_BYTES).feed(ends[0].recv(1 << 16))
    assert (told["type"], told["reason"], told["exit_code"]) == ("fault", "user-error", 1)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert told["message"].startswith(f"the {limit} descriptors that a process may have are all open here")


def test_who_waits_until_memory_is_handed_on_takes_no_thread_for_begun_that_is_about_to_be(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job failed as `internal`, "cannot join thread before it is started", where the directory had been killed while
    it was saved."""
    about_to_begin, may_begin, is_waited_for = threading.Event(), threading.Event(), threading.Event()
    handed = []

    class Begun(threading.Thread):
        def start(self) -> None:
            about_to_begin.set()
            assert may_begin.wait(60)
            super().start()

        def join(self, timeout: float | None = None) -> None:
            is_waited_for.set()
            super().join(timeout)

    class Handing:
        def hand_memory_on(self) -> None:
            assert is_waited_for.wait(60)
            handed.append(self)

    worker: Any = process._Worker(ends[1], CONFIG, StandIn(), Footprint.now({}), Spares(ends[0], os.getpid()))
    worker._attempt = Handing()
    order = {"type": "hand-memory-on", "job": "digits", "attempt": 2}
    control = threading.Thread(target=worker._route, args=(order,))
    monkeypatch.setattr(threading, "Thread", Begun)
    control.start()
    assert about_to_begin.wait(60)
    worker._until_handed_on()
    may_begin.set()
    control.join()
    worker._until_handed_on()
    assert handed == [worker._attempt]
