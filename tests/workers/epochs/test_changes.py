"""What a function changed between two epochs, told to another process: another workload that the same code made."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weft.workers.epochs import changes
from weft.workers.epochs.changes import EpochChanges, ToldChanges, take
from weft.workers.snapshots.attributes import Attributes
from weft.workers.snapshots.plain import unpacked
from weft.workload.code.variables import variables_of
from weft.workload.workload import Workload, WorkloadError


class Meter:
    def __init__(self) -> None:
        self.total, self.values = 0.0, [1.0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3)
        self.layer, self.heat, self.calls = nn.Linear(2, 2), 1.0, 0
        self.layer.count, self.layer.ways = 0, {"calls": 0, "gain": 1}  # type: ignore[assignment]
        self.recent, self.generator = [torch.zeros(2)], torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.heat * self.scale  # type: ignore[no-any-return]


class Job:
    """As a function makes it in each process."""

    def __init__(self) -> None:
        self.model = model = Net()
        self.meter = meter = Meter()
        self.ways = ways = {"kl": 1.0, "training": 0, "counts": {"here": 0, "there": 0}, "big": torch.zeros(2)}
        self.unread: dict[str, Any] = {"best": 0}
        self.centres = centres = torch.zeros(3)
        self.turned: Any = None
        turns = SimpleNamespace(by=None)
        self.turns = turns

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            weight = ways["kl"] * meter.total + sum(centres) + len(meter.values)
            return (model(batch) * weight).sum() if turns.by is None else turns.by(batch)  # type: ignore[no-any-return]

        def on_epoch(values: Any) -> None:
            self.unread["best"] += 1

        self.workload = Workload(
            model, torch.zeros(4, 2), step=step, optimizer=torch.optim.SGD, on_epoch=on_epoch, epoch_metrics=[]
        )
        self.attributes = Attributes({**dict(model.named_modules()), **variables_of(self.workload)})


def changed_by(job: Job, change: Callable[[Job], object], counted: tuple[str, ...] = ()) -> ToldChanges:
    found, own = ToldChanges(), EpochChanges(job.model, [job.attributes], counted)
    with own.watching():
        change(job)
    own.find(found, [job.workload.step, None])
    return found


def anneal(job: Job) -> None:
    job.model.heat *= 0.5
    job.ways["kl"] = 0.25
    job.ways["training"] = 3
    job.ways["counts"]["there"] = 5
    job.meter.total = 2.0
    job.meter.values.clear()
    job.centres.add_(1.0)
    job.model.recent[0].add_(2.0)
    job.model.recent.append(torch.ones(1))
    job.unread["best"] = 7


def test_another_process_has_what_was_changed_and_keeps_its_own() -> None:
    one, other = Job(), Job()
    other.ways["counts"]["here"] = 9  # where each counts for itself
    before = other.meter.values, other.centres, other.model.recent, other.ways
    found = changed_by(one, anneal)
    assert not found.refused
    assert not found.untold
    take(unpacked(found.packed()), other.attributes)
    assert (other.model.heat, other.meter.total, other.meter.values) == (0.5, 2.0, [])
    assert other.ways["counts"] == {"here": 9, "there": 5}
    assert (other.ways["kl"], other.ways["training"]) == (0.25, 3)
    assert other.centres.tolist() == [1.0] * 3
    assert [each.tolist() for each in other.model.recent] == [[2.0, 2.0], [1.0]]
    assert all(
        now is then
        for now, then in zip(before, (other.meter.values, other.centres, other.model.recent, other.ways), strict=True)
    )
    assert other.unread == {"best": 0}, "of what the function alone goes by nobody is told"
    assert ("", "heat") in other.attributes.as_restored(), "another stage may go on to change it"
    assert not changed_by(one, lambda job: None).packed()


@pytest.mark.parametrize("has_one_replica", [True, False])
def test_code_that_others_would_not_have_is_refused(has_one_replica: bool) -> None:
    """A step in another process went on with the function of before. Of one replica that may be of no account: where
    only the last stage comes to it."""

    def change(job: Job) -> None:
        job.model.recent = [torch.relu]  # type: ignore[list-item]
        job.turns.by = torch.tanh  # type: ignore[assignment]
        job.meter.best = torch.sin  # type: ignore[attr-defined]  # asked for by nobody

    job, found = Job(), ToldChanges()
    own = EpochChanges(job.model, [job.attributes], (), has_one_replica=has_one_replica)
    change(job)
    own.find(found, [job.workload.step, None])
    both = [[each.rpartition(".")[2] for each in names] for names in (found.refused, found.untold)]
    assert both == ([["recent"], ["by"]] if has_one_replica else [["recent", "by"], []])


def test_what_another_stage_counts_is_told_where_it_is_set_to_what_is_here_already() -> None:
    def reset(job: Job) -> None:
        job.model.calls = 0

    one, other = Job(), Job()
    other.model.calls = 12
    assert not changed_by(one, reset).told
    take(unpacked(changed_by(one, reset, ("calls", "layer.unknown")).packed()), other.attributes)
    assert other.model.calls == 0


def test_a_dictionary_that_is_another_one_now_is_told_whole() -> None:
    def replace(job: Job) -> None:
        job.model.recent = {"a": 1}  # type: ignore[assignment]
        job.ways["counts"] = {"new": 1}

    one, other = Job(), Job()
    take(unpacked(changed_by(one, replace).packed()), other.attributes)
    assert other.model.recent == {"a": 1}
    assert other.ways["counts"] == {"new": 1}
    changed = changed_by(one, lambda job: job.model.recent.update(b=2))  # type: ignore[attr-defined]
    assert changed.told == {"/recent": {"b": 2}}


def test_what_nobody_can_be_told_is_named_where_steps_ask_for_it() -> None:
    def change(job: Job) -> None:
        job.turns.by = job.model.layer  # of which the step is to make use
        job.unread["best"] = object()  # type: ignore[assignment]
        job.model.generator.manual_seed(3)
        job.model.best = nn.Linear(2, 2).state_dict  # asked for by nobody

    found = changed_by(Job(), change)
    assert [name.rpartition(".")[2] for name in found.untold] == ["by"]
    assert found.refused == ["generator"], "each process draws from one of its own"


def test_what_is_too_large_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_BYTES", 1000)

    def many(job: Job) -> None:
        job.meter.values.extend(map(float, range(1000)))

    def large(job: Job) -> None:
        job.model.scale = torch.zeros(1000)
        job.model.best = torch.zeros(1000)  # which no forward asks for

    with pytest.raises(WorkloadError, match=r"KiB of what|MiB of what.*most of it in Workload.step.meter.values"):
        changed_by(Job(), many).packed()
    assert changed_by(Job(), large).refused == ["scale"]


@pytest.mark.parametrize("how", ["counted", "by keys", "set", "another key", "told before"])
def test_what_the_forward_of_another_stage_has_changed_too_is_refused_unless_it_is_set(how: str) -> None:
    def change(job: Job) -> None:
        layer: Any = job.model.layer
        match how:
            case "counted" | "told before":
                layer.count += 1
            case "set":
                layer.count = 0
            case "by keys":
                layer.ways["calls"] += 1
            case _:
                layer.ways["gain"] += 1

    asked, other = Job(), Job()
    own = Attributes({"": asked.model})  # the layer is the other's
    for _ in range(2):
        if how != "told before":
            other.model.layer.count += 1  # type: ignore[operator]
            other.model.layer.ways["calls"] += 1  # type: ignore[index, operator]
        found, there = ToldChanges(), EpochChanges(asked.model, [own], ())
        with there.watching():
            change(asked)
        there.find(found, [])
        if how in ("counted", "by keys"):
            name = {"counted": "layer.count", "by keys": "layer.ways.calls"}[how]
            with pytest.raises(WorkloadError, match=f"on_epoch has changed {name}, and so has the forward"):
                take(unpacked(found.packed()), other.attributes)
            return
        take(unpacked(found.packed()), other.attributes)
    layer: Any = other.model.layer
    expected = {"set": (0, 2, 1), "another key": (2, 2, 3), "told before": (2, 0, 1)}[how]
    assert (layer.count, layer.ways["calls"], layer.ways["gain"]) == expected


def test_a_note_names_a_variable_of_a_function_once_and_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(job: Job) -> None:
        job.ways["kl"] = object()  # type: ignore[assignment]
        job.meter.values = job.model.layer.bias  # type: ignore[assignment]  # whose elements others have otherwise

    found = changed_by(Job(), change)
    assert sorted(name.rpartition(".")[2] for name in found.untold) == ["kl", "values"]


def test_what_no_step_asks_for_is_left_out_where_it_would_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_BYTES", 1000)

    def best(job: Job) -> None:
        job.meter.best = torch.zeros(100), torch.zeros(100), torch.zeros(100)  # type: ignore[attr-defined]
        job.meter.total = 2.0

    one, other = Job(), Job()
    take(unpacked(changed_by(one, best).packed()), other.attributes)
    assert other.meter.total == 2.0
    assert not hasattr(other.meter, "best")


def test_modules_beside_the_model_are_told_in_place_or_anew_and_refused_where_replicas_lack_what_is_large() -> None:
    def made() -> tuple[nn.Module, Attributes]:
        beside = nn.Linear(2, 2).requires_grad_(False)
        beside.register_buffer("weight_of", torch.ones(2))
        beside.register_buffer("none", None)
        return beside, Attributes({"Workload.loss": beside})

    (one, own), (other, there) = made(), made()
    stood, model = other.weight, nn.Linear(1, 1)
    changed = EpochChanges(model, [own], ())
    one.weight.data.fill_(3.0)
    one.weight_of, one.none = torch.zeros(3), torch.ones(1)
    found = ToldChanges()
    changed.find(found, [])
    take(unpacked(found.packed()), there)
    assert other.weight is stood
    assert other.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert (other.weight_of.tolist(), other.none.tolist()) == ([0.0] * 3, [1.0])
    for has_one_replica in (True, False):
        changed = EpochChanges(model, [own], (), has_one_replica=has_one_replica)
        one.weight_of = torch.zeros(changes.MAX_BYTES // 4 + 1)
        found = ToldChanges()
        changed.find(found, [])
        assert (found.untold if has_one_replica else found.refused) == ["Workload.loss.weight_of"]
        assert not found.packed()
