"""A remedy changes something: what it advises is not set already, and makes a spec that is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.cli.screens import remedies
from weft.cli.screens.remedies import Remedy, Setup
from weft.plan.schedules.grid import drawn
from weft.plan.schedules.named import SCHEDULES
from weft.spec.job_spec import JobSpec, SpecError, apply_override
from weft.spec.replica import Replica
from weft.spec.schedule_text import why_not_stages
from weft.spec.strategy import MAX_LOADERS, MAX_PREFETCH, Strategy

UNITS = 6

KINDS: dict[str, Callable[[Setup, int], Remedy]] = {
    "data": lambda setup, _: remedies.of_data(setup, from_device=False, source_is_busy=False),
    "data of a device": lambda setup, _: remedies.of_data(setup, from_device=True, source_is_busy=False),
    "data of a busy loader": lambda setup, _: remedies.of_data(setup, from_device=False, source_is_busy=True),
    "small-tasks": remedies.of_small_tasks,
    "bubble": remedies.of_bubble,
    "slow-stage, the first": lambda setup, number: remedies.of_slow_stage(setup, number, 0, 1),
    "slow-stage, the second": lambda setup, number: remedies.of_slow_stage(setup, number, 1, 0),
    "slow-stage, unknown": lambda setup, number: remedies.of_slow_stage(setup, number, None, 0),
    "slow-replica": lambda setup, number: remedies.of_slow_replica(setup, number, 0),
    "uneven-replicas": lambda setup, _: remedies.of_uneven_replicas(setup),
    "sync": lambda setup, _: remedies.of_sync(setup),
    "sync, beside one that rests": lambda setup, number: remedies.of_sync(replace(setup, resting=(number,))),
    "slot": remedies.of_slot,
    "dispatch": remedies.of_dispatch,
    "update": remedies.of_update,
    "busy": lambda *_: remedies.of_busy(),
    "recovery": lambda *_: remedies.of_recovery(),
    "idle": lambda *_: remedies.of_idle(),
}


@st.composite
def cuts(draw: st.DrawFn) -> dict[str, Any]:
    stages = draw(st.integers(1, 4))
    split = draw(st.none() | st.sets(st.integers(1, UNITS - 1), min_size=stages - 1, max_size=stages - 1).map(sorted))
    if split and draw(st.booleans()):
        split = [str(unit) for unit in split]  # by name
    return {"stages": stages} | ({} if split is None else {"split": split})


@st.composite
def listed(draw: st.DrawFn) -> dict[str, Any]:
    replica = draw(cuts())
    if draw(st.booleans()):
        replica["device"] = "gpu"
        if draw(st.booleans()):
            replica["gpus"] = draw(st.integers(1, replica["stages"]))
    if draw(st.booleans()):
        replica["microbatches"] = draw(st.sampled_from([1, 3, 8]))
    return replica


@st.composite
def setups(draw: st.DrawFn) -> tuple[JobSpec, Setup]:
    several = draw(st.none() | st.integers(1, 3) | st.lists(listed(), min_size=1, max_size=3))
    cut = {} if isinstance(several, list) else draw(cuts())
    given_axes: dict[str, st.SearchStrategy[Any]] = {
        "microbatches": st.sampled_from([1, 2, 5, 16]),
        "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble-v"]),
        "window": st.integers(1, 100),
        "sync": st.sampled_from(["coarse", "fine"]),
        "update": st.sampled_from(["local", "cpu", "balanced"]),
        "share": st.sampled_from(["fixed", "adaptive", "stealing"]),
        "staleness": st.integers(0, 2),
        "loaders": st.sampled_from([1, 2, MAX_LOADERS]),
        "prefetch": st.sampled_from([{"load": MAX_PREFETCH, "transfer": MAX_PREFETCH}, {"load": 3, "transfer": 1}]),
    }
    strategy = (
        draw(st.fixed_dictionaries({}, optional=given_axes)) | cut | ({} if several is None else {"replicas": several})
    )
    batch_size, num_train = draw(st.sampled_from([(1, 1), (8, 8), (32, 1000), (100, 120), (500, 8)]))
    try:
        spec = JobSpec.parse(
            {"job": {"entry": "a.py:b", "steps": 1, "batch_size": batch_size}, "strategy": strategy, "directory": "/"}
        )
    except SpecError:
        assume(False)
        raise
    assume(all(has_grid(spec.strategy, replica) for replica in spec.strategy.replica_list))
    stages = []
    for number, replica in enumerate(spec.strategy.replica_list):
        bounds = [0, *map(int, replica.split or range(1, replica.stages)), UNITS]
        for place in range(replica.stages):
            units = [bounds[place], bounds[place + 1]]
            stages.append({"replica": number, "worker": f"cpu-{len(stages)}", "units": units})
    plan = {
        "strategy": spec.to_wire()["strategy"],
        "stages": stages,
        "batch_size": batch_size,
        "num_train": num_train,
    }
    setup = Setup.of(plan)
    assert setup is not None
    return spec, setup


def has_grid(strategy: Strategy, replica: Replica) -> bool:
    return why_not_stages(strategy.schedule, replica.stages, strategy.stages_per_worker) is None


@settings(max_examples=300)
@given(kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_every_alternative_of_every_remedy_is_another_spec_that_is_one(kind: str, data: st.DataObject) -> None:
    """Leaving split unset was advised where it was unset."""
    spec, setup = data.draw(setups())
    number = data.draw(st.integers(0, len(spec.strategy.replica_list) - 1))
    if kind.startswith("slow-stage"):  # of a replica that has several
        assume(setup.replica(number).stages > 1)
    remedy = KINDS[kind](setup, number)
    assert remedy.text.endswith(".")
    assert remedy.text[0].isupper() or remedy.text.startswith("strategy.")
    for alternative in remedy.alternatives:
        tables = spec.to_wire()
        for setting in alternative:
            apply_override(tables, setting)
            assert setting.partition("=")[0] in remedy.text
        changed = JobSpec.parse(tables)
        assert changed != spec, remedy
        for replica in changed.strategy.replica_list:
            assert int((replica.split or [0])[-1]) < UNITS
            assert has_grid(changed.strategy, replica)
        assert max(changed.strategy.microbatch_counts) <= max(setup.batch_size, *spec.strategy.microbatch_counts)
        assert changed.job.batch_size <= max(setup.num_train, spec.job.batch_size)
        assert setup.batch_size <= setup.num_train
    for axis in ("split", "window"):
        if f"{axis} unset" in remedy.text:
            assert any(getattr(each, axis, None) is not None for each in (spec.strategy, setup.replica(number)))


def test_no_second_loader_is_advised_to_data_that_one_draws() -> None:
    setup = Setup(strategy=Strategy(), stages=(), batch_size=8, num_train=8, streams=True)
    remedy = remedies.of_data(setup, from_device=False, source_is_busy=True)
    assert remedy == Remedy(text="Make the dataset's items cheaper to get.")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_nobody_is_advised_other_numbers_than_a_grid_has(kind: str) -> None:
    """Twice as many microbatches were, and the job was refused with them."""
    grid = drawn(SCHEDULES["1f1b"](2, 4), "mine") + "\n"
    stages = [{"replica": 0, "worker": f"cpu-{n}", "units": [3 * n, 3 * n + 3]} for n in range(2)]
    strategy = Strategy(stages=2, microbatches=4, schedule=grid)
    remedy = KINDS[kind](Setup(strategy=strategy, stages=stages, batch_size=8, num_train=100), 0)
    for alternative in remedy.alternatives:
        axes = {setting.partition("=")[0] for setting in alternative}
        assert axes.isdisjoint({"strategy.microbatches", "strategy.stages"}) or "strategy.schedule" in axes


def test_a_stage_gives_a_unit_to_the_neighbour_that_computes_less() -> None:
    stages = [{"worker": f"cpu-{n}", "units": units} for n, units in enumerate(([0, 1], [1, 5], [5, 6]))]
    setup = Setup(strategy=Strategy(stages=3), stages=stages, batch_size=8, num_train=8)
    assert remedies.of_slow_stage(setup, 0, 1, 0).alternatives == (("strategy.split=[2, 5]",),)
    assert remedies.of_slow_stage(setup, 0, 1, 2).alternatives == (("strategy.split=[1, 4]",),)
    assert remedies.of_slow_stage(setup, 0, 0, 1).alternatives == (("strategy.stages=2",),)
    assert "unset" not in remedies.of_slow_stage(setup, 0, 1, 2).text
    chosen = replace(setup, chosen=True)  # beside preset = "auto" a split by itself was refused
    remedy = remedies.of_slow_stage(chosen, 0, 1, 0)
    assert remedy.alternatives == (("strategy.stages=3", "strategy.split=[2, 5]"),)
    assert remedy.text.endswith("strategy.stages = 3 with strategy.split = [2, 5].")
    tables = {"job": {"entry": "a.py:b", "steps": 1, "batch_size": 8}, "strategy": {"preset": "auto"}, "directory": "/"}
    for setting in remedy.alternatives[0]:
        apply_override(tables, setting)
    JobSpec.parse(tables)
    given_split = Setup(strategy=Strategy(stages=3, split=[1, 5]), stages=stages, batch_size=8, num_train=8)
    assert remedies.of_slow_stage(given_split, 0, 1, 2).text.endswith("or leave split unset to balance measured times.")
    assert remedies.of_slow_stage(given_split, 0, 0, 1).alternatives == (("strategy.stages=2", "strategy.split=[1]"),)
    named = Setup(strategy=Strategy(stages=3, split=["1", "5"]), stages=stages, batch_size=8, num_train=8)
    assert remedies.of_slow_stage(named, 0, 0, 1).alternatives == (("strategy.stages=2", 'strategy.split=["1"]'),)
