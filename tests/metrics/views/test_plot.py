"""The picture of a job's numbers, and the shares that stalls have of its steps."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from weft.metrics.recording.recording import Recording
from weft.metrics.recording.stall_shares import stall_shares
from weft.metrics.recording.step_log import Step, StepLog, Validation
from weft.plan.kinds import FIRST_STALL, MODES
from weft.plan.plan import Plan
from weft.plan.rows import packed_rows

SVG = "{http://www.w3.org/2000/svg}"
FORWARD, STALL = MODES.index("forward"), MODES.index("stall_data")


@pytest.fixture(scope="module")
def recording(pipeline_of: Callable[..., Plan], recording_of: Callable[..., Recording]) -> Recording:
    return recording_of(pipeline_of(stages=2, microbatches=4))


# --- shares


def test_the_shares_of_an_iteration_are_its_stalls_over_the_time_of_all_compute_lanes(recording: Recording) -> None:
    whole = stall_shares(recording)
    assert [each.iteration for each in whole] == list(recording.iteration_ends)
    lanes = [lane for lane in recording.programs if lane.endswith("/compute")]
    stalled: dict[str, int] = {}
    first = min(row[4] for rows in recording.rows.values() for row in rows if row[0] < FIRST_STALL)
    last = max(recording.iteration_ends.values())
    for lane in lanes:
        for mode, _, _, _, start, end in recording.rows[lane]:
            if mode >= FIRST_STALL:
                cause = MODES[mode].removeprefix("stall_")
                stalled[cause] = stalled.get(cause, 0) + min(end, last) - max(start, first)
    for cause, ns in stalled.items():
        shares = sum(each.shares.get(cause, 0.0) * each.seconds for each in whole) * len(lanes)
        assert shares == pytest.approx(ns / 1e9, rel=1e-9), cause


def test_a_stall_that_spans_the_end_of_an_iteration_is_divided_there(recording: Recording) -> None:
    rows = [
        (FORWARD, 0, 0, -1, 0, 100),
        (STALL, 0, 1, -1, 100, 160),
        (FORWARD, 0, 1, -1, 160, 200),
        (STALL, 0, 2, -1, 200, 450),
        (FORWARD, 0, 2, -1, 450, 500),
    ]
    other = [(FORWARD, 1, 0, -1, 0, 100), (FORWARD, 1, 1, -1, 100, 300), (FORWARD, 1, 2, -1, 300, 500)]
    packed = {"cpu-0/compute": packed_rows(rows), "cpu-1/compute": packed_rows(other)}
    programs = {"cpu-0/compute": (0,), "cpu-1/compute": (1,)}
    shares = stall_shares(replace(recording, packed=packed, programs=programs))
    # iteration 1 lasts from 100 to 300, iteration 2 to 500; the second stall is 100 in the one and 150 in the other
    assert [each.shares for each in shares] == [{}, {"data": 160 / 400}, {"data": 150 / 400}]


# --- the picture


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
