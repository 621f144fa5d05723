"""The drawing of lanes: what stands where, and that a browser can do nothing with it but look."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.metrics.views.timeline import COLOURS, MAX_TICKS, Bar, tick_seconds, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"
INK = "#111111"


def bar(start: float, end: float, kind: str = "forward", label: str = "F0", **changes: Any) -> Bar:
    facts: dict[str, Any] = {"start": start, "end": end, "kind": kind, "label": label, "iteration": 0}
    return Bar(**facts | changes)


def drawn(
    lanes: Mapping[str, Sequence[Bar]], seconds: tuple[float, float] = (0.0, 1.0), title: str = "a job"
) -> ElementTree.Element:
    return ElementTree.fromstring(timeline_svg(lanes, title=title, seconds=seconds))


def bars(root: ElementTree.Element) -> list[ElementTree.Element]:
    """The groups and milestones that say what they are when hovered over; those of the legend do not."""
    shapes = [*root.iter(f"{SVG}g"), *root.iter(f"{SVG}polygon")]
    return [shape for shape in shapes if shape.find(f"{SVG}title") is not None]


def said(shape: ElementTree.Element) -> str:
    return shape.findtext(f"{SVG}title") or ""


def box(shape: ElementTree.Element) -> tuple[float, float]:
    """Left and right edge."""
    (rect,) = shape.iter(f"{SVG}rect")
    return float(rect.attrib["x"]), float(rect.attrib["x"]) + float(rect.attrib["width"])


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_a_bar_says_what_when_and_where() -> None:
    (shape,) = bars(drawn({"cpu-0/compute": [bar(0.25, 0.5, detail="FORWARD(0,0)", iteration=7)]}))
    assert said(shape) == "FORWARD(0,0), iteration 7, forward on cpu-0/compute: 250 ms from 250 ms"
    assert shape.findtext(f"{SVG}text") == "F0"


def test_bars_are_as_long_as_their_times_and_meet_where_those_meet() -> None:
    first, second = map(box, bars(drawn({"lane": [bar(0.0, 0.25), bar(0.25, 0.75, "backward")]})))
    assert first[1] == pytest.approx(second[0], abs=0.02)
    assert second[1] - second[0] == pytest.approx(2 * (first[1] - first[0]), abs=0.05)


def test_lanes_are_rows_in_the_order_given() -> None:
    root = drawn({"b": [bar(0, 1)], "a": [bar(0, 1)]})
    heights = [float(next(shape.iter(f"{SVG}rect")).attrib["y"]) for shape in bars(root)]
    assert heights == sorted(set(heights))
    assert texts(root).index("b") < texts(root).index("a")


def test_only_what_lies_in_the_window_is_drawn_and_cut_at_its_ends() -> None:
    lane = [bar(0, 1), bar(1, 3, label="cut"), bar(3.5, 4, label="whole"), bar(4.5, 6, label="cut"), bar(6, 7)]
    root = drawn({"lane": lane}, seconds=(2, 5))
    assert [shape.findtext(f"{SVG}text") for shape in bars(root)] == ["cut", "whole", "cut"]
    edges = [edge for shape in bars(root) for edge in box(shape)]
    assert edges == sorted(edges)
    assert edges[-1] - edges[0] == pytest.approx(3 * (edges[1] - edges[0]), abs=0.05)
    assert "from -1 s" in said(bars(root)[0]), "the text knows where it began"


def test_a_label_stands_only_where_it_fits() -> None:
    short, long = bars(drawn({"lane": [bar(0, 0.001), bar(0.5, 1)]}))
    assert short.find(f"{SVG}text") is None
    assert long.findtext(f"{SVG}text") == "F0"
    assert "F0" in said(short)


def test_what_is_too_short_to_see_is_drawn_all_the_same() -> None:
    (shape,) = bars(drawn({"lane": [bar(0.5, 0.5000001)]}))
    left, right = box(shape)
    assert right - left >= 0.5


def test_a_bar_without_length_is_a_milestone_in_front_of_the_others() -> None:
    root = drawn({"lane": [bar(0.5, 0.5, label="b0"), bar(0.0, 1.0, "backward")]})
    order = [shape.tag.removeprefix(SVG) for shape in root if shape in bars(root)]
    assert order == ["g", "polygon"]
    assert said(bars(root)[1]).endswith("at 500 ms")
    assert "▴ milestone" in texts(root)


def test_every_second_iteration_is_lighter() -> None:
    shades = [
        shape.attrib["class"]
        for shape in bars(drawn({"lane": [bar(i / 4, (i + 1) / 4, iteration=i) for i in range(4)]}))
    ]
    assert shades == ["bar forward0", "bar forward1"] * 2


def test_the_legend_has_the_kinds_that_occur_in_the_window_and_no_other() -> None:
    root = drawn({"lane": [bar(0, 0.5, "update"), bar(0.5, 1, "sync"), bar(2, 3, "load")]})
    assert [text for text in texts(root) if text in COLOURS] == ["sync", "update"]
    assert "▴ milestone" not in texts(root)


def test_nothing_to_draw_is_an_empty_picture() -> None:
    assert bars(drawn({})) == []
    assert bars(drawn({"lane": []})) == []


def test_the_axis_begins_at_zero_and_names_its_unit_once() -> None:
    root = drawn({"lane": []}, seconds=(10.0, 10.05))
    ticks = [element.text for element in root.iter(f"{SVG}text") if element.get("class") == "tick"]
    assert ticks == ["0 ms", "5", "10", "15", "20", "25", "30", "35", "40", "45", "50"]


@given(st.floats(1e-9, 1e9))
def test_there_are_some_ticks_and_not_too_many(seconds: float) -> None:
    step = tick_seconds(seconds)
    assert MAX_TICKS / 2.6 <= seconds / step <= MAX_TICKS * 1.001
    assert re.fullmatch("[125]0*", f"{step / 10 ** math.floor(math.log10(step) + 1e-9):.0f}")


def test_any_text_leaves_the_picture_well_formed() -> None:
    text = "<script>&'\"\x00\x1b\ud800]]>"
    root = drawn({text: [bar(0, 1, label=text, detail=text)]}, title=text)
    assert (root.findtext(f"{SVG}title") or "").startswith("<script>&'\"")
    assert not list(root.iter(f"{SVG}script"))


def test_the_picture_runs_nothing_and_fetches_nothing() -> None:
    svg = timeline_svg({"lane": [bar(0, 1)]}, title="a job", seconds=(0, 1))
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"], "the name of the format"
    assert not re.search(r"<script|href|@import|url\(|\bon\w+=", svg)
    assert "prefers-color-scheme: dark" in svg


def test_the_same_bars_give_the_same_text() -> None:
    lanes = {"b": [bar(0, 0.3), bar(0.3, 0.3)], "a": [bar(0.1, 0.9, "load")]}
    assert len({timeline_svg(lanes, title="a job", seconds=(0, 1)) for _ in range(3)}) == 1


@pytest.mark.parametrize("colour", [shade for shades in COLOURS.values() for shade in shades])
def test_text_on_every_colour_can_be_read(colour: str) -> None:
    assert (luminance(colour) + 0.05) / (luminance(INK) + 0.05) >= 4.5, "WCAG 2.1, 1.4.3"


def luminance(colour: str) -> float:
    """Relative, as WCAG 2.1 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.5), (math.nan, 1.0), (0.0, math.inf)])
def test_a_bar_that_ends_before_it_begins_or_never_is_refused(start: float, end: float) -> None:
    with pytest.raises(ValueError, match="finite times"):
        bar(start, end)


def test_a_bar_of_no_known_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'napping'; known here: forward"):
        bar(0, 1, "napping")


@pytest.mark.parametrize("seconds", [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_a_window_without_length_is_refused(seconds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="window"):
        timeline_svg({}, title="a job", seconds=seconds)
