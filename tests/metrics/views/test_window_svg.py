"""The picture of a window: waits hatched, the plan above what happened, the critical path underlined."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from weft.metrics.recording.critical_path import critical_path
from weft.metrics.recording.recording import Recording
from weft.metrics.recording.window import Window, last_iterations
from weft.metrics.views.timeline import STRIP, Bar, timeline_svg
from weft.metrics.views.window_svg import window_svg
from weft.plan.plan import Plan

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recording(pipeline_of: Callable[..., Plan], recording_of: Callable[..., Recording]) -> Recording:
    return recording_of(pipeline_of(stages=2, microbatches=4))


@pytest.fixture(scope="module")
def window(recording: Recording) -> Window:
    found = last_iterations(recording, 2)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def picture(recording: Recording, window: Window) -> ElementTree.Element:
    return ElementTree.fromstring(window_svg(recording, window))


def groups(picture: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """Those of bars; what the legend shows says nothing when hovered over."""
    found = [group for group in picture.iter(f"{SVG}g") if name in group.attrib["class"].split()]
    return [group for group in found if group.find(f"{SVG}title") is not None]


def top(group: ElementTree.Element) -> float:
    return float(next(group.iter(f"{SVG}rect")).attrib["y"])


def said(group: ElementTree.Element) -> str:
    return group.findtext(f"{SVG}title") or ""


def test_a_wait_is_hatched_and_says_what_it_was_for(picture: ElementTree.Element) -> None:
    waits = [said(group) for group in groups(picture, "wait")]
    assert any(text.startswith("stall for gradient: waits for BACKWARD(1,0) on cpu-1/compute") for text in waits)
    pattern = picture.find(f"{SVG}defs/{SVG}pattern")
    assert pattern is not None
    assert pattern.attrib["id"] == "stall"
    assert "url(#stall)" in (picture.findtext(f"{SVG}style") or "")


def test_every_task_of_the_window_is_drawn_with_what_was_planned_above_it(
    picture: ElementTree.Element, recording: Recording, window: Window
) -> None:
    lane = "cpu-1/compute"
    actual = [group for group in groups(picture, "bar") if f" on {lane}:" in said(group)]
    planned = [group for group in groups(picture, "planned") if f" on {lane}:" in said(group)]
    names = [said(group).split(", iteration")[0] for group in actual]
    tasks = [recording.tasks[task] for task in recording.programs[lane]]
    assert sorted(names) == sorted(2 * [task.name for task in tasks if task.kind != "snapshot"])
    assert [said(group).removeprefix("planned: ").split(", iteration")[0] for group in planned] == names
    assert {top(group) for group in actual} == {top(actual[0])}
    assert top(actual[0]) - 2 * STRIP < top(planned[0]) < top(actual[0]) - STRIP


def test_the_steps_of_the_critical_path_are_underlined_and_no_other(
    picture: ElementTree.Element, recording: Recording, window: Window
) -> None:
    steps = {
        (recording.tasks[step.task].name, step.iteration)
        for step in critical_path(recording, window.start_ns, window.end_ns)
    }
    marked = [group for group in groups(picture, "bar") if group.find(f"{SVG}path[@class='critical']") is not None]
    found = [re.match(r"(.*), iteration (\d+),", said(group)) for group in marked]
    assert {(match[1], int(match[2])) for match in found if match} == steps


def test_the_title_tells_the_iteration_time_and_the_planned_one(recording: Recording, window: Window) -> None:
    facts = {**recording.facts, "predicted_iteration_seconds": 0.0125}
    picture = ElementTree.fromstring(window_svg(replace(recording, facts=facts), window))
    title = picture.findtext(f"{SVG}title") or ""
    assert re.fullmatch(r"made-up-1: [\d.]+ ms for an iteration, 12\.5 ms planned", title)


def test_it_refers_to_nothing_outside_itself(recording: Recording, window: Window) -> None:
    text = window_svg(recording, window)
    assert re.findall(r"url\((.*?)\)", text) == ["#stall"]
    assert not re.search(r"href|<script|@import|@font-face|\son\w+=", text)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


def test_without_a_plan_the_rows_are_as_in_any_timeline(recording: Recording, window: Window) -> None:
    picture = ElementTree.fromstring(window_svg(replace(recording, planned=()), window))
    assert groups(picture, "planned") == []
    assert "thin: as planned" not in [text.text for text in picture.iter(f"{SVG}text")]


def test_the_legend_has_hatching_underline_and_strip_where_they_occur() -> None:
    def legend(*bars: Bar, planned: bool = False) -> set[str]:
        strips = {"lane": [bars[0]]} if planned else None
        root = ElementTree.fromstring(timeline_svg({"lane": bars}, title="", seconds=(0, 1), planned=strips))
        return {text.text or "" for text in root.iter(f"{SVG}text")} & {"stall", "critical path", "thin: as planned"}

    bar = Bar(start=0, end=1, kind="forward", label="", iteration=0)
    assert legend(bar) == set()
    assert legend(bar, replace(bar, kind="stall")) == {"stall"}
    assert legend(replace(bar, critical=True)) == {"critical path"}
    assert legend(bar, planned=True) == {"thin: as planned"}
