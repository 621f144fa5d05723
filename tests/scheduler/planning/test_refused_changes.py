"""What a plan makes of a step that changes parameters by itself, or has hooks on their gradients, or sparse ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from weft.plan.inspection import Inspection, ParameterFacts, UnitFacts
from weft.plan.plan import Plan
from weft.scheduler.planning.choosing.choice import trains_alike
from weft.scheduler.planning.partition import PlanError

FROZEN = {"changed_as": "teacher.mean", "trained": False}
TRAINED = {"changed_as": "head.weight"}
HOOKED = {"hooked_as": "head.weight"}
SPARSE = {"sparse_as": "words.weight"}
TWO, GPU = {"replicas": 2}, {"replicas": [{"device": "gpu"}], "update": "cpu"}


@pytest.fixture
def changing(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    parameter_of: Callable[..., ParameterFacts],
) -> Callable[[dict[str, Any]], Inspection]:
    def make(facts: dict[str, Any]) -> Inspection:
        parameters = (parameter_of(0), dataclasses.replace(parameter_of(1), **facts))
        return dataclasses.replace(inspection_of([unit_of(0), unit_of(1)]), parameters=parameters)

    return make


@pytest.mark.parametrize(
    ("facts", "settings", "text"),
    [
        (
            FROZEN,
            TWO,
            "changes the parameter 'teacher.mean', which is not trained .* each of 2 replicas .* use one rep",
        ),
        (
            FROZEN,
            {"recompute": True},
            "strategy.recompute = true .* 'teacher.mean', .* buffers .* or leave recompute out",
        ),
        (TRAINED, TWO, "'head.weight', which the optimizer trains, too, and each of 2 replicas .* use one replica"),
        (
            TRAINED,
            GPU,
            "'head.weight', which the optimizer trains, .* the next update overwrites; compute .*parametriz",
        ),
        (TRAINED, {"staleness": 1}, "'head.weight', which the optimizer trains, .* without staleness"),
        (HOOKED, TWO, "a hook of the parameter 'head.weight' .* use register_hook, .* or one replica"),
        (
            SPARSE,
            TWO,
            "'words.weight' gets a sparse gradient, and 2 replicas add up .* sparse=False, or train one replica",
        ),
        (
            SPARSE,
            GPU,
            "'words.weight' gets a sparse gradient, and a replica on a device, .* or train on the CPU without",
        ),
        (SPARSE, {"staleness": 1}, "'words.weight' .* or a stale one, hands dense ones .* without staleness"),
        (
            SPARSE,
            {"clip_norm": 1.0},
            "'words.weight' gets a sparse gradient, and strategy.clip_norm .* leave clip_norm",
        ),
        (
            SPARSE,
            {"skip_nonfinite": True},
            "and strategy.skip_nonfinite looks at dense ones; .* leave skip_nonfinite out",
        ),
    ],
)
def test_what_cannot_be_as_in_the_plain_loop_is_refused_by_its_name(
    plan_of: Callable[..., Plan],
    changing: Callable[[dict[str, Any]], Inspection],
    facts: dict[str, Any],
    settings: dict[str, Any],
    text: str,
) -> None:
    with pytest.raises(PlanError, match=text):
        plan_of(changing(facts), **settings)


def test_a_sparse_gradient_is_refused_where_stages_share_a_parameter(
    plan_of: Callable[..., Plan],
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    parameter_of: Callable[..., ParameterFacts],
) -> None:
    units = [unit_of(0), unit_of(1), unit_of(2)]
    tied = dataclasses.replace(inspection_of(units), parameters=(parameter_of(0, 2, **SPARSE), parameter_of(1)))
    with pytest.raises(PlanError, match=r"'words.weight' .* stages that share a parameter .* where no parameter is"):
        plan_of(tied, stages=2)
    assert plan_of(tied, stages=1).synchronisation is None


@pytest.mark.parametrize(
    ("facts", "settings"),
    [(FROZEN, {"stages": 2}), (FROZEN, GPU), (TRAINED, {}), (HOOKED, GPU), (HOOKED, {"stages": 2})],
)
def test_a_stage_knows_what_its_steps_change_beside_what_is_trained(
    plan_of: Callable[..., Plan],
    changing: Callable[[dict[str, Any]], Inspection],
    facts: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    stages = plan_of(changing(facts), **settings).stages
    assert [stage.changing for stage in stages][-1] == (("teacher.mean",) if facts is FROZEN else ())
    assert all(not stage.changing for stage in stages[:-1])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (TWO, "each of 2 replicas has a model of its own; train one replica, or, where it looks"),
        (GPU, "a replica on a device, .* is updated bucket by bucket; train on the CPU without staleness, or"),
        ({"staleness": 1}, "or a stale one, is updated bucket by bucket; train on the CPU without staleness, or"),
        ({"stages": 2}, "each of 2 stages has an optimizer and a part of the model; use stages = 1, or, where"),
        ({"clip_norm": 1.0}, "strategy.clip_norm has a model updated bucket by bucket; leave clip_norm out, or"),
        ({"skip_nonfinite": True}, "strategy.skip_nonfinite has .* bucket; leave skip_nonfinite out, or, where"),
    ],
)
def test_a_hook_around_the_optimizers_step_is_refused_where_the_model_has_more_than_one_step(
    plan_of: Callable[..., Plan],
    changing: Callable[[dict[str, Any]], Inspection],
    settings: dict[str, Any],
    text: str,
) -> None:
    """It ran for each bucket or stage, on whatever that had, or in a worker whose model nobody trains."""
    hooked = dataclasses.replace(changing({}), step_hook="register_step_post_hook(mean)")
    with pytest.raises(PlanError, match=rf"register_step_post_hook\(mean\), is called once a step .*{text}"):
        plan_of(hooked, **settings)
    assert plan_of(changing({}), **settings).stages
    assert plan_of(hooked, stages=1, microbatches=2).synchronisation is None
    assert plan_of(hooked, stages=2, mode="forward").stages, "nobody steps"


def test_an_option_of_the_optimizer_that_the_step_sets_is_refused_where_others_have_their_own(
    plan_of: Callable[..., Plan], changing: Callable[[dict[str, Any]], Inspection]
) -> None:
    sets = dataclasses.replace(changing({}), set_by_step="param_groups[0]['lr']")
    for settings in ({}, {"stages": 2}, {"microbatches": 2}, {"replicas": 2, "mode": "forward"}):
        assert plan_of(sets, **settings).stages, settings
    for settings in (TWO, {"clip_norm": 1.0}, {"replicas": [{"device": "gpu"}]}):
        with pytest.raises(PlanError, match=r"sets param_groups\[0\]\['lr'\] of .* give Workload.scheduler"):
            plan_of(sets, **settings)


@pytest.mark.parametrize(("settings", "count"), [({}, 0), (TWO, 1)])
def test_a_line_tells_of_what_a_step_keeps_where_nobody_else_knows_of_it(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    plan_of: Callable[..., Plan],
    settings: dict[str, Any],
    count: int,
) -> None:
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), keeps_elsewhere=True)
    notes = [note for note in plan_of(inspection, **settings).notes if note.startswith("state: ")]
    assert len(notes) == count
    with pytest.raises(PlanError, match=r"recompute = true runs each .* an attribute, .* or leave recompute out"):
        plan_of(inspection, recompute=True, **settings)
    plan_of(dataclasses.replace(inspection, keeps_numbers=True), recompute=True, **settings)


def test_no_choice_divides_a_batch_otherwise_whose_every_microbatch_changes_a_parameter(
    changing: Callable[[dict[str, Any]], Inspection], spec_of: Callable[..., Any]
) -> None:
    whole, divided = spec_of(batch_size=8), spec_of(batch_size=8, microbatches=2)
    assert not trains_alike(divided, whole, changing(FROZEN))
    assert trains_alike(divided, whole, changing({}))


def test_no_choice_has_others_keep_what_on_epoch_reads(
    changing: Callable[[dict[str, Any]], Inspection], spec_of: Callable[..., Any]
) -> None:
    """An accuracy over what `validate` had appended was of half the samples, where two replicas were chosen."""
    whole, divided = spec_of(batch_size=8), spec_of(batch_size=8, microbatches=2)
    replicas, stages = spec_of(batch_size=8, replicas=2), spec_of(batch_size=8, stages=2)
    for unit, alike in ("", [whole, stages]), ("0.", [whole]):
        kept = {"on_epoch": ["preds"], "on_epoch_units": [unit]}
        inspection = dataclasses.replace(changing({}), lost_beside=kept)
        assert [each for each in (whole, divided, replicas, stages) if trains_alike(each, whole, inspection)] == alike


def test_what_a_backward_changes_is_refused_where_another_forward_comes_between(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    plan_of: Callable[..., Plan],
) -> None:
    changed = {"kind": "Checkpointed", "backward_changes": "norm.running_mean"}
    inspection = inspection_of([dataclasses.replace(unit_of(number), **changed) for number in range(2)])
    for settings in (
        {},
        {"microbatches": 4},
        {"stages": 2, "microbatches": 4, "schedule": "model-parallel"},
        {"stages": 2},
        {"replicas": 2, "microbatches": 4},
        {"stages": 2, "microbatches": 4, "mode": "forward"},
    ):
        assert plan_of(inspection, **settings).stages, settings
    told = "'norm.running_mean', as forward does .* use schedule = 'model-parallel', or strategy.recompute = true in"
    for settings, what in (
        ({"stages": 2, "microbatches": 4}, "'1f1b' has 2 microbatches at once there"),
        ({"stages": 2, "microbatches": 4, "schedule": "gpipe"}, "'gpipe' has 4 microbatches at once there"),
        ({"stages": 2, "microbatches": 1, "schedule": "zero-bubble"}, "'zero-bubble' has a backward in two parts"),
        (
            {
                "replicas": [{"device": "gpu", "working_window": 1}],
                "microbatches": 3,
                "update": "cpu",
                "recompute": True,
            },
            "has 3 microbatches at once there",
        ),
    ):
        with pytest.raises(PlanError, match=told) as refused:
            plan_of(inspection, **settings)
        assert what in str(refused.value)


def test_so_is_what_takes_what_the_newest_forward_has_left(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts], plan_of: Callable[..., Plan]
) -> None:
    inspection = dataclasses.replace(inspection_of([unit_of(0), unit_of(1)]), mixes_microbatches=True)
    for settings in ({"microbatches": 4}, {"stages": 2}, {"stages": 2, "microbatches": 4, "recompute": True}):
        assert plan_of(inspection, **settings).stages, settings
    with pytest.raises(PlanError, match=r"'1f1b' has 2 microbatches at once; .* use schedule = 'model-parallel'"):
        plan_of(inspection, stages=2, microbatches=4)
