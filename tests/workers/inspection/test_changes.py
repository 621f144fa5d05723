"""What an inspection tells of a step that changes parameters by itself, and of memory that units have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from weft.spec.job_spec import JobSpec
from weft.workers.devices.host import HostDevice
from weft.workers.inspection.inspection import inspect
from weft.workload.workload import Workload

DATA = (torch.linspace(-1, 1, 24).view(8, 3), torch.linspace(1, 2, 24).view(8, 3))


def told(make_spec: Callable[..., JobSpec], model: nn.Module, **changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {"train": DATA, "optimizer": lambda each: torch.optim.SGD(each, lr=0.1)}
    workload = Workload(model=model, **parts | ({} if "step" in changes else {"loss": nn.MSELoss()}) | changes)
    return inspect(workload, make_spec(batch_size=4, stages=2), HostDevice())


def changed(facts: dict[str, Any]) -> list[str]:
    return [each["changed_as"] for each in facts["parameters"] if each["changed_as"] is not None]


class Mean(nn.Module):
    """Changes a parameter that nobody trains."""

    def __init__(self, change: Callable[[nn.Module, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.mean = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.change(self, x)
        return self.layer(x - self.mean)


CHANGES: dict[str, tuple[Callable[[Any, torch.Tensor], object], str]] = {
    "in place": (lambda own, x: own.mean.lerp_(x.mean(0), 0.1), "mean"),
    "past the count of changes": (lambda own, x: own.mean.data.lerp_(x.mean(0), 0.1), "mean"),
    "to what it is": (lambda own, x: own.mean.lerp_(own.mean, 0.1), "mean"),
    "one that is trained": (lambda own, x: own.layer.weight.clamp_(-0.1, 0.1), "layer.weight"),
}


@pytest.mark.parametrize("step", [False, True], ids=["units", "calls"])
@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
def test_a_parameter_that_forward_changes_is_told_by_its_name(
    spec_of: Callable[..., JobSpec], change: Callable[[Any, torch.Tensor], object], name: str, step: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Mean(change))
    how = {"step": lambda model, batch: mse_loss(model(batch[0]), batch[1])} if step else {}
    assert changed(told(spec_of, model, **how)) == [f"1.{name}"]
    assert changed(told(spec_of, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), **how)) == []


def assign(own: torch.Tensor, its: torch.Tensor) -> None:
    own.data = own.data * 0.9 + its.data * 0.1


FOLLOWING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "in place": lambda own, its: own.lerp_(its, 0.1),
    "by what has its memory": lambda own, its: own.data.lerp_(its.data, 0.1),
    "by a copy": lambda own, its: own.detach().copy_(own * 0.9 + its * 0.1),
    "by assigned data": assign,
}


class Taught(nn.Module):
    def __init__(self, follow: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.own = follow

    @torch.no_grad()
    def follow(self) -> None:
        for own, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            self.own(own, its)


@pytest.mark.parametrize("follow", FOLLOWING.values(), ids=FOLLOWING)
def test_a_teacher_that_a_step_changes_is_not_cut_apart_and_the_rest_of_the_model_is_cut(
    spec_of: Callable[..., JobSpec], follow: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    """Each run of the inspection began with another teacher, so all cuts differed. Assigned data ended the process,
    since a stage without the student assigned what has no numbers, and no memory either."""

    def step(model: Taught, batch: Any) -> torch.Tensor:
        model.follow()
        with torch.no_grad():
            wanted = model.teacher(batch[0])
        return mse_loss(model.student(batch[0]), wanted + batch[1])

    facts = told(spec_of, Taught(follow), step=step)
    names = [unit["name"] for unit in facts["units"]]
    first = names.index("student.0")
    assert changed(facts) == [f"teacher.{number}.{kind}" for number in (0, 1) for kind in ("weight", "bias")]
    assert first not in dict(facts["cut_problems"])
    assert all(max(unit["tied_to"], default=0) < first for unit in facts["units"])
    assert any(tied < first for unit in facts["units"][1:first] for tied in unit["tied_to"])
    (why,) = {why.partition(" at ")[2].partition(" ")[2] for _, why in facts["cut_problems"]}
    assert why.startswith("writes to what the model keeps numbers that another stage has; ")


def test_a_cut_is_refused_where_a_stage_does_not_change_what_the_whole_step_does(
    spec_of: Callable[..., JobSpec],
) -> None:
    """A copy of the student came out alike, since it began as that: nobody saw that a stage had not changed it."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            self.mean = copy.deepcopy(self.student).requires_grad_(False)

    def step(model: Averaged, batch: Any) -> torch.Tensor:
        loss = mse_loss(model.student(batch[0]), batch[1])
        with torch.no_grad(), torch._C.DisableTorchFunction():  # which nobody sees
            for own, its in zip(model.mean.parameters(), model.student.parameters(), strict=True):
                if type(own) is type(its) is nn.Parameter:
                    own.copy_(its)
        return loss

    facts = told(spec_of, Averaged(), step=step)
    assert len(facts["cut_problems"]) == len(facts["units"]) - 1 > 0
    assert all("mean." in why and "the step changes by itself" in why for _, why in facts["cut_problems"])


class Queue(nn.Module):
    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("last", torch.zeros(3)) if buffer else setattr(self, "last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(self.layer(x), 0.5) + self.last
        self.last = x.detach().mean(0)
        return y


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) / self.calls  # type: ignore[no-any-return]


@pytest.mark.parametrize("changes", [{"replicas": 2}, {"recompute": True}, {}])
def test_what_lasts_beside_parameters_and_buffers_is_found_where_it_would_be_lost_or_changed_twice(
    spec_of: Callable[..., JobSpec], changes: dict[str, Any]
) -> None:
    def keeps(model: nn.Module) -> tuple[bool, bool]:
        workload = Workload(model, DATA, loss=nn.MSELoss(), optimizer=lambda each: torch.optim.SGD(each, lr=0.1))
        found = inspect(workload, spec_of(batch_size=4, **changes), HostDevice())
        return found.get("keeps_elsewhere", False), found.get("keeps_numbers", False)

    assert keeps(nn.Sequential(nn.Linear(3, 3), Queue(buffer=False))) == (bool(changes), False)
    assert keeps(nn.Sequential(nn.Linear(3, 3), Queue(buffer=True))) == (False, False)
    assert keeps(nn.Sequential(nn.Linear(3, 3), Counted())) == (bool(changes), bool(changes))
    assert keeps(nn.Sequential(Counted(), Queue(buffer=False))) == (bool(changes), False)


@pytest.mark.parametrize("changes", [{"replicas": 2}, {"recompute": True}, {}])
def test_what_begins_anew_with_the_first_batch_is_found_by_the_second(
    spec_of: Callable[..., JobSpec], changes: dict[str, Any]
) -> None:
    kept: list[torch.Tensor] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x, number = batch
        if int(number[0]) == 0:
            kept.clear()
        output = model(x + kept[-1] if kept else x)
        kept.append(output.detach().mean(0))
        return output.square().mean()

    numbered = TensorDataset(torch.randn(16, 3), torch.arange(16))
    workload = Workload(
        nn.Linear(3, 3),
        DataLoader(numbered, batch_size=4),
        step=step,
        optimizer=lambda each: torch.optim.SGD(each, lr=0.1),
    )
    found = inspect(workload, spec_of(batch_size=4, **changes), HostDevice())
    assert found.get("keeps_elsewhere", False) == bool(changes)
    assert not found.get("keeps_numbers", False)


class Remembered(torch.autograd.Function):
    """Backward takes what the newest forward has left, as reversible layers may."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer, layer.kept = layer, x.detach().clone()
        return x * layer.kept

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient * ctx.layer.kept[: len(gradient)], None


class Remembering(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Remembered.apply(x, self)
        return found


class Hooked(nn.Module):
    """A hook that takes the newest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x.detach().clone()
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * self.kept)
        return x * 2


class Checkpointed(nn.Module):
    """What is computed again takes the newest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x.detach().clone()
        found: torch.Tensor = checkpoint(lambda y: (y * self.kept).tanh(), x, use_reentrant=False)
        return found


class CountedAgain(nn.Module):
    """What is computed again counts again, in a number by which the next forward goes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.counted, x, use_reentrant=False)
        return found

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (x * self.calls).tanh()


class OfItsOwn(nn.Module):
    """Code in backward that takes what its own forward had, behind layers that keep and draw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.Sequential(Queue(buffer=True), nn.BatchNorm1d(3), nn.Dropout(0.5)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.layers(x) * self.calls
        kept = x.detach().clone()
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * kept)
        return x * 2


@pytest.mark.parametrize(
    ("changes", "holds"),
    [({"stages": 2, "microbatches": 2}, True), ({"stages": 2}, False), ({"microbatches": 2}, False)],
)
@pytest.mark.parametrize("kind", [Remembering, Hooked, Checkpointed, CountedAgain])
def test_a_backward_that_takes_what_another_microbatch_has_left_is_found_where_there_are_several(
    spec_of: Callable[..., JobSpec], kind: Callable[[], nn.Module], changes: dict[str, Any], holds: bool
) -> None:
    def mixes(layer: nn.Module) -> bool:
        model = nn.Sequential(nn.Linear(3, 3), layer, nn.Tanh(), nn.Linear(3, 3))
        data = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), DATA[1]
        workload = Workload(model, data, loss=nn.MSELoss(), optimizer=lambda each: torch.optim.SGD(each, lr=0.1))
        found: bool = inspect(workload, spec_of(batch_size=4, **changes), HostDevice())["mixes_microbatches"]
        return found

    assert mixes(kind()) == holds
    assert not mixes(OfItsOwn())
    assert not mixes(nn.Dropout(0.5))


def test_a_teacher_outside_of_the_model_is_as_it_was_when_cuts_have_been_tried(spec_of: Callable[..., JobSpec]) -> None:
    """It had lost its numbers to a stage that has none to write there, and the job, of one stage, was refused."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    teacher = copy.deepcopy(model)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for own, its in zip(teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(its, 0.1)
        return mse_loss(model(batch[0]), teacher(batch[0]).detach() + batch[1])

    told(spec_of, model, step=step)
    assert {type(each) for each in teacher.parameters()} == {nn.Parameter}


def test_units_with_views_of_one_memory_are_tied_where_these_overlap(spec_of: Callable[..., JobSpec]) -> None:
    class Table(nn.Module):
        def __init__(self, rows: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("rows", rows)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.rows

    memory = torch.zeros(9)
    model = nn.Sequential(Table(memory[:3]), nn.Linear(3, 3), Table(memory[3:6]), Table(memory[2:5]))
    units = told(spec_of, model)["units"]
    assert [(unit["tied_to"], unit["tied_by"]) for unit in units] == [
        ([], []),
        ([], []),
        ([], []),
        ([0, 2], ["0.rows", "2.rows"]),
    ]


class Around(nn.Module):
    """Its lines, and a module that is called twice, read buffers on both sides of a layer."""

    def __init__(self, changes: str) -> None:
        super().__init__()
        self.inner, self.changes = Table(), changes
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes == "past the count of changes":
            self.scale.data.mul_(0.5)
        elif self.changes == "of a module":
            x = self.inner(x)
        x = self.second(self.first(x * self.scale)) * self.scale
        return self.inner(x) if self.changes == "of a module" else x


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.values.clone()


@pytest.mark.parametrize(
    ("changes", "tied"),
    [
        ("", []),
        ("past the count of changes", ["scale"]),
        ("of a module", ["inner.values"]),
    ],
)
def test_a_buffer_that_no_run_changes_ties_no_units(
    spec_of: Callable[..., JobSpec], changes: str, tied: list[str]
) -> None:
    facts = told(spec_of, Around(changes), validation=DATA)
    assert sorted({name for unit in facts["units"] for name in unit["tied_by"]}) == tied
