"""What memory a plan takes for snapshots, and why a job has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.inspection import Inspection, ParameterFacts, StateFacts, UnitFacts
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.scheduler.planning.memory import SNAPSHOT_SHARE, UNKNOWN_STATE, told_apart, why_not_snapshots
from weft.spec.job_spec import JobSpec

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
