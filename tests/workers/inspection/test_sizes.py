"""A batch that has no room whole is never run whole where it need not be."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.machine.free_memory import FreeMemory
from weft.plan.inspection import Inspection
from weft.scheduler.planning.choosing.choice import choose, consider
from weft.scheduler.planning.planner import make_plan
from weft.spec.candidates import or_auto
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host
from weft.workers.devices.device import Device
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.inspection import inspection, sizes
from weft.workers.inspection.inspection import inspect_job, inspect_threaded
from weft.workload.data.batches import Batches
from weft.workload.workload import Workload

_SPLIT = runpy.run_path(str(Path(__file__).with_name("test_split_times.py")))
MODELS: dict[str, Callable[..., nn.Module]] = _SPLIT["MODELS"]

BATCH, WIDTH, PLENTY = 32, 16, 1 << 40
ROW = 4 * WIDTH  # bytes of an activation of one sample


class Layer(nn.Module):
    """Tells how many samples it is given."""

    seen: set[int] = set()  # of all layers

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(len(x))
        with torch.no_grad():
            self.get_buffer("calls").add_(1)
        return torch.sin(self.linear(x))


def workload_of(kind: str, layer: Callable[[], nn.Module] = Layer) -> Workload:
    torch.manual_seed(1)
    return Workload(
        MODELS[kind](layer(), layer(), layer()),
        train=(torch.randn(2 * BATCH + 5, WIDTH), torch.randn(2 * BATCH + 5, WIDTH)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def spec_of(**strategy: Any) -> JobSpec:
    job = {"entry": "job.py:workload", "batch_size": BATCH, "steps": 1}
    return JobSpec.parse({"job": job, "strategy": {"preset": "auto"} | strategy, "directory": "/jobs"})


@pytest.fixture
def with_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """So many bytes of the host's memory."""
    Layer.seen.clear()

    def be(num_bytes: float) -> None:
        monkeypatch.setattr(sizes, "free_memory", lambda: FreeMemory(shared=PLENTY, host=int(num_bytes)))

    return be


def room_for(samples: int) -> float:
    """What trying a microbatch of so many takes, and less than one of twice as many: a layer keeps two activations, and
    the loss as much."""
    parameters = 3 * 4 * (WIDTH * WIDTH + WIDTH)
    return sizes.COPIES * parameters + sizes.MORE * samples * 9 * ROW


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_too_large_never_runs_and_what_is_chosen_was_looked_at(
    with_free: Callable[[float], None], kind: str, workers: int
) -> None:
    """The last batch, of five samples, has parts of its own."""
    with_free(PLENTY)
    whole = inspect_job(lambda: workload_of(kind), spec_of(), HostDevice(), Host(workers=workers))
    assert (whole["crowded"], whole["timed_size"], max(Layer.seen)) == (None, BATCH, BATCH)

    with_free(room_for(8))
    Layer.seen.clear()
    facts = inspect_job(lambda: workload_of(kind), spec_of(), HostDevice(), Host(workers=workers))
    most = 8
    assert facts["most_samples"] == facts["timed_size"] == max(Layer.seen) == most
    assert "a microbatch of 32 samples takes some" in facts["crowded"]
    if workers > 1:
        facts["threaded"] = inspect_threaded(lambda: workload_of(kind), spec_of(), Host(workers=workers), facts)
        assert max(Layer.seen) == most
    inspection = replace(Inspection.from_wire(facts), host=Host(workers=workers))
    chosen = choose(spec_of(), inspection, lambda *own, **options: make_plan(*own, shared_bytes_free=PLENTY, **options))
    assert BATCH / sum(chosen.spec.strategy.microbatch_counts) <= most


@pytest.mark.parametrize("kind", MODELS)
def test_the_model_is_as_the_function_has_made_it(with_free: Callable[[float], None], kind: str) -> None:
    with_free(room_for(8))
    workload, fresh = workload_of(kind), workload_of(kind)
    batches = Batches(workload, seed=0, batch_size=BATCH, steps=1)
    most, told = sizes.most_with_room(workload, spec_of(), batches, [1, 8, 16, BATCH], HostDevice())
    assert (most, told is None, Layer.seen) == (8, False, {1})
    for name, tensor in fresh.model.state_dict().items():
        assert torch.equal(tensor, workload.model.state_dict()[name]), name
    assert all(parameter.grad is None for parameter in workload.model.parameters())


@pytest.mark.parametrize("strategy", [{"microbatches": 1}, {"replicas": 1, "microbatches": 1}])
def test_a_batch_that_the_user_has_divided_is_tried_as_it_is(
    with_free: Callable[[float], None], strategy: dict[str, Any]
) -> None:
    with_free(1.0)
    facts = inspect_job(lambda: workload_of("by calls"), spec_of(**strategy), HostDevice(), Host(workers=1))
    assert (facts["timed_size"], facts["crowded"]) == (BATCH, None)


def test_without_any_room_the_smallest_is_tried(with_free: Callable[[float], None]) -> None:
    with_free(1.0)
    facts = inspect_job(lambda: workload_of("by calls"), spec_of(), HostDevice(), Host(workers=1))
    assert facts["most_samples"] == 1


class Normed(Layer):
    """In training a norm over the batch refuses a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


@pytest.mark.parametrize("kind", MODELS)
def test_the_smallest_that_the_model_takes_tells(with_free: Callable[[float], None], kind: str) -> None:
    with_free(room_for(8))
    workload = workload_of(kind, Normed)
    batches = Batches(workload, seed=0, batch_size=BATCH, steps=1)
    most, told = sizes.most_with_room(workload, spec_of(), batches, [1, 2, 4, 8, BATCH], HostDevice())
    assert 2 <= most < BATCH
    assert told is not None
    assert Layer.seen == {2}


class Refuses(Layer):
    """Whatever it raises for every microbatch is told where a job would come to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"samples are too few: {len(x)}")


def test_what_the_model_raises_is_told_with_its_place(with_free: Callable[[float], None]) -> None:
    with_free(1.0)
    with pytest.raises(ValueError, match="samples are too few") as told:
        inspect_job(lambda: workload_of("by calls", Refuses), spec_of(), HostDevice(), Host(workers=1))
    assert "tried before training" in "".join(getattr(told.value, "__notes__", []))


class Small(StandIn):
    """A device that has room for a quarter of the batch."""

    def capacity_bytes(self) -> int:
        return int(room_for(8))


@pytest.mark.parametrize(("host_has", "most"), [(PLENTY, 8), (room_for(4), 4)])
def test_host_and_device_are_timed_with_what_both_have_room_for(
    with_free: Callable[[float], None], host_has: float, most: int
) -> None:
    with_free(host_has)
    device: Device = Small()
    facts = inspect_job(lambda: workload_of("by calls"), spec_of(), device, Host(workers=1, gpus=1))
    assert facts["crowded"] is not None
    assert (facts["timed_size"], facts["most_samples"]) == (most, most)
    for values in (facts["values"], facts["device_values"]):
        assert {max(size for size, _ in value["shapes"]) for value in values} == {most}


class Choosy(nn.Module):
    """As batch norm, though nobody knows it by its type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 3:
            raise ValueError(f"{len(x)} are too few\nof them")
        return x


def refusing(kind: str) -> Workload:
    torch.manual_seed(1)
    data = torch.randn(2 * BATCH, WIDTH), torch.randn(2 * BATCH, WIDTH)
    model = MODELS[kind](nn.Linear(WIDTH, WIDTH), Choosy(), nn.Linear(WIDTH, WIDTH))
    return Workload(model, train=data, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("is_asked_for", [True, False], ids=["auto", "by default"])
def test_candidates_with_a_size_that_the_users_code_refuses_are_left_out(
    kind: str, is_asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that trains without `preset = "auto"` failed with it: one of 16 microbatches had a sample alone."""
    for name in ("WORTH_SECONDS", "WORTH_TIMES"):
        monkeypatch.setattr(inspection, name, 0)
    host = Host(workers=16)
    spec = spec_of()
    if not is_asked_for:
        spec = or_auto(JobSpec.parse({"job": spec.job.model_dump(exclude_defaults=True), "directory": "/jobs"}))
    facts = inspect_job(lambda: refusing(kind), spec, HostDevice(), host)
    assert "unchosen" not in facts
    refused = [[1, "ValueError: 1 are too few"], [2, "ValueError: 2 are too few"]]
    assert facts["refused_sizes"] == (refused if is_asked_for else refused[1:])
    facts["threaded"] = inspect_threaded(lambda: refusing(kind), spec, host, facts)
    assert facts["threaded"] is not None
    assert min(size for value in facts["values"] for size, _ in value["shapes"]) > 2
    found = replace(Inspection.from_wire(facts), host=host)
    plan = partial(make_plan, shared_bytes_free=PLENTY)
    chosen = choose(spec, found, plan)
    assert BATCH // sum(chosen.spec.strategy.division[1]) > 2
    told = f"auto: no microbatch may be of size {'1, 2' if is_asked_for else '2'}, for which the job's code raises"
    assert any(line.startswith(f"{told} ValueError: ") for line in chosen.plan.notes)
    for each in consider(spec, found, plan, prunes=not is_asked_for):
        is_refused = BATCH // sum(each.spec.strategy.division[1]) < 3
        assert is_refused == ("are too few" in (each.why_not or "")), each.title


@pytest.mark.parametrize("kind", MODELS)
def test_a_size_that_each_candidate_has_fails_the_job_with_what_was_raised(kind: str) -> None:
    for strategy in ({"microbatches": BATCH}, {"preset": None, "microbatches": BATCH}):
        with pytest.raises(ValueError, match="1 are too few") as raised:
            inspect_job(lambda: refusing(kind), spec_of(**strategy), HostDevice(), Host(workers=2))
        assert raised.value.__context__ is None


def test_what_the_jobs_function_raises_while_candidates_are_looked_at_is_told_once() -> None:
    """It is called again to see which sizes are at fault, and the log had two tracebacks, one of Weft's own lines."""

    def load() -> Workload:
        raise ValueError("of the job's function")

    with pytest.raises(ValueError, match="of the job's function") as raised:
        inspect_job(load, spec_of(), HostDevice(), Host(workers=16))
    assert raised.value.__context__ is None
