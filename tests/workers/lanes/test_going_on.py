"""Whole attempts in one thread, broken off in the midst of an iteration: those who go on from the newest whole snapshot
come to the same bits as if nothing had happened."""

from __future__ import annotations

import dataclasses
import gc
import random
import runpy
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.plan.tables import Adjustment
from weft.transport.memory.directory import Directory
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.lanes.attempt import Attempt
from weft.workers.snapshots import place
from weft.workers.snapshots.place import read_place
from weft.workers.snapshots.saved import Saved
from weft.workload.entry import load_workload

pytestmark = pytest.mark.weighs(tests=16)

_TURNS = runpy.run_path(str(Path(__file__).with_name("test_attempt.py")))
Turns: Any = _TURNS["Turns"]
PLACE = 1
STRATEGIES: dict[str, dict[str, Any]] = {
    name: strategy for name, strategy in _TURNS["STRATEGIES"].items() if "staleness" not in strategy
}


class Attempted(Turns):  # type: ignore[misc]  # a class that runpy has loaded
    """One attempt. goes_on: the iteration of which `snapshots` has what every task has copied; None where it begins."""

    def __init__(self, planned: Any, snapshots: Directory, goes_on: int | None = None, tasks: Any = ()) -> None:
        """tasks: by which parts of the snapshot are found, as the plan names them that made it."""
        self.plan = planned.plan
        self._directory = planned.new_directory()
        self.begins = 0 if goes_on is None else goes_on + 1
        self._lanes, self._attempts = [], []
        for kind, view in zip(planned.plan.workers, planned.views, strict=True):
            if view.programs:
                saved = None
                if goes_on is not None:
                    saved = Saved(read_place(snapshots, PLACE, task, goes_on) for task in tasks)
                self._attempts.append(self._attempt(planned, view, kind, snapshots, saved))
        self._done = [len(operations) * self.begins for _, operations in self._lanes]

    def _attempt(self, planned: Any, view: Any, kind: str, snapshots: Directory, saved: Saved | None) -> Attempt:
        device = StandIn() if kind == "gpu" else HostDevice()
        workload = load_workload(planned.spec)
        attempt = Attempt(
            planned.spec,
            view,
            workload,
            self._directory,
            0.0,
            device,
            begins=self.begins,
            snapshots=snapshots,
            saved=saved,
        )
        self._add_lanes(attempt, view)
        return attempt

    def lose(self, planned: Any, lost: set[int], snapshots: Directory, goes_on: int) -> None:
        """Those of some workers that have any lanes are gone, by their numbers, and others are made in their places;
        the rest go on with what they have."""
        self.begins = goes_on + 1
        held = [(kind, view) for kind, view in zip(planned.plan.workers, planned.views, strict=True) if view.programs]
        attempts, self._attempts, self._lanes = self._attempts, [], []
        for number, (attempt, (kind, view)) in enumerate(zip(attempts, held, strict=True)):
            tasks = planned.plan.snapshot_tasks()
            saved = Saved(read_place(snapshots, PLACE, task, goes_on) for task in tasks)
            if number not in lost and attempt.rewind(view, self.begins, saved):
                self._attempts.append(attempt)
                self._add_lanes(attempt, view)
            else:
                self._attempts.append(self._attempt(planned, view, kind, snapshots, saved))
        self._done = [len(operations) * self.begins for _, operations in self._lanes]

    def _add_lanes(self, attempt: Attempt, view: Any) -> None:
        for lane, program in view.programs.items():
            operations = attempt.operations(lane, program)
            self._lanes.append((attempt, [operations[task.id] for task in program]))

    def copy_after(self, iteration: int) -> None:
        for attempt in self._attempts:
            attempt.course.adjust(iteration, Adjustment(snapshot=PLACE))

    def set_ways(self, ways: Sequence[frozenset[int]], first: int = 1) -> None:
        for index in range(first, len(ways)):
            for attempt in self._attempts:
                attempt.course.adjust(index, Adjustment(local=sorted(ways[index])))

    def go(self, choose: Callable[[list[int]], int], *, until: int, and_turns: int = 0) -> None:
        """Until all lanes are through so many iterations; then so many turns of any lane."""
        ends = [len(operations) * self.plan.itinerary.num_iterations for _, operations in self._lanes]
        while (behind := self._behind(until)) or and_turns:
            ready = [n for n in range(len(ends)) if self._done[n] < ends[n] and self._can(n, self._done)]
            assert ready, "nobody can go on"
            number = choose(ready)
            self._run(number, self._done[number])
            self._done[number] += 1
            and_turns -= not behind
        for attempt in self._attempts:  # as before its next update
            attempt._snapshots.finish(range(len(self.plan.graph.tasks)))

    def _behind(self, until: int) -> bool:
        return any(
            done < until * len(operations) for done, (_, operations) in zip(self._done, self._lanes, strict=True)
        )

    def values(self) -> tuple[Any, Any]:
        """(means, facts) of the iterations from the first on, and as plain as they can be compared."""
        means, facts = self.measured()
        return {each: dict(told) for each, told in means.items()}, {each: dict(told) for each, told in facts.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.state().items()}


@pytest.fixture(params=[True, False], ids=["beside", "in lanes"])
def copied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is, where copies may go on beside lanes."""
    monkeypatch.setattr(place, "LEAST_BYTES", 0 if request.param else sys.maxsize)


@pytest.fixture
def plan_with(planned: Any, tmp_path: Path) -> Callable[..., Any]:
    def build(source: str = _TURNS["SOURCE"], **strategy: Any) -> Any:
        (tmp_path / "job.py").write_text(source)
        probe = _TURNS["planned_workload"](tmp_path)
        return planned(probe, steps=5, directory=str(tmp_path), **{"batch_size": 9} | strategy)

    return build


def assert_same(ours: Attempted, expected: tuple[Any, Any], state: dict[str, torch.Tensor]) -> None:
    for found, other in zip(ours.values(), expected, strict=True):
        assert found == {index: told for index, told in other.items() if index >= ours.begins}
    assert ours.state().keys() == state.keys()
    for name, tensor in ours.state().items():
        assert torch.equal(tensor, state[name]), name


def train(plan: Any, snapshots: Directory) -> tuple[tuple[Any, Any], dict[str, torch.Tensor]]:
    whole = Attempted(plan, snapshots)
    whole.go(min, until=plan.plan.itinerary.num_iterations)
    return whole.values(), whole.tensors()


@pytest.mark.usefixtures("copied")
@pytest.mark.pairs(3, strategy=tuple(STRATEGIES), dice=(1, 2))
def test_a_job_that_is_broken_off_and_goes_on_comes_to_the_bits_of_one_that_is_not(
    plan_with: Callable[..., Any], strategy: str, dice: int
) -> None:
    plan, choose = plan_with(**STRATEGIES[strategy]), random.Random(dice).choice
    itinerary = plan.plan.itinerary
    tasks = plan.plan.snapshot_tasks()
    assert tasks
    expected, state = train(plan, plan.new_directory())
    learning = [index for index in range(itinerary.num_iterations - 1) if itinerary.at(index).learns]
    for copied in learning:
        snapshots = plan.new_directory()
        broken = Attempted(plan, snapshots)
        broken.copy_after(copied)
        broken.go(choose, until=copied + 1, and_turns=0 if copied == learning[-1] else 5)
        again = Attempted(plan, snapshots, copied, tasks)
        again.go(choose, until=itinerary.num_iterations)
        assert_same(again, expected, state)


@pytest.mark.usefixtures("copied")
@pytest.mark.pairs(3, strategy=tuple(STRATEGIES), dice=(3, 4))
def test_those_who_survive_a_lost_worker_go_on_with_what_they_have_to_the_same_bits(
    plan_with: Callable[..., Any], strategy: str, dice: int
) -> None:
    check_survivors(plan_with(**STRATEGIES[strategy]), dice)


# Beside a batch norm, dropout, a shared parameter and one that is not always used: what else may stay behind.
DATA = "train=data,\n        validation=(data[0][:11], data[1][:11]),"
STREAM = """

class Items(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data, self.given = data, 0

    def __len__(self):
        return len(self.data[0])

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]

    def __iter__(self):
        for _ in range(len(self)):
            self.given += 1  # what it gives depends on what it has given before, in any epoch
            number = self.given * 7 % len(self)
            yield self.data[0][number] + torch.rand(()), self.data[1][number]
"""
MODULE = """

class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1  # in the stage of the first call alone
        for layer in self.layers:
            x = layer(x)
        return x + 1e-3 * self.seen


def step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], ignore_index=-1)
"""
SOURCES = {
    "frozen in its first epoch": ((DATA, DATA), ("model[5].weight =", "model[1].eval()\n    model[5].weight =")),
    "an optimizer by hand": (("torch.optim.Adam(parameters, lr=0.05, eps=1e-3)", "Trusting(parameters)"),),
    "stream": ((DATA, DATA.replace("=data", "=Items(data)").replace("=(data[0][:11], data[1][:11])", "=Items(data)")),),
    "step": (
        ("model = nn.Sequential(*layers)", "model = Net(layers)"),
        ("model[5].weight = model[3].one.weight", "layers[5].weight = layers[3].one.weight"),
        ("loss=lambda y, target: nn.functional.cross_entropy(y, target, ignore_index=-1),", "step=step,"),
        ('metrics={"accuracy": lambda y, target: (y.argmax(1) == target).sum() / (target != -1).sum()},', ""),
        ("lambda target: (target", "lambda batch: (batch[1]"),
    ),
}
HELD_BY: dict[str, dict[str, Any]] = {
    "stages": {"stages": 2, "microbatches": 3},
    "recomputed": {"stages": 2, "microbatches": 3, "recompute": True},
    "split backwards": {"stages": 2, "microbatches": 3, "schedule": "zero-bubble"},
    "replicas": {"replicas": 2, "microbatches": 2, "clip_norm": 0.5},
}


@pytest.mark.pairs(2, source=SOURCES, held=HELD_BY)
def test_nothing_that_a_job_may_have_stays_half_done(plan_with: Callable[..., Any], source: str, held: str) -> None:
    text = _TURNS["SOURCE"].replace("\n\ndef workload", _TURNS["TRUSTING"] + STREAM + MODULE + "\n\ndef workload", 1)
    for old, new in SOURCES[source]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    check_survivors(plan_with(text, **HELD_BY[held]))


def check_survivors(plan: Any, seed: int = 3) -> None:
    """Broken off twice in the midst of something, with one iteration or two between, whoever is lost each time."""
    dice, itinerary = random.Random(seed), plan.plan.itinerary
    expected, state = train(plan, plan.new_directory())
    learning = [index for index in range(itinerary.num_iterations - 1) if itinerary.at(index).learns]
    count = sum(bool(view.programs) for view in plan.views)
    for first, second in zip(learning, [*learning[1:], learning[-1]], strict=True):
        snapshots = plan.new_directory()
        ours = Attempted(plan, snapshots)
        for copied in (first, second):
            ours.copy_after(copied)
            ours.go(dice.choice, until=copied + 1, and_turns=0 if copied == learning[-1] else dice.randrange(12))
            ours.lose(plan, {dice.randrange(count)}, snapshots, copied)
        ours.go(dice.choice, until=itinerary.num_iterations)
        assert_same(ours, expected, state)


@pytest.mark.parametrize("rewound", [False, True])
def test_what_it_went_on_from_is_let_go_of_once_another_snapshot_goes_there(
    plan_with: Callable[..., Any], rewound: bool
) -> None:
    """The other worker may then make that place anew, in another shape: who still mapped the old one handed it on to a
    directory in the place of one that had died, and the job went back to its beginning."""
    plan = plan_with(microbatches=3)
    snapshots, tasks = plan.new_directory(), plan.plan.snapshot_tasks()
    broken = Attempted(plan, snapshots)
    broken.copy_after(1)
    broken.go(min, until=2)
    saved = Saved((read_place(snapshots, PLACE, task, 1) for task in tasks), PLACE)
    ours = Attempted(plan, snapshots, 1, tasks) if rewound else broken
    kind, view = next((k, v) for k, v in zip(plan.plan.workers, plan.views, strict=True) if "compute" in v.programs)
    attempt = ours._attempts[0] if rewound else ours._attempt(plan, view, kind, snapshots, saved)
    if rewound:
        assert attempt.rewind(view, 2, saved)
    kept = weakref.ref(saved)
    del saved
    gc.collect()
    assert kept() is not None, "the directory may die before there is another"
    for other in (0, 2):
        attempt.adjust(3, Adjustment(snapshot=other))
        assert kept() is not None
    attempt.adjust(3, Adjustment(local=[]))
    attempt.adjust(4, Adjustment(snapshot=PLACE))
    gc.collect()
    assert kept() is None
    assert attempt.course.snapshot_place(attempt.iteration(4)) == PLACE


CUTS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "stages": {"stages": 3, "split": [2, 4]},
    "clipped in stages": {"stages": 2, "split": [3], "clip_norm": 1e9},
    "device": {"replicas": [{"device": "gpu"}], "update": "local"},
    "device updated by the host": {"replicas": [{"device": "gpu"}], "update": "cpu"},
    "device in stages": {"replicas": [{"device": "gpu", "stages": 2, "split": [3]}]},
}


@pytest.mark.pairs(before=CUTS, after=CUTS)
def test_a_snapshot_knows_no_plan(plan_with: Callable[..., Any], before: str, after: str) -> None:
    """What one plan's workers copied is gone on from by another's, as of a job whose GPUs others have taken."""
    one, other = (plan_with(microbatches=3, **CUTS[name]) for name in (before, after))
    _, state = train(other, other.new_directory())
    snapshots = one.new_directory()
    broken = Attempted(one, snapshots)
    broken.copy_after(1)
    broken.go(max, until=2)
    again = Attempted(other, snapshots, 1, one.plan.snapshot_tasks())
    again.go(min, until=other.plan.itinerary.num_iterations)
    for name, tensor in again.state().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-4, atol=1e-5)


@pytest.mark.pairs(2, name=_TURNS["TWO_WAYS"], optimizer=_TURNS["OPTIMIZERS"])
def test_buckets_that_go_another_way_at_any_step_go_on_from_wherever_they_were(
    plan_with: Callable[..., Any], name: str, optimizer: str
) -> None:
    """What is kept of a bucket is copied where its update was made, even if it is on its way to the other side. As the
    core has it, the next attempt's first step goes the ways that it begins with: a step before it moves nothing."""
    plan = plan_with(_TURNS["two_way_source"](optimizer), update="balanced", **_TURNS["TWO_WAYS"][name])
    itinerary, dice = plan.plan.itinerary, random.Random(2)
    whole = Attempted(plan, plan.new_directory())
    ways = whole.set_routes(random.Random(1))
    whole.go(min, until=itinerary.num_iterations)
    expected, state = whole.values(), whole.tensors()
    learning = [index for index in range(itinerary.num_iterations - 1) if itinerary.at(index).learns]
    for copied in learning:
        snapshots = plan.new_directory()
        broken = Attempted(plan, snapshots)
        broken.set_ways(ways)
        broken.copy_after(copied)
        broken.go(dice.choice, until=copied + 1)
        step = next(index for index in [*learning, len(ways) - 1] if index > copied)
        again = Attempted(beginning_with(plan, ways[step]), snapshots, copied, plan.plan.snapshot_tasks())
        again.set_ways(ways, step + 1)
        again.go(dice.choice, until=itinerary.num_iterations)
        assert_same(again, expected, state)


def beginning_with(plan: Any, way: frozenset[int]) -> Any:
    """As the core has it: the plan with what it has been adjusted to."""
    views = [
        dataclasses.replace(view, synchronisation=dataclasses.replace(view.synchronisation, local=tuple(sorted(way))))
        for view in plan.views
    ]
    return dataclasses.replace(plan, views=views)
