"""What progress makes of the values that lanes have measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.plan import Plan
from weft.scheduler.runs.progress import Progress

LOSSES, WEIGHTS = (0.1, 0.7, 0.3), (7.0, 0.0, 3.0)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_validation_comes_to_the_bits_of_the_plain_loop(
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    plan_of: Callable[..., Plan],
    weighted: bool,
) -> None:
    """Divided by the sum of the weights in the end, it had another last digit."""
    inspection = dataclasses.replace(inspection_of([unit_of(0)]), num_train=12, num_validation=10)
    plan = plan_of(inspection, batch_size=4)
    progress, told = Progress(plan), {}
    held_out = [each for each in map(plan.itinerary.at, range(plan.itinerary.num_iterations)) if not each.training]
    assert [each.size for each in held_out] == [4, 4, 2]
    for iteration, loss, weight in zip(held_out, LOSSES, WEIGHTS, strict=True):
        facts = {"weight": weight} if weighted else {}
        progress.add(b"", [{"iteration": iteration.index, "means": {"loss": loss}, "facts": facts}])
        told = progress.finish(iteration, None, [iteration.size])
    weights = WEIGHTS if weighted else (4.0, 4.0, 2.0)
    parts = [loss * (weight / sum(weights)) for loss, weight in zip(LOSSES, weights, strict=True)]
    assert told["validation"] == {"loss": 0.0 + parts[0] + parts[1] + parts[2]}


def test_what_a_step_tells_beside_the_loss_is_in_its_line_and_in_the_news(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    progress = Progress(plan)
    for index, means in enumerate(({"loss": 0.5, "right": 0.25}, {"loss": 0.4, "right": 0.75}, {"loss": 0.3})):
        iteration = plan.itinerary.at(index)
        assert iteration.training
        half = {name: value / 2 for name, value in means.items()}  # of each of two lanes
        progress.add(b"", [{"iteration": index, "means": half, "facts": {}}] * 2)
        progress.ended_ns = 10**9 * (index + 1)
        line = progress.finish(iteration, None, [iteration.size])
        others = {name: value for name, value in means.items() if name != "loss"}
        assert line.get("measured", {}) == others
        assert ("measured" in line) is bool(others)
    news = progress.take_news()
    assert news is not None
    assert news["measured"] == {}


def test_a_step_counts_its_samples_or_what_the_workload_says(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    progress, counted = Progress(plan), []
    for index, facts in enumerate(({}, {"weight": 2.5}, {"weight": 0.0})):
        iteration = plan.itinerary.at(index)
        progress.add(b"", [{"iteration": index, "means": {"loss": 0.5}, "facts": facts}])
        assert progress.finish(iteration, None, [iteration.size])["samples"] == iteration.size
        counted.append(progress.counted)
    assert counted == [plan.itinerary.at(0).size, 2.5, 0.0]


def test_samples_of_batches_that_the_user_makes_are_those_that_were_told(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    progress, lines = Progress(plan), []
    for index, samples in enumerate((3, 8)):
        facts = {"weight": 0.5, "samples": samples}
        progress.add(b"", [{"iteration": index, "means": {"loss": 0.5}, "facts": facts}])
        lines.append(progress.finish(plan.itinerary.at(index), 2.0, [2, 1, 1]))
    assert [(line["samples"], line["shares"]) for line in lines] == [(3, [1, 1, 1]), (8, [4, 2, 2])]
    assert progress.samples_per_step == 5.5
    assert [value for _, value in progress.history.curves()["samples_per_second"]] == [1.5, 4.0]
