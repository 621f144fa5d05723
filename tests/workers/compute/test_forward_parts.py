"""Forwards that wait inside for parameters that are still on their way: whole attempts in one thread, the other lanes'
tasks in any order while one waits, train to the bits of those that wait before they begin."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.reference import loop as reference
from weft.scheduler.planning.graph import lane_order
from weft.spec.job_spec import JobSpec
from weft.transport.memory.board import Aborted
from weft.workers.compute.forward_parts import ForwardParts
from weft.workers.compute.pairs import DataPair
from weft.workers.compute.unit_stage import UnitStage
from weft.workers.devices.host import HostDevice
from weft.workload.entry import load_workload
from weft.workload.units import Unit

pytestmark = pytest.mark.weighs(tests=8)

_ATTEMPTS = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "test_attempt.py"))
Turns: Any = _ATTEMPTS["Turns"]
GPU, CPU = {"device": "gpu"}, {"device": "cpu"}
MODEL = '''

class Model(nn.Module):
    """Blocks, each with a dropout; a scale that no module called has; the first weight is the last one, too."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))
        self.last = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        y = self.first(x)
        for block in self.blocks:
            y = y + block(y)
        return self.head(self.last(y * self.scale) + nn.functional.linear(y, self.first.weight.T))


def workload():
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(26, 4, generator=generator), torch.randint(3, (26,), generator=generator)
    return weft.Workload(
        model=Model(),
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": lambda y, target: (y.argmax(1) == target).sum() / len(target)},
        train=data,
        validation=(data[0][:11], data[1][:11]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05, eps=1e-3),
    )
'''
SOURCES = {"units": _ATTEMPTS["SOURCE"], "calls": _ATTEMPTS["SOURCE"].partition("class Gate")[0] + MODEL}
STRATEGIES: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 2},
    "replicas clipped": {"replicas": 2, "clip_norm": 0.5, "microbatches": 2},
    "replicas recomputed": {"replicas": 2, "recompute": True},
    "replicas, one without a share": {"replicas": 2, "shares": [0.0, 1.0], "clip_norm": 0.5},
    "device updated by the host": {"replicas": [GPU], "update": "cpu"},
    "device updated by the host, clipped": {"replicas": [GPU], "update": "cpu", "clip_norm": 0.5},
    "device, balanced": {"replicas": [GPU], "update": "balanced"},
    "device and CPU": {"replicas": [GPU, CPU], "update": "local"},
    "stages beside one": {"replicas": [{"stages": 2, "split": [2]}, CPU], "clip_norm": 0.5},
    "device with stages that share it": {
        "replicas": [GPU | {"stages": 2, "split": [2], "gpus": 1}],
        "update": "cpu",
        "microbatches": 2,
    },
}


class Inside(Turns):  # type: ignore[misc]  # a class that runpy has loaded
    """Where a forward waits, the lanes that are not inside of a task take turns until it may go on."""

    def __init__(self, planned: Any) -> None:
        super().__init__(planned, planned.new_directory())
        self._done = [0] * len(self._lanes)
        self._inside: set[int] = set()
        self.num_waits = 0
        names = [lane for view in planned.views for lane in view.programs]
        for number, ((attempt, _), name) in enumerate(zip(self._lanes, names, strict=True)):
            attempt.goes_on[name] = partial(self._go_on, number)

    def run(self, choose: Callable[[list[int]], int]) -> None:
        self._choose = choose
        self._ends = [len(operations) * self.plan.itinerary.num_iterations for _, operations in self._lanes]
        while self._done != self._ends:
            self._turn()

    def _turn(self) -> None:
        able = [n for n in range(len(self._done)) if n not in self._inside and self._done[n] < self._ends[n]]
        number = self._choose([n for n in able if self._can(n, self._done)])
        self._inside.add(number)
        self._run(number, self._done[number])
        self._inside.remove(number)
        self._end(number)

    def _go_on(self, number: int) -> None:
        self._end(number)
        with torch.enable_grad():  # as in the others' own threads: a microbatch that does not count runs without
            while not self._can(number, self._done):
                self.num_waits += 1
                self._turn()

    def _end(self, number: int) -> None:
        """Of the task that the lane is in."""
        attempt, operations = self._lanes[number]
        index, place = divmod(self._done[number], len(operations))
        attempt.board.post(operations[place].task, index)
        self._done[number] += 1


@pytest.fixture
def inside_of(planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Inside, JobSpec]]:
    """Where every part is worth a task, and updates take far longer than backwards."""
    monkeypatch.setattr(lane_order, "LEAST_PART_SECONDS", 0.0)
    monkeypatch.setattr(lane_order, "MAX_PARTS", 1 << 20)
    monkeypatch.setattr(lane_order._Times, "_takes", lambda *_: 1.0)

    def build(source: str, **strategy: Any) -> tuple[Inside, JobSpec]:
        (tmp_path / "job.py").write_text(SOURCES[source])
        job = {"entry": "job.py:workload", "batch_size": 9, "steps": 3, "seed": 5}
        probe = load_workload(JobSpec.parse({"job": job, "directory": str(tmp_path)}))
        made = planned(probe, steps=3, directory=str(tmp_path), **{"batch_size": 9, "waits": "layer"} | strategy)
        return Inside(made), made.spec

    return build


def states_of(
    inside_of: Callable[..., tuple[Inside, JobSpec]], source: str, *orders: Callable[[list[int]], int], **told: Any
) -> list[dict[str, torch.Tensor]]:
    """What each order of turns trains, where forwards have waited inside; and what they train that wait for all."""
    states: list[dict[str, torch.Tensor]] = []
    num_waits = 0
    for choose in orders:
        turns, _ = inside_of(source, **told)
        assert any(task.goes_on for task in turns.plan.graph.tasks), "the case is without what it is about"
        turns.run(choose)
        num_waits += turns.num_waits
        states.append({name: tensor.clone() for name, tensor in turns.state().items()})
    assert num_waits, "nobody has waited inside"
    by_stage, _ = inside_of(source, **told, waits="stage")
    assert not any(task.goes_on for task in by_stage.plan.graph.tasks)
    by_stage.run(min)
    return [*states, by_stage.state()]


def test_a_forward_that_waits_for_each_layer_trains_what_one_does_that_waits_for_all(
    inside_of: Callable[..., tuple[Inside, JobSpec]],
) -> None:
    by_layer, by_stage = states_of(inside_of, "units", max, **STRATEGIES["replicas clipped"])
    assert all(torch.equal(by_layer[name], tensor) for name, tensor in by_stage.items())


@pytest.mark.slow(seconds=0.7)
@pytest.mark.pairs(2, name=STRATEGIES, source=SOURCES)
def test_whatever_the_strategy_and_the_model_it_does(
    inside_of: Callable[..., tuple[Inside, JobSpec]], name: str, source: str
) -> None:
    first, *others = states_of(inside_of, source, max, random.Random(0).choice, **STRATEGIES[name])
    for other in others:
        assert all(torch.equal(first[name], tensor) for name, tensor in other.items())
    _, spec = inside_of(source, **STRATEGIES[name])
    for name, tensor in reference.train(spec).state.items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_step_that_calls_its_blocks_in_another_order_now_and_then_waits_for_each_where_it_is_called(
    inside_of: Callable[..., tuple[Inside, JobSpec]], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = "self.blocks if x[0, 0] > 0 else list(self.blocks)[::-1]"
    monkeypatch.setitem(SOURCES, "any order", SOURCES["calls"].replace("in self.blocks:", f"in {blocks}:"))
    for name in ("replicas clipped", "device updated by the host, clipped"):
        first, *others = states_of(inside_of, "any order", max, random.Random(0).choice, **STRATEGIES[name])
        for other in others:
            assert all(torch.equal(first[name], tensor) for name, tensor in other.items())


READS = {
    "a weight": "self.last.weight.sum()",
    "a weight of a block": "self.blocks[2][0].weight[0]",
    "all": "sum(each.sum() for each in self.parameters())",
    "the names": "dict(self.named_parameters())['head.weight'].sum()",
}


@pytest.mark.slow(seconds=0.5)
@pytest.mark.pairs(2, read=READS)
def test_a_step_that_now_and_then_reads_what_it_has_not_called_yet_waits_for_that(
    inside_of: Callable[..., tuple[Inside, JobSpec]], read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the batches that it was tried with."""
    told = STRATEGIES["device updated by the host, clipped"]
    rare = f"y = self.first(x)\n        if x[0, 0] > 0.9:\n            y = y + 0.01 * {READS[read]}\n"
    monkeypatch.setitem(SOURCES, "a look ahead", SOURCES["calls"].replace("y = self.first(x)\n", rare))
    first, *others = states_of(inside_of, "a look ahead", max, random.Random(0).choice, **told)
    for other in others:
        assert all(torch.equal(first[name], tensor) for name, tensor in other.items())


# --- of one stage


def waiting_stage(
    go_on: Callable[[nn.Sequential], None],
    *,
    middle: Callable[[nn.Module], nn.Module] = lambda later: nn.Dropout(0.5),
    seeds_others: bool = False,
) -> tuple[nn.Sequential, UnitStage, ForwardParts, HostDevice]:
    """Three units; the last one's parameters are a second part's. go_on: what happens while that is waited for. middle:
    makes the second unit, of the last."""
    torch.manual_seed(1)
    last, device = nn.Linear(4, 2), HostDevice()
    model = nn.Sequential(nn.Linear(3, 4), middle(last), last)
    parts = ForwardParts({id(each): 1 for each in model[2].parameters()}, 2, lambda: go_on(model), device)
    units = [Unit(number, f"{number}.", module) for number, module in enumerate(model)]
    how: Any = {"functions": {}, "parts": parts, "seeds_others": seeds_others}
    stage = UnitStage(units, seed=5, recompute=False, device=device, **how)
    return model, stage, parts, device


BATCH = DataPair(torch.ones(2, 3), None)


def test_a_forward_finds_what_came_while_it_waited_and_others_may_draw_meanwhile() -> None:
    num_waits = 0

    def update(model: nn.Sequential) -> None:
        nonlocal num_waits
        num_waits += 1
        with device.drawing, torch.no_grad():  # a deadlock if the forward held it
            torch.manual_seed(7)
            model[2].get_parameter("weight").mul_(2.0)

    _, stage, parts, device = waiting_stage(update)
    parts.begin()
    (waited,) = stage.forward(0, 0, [], BATCH)
    parts.end()
    (again,) = stage.forward(0, 0, [], BATCH)
    assert num_waits == 1, "later microbatches have nothing to wait for"
    assert waited is not None
    assert again is not None
    assert torch.equal(waited, again), "with the parameters, and with the numbers of the microbatch"


class LooksAhead(nn.Module):
    """Draws, reads a weight of a layer that comes later, and draws."""

    def __init__(self, later: nn.Module) -> None:
        super().__init__()
        self._later = [later]  # no module of its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = torch.rand(x.shape) + random.random()
        return x * one + self._later[0].get_parameter("weight").sum() + torch.rand(x.shape) * random.random()


def test_who_reads_a_later_layers_weight_waits_for_it_and_goes_on_with_his_numbers() -> None:
    def update(model: nn.Sequential) -> None:
        with device.drawing, torch.no_grad():
            torch.manual_seed(7)
            random.seed(7)
            model[2].weight.mul_(2.0)

    _, stage, parts, device = waiting_stage(update, seeds_others=True, middle=LooksAhead)
    parts.begin()
    (waited,) = stage.forward(0, 0, [], BATCH)
    parts.end()
    (again,) = stage.forward(0, 0, [], BATCH)
    assert waited is not None
    assert again is not None
    assert torch.equal(waited, again)


def test_who_reads_for_the_library_or_in_another_thread_does_not_wait() -> None:
    def fail(model: nn.Sequential) -> None:
        raise AssertionError("nobody has called for it")

    model, stage, parts, _ = waiting_stage(fail)
    parts.begin()
    assert len(list(model.parameters())) == 4
    parts.end()
    stage.forward(0, 0, [], BATCH)


def test_an_attempt_that_ends_while_a_forward_waits_leaves_a_stage_that_begins_anew() -> None:
    def abort(model: nn.Sequential) -> None:
        raise Aborted

    _, stage, parts, device = waiting_stage(abort)
    parts.begin()
    with pytest.raises(Aborted):
        stage.forward(0, 0, [], BATCH)
    assert not device.drawing.locked()
    stage.rewind()
    parts.end()
    assert stage.num_in_flight == 0
    stage.forward(0, 0, [], BATCH)
