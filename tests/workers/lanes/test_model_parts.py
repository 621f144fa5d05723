"""What one worker holds of the model: parameters in buckets that all share, or state of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from weft.plan.course import Course
from weft.plan.kinds import Kind
from weft.transport.memory.directory import Directory
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.lanes.attempt import Attempt
from weft.workers.memory.bucket_memory import shaped_like
from weft.workers.snapshots.checkpoint import write_files
from weft.workers.snapshots.saved import Saved
from weft.workload.workload import Workload


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def tied() -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    layers[2].weight = layers[0].weight
    return layers


class Job:
    """A job's workers in one process: each with its own copy of the model, as each would build it."""

    def __init__(self, planned: Any, directory: Directory, make: Callable[[], Workload]) -> None:
        self.directory = directory
        self.plan = planned.plan
        self.workloads = [make() for _ in planned.views]
        self.attempts = [
            Attempt(planned.spec, view, workload, directory, 0.0, StandIn() if kind == "gpu" else HostDevice())
            for kind, view, workload in zip(self.plan.workers, planned.views, self.workloads, strict=True)
        ]

    def saved(self) -> dict[str, torch.Tensor]:
        """What whoever saves the model finds."""
        state: dict[str, torch.Tensor] = {}
        for arena in self.plan.arenas_to_save():
            state |= self.directory.find(arena).items()
        return state


@pytest.fixture
def job_of(planned: Any, directory: Directory, workload_of: Any) -> Callable[..., Job]:
    def build(make: Callable[[], nn.Module], **strategy: Any) -> Job:
        return Job(planned(workload_of(make()), **strategy), directory, lambda: workload_of(make()))

    return build


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_replicas_on_the_cpu_have_one_copy_of_the_parameters_and_each_its_buffers(job_of: Callable[..., Job]) -> None:
    job = job_of(model, replicas=2)
    first, second, _ = (workload.model for workload in job.workloads)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        a.data.fill_(7)
        assert b.eq(7).all(), name
    first[1].running_mean.fill_(7)
    assert not second[1].running_mean.any()


@pytest.mark.parametrize(
    "strategy",
    [{"replicas": 2}, {"stages": 2, "split": [1]}, {"replicas": 2, "stages": 2}, {"clip_norm": 1.0}, {}],
    ids=str,
)
def test_the_whole_state_dict_is_published_for_saving(job_of: Callable[..., Job], strategy: dict[str, Any]) -> None:
    job = job_of(model, **strategy)
    assert_same(job.saved(), model().state_dict())
    for workload in job.workloads[:-1]:  # the last one loads
        for parameter in workload.model.parameters():
            parameter.data.mul_(0).add_(3)
    for name, tensor in job.saved().items():
        if name in dict(model().named_parameters()):
            assert tensor.eq(3).all(), name


def test_modules_compute_where_the_buckets_are(job_of: Callable[..., Job]) -> None:
    job = job_of(model, replicas=2)
    memory = job.attempts[0]._parts._memory
    assert memory is not None
    parameters = list(job.workloads[0].model.parameters())
    for bucket in memory.buckets:
        for index, start in ((place.parameter, place.offset) for place in bucket.places):
            place = shaped_like(parameters[index], memory.parameters(bucket), start)
            place.fill_(index)
            assert parameters[index].eq(index).all()
            assert parameters[index].stride() == place.stride()


def test_a_worker_without_a_stage_keeps_no_copy_of_the_model(job_of: Callable[..., Job]) -> None:
    """The host of a device kept all parameters as they were when the model was built, for as long as the job ran."""
    job = job_of(model, replicas=[{"device": "gpu"}], update="cpu")
    memory = job.attempts[0]._parts._memory
    assert memory is not None
    shared = memory.parameters(memory.buckets[0]).untyped_storage().data_ptr()
    held = {parameter.untyped_storage().data_ptr() for parameter in job.workloads[0].model.parameters()}
    assert held == {shared}


def test_a_parameter_of_two_stages_is_published_under_both_of_its_names(job_of: Callable[..., Job]) -> None:
    job = job_of(tied, stages=2, split=[2])
    saved = job.saved()
    assert_same(saved, tied().state_dict())
    assert saved["0.weight"].data_ptr() == saved["2.weight"].data_ptr()


def test_parameters_that_are_not_trained_are_saved_beside_the_buckets(job_of: Callable[..., Job]) -> None:
    def frozen() -> nn.Sequential:
        layers = model()
        layers[0].weight.requires_grad_(False)
        return layers

    job = job_of(frozen, replicas=2)
    assert_same(job.saved(), frozen().state_dict())
    assert "0.weight" in job.directory.find("state-0-0").items()
    assert "0.bias" in job.directory.find("parameters").items()


def test_a_stage_without_buckets_owns_its_state_and_its_update(job_of: Callable[..., Job]) -> None:
    job = job_of(model, stages=2, split=[1])
    assert [sorted(attempt._parts.own_updates) for attempt in job.attempts] == [[0], [1], []]
    assert [attempt._parts.updates for attempt in job.attempts] == [None, None, None]


@pytest.mark.parametrize("update", ["local", "cpu"])
def test_who_updates_what_follows_the_plan(job_of: Callable[..., Job], update: str) -> None:
    """Two devices and the CPU worker where their gradients meet, which updates as well if it is to."""
    job = job_of(model, replicas=[{"device": "gpu"}] * 2, update=update)
    host, *devices, _ = job.attempts
    of_host, *of_devices = (attempt._parts.updates for attempt in (host, *devices))
    assert of_host is not None
    assert list(of_host.owners) == [0]
    assert host._parts.stages == {}
    assert [list(updates._of_devices) for updates in of_devices if updates is not None] == (
        [[(0, 0)], [(1, 0)]] if update == "local" else [[], []]
    )


@pytest.mark.parametrize("strategy", [{}, {"replicas": 2}, {"clip_norm": 1.0}, {"stages": 2, "split": [1]}], ids=str)
def test_a_checkpoint_has_parameters_without_elements_too(
    job_of: Callable[..., Job], tmp_path: Path, strategy: dict[str, Any]
) -> None:
    """No bucket has a piece of them: every checkpoint failed with a KeyError, and a paused job began again."""

    def with_empty() -> nn.Sequential:
        layers = model()
        layers[0].none = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        return layers

    job = job_of(with_empty, **strategy)
    iteration = Course(job.plan).iteration(0)
    tasks = [task for task in job.plan.graph.tasks if task.kind is Kind.SNAPSHOT]
    write_files(Saved([job.attempts[task.lane.worker]._parts.hold(task, iteration) for task in tasks]), tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == with_empty().state_dict().keys()
    assert (written["0.none"].shape, written["0.none"].dtype) == ((0, 3), torch.float64)
