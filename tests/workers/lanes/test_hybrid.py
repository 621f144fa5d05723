"""A pipeline of devices beside CPU replicas: each side updates its own parameters, and only gradients cross."""

from __future__ import annotations

import random
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.plan.itinerary import Iteration
from weft.plan.kinds import Kind
from weft.reference import loop as reference
from weft.workers.devices.stand_in import StandIn
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.operation import Operation

_ATTEMPT = runpy.run_path(str(Path(__file__).with_name("test_attempt.py")))
planned_workload, two_way_source = _ATTEMPT["planned_workload"], _ATTEMPT["two_way_source"]

CPU = {"device": "cpu"}
PIPELINES: dict[str, dict[str, Any]] = {
    "two stages on one": {"device": "gpu", "stages": 2, "gpus": 1},
    "two stages": {"device": "gpu", "stages": 2},
    "three stages on two": {"device": "gpu", "stages": 3, "gpus": 2},
}
GONE_ASTRAY = 0.5


class CountingDevice(StandIn):
    """copied: bytes by the name of the shared block and the way, up to the device or down from it."""

    def __init__(self, blocks: dict[int, str], copied: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self._blocks, self._copied = blocks, copied

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for tensor, way in ((target, "down"), (source, "up")):
            name = self._blocks.get(tensor.untyped_storage().data_ptr())
            if name is not None:
                self._copied[name, way] += source.nbytes
        super().copy(target, source)


class Sides(_ATTEMPT["Turns"]):  # type: ignore[misc]
    """astray: what a device's own updates add to each of its parameters that they update."""

    def __init__(self, planned: Any, astray: float = 0.0) -> None:
        self.blocks: dict[int, str] = {}
        self.copied: Counter[tuple[str, str]] = Counter()
        self._astray = astray
        directory = planned.new_directory()
        block = directory.block

        def named(name: str, num_bytes: int, fill: int = 0) -> torch.Tensor:
            tensor: torch.Tensor = block(name, num_bytes, fill)
            self.blocks[tensor.untyped_storage().data_ptr()] = name
            return tensor

        directory.block = named
        super().__init__(planned, directory, lambda: CountingDevice(self.blocks, self.copied))
        self.copied.clear()

    def _perform(self, attempt: Attempt, operation: Operation, iteration: Iteration) -> None:
        operation.run(iteration)
        task = self.plan.graph.tasks[operation.task]
        if self._astray and task.kind is Kind.UPDATE and task.owner is None:
            attempt._parts.memories[task.holder].values[task.bucket].add_(self._astray)

    def both(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each bucket of each stage on a device, its parameters there and those that are shared."""
        for attempt in self._attempts:
            for holder, memory in attempt._parts.memories.items():
                if self.plan.replicas[holder.replica].device == "gpu":
                    for bucket in attempt._parts._memory.held(holder):
                        yield memory.values[bucket.index], attempt._parts._memory.parameters(bucket)


SidesOf = Callable[..., tuple[Sides, Any]]


@pytest.fixture
def sides_of(planned: Any, tmp_path: Path) -> SidesOf:
    """Five steps and a validation, in float64."""

    def build(pipeline: str, num_cpus: int = 1, astray: float = 0.0, **strategy: Any) -> tuple[Sides, Any]:
        (tmp_path / "job.py").write_text(two_way_source("adam"))
        replicas = [PIPELINES[pipeline], *[CPU] * num_cpus]
        probe = planned_workload(tmp_path)
        plan = planned(probe, steps=5, directory=str(tmp_path), batch_size=9, replicas=replicas, **strategy)
        return Sides(plan, astray), plan.spec

    return build


@pytest.mark.pairs(
    pipeline=PIPELINES,
    num_cpus=(1, 2),
    sync=("fine", "coarse"),
    bound=({}, {"clip_norm": 0.5}, {"skip_nonfinite": True}),
)
def test_both_sides_come_to_the_same_bits_and_to_those_of_the_plain_loop_but_for_rounding(
    sides_of: SidesOf, pipeline: str, num_cpus: int, sync: str, bound: dict[str, Any]
) -> None:
    sides, spec = sides_of(pipeline, num_cpus, sync=sync, **bound)
    sides.run(random.Random(0).choice)
    assert all(torch.equal(own, shared) for own, shared in sides.both())
    expected, state = reference.train(spec).state, sides.state()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-11, atol=1e-13)


def test_coarse_and_fine_train_the_same_bits(sides_of: SidesOf) -> None:
    states = []
    for sync in ("fine", "coarse"):
        sides, _ = sides_of("two stages on one", 2, sync=sync, clip_norm=0.5)
        sides.run(max)
        states.append(sides.state())
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


@pytest.mark.parametrize("sync", ["fine", "coarse"])
def test_of_the_model_only_gradients_cross_each_of_them_once_either_way(sides_of: SidesOf, sync: str) -> None:
    """A batch's gradient comes down from the stage that has it, and the sum goes up to every stage that updates."""
    sides, _ = sides_of("two stages", sync=sync, clip_norm=0.5)
    sides.run(min)
    buckets, steps = sides.plan.synchronisation.buckets, sides.plan.itinerary.steps
    assert {name for name, _ in sides.copied} & {"parameters", "versions", "sums"} == set()
    for way, holders in (("down", "gradient_holders"), ("up", "holders")):
        crossing = [part.num_bytes for part in buckets for holder in getattr(part, holders) if holder.replica == 0]
        moved = [count for (name, its), count in sides.copied.items() if (name[:15], its) == ("bucket-gradient", way)]
        assert sum(moved) == steps * sum(crossing), way


def test_a_copy_that_goes_astray_is_taken_back_to_the_hosts_now_and_then(
    sides_of: SidesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may round otherwise than the host does: what that comes to stays as small as in so many steps."""
    for every, steps_since in ((5, 0), (4, 1), (64, 5)):
        monkeypatch.setattr("weft.plan.course.REFRESH_STEPS", every)
        sides, _ = sides_of("two stages", astray=GONE_ASTRAY)
        sides.run(min)
        for own, shared in sides.both():
            torch.testing.assert_close(own - shared, torch.full_like(own, steps_since * GONE_ASTRAY))
