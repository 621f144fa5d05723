"""Real parts for the tests of workers: the directory's own code in this process, and plans as the daemon makes them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.course import Course
from weft.plan.inspection import Inspection
from weft.plan.plan import Plan
from weft.plan.worker_view import WorkerView
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec
from weft.transport.memory.blocks import Blocks
from weft.transport.memory.directory import Directory, Server
from weft.transport.wire.frames import MAX_WORKER_FRAME_BYTES, FrameReader, encode
from weft.workers.devices.host import HostDevice
from weft.workers.inspection import inspection as inspection_module
from weft.workers.inspection import times
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workload.workload import Workload

PLENTY = 1 << 40
ONE_EACH = 1e-6  # MiB: no bucket has room for a second parameter


class Beside(Server):
    """The directory's blocks, without a process in between."""

    def connect(self) -> None:
        self.layouts: Any = {}
        self.blocks: Any = Blocks(self.layouts)
        self.handles: Any = {}

    def _is_there(self) -> bool:
        return True


class Local(Directory):
    """A client of those."""

    def __init__(self) -> None:
        self._job = "job"
        self._opened = lambda block: None
        self._asked = {}
        self._server = Beside(Path(), b"")


@dataclass(frozen=True)
class Planned:
    """views: of each worker, as they come off the wire."""

    spec: JobSpec
    plan: Plan
    views: list[WorkerView]

    @property
    def course(self) -> Course:
        return Course(self.views[0])

    def new_directory(self) -> Directory:
        """For another attempt at it."""
        return Local()

    def memory(self, directory: Directory) -> BucketMemory:
        assert self.plan.synchronisation is not None
        return BucketMemory(directory, self.plan.synchronisation, self.plan.replicas)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a lane: with more, a sum is cut where another one is not, and a tensor in the middle of a vector, where
    bfloat16 rounds otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def directory() -> Directory:
    return Local()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Planned]:
    """The plan of a workload for a strategy; batches of 4, one bucket for each parameter, and forwards that wait before
    they begin, if not told otherwise."""
    monkeypatch.setattr(times, "COPIED_BYTES", 1 << 10)

    def plan(
        workload: Workload,
        *,
        batch_size: int = 4,
        steps: int = 3,
        directory: str = "/jobs",
        peer_access: bool = False,
        mode: str = "train",
        **strategy: Any,
    ) -> Planned:
        job = {"entry": "job.py:workload", "batch_size": batch_size, "steps": steps, "seed": 5, "mode": mode}
        table = {"job": job, "strategy": {"bucket_mib": ONE_EACH, "waits": "stage"} | strategy, "directory": directory}
        spec = JobSpec.parse(table)
        thrown_away = dataclasses.replace(workload, model=copy.deepcopy(workload.model))
        inspection = inspection_module.inspect(thrown_away, spec, HostDevice()) | {"peer_access": peer_access}
        made = make_plan(spec, Inspection.from_wire(inspection), shared_bytes_free=PLENTY)
        views = [WorkerView.of(made, position).to_wire() for position in range(len(made.workers))]
        (message,) = FrameReader(MAX_WORKER_FRAME_BYTES).feed(encode({"views": views}))
        return Planned(spec, made, [WorkerView.from_wire(view) for view in message["views"]])

    return plan


@pytest.fixture
def workload_of() -> Callable[..., Workload]:
    """A workload of 12 samples of 3 numbers for the model given, or for two linear layers."""

    def workload(model: nn.Module | None = None, **changes: Any) -> Workload:
        if model is None:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        generator = torch.Generator().manual_seed(7)
        parts: dict[str, Any] = {
            "model": model,
            "loss": nn.MSELoss(),
            "train": (torch.randn(12, 3, generator=generator), torch.randn(12, 2, generator=generator)),
            "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
        }
        return Workload(**parts | changes)

    return workload
