"""What memory a plan takes, of each worker and for snapshots, and why it is refused, or has none of these."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from weft.plan.inspection import Inspection, ParameterFacts, StateFacts, UnitFacts
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.scheduler.planning.memory import SNAPSHOT_SHARE, UNKNOWN_STATE, told_apart, why_not_snapshots
from weft.scheduler.planning.partition import NoRoom
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec
from weft.workers.memory.bucket_memory import BucketMemory

MIB = 1 << 20
ADAM = tuple(StateFacts(name, "elements", "float32", 4) for name in ("exp_avg", "exp_avg_sq"))


@pytest.fixture
def of_a_mib(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    parameter_of: Callable[..., ParameterFacts],
) -> Callable[..., Inspection]:
    """One parameter of 1 MiB, and buffers of 1 MiB."""

    def inspection(state: Any = ADAM, *, trained: bool = True, **changes: Any) -> Inspection:
        parameter = parameter_of(0, num_elements=MIB // 4, state=state, trained=trained)
        return inspection_of([unit_of(0, parameter_bytes=MIB, buffer_bytes=MIB)], parameters=(parameter,), **changes)

    return inspection


@pytest.mark.parametrize("axes", [{}, {"staleness": 1}, {"staleness": [0, 2]}], ids=str)
def test_a_plan_counts_what_replicas_ask_the_directory_for(
    of_a_mib: Callable[..., Inspection], spec_of: Callable[..., JobSpec], axes: dict[str, Any]
) -> None:
    """Where gradients have several places their sum has one of its own, which was not counted."""
    plan = make_plan(spec_of(replicas=2, **axes), of_a_mib(), shared_bytes_free=1 << 40)
    sync = plan.synchronisation
    assert sync is not None
    wanted = sum(each.num_bytes for each in BucketMemory.wants(sync, plan.replicas))
    gradients = sum(
        (1 + plan.replicas[replica].staleness) * bucket.num_bytes
        for bucket in sync.buckets
        for replica, _ in bucket.gradient_holders
    )
    rings = sum(ring.depth * ring.slot_bytes for ring in plan.rings if ring.memory == "shared")
    assert 0.9 * (wanted + gradients + rings) < plan.shared_bytes < 1.4 * (wanted + gradients + rings)
    assert plan.shared_bytes > wanted + gradients + rings - 4096, "norms and what is missing are a few bytes"


@pytest.mark.parametrize(
    ("state", "trained", "mib"),
    [
        (ADAM, True, 4),  # values, two averages, buffers
        ((*ADAM, StateFacts("step", "tensor", "float32", 4)), True, 4),
        ((), True, 2),
        (None, True, 2 + UNKNOWN_STATE),
        (ADAM, False, 2),  # what nobody trains is copied, once
    ],
)
def test_two_snapshots_have_to_fit_beside_the_plan(
    of_a_mib: Callable[..., Inspection], spec_of: Callable[..., JobSpec], state: Any, trained: bool, mib: int
) -> None:
    inspection, spec, other = of_a_mib(state, trained=trained), spec_of(), 3 * MIB
    need = (other + 2 * mib * MIB) / SNAPSHOT_SHARE
    assert why_not_snapshots(spec, inspection, other, bytes_free=need + 1) is None
    told = why_not_snapshots(spec, inspection, other, bytes_free=need * 0.99)
    assert told is not None
    copies, plan, free, room = map(float, re.findall(r"[\d.]+(?= MiB)", told))
    assert (copies, plan, free) == (2 * mib, 3, pytest.approx(need * 0.99 / MIB, abs=0.5))
    assert room < copies


def test_what_is_told_of_sizes_shows_which_is_more() -> None:
    """A plan was refused that needed 4 MiB where 4 MiB were free."""
    assert told_apart(4 * MIB, 3 * MIB) == ["4 MiB", "3 MiB"]
    assert told_apart(4 * MIB, 4 * MIB - 1) == ["4.000000 MiB", "3.999999 MiB"]
    assert told_apart(100_000, 40_000, 40_000) == ["0.1 MiB", "0.0 MiB", "0.0 MiB"]


def test_a_plan_that_leaves_no_room_at_all_says_so(
    of_a_mib: Callable[..., Inspection], spec_of: Callable[..., JobSpec]
) -> None:
    told = why_not_snapshots(spec_of(), of_a_mib(), 9 * MIB, bytes_free=10 * MIB)
    assert told == (
        "they take 8 MiB of memory beside the plan's 9 MiB, and of the 10 MiB that are free there is room for none"
    )


def test_each_reason_is_told(of_a_mib: Callable[..., Inspection], spec_of: Callable[..., JobSpec]) -> None:
    def why(unsaved: str | None = None, **strategy: Any) -> str | None:
        return why_not_snapshots(spec_of(**strategy), of_a_mib(unsaved=unsaved), 0, bytes_free=1 << 40)

    assert why() is None
    assert why(recovery="off") == "strategy.recovery is 'off'"
    assert why("Adam keeps a secret") == "Adam keeps a secret"
    assert "strategy.staleness" in (why(replicas=2, staleness=[0, 1]) or "")


def snapshots_of(plan: Plan) -> list[str]:
    return [str(task) for task in plan.graph.tasks if task.kind is Kind.SNAPSHOT]


def test_each_stage_and_each_owner_copies_what_it_has(
    plan_of: Callable[..., Plan], of_a_mib: Callable[..., Inspection]
) -> None:
    assert plan_of(stages=2).snapshot_tasks() == ("stage-0-0", "stage-0-1")
    assert set(plan_of(of_a_mib(), replicas=2).snapshot_tasks()) == {"stage-0-0", "stage-1-0", "owner-0", "owner-1"}
    assert plan_of(stages=2, recovery="off").snapshot_tasks() == ()
    assert plan_of(stages=2, mode="forward").snapshot_tasks() == ()


@pytest.mark.parametrize(
    "strategy", [{"stages": 2}, {"replicas": 2, "clip_norm": 1.0}, {"replicas": [{"device": "gpu"}]}]
)
def test_a_copy_is_the_last_that_a_lane_does_in_an_iteration(
    plan_of: Callable[..., Plan], strategy: dict[str, Any]
) -> None:
    """So it stands behind all that changes what is copied, and before all of the next iteration."""
    plan = plan_of(**strategy)
    tasks = plan.graph.tasks
    assert snapshots_of(plan)
    for program in plan.graph.programs.values():
        kinds = [tasks[task].kind for task in program]
        first = kinds.index(Kind.SNAPSHOT) if Kind.SNAPSHOT in kinds else len(kinds)
        assert set(kinds[first:]) <= {Kind.SNAPSHOT}


def test_a_plan_that_has_no_room_for_copies_says_so_and_is_none_the_less_made(
    plan_of: Callable[..., Plan], inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    plan = plan_of(inspection_of([unit_of(0)], unsaved="Adam keeps a secret"))
    assert snapshots_of(plan) == []
    assert plan.notes == ("snapshots: none, since Adam keeps a secret; after a lost worker the job begins again",)


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        ({"stages": 2, "schedule": "gpipe", "microbatches": 4}, [4, 4]),
        ({"stages": 2, "schedule": "1f1b", "microbatches": 4}, [2, 1]),
        ({"stages": 2, "schedule": "gpipe", "microbatches": 4, "recompute": True}, [1, 1]),
        # The second stage's backwards are in two parts, the first one's whole.
        ({"stages": 2, "schedule": "zero-bubble", "microbatches": 4}, [2, 2]),
        ({"stages": 2, "schedule": "zero-bubble", "microbatches": 4, "recompute": True}, [1, 2]),
        ({"microbatches": 4}, [2]),  # both units, one microbatch at a time
        ({"replicas": [{"microbatches": 1}, {"microbatches": 2}]}, [2, 1]),  # whose microbatches are half as large
        ({"replicas": [{"microbatches": 1}, {"microbatches": 1}], "shares": [3, 1]}, [2, 2 / 3]),
    ],
)
def test_workers_have_room_for_what_their_forwards_keep_at_one_time(
    plan_of: Callable[..., Plan],
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    strategy: dict[str, Any],
    kept: list[float],
) -> None:
    """Of two units that keep a MiB each, for the largest microbatch."""
    inspection = inspection_of([unit_of(number, kept_bytes=MIB) for number in range(2)], num_train=24)
    plan = plan_of(inspection, batch_size=24, **strategy)
    found = [num_bytes / MIB for num_bytes, kind in zip(plan.activation_bytes, plan.workers, strict=True)]
    assert found == pytest.approx([*kept, 0])  # the loader
    without = plan_of(inspection_of([unit_of(number) for number in range(2)], num_train=24), batch_size=24, **strategy)
    for worker, num_bytes in plan.worker_bytes().items():
        assert num_bytes == without.worker_bytes()[worker] + plan.activation_bytes[worker]


def test_a_worker_with_several_stages_has_room_for_those_of_all_at_one_time(
    plan_of: Callable[..., Plan], inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    inspection = inspection_of([unit_of(number, kept_bytes=MIB) for number in range(4)], num_train=24)
    plan = plan_of(inspection, batch_size=24, stages=4, schedule="interleaved", microbatches=4)
    assert plan.workers == ("cpu", "cpu", "loader")
    assert all(2 * MIB < kept <= 8 * MIB for kept in plan.activation_bytes[:2])


@pytest.mark.parametrize(
    ("strategy", "owned"),
    [
        ({}, [2]),
        ({"replicas": 2}, [1, 1]),  # each updates a half
        ({"replicas": [{"device": "gpu"}], "update": "cpu"}, [2, 0]),
        ({"replicas": [{"device": "gpu"}], "update": "local"}, [2]),
    ],
)
def test_the_optimizers_state_is_where_updates_are(
    plan_of: Callable[..., Plan], of_a_mib: Callable[..., Inspection], strategy: dict[str, Any], owned: list[int]
) -> None:
    plan = plan_of(of_a_mib(), **strategy)
    assert [num_bytes / MIB for num_bytes in plan.optimizer_bytes] == pytest.approx([*owned, 0], rel=1e-3)


def test_what_does_not_fit_is_refused_with_the_sum(
    of_a_mib: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    spec_of: Callable[..., JobSpec],
) -> None:
    """On the host all workers together; on a GPU its own. The layers of a working window are not there together."""
    units = (unit_of(0, parameter_bytes=MIB, kept_bytes=16 * MIB),)
    inspection, plenty = replace(of_a_mib(num_train=8), units=units), 1 << 40

    def make(room: int, **strategy: Any) -> Plan:
        return make_plan(spec_of(**strategy), inspection, shared_bytes_free=plenty, host_bytes_free=room)

    needed = make(plenty, replicas=2)
    sum_of_all = needed.shared_bytes + sum(needed.activation_bytes) + sum(needed.optimizer_bytes)
    assert sum_of_all > 34 * MIB
    assert make(sum_of_all, replicas=2).workers == needed.workers
    told = r"the plan needs 3\d\.\d+ MiB of the host's memory at the least \(in MiB: parameters, gradients and slots "
    with pytest.raises(NoRoom, match=told + r"\S+, activations 32, the optimizer's state 2\) and .* are free; use rec"):
        make(sum_of_all - 1, replicas=2)

    gpu = {"replicas": [{"device": "gpu"}], "update": "local"}
    inspection = replace(inspection, device_units=units, device_bytes=20 * MIB)
    assert make(plenty, **gpu).activation_bytes == (16 * MIB, 0)
    inspection = replace(inspection, device_bytes=20 * MIB - 1)
    with pytest.raises(NoRoom, match=r"a GPU's part of the plan needs 20.* parameters and gradients 2, activations 16"):
        make(plenty, **gpu)
    make(plenty, preset="stronghold")


def test_each_gpu_has_its_own_memory(
    of_a_mib: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], spec_of: Callable[..., JobSpec]
) -> None:
    """The smallest one's was taken for all, and what stood on the larger ones was refused."""
    units = tuple(unit_of(n, parameter_bytes=MIB, kept_bytes=kept * MIB) for n, kept in enumerate((16, 1)))
    inspection = replace(of_a_mib(num_train=8), units=units, device_units=units, device_bytes=8 * MIB)
    spec = spec_of(replicas=[{"device": "gpu", "stages": 2, "split": [1]}], update="cpu")
    with pytest.raises(NoRoom, match="a GPU's part of the plan needs"):
        make_plan(spec, inspection, shared_bytes_free=1 << 40)
    make_plan(spec, replace(inspection, gpu_bytes=(24 * MIB, 8 * MIB)), shared_bytes_free=1 << 40)
    with pytest.raises(NoRoom, match="a GPU's part of the plan needs"):
        make_plan(spec, replace(inspection, gpu_bytes=(8 * MIB, 24 * MIB)), shared_bytes_free=1 << 40)
