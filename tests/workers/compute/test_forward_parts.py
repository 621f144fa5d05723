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

from weft.reference import loop as reference
from weft.scheduler.planning.graph import lane_order
from weft.spec.job_spec import JobSpec
from weft.workload.entry import load_workload

pytestmark = pytest.mark.weighs(tests=8)

_ATTEMPTS = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "test_attempt.py"))
Turns: Any = _ATTEMPTS["Turns"]
GPU, CPU = {"device": "gpu"}, {"device": "cpu"}
STEP = '''

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


def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def workload():
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(26, 4, generator=generator), torch.randint(3, (26,), generator=generator)
    return weft.Workload(
        model=Model(),
        step=step,
        train=data,
        validation=(data[0][:11], data[1][:11]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05, eps=1e-3),
    )
'''
SOURCES = {"units": _ATTEMPTS["SOURCE"], "calls": _ATTEMPTS["SOURCE"].partition("class Gate")[0] + STEP}
STRATEGIES: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 2},
    "replicas clipped": {"replicas": 2, "clip_norm": 0.5, "microbatches": 2},
    "replicas recomputed": {"replicas": 2, "recompute": True},
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
        job = {"entry": "job.py:workload", "batch_size": 9, "steps": 5, "seed": 5}
        probe = load_workload(JobSpec.parse({"job": job, "directory": str(tmp_path)}))
        made = planned(probe, steps=5, directory=str(tmp_path), **{"batch_size": 9} | strategy)
        return Inside(made), made.spec

    return build


@pytest.mark.pairs(name=STRATEGIES, source=SOURCES)
def test_a_forward_that_waits_for_each_layer_trains_what_one_does_that_waits_for_all(
    inside_of: Callable[..., tuple[Inside, JobSpec]], name: str, source: str
) -> None:
    states: list[dict[str, torch.Tensor]] = []
    for choose in (min, max, random.Random(0).choice):
        turns, spec = inside_of(source, **STRATEGIES[name])
        assert any(task.goes_on for task in turns.plan.graph.tasks), "the case is without what it is about"
        turns.run(choose)
        states.append({name: tensor.clone() for name, tensor in turns.state().items()})
    assert turns.num_waits, "nobody has waited inside"
    by_stage, spec = inside_of(source, **STRATEGIES[name], waits="stage")
    assert not any(task.goes_on for task in by_stage.plan.graph.tasks)
    by_stage.run(min)
    for other in (*states[1:], by_stage.state()):
        assert all(torch.equal(states[0][name], tensor) for name, tensor in other.items())
    for name, tensor in reference.train(spec).state.items():
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-4, atol=1e-5)
