"""The rule of `[stop]`: what it decides after each validation, and that what it remembers can be gone on with."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.spec.field_errors import SpecError
from weft.spec.job_spec import CheckpointSection, StopSection
from weft.spec.stopping import MAX_KEPT, Rule, Standing, Training, UnknownMetric, reported_names, value_for_scheduler


def rule_of(**stop: Any) -> Rule:
    return Rule(StopSection(**stop))


def stops(rule: Rule, values: list[float], standing: Standing | None = None) -> tuple[int, str] | None:
    """(the epoch after which it stops, why)"""
    now = standing or Standing()
    for epoch, value in enumerate(values):
        now, why = rule.validated(now, epoch, {str(rule.stop and rule.stop.metric): value})
        if why is not None:
            return epoch, why
    return None


@pytest.mark.parametrize(
    ("stop", "values", "epoch", "why"),
    [
        (
            {"metric": "accuracy"},
            [0.8, 0.9, 0.913, 0.91, 0.9, 0.913],
            5,
            "accuracy has not improved on 0.913 of epoch 3 for 3 epochs",
        ),
        ({"metric": "loss", "patience": 1}, [3.0, 2.0, 2.0], 2, "loss has not improved on 2 of epoch 2 for 1 epoch"),
        ({"metric": "loss", "mode": "max", "patience": 2}, [1.0, 0.5, 0.7], 2, "loss has not improved on 1 of epoch 1"),
        (
            {"metric": "error", "mode": "min", "patience": 2, "min_delta": 0.1},
            [1.0, 0.95, 0.91, 0.5],
            2,
            "error has not improved by 0.1 on 1 of epoch 1 for 2 epochs",
        ),
        ({"metric": "loss", "patience": 2}, [math.nan, math.inf], 1, "loss has been no number for 2 epochs"),
    ],
)
def test_it_stops_after_so_many_epochs_without_an_improvement(
    stop: dict[str, Any], values: list[float], epoch: int, why: str
) -> None:
    stopped = stops(rule_of(**stop), values)
    assert stopped is not None
    assert (stopped[0], why in stopped[1]) == (epoch, True), stopped


@pytest.mark.parametrize(
    ("stop", "values"),
    [
        ({"metric": "loss", "patience": 2}, [5.0, 6.0, 4.0, 6.0, 3.0]),
        ({"metric": "loss", "patience": 2}, [math.nan, 1.0, math.nan, 0.5]),
        ({"max_time": "1 s"}, [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_it_goes_on_while_there_is_an_improvement_in_time(stop: dict[str, Any], values: list[float]) -> None:
    assert stops(rule_of(**stop), values) is None


def test_of_a_value_that_no_validation_reports_the_error_names_those_that_are() -> None:
    with pytest.raises(
        UnknownMetric, match=r"^stop\.metric = 'f1': validations report loss, accuracy; use one of these"
    ):
        rule_of(metric="f1").validated(Standing(), 0, {"loss": 1.0, "accuracy": 0.5})
    with pytest.raises(UnknownMetric, match=r"^stop\.metric = 'f1': the job has no validation; give Workload\.valid"):
        rule_of(metric="f1").validated(Standing(), 0, {})


def test_an_epoch_that_says_nothing_of_a_value_is_none_for_its_rules() -> None:
    training = Training(Rule(StopSection(metric="f1", patience=2), CheckpointSection(keep_best="f1")))
    told = [0.5, None, 0.4, None, None, 0.3]
    assert [training.validated(epoch, {"f1": value}) is not None for epoch, value in enumerate(told)] == [False] * 5 + [
        True
    ]
    assert [training.take_best({"f1": value}) for value in (None, 0.5, None, 0.6)] == [False, True, False, True]
    assert value_for_scheduler("f1", {"f1": None}) is None


def test_a_name_stands_for_one_value() -> None:
    assert reported_names(["loss", "accuracy"], ["f1"]) == ["loss", "accuracy", "f1"]
    with pytest.raises(SpecError, match=r"^Workload\.epoch_metrics: validations report 'accuracy', too; give it"):
        reported_names(["loss", "accuracy"], ["f1", "accuracy"])


def test_a_scheduler_is_stepped_with_a_value_that_validations_report_or_there_is_a_remedy() -> None:
    assert value_for_scheduler("accuracy", {"loss": 1.0, "accuracy": 0.5}) == 0.5
    assert value_for_scheduler(None, {}) is None
    with pytest.raises(
        UnknownMetric, match=r"^Workload\.scheduler_metric, .* = 'f1': validations report loss; use one"
    ):
        value_for_scheduler("f1", {"loss": 1.0})
    remedy = (
        r"for ReduceLROnPlateau, = 'loss': the job has no validation; give Workload\.validation, or .*, or a scheduler"
    )
    with pytest.raises(UnknownMetric, match=remedy):
        value_for_scheduler("loss", {})


@pytest.mark.parametrize(("best", "kept"), [(None, [True, False, True, False]), ("max", [True, True, False, False])])
def test_the_best_is_better_than_all_before(best: Any, kept: list[bool]) -> None:
    training = Training(Rule(None, CheckpointSection(keep_best="loss", best=best)))
    assert [training.take_best({"loss": value}) for value in (2.0, 3.0, 1.0, math.nan)] == kept


@given(values=st.lists(st.floats(), min_size=1), cut=st.integers(min_value=0), patience=st.integers(1, 4))
def test_who_goes_on_with_what_it_remembers_comes_to_the_same_decision(
    values: list[float], cut: int, patience: int
) -> None:
    """By way of the disk."""
    rule, cut = rule_of(metric="loss", patience=patience), cut % len(values)
    now, whole = Standing(), []
    for epoch, value in enumerate(values):
        if epoch == cut:
            now = Standing.from_wire(json.loads(json.dumps(now.to_wire())))
        now, why = rule.validated(now, epoch, {"loss": value})
        whole.append(why)
    undisturbed = Standing()
    for epoch, value in enumerate(values):
        undisturbed, why = rule.validated(undisturbed, epoch, {"loss": value})
        assert why == whole[epoch]


@pytest.mark.parametrize(
    "data",
    [
        *(None, [], {"best": "high"}, {"since": 1.5}, {"samples": True}, {"other": 1}),
        *({"loss": None}, {"seconds": None}, {"since": None}, {"samples": None}, {"loss": 10**400}),
    ],
)
def test_what_a_checkpoint_has_instead_is_refused(data: object) -> None:
    """With a loss of null the daemon failed as it added the next one."""
    with pytest.raises(ValueError, match=r"does not say how|is "):
        Standing.from_wire(data)


def test_the_mean_loss_is_that_of_the_epochs_samples() -> None:
    training = Training(Rule(None))
    assert training.now.mean_loss is None
    for loss, samples, first in [(9.0, 1, True), (1.0, 3, True), (5.0, 1, False)]:
        training.step(loss, samples, begins_epoch=first, now=0.0)
    assert training.now.mean_loss == 2.0


def test_time_is_that_of_training_over_attempts_and_lost_work_does_not_count() -> None:
    training = Training(rule_of(max_time="10 s"))
    training.start(100.0)
    training.step(1.0, 1, begins_epoch=True, now=104.0)
    training.keep(0)
    training.step(1.0, 1, begins_epoch=False, now=109.0)
    assert training.time_up() is None
    training.begin(1)
    training.step(1.0, 1, begins_epoch=False, now=900.0)  # before it trains: it prepares
    assert training.time_up() is None
    training.start(1000.0)
    training.step(1.0, 1, begins_epoch=False, now=1006.0)
    assert training.time_up() == "10 s of training are over"


def test_the_best_is_known_for_as_long_as_it_waits_for_the_disk() -> None:
    training = Training(Rule(None, CheckpointSection(keep_best="loss")))
    for iteration in range(3 * MAX_KEPT):
        training.step(1.0, 1, begins_epoch=iteration == 0, now=0.0)
        training.keep(iteration)
        assert training.take_best({"loss": 1.0 if iteration == 2 else 2.0 + iteration}) is (iteration in (0, 2))
    assert training.at(2).samples == 3
    assert training.at(0) == training.at(3) == Standing(), "of others the newest alone"


def test_an_attempt_goes_on_with_what_was_known_where_it_begins() -> None:
    training = Training(rule_of(metric="loss"))
    for iteration in range(3 * MAX_KEPT):
        training.validated(iteration, {"loss": float(iteration)})
        training.keep(iteration)
    last = 3 * MAX_KEPT - 1
    assert training.at(last - 2).since == last - 2
    training.begin(last - 1)
    assert training.now.since == last - 2
    training.begin(0)
    assert training.now == Standing()
    training.validated(0, {"loss": 1.0})
    training.keep(0)
    training.begin(1)
    assert training.now.best == 1.0, "what was known of later iterations is not in its way"
