"""The picture of a plan: what `weft plan` tells of one iteration, each task where it says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from xml.etree import ElementTree

import pytest

from weft.metrics.views.plan_svg import plan_svg
from weft.plan.inspection import Inspection
from weft.scheduler.planning.choosing.choice import choose
from weft.scheduler.planning.choosing.told import told
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def planned(
    inspection_of: Callable[..., Inspection], unit_of: Callable[..., Any], spec_of: Callable[..., JobSpec]
) -> Callable[[], dict[str, Any]]:
    """Of a pipeline of two stages."""

    def plan() -> dict[str, Any]:
        inspection = inspection_of([unit_of(0, 0.01, 0.02), unit_of(1, 0.01, 0.02)], update_seconds=0.004)
        spec = spec_of(batch_size=8, stages=2, microbatches=4)
        choice = choose(spec, inspection, partial(make_plan, shared_bytes_free=1 << 40))
        return told(choice, None, shared_bytes_free=1 << 40, host_bytes_free=1 << 40)

    return plan


def test_every_task_that_is_told_is_a_bar_of_its_lane(planned: Callable[[], dict[str, Any]]) -> None:
    plan = planned()
    picture = ElementTree.fromstring(plan_svg(plan))
    bars = [title for group in picture.iter(f"{SVG}g") if (title := group.findtext(f"{SVG}title")) is not None]
    tasks = [(task, lane["lane"]) for lane in plan["timeline"] for task in lane["tasks"]]
    assert len(bars) == len(tasks) > 16
    for task, lane in tasks:
        assert any(text.startswith(f"{task['task']}, ") and f" {task['mode']} on {lane}: " in text for text in bars)
    assert sum(", this iteration, forward on cpu-0/compute: " in text for text in bars) == 4
    labels = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"F0", "F3", "B0", "B3", "U"} <= set(labels)
    first, second, last = (labels.index(lane) for lane in ("cpu-0/compute", "cpu-1/compute", "loader-0/load"))
    assert first < second < last
    assert (
        labels[0]
        == f"a pipeline of 2 workers (1f1b, 4 microbatches): {_milliseconds(plan)} ms for an iteration, as predicted"
    )


def _milliseconds(plan: dict[str, Any]) -> str:
    return f"{plan['predicted_iteration_seconds'] * 1e3:.3g}"


def test_the_same_plan_gives_the_same_picture_in_light_and_dark_and_refers_to_nothing(
    planned: Callable[[], dict[str, Any]],
) -> None:
    text = plan_svg(planned())
    assert text == plan_svg(planned())
    assert "@media (prefers-color-scheme: dark)" in text
    assert text.count("http") == 1, "its namespace"
