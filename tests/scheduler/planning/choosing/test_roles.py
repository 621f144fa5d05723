"""What the host would bring beside a device, by the simulator; and the shares that adaptive replicas begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from weft.plan.inspection import Inspection, TensorFacts, UnitFacts, ValueFacts
from weft.plan.plan import Plan
from weft.scheduler.planning.choosing.choice import Considered, choose, consider, simulated
from weft.scheduler.planning.choosing.roles import MAX_TASKS, Roles, roles_of, with_roles
from weft.scheduler.planning.planner import make_plan
from weft.spec.candidates import all_threads, candidates, looked_at, workers_wanted
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host

BATCH, NUM_UNITS = 128, 3
GPU, CPU = {"device": "gpu"}, {"device": "cpu"}
HOST = Host(workers=1, gpus=1)

BesideOf = Callable[..., Inspection]
SpecOf = Callable[..., JobSpec]
make: Callable[..., Plan] = partial(make_plan, shared_bytes_free=1 << 40)


@pytest.fixture(scope="session")
def beside(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], value_of: Callable[..., ValueFacts]
) -> BesideOf:
    """Of a model that takes a host `seconds` for a whole batch, and a device `speed` times less."""

    def inspection(seconds: float, speed: float, *, parameter_bytes: int = 4000, **changes: Any) -> Inspection:
        def units(whole: float) -> tuple[UnitFacts, ...]:
            forward = whole / NUM_UNITS / 3
            return tuple(
                unit_of(number, forward, 2 * forward, parameter_bytes=parameter_bytes) for number in range(NUM_UNITS)
            )

        shapes = {size: (size, 8) for size in (43, 64, BATCH)}
        values = tuple(value_of(number, shapes=shapes) for number in range(NUM_UNITS - 1))
        facts: dict[str, Any] = {
            "device_units": units(seconds / speed),
            "values": values,
            "device_values": values,
            "input": TensorFacts(dtype="float32", itemsize=4, shapes=shapes),
            "target": TensorFacts(dtype="int64", itemsize=8, shapes={size: (size,) for size in shapes}),
            "num_train": BATCH,
            "update_seconds": 1e-6,
            "device_update_seconds": 1e-6,
            "timed_size": BATCH,
            "host": HOST,
        }
        return inspection_of(units(seconds), **facts | changes)

    return inspection


@pytest.fixture(scope="session")
def spec(spec_of: SpecOf) -> SpecOf:
    return partial(spec_of, batch_size=BATCH)


def brought(roles: Roles | None) -> dict[str, float | None]:
    assert roles is not None
    return {each.role: each.brings for each in roles.roles}


def test_beside_a_gpu_that_is_34_times_as_fast_a_replica_brings_at_most_a_thirty_fifth(
    beside: BesideOf, spec: SpecOf
) -> None:
    """And auto sees it: shares that began equal said seventeen times as long, whatever the machine was."""
    facts = beside(34.0, 34)
    roles = roles_of(spec(replicas=[GPU]), facts, make)
    assert roles is not None
    assert roles.at_most == pytest.approx(1 / 35, rel=1e-3)
    replica = brought(roles)["replica"]
    assert replica is not None
    assert 0 < replica <= roles.at_most, "125 and 3 samples of 128"
    hybrids = [each for each in consider(spec(preset="auto"), facts, make) if "shares 125 : 3" in each.title]
    assert hybrids
    assert [each.seconds for each in hybrids] == pytest.approx([1 - replica] * len(hybrids), rel=1e-3)
    heavy = beside(0.034, 34, parameter_bytes=8 << 20)
    assert (brought(roles_of(spec(replicas=[GPU]), heavy, make))["replica"] or 0) < 0
    assert choose(spec(preset="auto"), heavy, make).considered[0].title == "one GPU"


def test_the_best_role_is_the_one_that_makes_the_job_faster_or_else_a_second_job(
    beside: BesideOf, spec: SpecOf
) -> None:
    def best(facts: Inspection) -> str | None:
        roles = roles_of(spec(replicas=[GPU]), facts, make)
        assert roles is not None
        assert f"worth most {'for a' if roles.best == 'second job' else 'as'} {roles.best}: " in roles.line()
        return roles.best

    facts = beside(0.3, 3)
    assert best(facts) == "replica"
    assert best(beside(10.0, 100)) == "second job"
    assert best(replace(facts, load_seconds=1.0)) == "loader"
    assert best(replace(beside(10.0, 100), device_update_seconds=0.1)) == "updater"


def test_each_role_brings_what_its_strategy_saves_of_the_devices_iteration(beside: BesideOf, spec: SpecOf) -> None:
    roles = roles_of(spec(replicas=[GPU]), beside(0.3, 3, load_seconds=0.2), make)
    assert roles is not None
    alone = roles.predicted_iteration_seconds
    assert alone == pytest.approx(0.2, rel=1e-2), "it waits for its loader"
    for each in roles.roles:
        assert each.brings is not None
        assert each.predicted_iteration_seconds is not None
        ratio = each.predicted_iteration_seconds / alone
        assert each.brings == pytest.approx(1 / ratio if each.role == "second job" else 1 - ratio)
    assert brought(roles)["loader"] == pytest.approx(0.5, abs=0.01), "2 loaders are as fast as the GPU"
    assert roles.told()["roles"][0]["title"].startswith("one GPU and one process (")


def test_stages_that_share_a_gpu_are_compared_with_one(beside: BesideOf, spec: SpecOf) -> None:
    """A prediction takes each stream to be as fast as a GPU of its own."""
    both = [roles_of(spec(**axes).model_copy(), beside(0.3, 3), make) for axes in ({"replicas": [GPU]}, _hybrid(2))]
    assert both[0] == both[1]


def _hybrid(stages: int) -> dict[str, Any]:
    return {"replicas": [GPU | {"stages": stages, "gpus": 1}, CPU], "microbatches": 4, "share": "adaptive"}


def test_what_was_not_measured_is_not_told(beside: BesideOf, spec: SpecOf) -> None:
    """Of a job of devices alone the host's units are none, and the update was made by one of both."""
    facts = replace(beside(0.3, 3), device_units=(), timed_size=0)
    on_device = roles_of(spec(replicas=[GPU]), facts, make)
    assert brought(on_device) == {"replica": None, "updater": None, "loader": 0.0, "second job": None}
    assert on_device is not None
    assert on_device.line().endswith("; `weft plan` measures the replica and the updater and the second job")
    assert roles_of(spec(replicas=[GPU], update="cpu"), replace(facts, device_update_seconds=None), make) is None
    assert roles_of(spec(replicas=2), replace(facts, host=Host(workers=2)), make) is None, "there is no device"
    assert roles_of(spec(stages=2), replace(facts, device_update_seconds=None), make) is None, "it was not looked at"
    assert roles_of(spec(preset="stronghold"), beside(0.3, 3), make) is None


def test_a_batch_that_modules_look_at_has_no_replica_beside_it(beside: BesideOf, spec: SpecOf) -> None:
    roles = roles_of(spec(replicas=[GPU]), beside(0.3, 3, batch_modules=("1 (BatchNorm1d)",)), make)
    assert roles is not None
    replica = roles.roles[0]
    assert (replica.brings, replica.title) == (None, None)
    assert (
        replica.why_not
        == "what the model gives for a sample depends on the others of its microbatch, which would be others"
    )
    assert "replica" not in roles.line()
    forward = roles_of(spec(replicas=[GPU], mode="forward"), beside(0.3, 3), make)
    assert brought(forward)["updater"] is None, "nothing is updated"


def test_the_line_is_a_note_of_a_plan_that_is_about_to_run(beside: BesideOf, spec: SpecOf) -> None:
    own, facts = spec(replicas=[GPU]), beside(0.3, 3)
    plan, roles = make(own, facts), roles_of(own, facts, make)
    assert roles is not None
    assert with_roles(plan, own, facts, make).notes == (*plan.notes, roles.line())
    assert roles.line().startswith("cpu: beside one GPU (100 ms an iteration), worth most as replica: as replica 2")
    large = make(spec(replicas=[GPU], microbatches=64), replace(facts, timed_size=0))
    several = replace(
        large, graph=replace(large.graph, tasks=large.graph.tasks * (1 + MAX_TASKS // len(large.graph.tasks)))
    )
    assert with_roles(several, own, facts, make) is several


# --- shares


@pytest.mark.parametrize("speed", [1.0, 3.0, 7.0, 34.0, 128.0, 1000.0])
def test_adaptive_shares_begin_where_an_iteration_is_shortest(beside: BesideOf, spec: SpecOf, speed: float) -> None:
    facts = beside(1.0, speed)
    hybrid = spec(replicas=[GPU, CPU], share="adaptive")

    def seconds(shares: list[float]) -> float:
        given = spec(replicas=[GPU, CPU], share="adaptive", shares=shares)
        found = simulated(Considered(spec=given, title="", least_seconds=0.0), facts, make)
        assert found.seconds is not None
        return found.seconds

    found = simulated(Considered(spec=hybrid, title="", least_seconds=0.0), facts, make)
    shares = found.spec.strategy.shares
    assert shares is not None
    assert sum(shares) == BATCH
    on_host = round(shares[1])
    assert on_host >= 2, "as a division leaves it"
    assert found.seconds == min(seconds([BATCH - count, count]) for count in range(max(2, on_host - 3), on_host + 4))
    assert found.spec.strategy.share == "adaptive", "it goes on from there"
    given = spec(replicas=[GPU, CPU], share="adaptive", shares=[1.0, 1.0])
    assert simulated(Considered(spec=given, title="", least_seconds=0.0), facts, make).spec is given


# --- what is looked at


def test_a_job_that_is_planned_only_has_the_host_looked_at_and_holds_it(spec: SpecOf) -> None:
    own, host = spec(replicas=[GPU]), Host(workers=3, gpus=1)
    assert looked_at(own, host) == (own,)
    assert workers_wanted(own, host) == {"gpu": 1, "loader": 1}
    asked = own.model_copy(update={"plan_for": "time"})
    kinds = {replica.device for each in looked_at(asked, host) for replica in each.strategy.replica_list}
    assert kinds == {"cpu", "gpu"}
    assert workers_wanted(asked, host) == {"cpu": 3, "gpu": 1, "loader": 1}
    assert (all_threads(own, host), all_threads(asked, host)) == (None, 3)
    on_host = spec(stages=2).model_copy(update={"plan_for": "time"})
    assert looked_at(on_host, host) == (on_host,)


def test_no_candidate_has_devices_alone_compute_with_all_threads(spec: SpecOf) -> None:
    """One had, and the times of the host's threads then stood for the device's."""
    found = candidates(spec(preset="auto", replicas=[GPU]), Host(workers=2, gpus=1))
    assert found
    assert all(each.strategy.threads is None for each in found)
