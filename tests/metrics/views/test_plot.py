"""The picture of a job's numbers."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from weft.metrics.recording.recording import Recording
from weft.metrics.recording.step_log import Step, StepLog, Validation
from weft.plan.kinds import MODES
from weft.plan.plan import Plan

SVG = "{http://www.w3.org/2000/svg}"
FORWARD, STALL = MODES.index("forward"), MODES.index("stall_data")


@pytest.fixture(scope="module")
def recording(pipeline_of: Callable[..., Plan], recording_of: Callable[..., Recording]) -> Recording:
    return recording_of(pipeline_of(stages=2, microbatches=4))


def log_of(steps: int, *, validate_every: int = 50) -> StepLog:
    return StepLog(
        steps=[
            Step(
                step=number,
                epoch=0,
                loss=math.exp(-number / 100),
                lr=0.1,
                grad_norm=None,
                samples=32,
                seconds=None if number == 1 else 0.01,
            )
            for number in range(1, steps + 1)
        ],
        validations=[
            Validation(step=number, epoch=0, values={"loss": 0.5, "accuracy": 0.9})
            for number in range(validate_every, steps + 1, validate_every)
        ],
    )


@pytest.fixture(scope="module")
def plot() -> Callable[..., bytes]:
    pytest.importorskip("matplotlib")
    from weft.metrics.views.plot import StepStalls
    from weft.metrics.views.plot import plot as draw

    def make(log: StepLog, recorded: range = range(0), **options: object) -> bytes:
        stalls = [StepStalls(step=number, seconds=0.01, shares={"gradient": 0.25}) for number in recorded]
        chosen: dict[str, object] = {"title": "digits-1", "limit_seconds": 0.008, "stalls": stalls} | options
        return draw(log, **chosen)  # type: ignore[arg-type]  # the options are those of plot

    return make


def texts(svg: bytes) -> list[str]:
    """Matplotlib draws text as glyphs, each in a group after a comment that says what it is."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.fromstring(svg, parser)
    return [str(element.text).strip() for element in root.iter() if element.tag is ElementTree.Comment]


def test_it_is_a_picture_of_readable_size(plot: Callable[..., bytes]) -> None:
    data = plot(log_of(300), range(1, 301))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (880, 1056)


def test_it_shows_loss_throughput_iteration_time_with_the_limit_and_stalls(plot: Callable[..., bytes]) -> None:
    said = texts(plot(log_of(300), range(1, 301), picture_format="svg"))
    assert {"loss", "training", "validation", "samples / s", "iteration time (ms)", "training step"} <= set(said)
    assert {"limit of the graph, 8 ms", "stalled (% of compute lanes)", "gradient", "digits-1"} <= set(said)
    assert "not recorded" not in said


def test_steps_that_the_recording_has_lost_are_shown_as_not_recorded(plot: Callable[..., bytes]) -> None:
    assert "not recorded" in texts(plot(log_of(300), range(200, 301), picture_format="svg"))
    assert "not recorded" in texts(plot(log_of(300), picture_format="svg"))


def test_a_rare_long_step_does_not_flatten_the_others_and_is_told(plot: Callable[..., bytes]) -> None:
    log = log_of(300)
    log.steps[100] = replace(log.steps[100], seconds=5.0)
    said = texts(plot(log, picture_format="svg"))
    assert any("1 of 299 steps lie above, up to 5000" in text for text in said)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_first_steps_can_be_drawn(plot: Callable[..., bytes], steps: int) -> None:
    assert plot(log_of(steps), range(1, steps + 1), limit_seconds=None)
    log = log_of(steps)
    log.steps = [replace(step, loss=None, seconds=None) for step in log.steps]
    assert plot(log, limit_seconds=None)


def test_the_same_numbers_give_the_same_picture(plot: Callable[..., bytes]) -> None:
    assert len({plot(log_of(40), range(10, 41)) for _ in range(2)}) == 1


def test_many_steps_are_drawn_in_groups_that_keep_every_extreme() -> None:
    pytest.importorskip("matplotlib")
    from weft.metrics.views.plot import MAX_POINTS, grouped

    points = [(number, float(number % 97)) for number in range(10_007)]
    groups = grouped(points)
    assert MAX_POINTS / 2 < len(groups) <= MAX_POINTS
    assert min(least for _, least, _, _ in groups) == 0
    assert max(greatest for *_, greatest in groups) == 96
    assert all(least <= middle <= greatest for _, least, middle, greatest in groups)
    assert [step for step, *_ in groups] == sorted(step for step, *_ in groups)
    assert grouped(points[:5]) == [(number, value, value, value) for number, value in points[:5]]


def test_causes_have_colours_of_their_own() -> None:
    pytest.importorskip("matplotlib")
    from weft.metrics.views.plot import CAUSE_COLOURS, CAUSES

    assert list(CAUSE_COLOURS) == list(CAUSES)
    assert len(set(CAUSE_COLOURS.values())) == len(CAUSES)
