"""Whose fault it is: `user-error` is never the reason of a fault of ours, nor `internal` of the user's."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.machine.free_memory import SharedMemoryFull
from weft.machine.run_file import RunFileError
from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.transport.memory.board import Board
from weft.transport.wire.frames import encode
from weft.workers.compute.pairs import DataPair
from weft.workers.compute.unit_stage import UnitStage
from weft.workers.devices.host import HostDevice
from weft.workers.lanes import attempt
from weft.workers.updates.bucket_updates import BucketUpdates
from weft.workload import origin
from weft.workload.data.batches import Batches
from weft.workload.faults import OURS, fault_of
from weft.workload.optimizer import make_optimizer
from weft.workload.units import Unit
from weft.workload.workload import Workload

ROOT = Path(weft.__file__).parent
Local = runpy.run_path(str(Path(__file__).parents[1] / "workers" / "conftest.py"))["Local"]
VALIDATION = Iteration(index=0, training=False, epoch=0, step=0, start=0, size=1)
TRAINING = Iteration(index=0, training=True, epoch=0, step=0, start=0, size=2)


def raised_by(run: Callable[[], Any]) -> BaseException:
    """As the worker catches it: without the test's own lines, which would be the user's."""
    try:
        run()
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and not Path(trace.tb_frame.f_code.co_filename).is_relative_to(ROOT):
            trace = trace.tb_next
        assert trace is not None, "it never was in our code"
        return error.with_traceback(trace)
    raise AssertionError("nothing was raised")


def stage_of(*modules: nn.Module) -> UnitStage:
    units = [Unit(index, f"{index}.", module) for index, module in enumerate(modules)]
    functions = {"loss": nn.functional.nll_loss}
    return UnitStage(units, seed=0, recompute=False, device=HostDevice(), functions=functions)


def batches_of(train: Any) -> Batches:
    workload = Workload(model=nn.Linear(1, 1), loss=nn.MSELoss(), train=train, optimizer=torch.optim.SGD)
    return Batches(workload, seed=0)


class Listed(list[Any]):
    """A data set whose items no Python code of anybody's makes."""


OF_THE_USER: dict[str, Callable[[], Any]] = {
    "layers of torch's that do not fit": lambda: stage_of(nn.Linear(3, 3)).forward(
        0, 0, [], DataPair(torch.zeros(1, 4), None)
    ),
    "an optimizer of torch's that takes no such rate": lambda: make_optimizer(
        functools.partial(torch.optim.SGD, lr=-1.0), nn.Linear(1, 1).parameters()
    ),
    "a loss of torch's on what it cannot take": lambda: stage_of(nn.Linear(2, 2)).lose(
        0, 0, [], DataPair(torch.zeros(1, 2), torch.tensor([7]))
    ),
    "samples that cannot be put together": lambda: batches_of(
        Listed([(torch.zeros(1), torch.zeros(1)), (torch.zeros(2), torch.zeros(1))])
    ).load(TRAINING, Part(0, 0, 2)),
    "a model that asserts": lambda: stage_of(Asserting()).forward(0, 0, [], DataPair(torch.zeros(1), None)),
}


class Asserting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.numel() == 7
        return x


NO_TASK: Any = SimpleNamespace(owner=None, kind=None, bucket=None)
NOTHING: Any = None
OF_OURS: dict[str, Callable[[], Any]] = {
    "a task of no kind": lambda: BucketUpdates.bind(NOTHING, NO_TASK, NOTHING),
    "a task without its number": lambda: attempt._given(None),
    "a board of another dtype": lambda: Board(torch.zeros(3)),
    "a message that cannot be sent": lambda: encode({"type": object()}),
    "an assertion beside the user's data": lambda: batches_of((torch.zeros(4, 1), torch.zeros(4, 1))).load(
        VALIDATION, Part(0, 0, 1)
    ),
}


@pytest.mark.parametrize("case", OF_OURS)
def test_a_fault_of_ours_is_internal_and_asks_to_be_reported(case: str) -> None:
    fault = fault_of(raised_by(OF_OURS[case]))
    assert (fault.reason, fault.exit_code) == ("internal", 70)
    assert fault.message.startswith(OURS + "Traceback")


@pytest.mark.parametrize("case", OF_THE_USER)
def test_a_fault_of_the_job_is_the_users_though_no_line_of_theirs_was_running(case: str) -> None:
    assert fault_of(raised_by(OF_THE_USER[case])).reason in ("user-error", "invalid-workload")


def test_a_block_of_another_size_than_it_has_is_ours() -> None:
    directory = Local()
    directory.block("board", 64)
    assert fault_of(raised_by(lambda: directory.block("board", 128))).reason == "internal"


def test_what_a_gpu_reports_late_is_of_a_kernel_of_the_users() -> None:
    """The host hears of it in whatever waits next, which is most often a lane."""

    def run() -> None:
        attempt._given(None)

    error = raised_by(run)
    late = torch.AcceleratorError("CUDA error: device-side assert triggered").with_traceback(error.__traceback__)
    assert fault_of(late).reason == "user-error"


@pytest.mark.parametrize(
    ("error", "reason", "exit_code"),
    [
        (SharedMemoryFull("9 MiB more of shared memory cannot be had"), "shared-memory", 1),
        (RunFileError(5, "/runs/a/model.safetensors: cannot be written"), "run-directory", 74),
    ],
)
def test_what_the_machine_lacks_is_a_reason_of_its_own_without_traceback(
    error: Exception, reason: str, exit_code: int
) -> None:
    fault = fault_of(error)
    assert (fault.reason, fault.message, fault.exit_code) == (reason, str(error), exit_code)


def test_the_modules_that_are_ours_alone_are_there() -> None:
    for name in origin._OURS_ALONE:
        assert (ROOT / name).exists(), name
