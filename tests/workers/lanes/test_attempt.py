"""All workers of a job in one thread: whatever order their lanes take turns in, they train what the plain loop does."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.plan.itinerary import Iteration
from weft.plan.plan import Role
from weft.plan.tables import Adjustment
from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Accelerator, Device
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.operation import Operation
from weft.workload.entry import load_workload
from weft.workload.workload import Workload

pytestmark = pytest.mark.weighs(tests=5)

SOURCE = '''
import torch
from torch import nn

import weft


class Gate(nn.Module):
    """Its second layer has no part in a microbatch whose first number is below 0."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.one(x) if x[0, 0] < 0 else self.one(x) + self.other(x)


def workload():
    """More than half of the samples do not count, so neither do some microbatches, nor all of some small batches."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(26, 4, generator=generator), torch.randint(-4, 3, (26,), generator=generator).clamp(min=-1)
    first = nn.Linear(4, 6, bias=False)  # whose gradient before a norm is rounding alone, and Adam makes much of it
    layers = [first, nn.BatchNorm1d(6), nn.Dropout(0.2), Gate(), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]
    model = nn.Sequential(*layers)
    model[5].weight = model[3].one.weight
    return weft.Workload(
        model=model,
        loss=lambda y, target: nn.functional.cross_entropy(y, target, ignore_index=-1),
        metrics={"accuracy": lambda y, target: (y.argmax(1) == target).sum() / (target != -1).sum()},
        weight=lambda target: (target != -1).sum(),
        train=data,
        validation=(data[0][:11], data[1][:11]),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05, eps=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    )
'''

ORDERS: list[Callable[[list[int]], int]] = [min, max, random.Random(0).choice]  # the first lane that can, the last, any
GPU, CPU = {"device": "gpu"}, {"device": "cpu"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one worker": {"microbatches": 2},
    "clipped": {"clip_norm": 0.5},
    "stages": {"stages": 3, "split": [2, 4], "microbatches": 3},
    "stages clipped": {"stages": 3, "split": [2, 4], "microbatches": 3, "clip_norm": 0.5},
    "gpipe recomputed": {"stages": 2, "split": [3], "microbatches": 2, "schedule": "gpipe", "recompute": True},
    "replicas": {"replicas": 3},
    "coarse replicas": {"replicas": 2, "sync": "coarse", "clip_norm": 0.5},
    "replicas in one bucket": {"replicas": 2, "bucket_mib": 1.0, "microbatches": 2},
    "uneven replicas": {
        "replicas": [{"stages": 2, "split": [2]}, {"stages": 2, "split": [4], "microbatches": 2}],
        "shares": [0.3, 0.7],
    },
    "small batches": {"batch_size": 2, "clip_norm": 0.5},
    "replicas of small batches": {"batch_size": 4, "replicas": 2},
    "no share": {"replicas": 2, "shares": [0.0, 1.0]},
    "stale": {"replicas": 2, "staleness": [0, 2]},
    "all stale after a warm-up": {"replicas": 2, "staleness": 1, "staleness_warmup": 2, "clip_norm": 0.5},
    "device": {"replicas": [GPU], "microbatches": 2, "update": "local"},
    "device updated by the host": {"replicas": [GPU], "update": "cpu", "clip_norm": 0.5},
    "devices": {"replicas": [GPU, GPU], "update": "local", "clip_norm": 0.5},
    "device and CPU": {"replicas": [GPU, CPU], "update": "local"},
    "device and CPU by the host": {"replicas": [CPU, GPU], "update": "cpu", "microbatches": 2},
    "device with stages that share it": {
        "replicas": [{"device": "gpu", "stages": 3, "split": [2, 4], "gpus": 1}],
        "microbatches": 2,
    },
    "device with a working window": {
        "replicas": [{"device": "gpu", "working_window": 2}],
        "microbatches": 2,
        "update": "cpu",
        "recompute": True,
        "clip_norm": 0.5,
    },
    "device in stages": {"replicas": [{"device": "gpu", "stages": 2, "split": [3]}], "microbatches": 2},
}

Values = Mapping[int, Mapping[str, float]]


class Turns:
    """Every lane of every worker, run a task at a time in this thread."""

    def __init__(self, planned: Any, directory: Directory, make_device: Callable[[], Device] = StandIn) -> None:
        """make_device: of the workers that have one."""
        self.plan = planned.plan
        self._directory = directory
        self._lanes: list[tuple[Attempt, list[Operation]]] = []
        self._attempts = []
        for kind, view in zip(planned.plan.workers, planned.views, strict=True):
            if not view.programs:
                continue
            device = make_device() if kind == "gpu" else HostDevice()
            attempt = Attempt(planned.spec, view, load_workload(planned.spec), directory, 0.0, device)
            self._attempts.append(attempt)
            for lane, program in view.programs.items():
                operations = attempt.operations(lane, program)
                self._lanes.append((attempt, [operations[task.id] for task in program]))

    def run(self, choose: Callable[[list[int]], int]) -> None:
        """All iterations, the next lane chosen from those that can go on."""
        num_iterations = self.plan.itinerary.num_iterations
        done = [0] * len(self._lanes)
        ends = [len(operations) * num_iterations for _, operations in self._lanes]
        while done != ends:
            ready = [number for number in range(len(done)) if done[number] < ends[number] and self._can(number, done)]
            assert ready, "nobody can go on"
            number = choose(ready)
            self._run(number, done[number])
            done[number] += 1

    def set_routes(self, rng: random.Random) -> list[frozenset[int]]:
        """Each bucket that may goes any way in each iteration; the buckets that devices update, by iteration."""
        sync = self.plan.synchronisation
        either = [part.index for part in sync.buckets if part.route == "either"]
        ways = [frozenset(sync.local)]
        for index in range(1, self.plan.itinerary.num_iterations):
            ways.append(frozenset(bucket for bucket in either if rng.random() < 0.5))
            for attempt in self._attempts:
                attempt.course.adjust(index, Adjustment(local=sorted(ways[-1])))
        return ways

    def may_go_either_way(self) -> bool:
        return bool(self.plan.has_ways)

    def _can(self, number: int, done: list[int]) -> bool:
        attempt, operations = self._lanes[number]
        index, place = divmod(done[number], len(operations))
        operation, iteration = operations[place], attempt.iteration(index)
        if not operation.runs(iteration):
            return True
        return all(
            attempt.board.words[1 + source] >= index - distance for source, distance, _ in operation.waits_in(iteration)
        )

    def _run(self, number: int, turn: int) -> None:
        attempt, operations = self._lanes[number]
        index, place = divmod(turn, len(operations))
        operation, iteration = operations[place], attempt.iteration(index)
        if operation.runs(iteration):
            self._perform(attempt, operation, iteration)
        if isinstance(attempt.device, Accelerator):
            for act in attempt.device.take_acts():
                act()
        attempt.board.post(operation.task, index)

    def _perform(self, attempt: Attempt, operation: Operation, iteration: Iteration) -> None:
        if operation.finish_copies is not None:
            operation.finish_copies()
        operation.run(iteration)

    def measured(self) -> tuple[Values, Values]:
        """(means, facts) by iteration, over all lanes."""
        means: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        facts: dict[int, dict[str, float]] = defaultdict(dict)
        for attempt in self._attempts:
            for lane in attempt.measured.values():
                for fragment in lane.take():
                    part: Any = fragment
                    facts[part["iteration"]] |= part["facts"]
                    for name, value in part["means"].items():
                        means[part["iteration"]][name] += value
        return means, facts

    def state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for arena in self.plan.arenas_to_save():
            state |= self._directory.find(arena).items()
        return state


def validations(plan: Any, means: Values, facts: Values) -> list[dict[str, float]]:
    """Means over what each validation counts."""
    sums: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    totals: dict[int, float] = defaultdict(float)
    for index in range(plan.itinerary.num_iterations):
        iteration = plan.itinerary.at(index)
        if not iteration.training:
            totals[iteration.epoch] += facts[index]["weight"]
            for name, value in means[index].items():
                sums[iteration.epoch][name] += value * facts[index]["weight"]
    return [{name: value / (totals[epoch] or 1.0) for name, value in sums[epoch].items()} for epoch in sorted(sums)]


@pytest.fixture
def turns_of(planned: Any, tmp_path: Path) -> Callable[..., tuple[Turns, Any]]:
    def build(source: str = SOURCE, **strategy: Any) -> tuple[Turns, Any]:
        (tmp_path / "job.py").write_text(source)
        probe = planned_workload(tmp_path)
        plan = planned(probe, steps=5, directory=str(tmp_path), **{"batch_size": 9} | strategy)
        return Turns(plan, plan.new_directory()), plan.spec

    return build


def planned_workload(directory: Path) -> Workload:
    job = {"entry": "job.py:workload", "batch_size": 9, "steps": 5, "seed": 5}
    return load_workload(JobSpec.parse({"job": job, "directory": str(directory)}))


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_every_order_of_turns_trains_what_the_plain_loop_trains(
    turns_of: Callable[..., tuple[Turns, Any]], strategy: dict[str, Any]
) -> None:
    states: list[dict[str, torch.Tensor]] = []
    expected = None
    for choose in ORDERS:
        turns, spec = turns_of(**strategy)
        expected = reference.train(spec) if expected is None else expected
        turns.run(choose)
        means, facts = turns.measured()
        steps = [index for index, values in sorted(facts.items()) if "lr" in values]
        assert [means[index]["loss"] for index in steps] == pytest.approx(expected.losses, rel=1e-5)
        assert [facts[index]["lr"] for index in steps] == expected.learning_rates
        if strategy.get("clip_norm"):
            assert [facts[index]["grad_norm"] for index in steps] == pytest.approx(expected.grad_norms, rel=1e-5)
        assert validations(turns.plan, means, facts) == [
            pytest.approx(values, rel=1e-4) for values in expected.validations
        ]
        states.append({name: tensor.clone() for name, tensor in turns.state().items()})
        assert states[-1].keys() == expected.state.keys()
        for name, tensor in expected.state.items():
            torch.testing.assert_close(states[-1][name], tensor, rtol=1e-4, atol=1e-5)
    for other in states[1:]:
        assert all(torch.equal(states[0][name], tensor) for name, tensor in other.items()), "bit for bit in any order"


@pytest.mark.parametrize("name", ["stages", "stages of a device", "device with stages that share it", "working window"])
def test_a_parameter_of_several_stages_trains_to_the_bits_of_the_plain_loop(
    turns_of: Callable[..., tuple[Turns, Any]], name: str
) -> None:
    own = {
        "stages of a device": {"replicas": [GPU | {"stages": 3, "split": [2, 4]}], "microbatches": 3, "update": "cpu"},
        "working window": {"replicas": [GPU | {"working_window": 2}], "microbatches": 3, "update": "cpu"},
    }
    turns, spec = turns_of(**(own | STRATEGIES)[name])
    tied = [ring.values[0].parameter for ring in turns.plan.rings if ring.role is Role.TIED]
    assert tied, "the case is without what it is about"
    turns.run(max)
    expected = reference.train(spec)
    assert all(torch.equal(turns.state()[each], tensor) for each, tensor in expected.state.items())


def test_no_milestone_is_posted_before_a_microbatch_that_does_not_count_has_run(
    turns_of: Callable[..., tuple[Turns, Any]],
) -> None:
    """The hooks of the last microbatch that counts posted them, and an owner updated the parameters that the forward of
    one behind it was to read: a batch norm's statistics then depended on who was faster."""
    states = []
    for choose in ORDERS:
        turns, _ = turns_of(replicas=2, microbatches=2, stages=2, split=[2])
        turns.run(choose)
        states.append({name: tensor.clone() for name, tensor in turns.state().items()})
    for name in ("1.running_mean", "1.running_var"):
        assert all(torch.equal(states[0][name], other[name]) for other in states[1:])


def test_a_validation_in_which_nothing_counts_has_means_of_0_as_in_the_plain_loop(
    turns_of: Callable[..., tuple[Turns, Any]],
) -> None:
    source = SOURCE.replace("validation=(data[0][:11], data[1][:11])", "validation=(data[0], data[1] * 0 - 1)")
    turns, spec = turns_of(source)
    turns.run(min)
    assert reference.train(spec).validations == validations(turns.plan, *turns.measured())


# --- buckets that go now this way, now that

OPTIMIZERS = {
    "adam": "torch.optim.Adam(parameters, lr=0.05, eps=1e-3, amsgrad=True)",
    "adamw": "torch.optim.AdamW(parameters, lr=0.05, eps=1e-3)",
    "momentum": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)",
    "plain": "torch.optim.SGD(parameters, lr=0.05)",
    "adagrad": "torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)",
    "whole": "Trusting(parameters)",
}
TRUSTING = '''

class Trusting(torch.optim.Optimizer):
    """Each tensor moves by a part of its own norm, ever less: no element is updated by itself."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["steps"] = state.get("steps", 0) + 1
                    state["mean"] = 0.5 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                    trust = parameter.norm() / (state["mean"].norm() + 1e-3) / state["steps"]
                    parameter.sub_(state["mean"] * trust, alpha=group["lr"])
'''
TWO_WAYS: dict[str, dict[str, Any]] = {
    "device": {"replicas": [GPU], "microbatches": 2},
    "device in one bucket": {"replicas": [GPU], "bucket_mib": 1.0},
    "device clipped": {"replicas": [GPU], "clip_norm": 1.0},
    "device clipped, coarse": {"replicas": [GPU], "clip_norm": 1.0, "sync": "coarse"},
    "device in stages": {"replicas": [{"device": "gpu", "stages": 2, "split": [3]}], "microbatches": 2},
    "device in stages clipped": {"replicas": [{"device": "gpu", "stages": 2, "split": [3]}], "clip_norm": 1.0},
    "devices": {"replicas": [GPU, GPU], "skip_nonfinite": True},
    "devices coarse": {"replicas": [GPU, GPU], "sync": "coarse", "clip_norm": 1.0, "bucket_mib": 1.0},
    "device and CPU": {"replicas": [GPU, CPU]},
    "CPUs and device clipped": {"replicas": [CPU, GPU, CPU], "clip_norm": 1.0, "bucket_mib": 1.0},
    "device and stages clipped": {"replicas": [GPU, {"stages": 2, "split": [3]}], "clip_norm": 1.0},
}


def two_way_source(optimizer: str) -> str:
    """Everything in float64, so that only what is wrong makes a difference."""
    adam = "torch.optim.Adam(parameters, lr=0.05, eps=1e-3)"
    changes = {
        "torch.randn(26, 4, generator=generator)": "torch.randn(26, 4, generator=generator, dtype=torch.float64)",
        "model = nn.Sequential(*layers)": "model = nn.Sequential(*layers).double()",
        adam: OPTIMIZERS[optimizer],
        "\n\ndef workload": TRUSTING + "\n\ndef workload",
    }
    source = SOURCE
    for old, new in changes.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    return source


@pytest.mark.pairs(name=TWO_WAYS, optimizer=OPTIMIZERS)
def test_buckets_that_go_another_way_at_any_step_train_what_the_plain_loop_trains(
    turns_of: Callable[..., tuple[Turns, Any]], name: str, optimizer: str
) -> None:
    """Five steps of two epochs, with validation between and behind them, and a last step on either way."""
    source, strategy, rng, expected = two_way_source(optimizer), TWO_WAYS[name], random.Random(1), None
    for choose in ORDERS:
        turns, spec = turns_of(source, update="balanced", **strategy)
        ways = turns.set_routes(rng)
        assert len(set(ways)) > 1
        expected = reference.train(spec) if expected is None else expected
        turns.run(choose)
        means, facts = turns.measured()
        steps = [index for index, values in sorted(facts.items()) if "lr" in values]
        assert [means[index]["loss"] for index in steps] == pytest.approx(expected.losses, rel=1e-12)
        assert [facts[index]["lr"] for index in steps] == expected.learning_rates
        if "clip_norm" in strategy:
            norms = [facts[index]["grad_norm"] for index in steps]
            assert norms == pytest.approx(expected.grad_norms, rel=1e-12)
            assert min(norms) < 1.0 < max(norms), "some steps are clipped"
        assert validations(turns.plan, means, facts) == [
            pytest.approx(values, rel=1e-12) for values in expected.validations
        ]
        state = turns.state()
        for name, tensor in expected.state.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-13)


def test_an_optimizer_of_which_nobody_knows_what_it_keeps_stays_where_the_plan_put_it(
    turns_of: Callable[..., tuple[Turns, Any]],
) -> None:
    """Adafactor keeps sums over rows and columns of a matrix; the other one counts its steps beside its state."""
    counting = TRUSTING.replace('state["steps"] = state.get(', 'group["steps"] = group.get(')
    counting = counting.replace('state["steps"]', 'group["steps"]')
    for optimizer in ("torch.optim.Adafactor(parameters)", "Trusting(parameters)"):
        source = SOURCE.replace("torch.optim.Adam(parameters, lr=0.05, eps=1e-3)", optimizer)
        source = source.replace("\n\ndef workload", counting + "\n\ndef workload")
        turns, _ = turns_of(source, update="balanced", replicas=[GPU], bucket_mib=1.0)
        assert not turns.may_go_either_way()
    turns, _ = turns_of(update="balanced", replicas=[GPU], bucket_mib=1.0)
    assert turns.may_go_either_way()
