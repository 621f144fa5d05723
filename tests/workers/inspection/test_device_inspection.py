"""What is inspected on a device and what on its host: on a device whose times nobody can mistake for the host's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.inspection import Inspection
from weft.spec.job_spec import JobSpec
from weft.workers.devices.device import Device, Result
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.inspection import update_times
from weft.workers.inspection.inspection import inspect, inspect_job
from weft.workload.workload import Workload

SECONDS = 1000.0  # of whatever runs on the device
CPU, GPU = {"device": "cpu"}, {"device": "gpu"}


class SlowDevice(StandIn):
    """Its memory is its own: what it has put there is not the host's tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.present: set[nn.Module] = set()
        self._brought = 0
        self._own: list[torch.Tensor] = []  # kept, so that no other tensor gets the place of one
        self.most_present = 0

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        self._own.append(tensor.clone())
        return self._own[-1]

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(tensor.data_ptr() == own.data_ptr() for own in self._own)

    def is_untouched(self) -> bool:
        return not self._own and not self.most_present

    def adopt(self, module: nn.Module) -> None:
        """With all its parts, as `module.to` does."""
        self.present |= set(module.modules())
        self._brought += 1
        self.most_present = max(self.most_present, self._brought)

    def give_back(self, module: nn.Module) -> None:
        self.present -= set(module.modules())
        self._brought -= 1

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        return SECONDS, work()


class Scale(nn.Module):
    """A unit that tells where it is run."""

    def __init__(self, device: SlowDevice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.device = device
        self.runs: set[bool] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.add(self in self.device.present)
        return x * self.weight


class Distance(nn.Module):
    """A loss with a tensor of its own, which is to be where the model is."""

    def __init__(self, device: SlowDevice) -> None:
        super().__init__()
        self.device = device
        self.runs: set[bool] = set()

    def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.runs.add(self in self.device.present)
        return nn.functional.mse_loss(y.float(), target)


def spec_of(mode: str = "train", **strategy: Any) -> JobSpec:
    job = {"entry": "job.py:workload", "batch_size": 8, "steps": 1, "mode": mode}
    return JobSpec.parse({"job": job, "strategy": strategy, "directory": "/jobs"})


def workload_of(model: nn.Module, **changes: Any) -> Workload:
    parts: dict[str, Any] = {
        "model": model,
        "loss": nn.MSELoss(),
        "train": (torch.randn(16, 3), torch.randn(16, 3)),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    }
    return Workload(**parts | changes)


class Job:
    """An inspection on a slow device of a model of three units."""

    def __init__(self, optimizer: Any = torch.optim.Adam, **strategy: Any) -> None:
        self.device = SlowDevice()
        self.loaded: list[tuple[list[Scale], Distance]] = []
        self._optimizer = optimizer
        told = inspect_job(self._load, spec_of(**strategy), self.device)
        self.inspection = Inspection.from_wire(told)

    def _load(self) -> Workload:
        units, loss = [Scale(self.device) for _ in range(3)], Distance(self.device)
        self.loaded.append((units, loss))
        return workload_of(nn.Sequential(*units), loss=loss, optimizer=self._optimizer)

    def ran_on(self) -> list[set[bool]]:
        """Of each workload that was loaded: whether its units and its loss were on the device when they ran."""
        return [set().union(loss.runs, *(unit.runs for unit in units)) for units, loss in self.loaded]

    def is_slow(self, kind: str) -> set[bool]:
        units = self.inspection.units_on(kind)
        times = [
            (u.forward_seconds, u.backward_seconds, u.small_forward_seconds, u.small_backward_seconds) for u in units
        ]
        return {seconds >= SECONDS for each in times for seconds in each}


def test_a_job_of_cpu_replicas_never_comes_near_a_device() -> None:
    job = Job(replicas=2)
    assert (job.is_slow("cpu"), job.ran_on()) == ({False}, [{False}])
    assert job.device.is_untouched()
    assert job.inspection.device_update_seconds is None


@pytest.mark.parametrize("strategy", [{"update": "local"}, {"update": "cpu"}, {"update": "balanced"}])
def test_of_a_job_of_devices_alone_the_host_never_runs_the_model(strategy: dict[str, Any]) -> None:
    job = Job(replicas=[GPU], **strategy)
    assert (job.is_slow("gpu"), job.ran_on()) == ({True}, [{True}])
    assert job.inspection.units_on("gpu") == job.inspection.units
    assert job.inspection.small_size == 2


def test_a_job_that_is_planned_only_has_both_measured_or_where_the_host_cannot_its_devices_alone() -> None:
    """It is asked what the host would bring; a model that no CPU can run has a plan all the same."""
    asked = spec_of(replicas=[GPU], update="cpu").model_copy(update={"plan_for": "time"})
    device, runs = SlowDevice(), []

    class ForDevices(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(self in device.present)
            if not runs[-1]:
                raise RuntimeError("no kernel for this device")
            return super().forward(x)

    def found(kind: type[Scale]) -> Inspection:
        told = inspect_job(lambda: workload_of(nn.Sequential(kind(device), kind(device))), asked, device)
        return Inspection.from_wire(told)

    both = found(Scale)
    assert both.device_units[0].forward_seconds >= SECONDS > both.units[0].forward_seconds
    assert both.device_update_seconds == SECONDS
    assert both.timed_size == 8
    alone = found(ForDevices)
    assert False in runs
    assert (alone.device_units, alone.units[0].forward_seconds, alone.timed_size) == ((), SECONDS, 0)


def test_units_come_to_the_device_one_at_a_time() -> None:
    job = Job(replicas=[GPU])
    assert job.device.most_present == 2, "the last unit, and the loss"
    assert job.device.present == set()


def test_a_loss_that_holds_units_has_them_on_the_device_when_it_runs() -> None:
    """One that tied its weights to the first unit's: they had come and gone before it was asked."""

    class Tied(Distance):
        def __init__(self, device: SlowDevice, first: nn.Linear) -> None:
            super().__init__(device)
            self.first = first

        def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.runs.add(self.first in self.device.present)
            return super().forward(y, target) + self.first.weight.square().sum()

    device = SlowDevice()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    loss = Tied(device, model[0])
    workload = workload_of(model, loss=loss)
    inspect(workload, spec_of(replicas=[GPU], update="local"), device)
    assert loss.runs == {True}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_where_both_kinds_compute_each_has_its_own_times_from_a_model_of_its_own() -> None:
    """A module may keep what it has computed, a table of angles, say: on a device it is of no use to the host."""
    job = Job(replicas=[CPU, GPU])
    assert (job.is_slow("cpu"), job.is_slow("gpu")) == ({False}, {True})
    assert job.ran_on() == [{True}, {False}]
    assert job.inspection.small_size == 1
    assert job.inspection.load_seconds < SECONDS


@pytest.mark.parametrize(
    ("strategy", "host", "device"),
    [
        ({"replicas": [GPU], "update": "local"}, None, SECONDS),
        ({"replicas": [GPU], "update": "cpu"}, 0.0, None),
        ({"replicas": [GPU], "update": "local", "staleness": 1}, 0.0, None),
        ({"replicas": [GPU], "update": "balanced"}, 0.0, SECONDS),
        ({"replicas": [CPU, GPU], "update": "local"}, 0.0, SECONDS),
        ({"replicas": [CPU, GPU], "update": "cpu"}, 0.0, None),
        ({"replicas": [CPU], "update": "local"}, 0.0, None),
        ({"replicas": [GPU], "mode": "forward"}, None, None),
    ],
)
def test_an_optimizer_is_timed_where_it_will_step_and_nowhere_else(
    strategy: dict[str, Any], host: float | None, device: float | None
) -> None:
    """One whose kernels are a GPU's alone cannot step on the host, nor one that was written for the host on a GPU."""
    stepped: set[str] = set()

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            stepped.update("gpu" if job_device.holds(p) else "cpu" for p in given)
            return super().step(closure)

    class WatchedJob(Job):
        def _load(self) -> Workload:
            nonlocal job_device
            job_device = self.device
            return super()._load()

    job_device = SlowDevice()
    told = WatchedJob(lambda parameters: Watching(parameters, lr=0.1), **strategy).inspection
    assert stepped == {name for name, seconds in (("cpu", host), ("gpu", device)) if seconds is not None}
    assert told.device_update_seconds == device
    if host is not None:
        assert 0 < told.update_seconds_on("cpu") < SECONDS
    else:
        assert told.update_seconds_on("cpu") == (device or 0.0), "nobody asks, but a what-if"


def test_under_autocast_a_unit_is_what_its_device_makes_of_it() -> None:
    """Autocast keeps its copies of parameters to its end: around the whole inspection they would fill the device."""
    ended: list[bool] = []

    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ended.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    device = SlowDevice()
    workload = workload_of(nn.Sequential(Asking(3, 3), nn.Linear(3, 3)), loss=Distance(device))
    told = inspect(workload, spec_of(replicas=[GPU], precision="bf16"), device)
    assert (set(ended), torch.is_autocast_enabled("cpu")) == ({True}, False)
    assert told["values"][0]["dtype"] == "bfloat16"


def test_a_workload_that_is_wrong_is_refused_on_a_device_as_on_the_host() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("theirs")

    with pytest.raises(ZeroDivisionError, match="theirs"):
        inspect(workload_of(nn.Sequential(nn.Linear(3, 3), Failing())), spec_of(replicas=[GPU]), SlowDevice())


# --- a sample for the optimizer


class Sums(torch.optim.Optimizer):
    """Keeps a number for each element of a vector, and of a matrix the sums of its rows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["sums"] = p.grad.sum(-1) if p.dim() == 2 else p.grad.clone()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1),
    "adamw, amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
    "own": Sums,
}


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.double()).float()


def many() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 40), nn.LayerNorm(40), nn.Linear(40, 3), Double(), Number(), nn.Linear(3, 3))


def bytes_of(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("device", [HostDevice, SlowDevice])
def test_a_sample_tells_the_state_of_every_parameter(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[Any], torch.optim.Optimizer], device: Callable[[], Device]
) -> None:
    """In two groups, of two dtypes; of none there is room for more than what stands for its sort."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        return build([{"params": given[0::2]}, {"params": given[1::2]}])

    def told() -> Any:
        spec = spec_of(replicas=[GPU], update="local") if device is SlowDevice else spec_of()
        return inspect(workload_of(many(), optimizer=optimizer), spec, device())["parameters"]

    whole = told()
    monkeypatch.setattr(update_times, "SAMPLE_BYTES", 100)
    assert told() == whole
    assert any(facts["state"] is not None for facts in whole)


@pytest.mark.parametrize("bound", [0, 100, 500, 1000, 1 << 20])
def test_state_is_made_of_as_many_bytes_as_the_bound_says_and_the_time_goes_with_the_whole(
    monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    monkeypatch.setattr(update_times, "SAMPLE_BYTES", bound)
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(parameters, lr=0.1))
        return made[-1]

    model = many()
    told = inspect(workload_of(model, optimizer=optimizer), spec_of(replicas=[GPU], update="local"), SlowDevice())
    assert not made[0].state, "the host is to update nothing"
    sample = bytes_of(made[1].state)
    trained = [p for name, p in model.named_parameters() if "unused" not in name]
    smallest = 72 + 12 + 4  # of a sort: the doubles' matrix or bias, another bias, the number
    assert sample <= max(bound, 0) + smallest
    assert sample == bytes_of(trained) or bound < bytes_of(trained)
    assert told["device_update_seconds"] == pytest.approx(SECONDS * bytes_of(trained) / sample)
    assert all(p.grad is None for p in model.parameters())


def test_what_the_host_steps_is_on_the_host_with_the_gradients_of_the_device() -> None:
    class Asking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in self.param_groups[0]["params"])
            return super().step(closure)

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = [p.detach().clone() for p in model.parameters()]
    workload = workload_of(model, optimizer=lambda parameters: Asking(parameters, lr=0.1))
    inspect(workload, spec_of(replicas=[GPU], update="cpu"), StandIn())
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("replicas", [[GPU], [CPU, GPU]])
def test_a_parameter_that_others_than_modules_have_hold_of_is_named(replicas: list[dict[str, Any]]) -> None:
    """As it came from the job: what the inspection itself takes hold of does not count."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def found() -> str | None:
        spec = spec_of(replicas=replicas, update="cpu")
        told: str | None = inspect_job(lambda: workload_of(model), spec, StandIn())["loose_parameter"]
        return told

    assert found() is None
    kept = [model[1].weight]
    assert found() == "1.weight"
    del kept
    assert found() is None


def test_gradients_that_are_sparse_stay_so() -> None:
    """SparseAdam refuses any others."""
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten())
    train = torch.randint(9, (16, 2)), torch.randn(16, 6)
    workload = workload_of(model, train=train, optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters)))
    for strategy in ({}, {"replicas": [GPU], "update": "balanced"}):
        assert inspect(workload, spec_of(**strategy), StandIn() if strategy else HostDevice())["update_seconds"] > 0


def test_a_parameter_that_several_units_use_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_times, "SAMPLE_BYTES", 12)
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    last.weight = first.weight
    workload = workload_of(nn.Sequential(first, nn.ReLU(), last))
    told = inspect(workload, spec_of(replicas=[GPU], update="local"), SlowDevice())
    assert told["device_update_seconds"] == pytest.approx(SECONDS * (36 + 12 + 12) / 12)
