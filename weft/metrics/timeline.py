"""Timeline: lanes of bars as one SVG, the picture of who did what when. Pure: the same bars give the same text.

    cpu-0/compute   ▐█ F0 █▌▐█ B0 █▌   ▐░ F0 ░▌▐░ B0 ░▌      a row for each lane, a colour for each kind,
    cpu-0/sync               ▴  ▐S▌▐U▌          ▴  ▐S▌▐U▌    lighter in every second iteration
                    0 ms     5      10      15      20       ▴ takes no time: a milestone

The SVG holds no script and refers to nothing outside itself. It follows the reader's light or dark theme; bars keep
their colours in both, since the text on them must stay readable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

# Okabe and Ito's palette, which colour-blind readers tell apart; the second is the first, half white. Black text has a
# contrast of at least 5 to 1 on each.
COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "forward": ("#56b4e9", "#abdaf4"),
    "backward": ("#009e73", "#80cfb9"),
    "sync": ("#f0e442", "#f8f2a1"),
    "update": ("#e69f00", "#f3cf80"),
    "transfer": ("#cc79a7", "#e6bcd3"),
    "load": ("#a0a0a0", "#d0d0d0"),
}

WIDTH, MARGIN = 960, 12
ROW, BAR, TITLE, AXIS, LEGEND = 26, 20, 30, 34, 26  # heights
CHARACTER = 6.7  # width of one in the font of 11 px, rounded up: monospace, so that texts need no measuring
MIN_BAR = 0.75  # what is shorter than this is drawn this wide, so that nothing that ran is invisible
MARK = 3  # half the width of a milestone's triangle
MAX_TICKS = 10

_STYLE: Final = """
text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #222 }
.title { font-weight: bold; font-size: 13px }
.back { fill: #fff } .row { fill: #f3f3f3 } .grid { stroke: #d8d8d8 } .bar text { fill: #111; text-anchor: middle }
.bar rect { stroke: #111; stroke-width: .4 } .mark { stroke: #111; stroke-width: .6 } .tick { text-anchor: middle }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .back { fill: #161616 } .row { fill: #222 } .grid { stroke: #444 } .mark { stroke: #eee }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One interval of a lane, in seconds; one without length is a milestone. Errors: ValueError.

    kind: one of COLOURS. label: shown where it fits. detail: what hovering says before the times; unset, the label.
    """

    start: float
    end: float
    kind: str
    label: str
    iteration: int
    detail: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.end) and self.start <= self.end):
            raise ValueError(f"a bar from {self.start} to {self.end} s; give finite times, the earlier one first")
        if self.kind not in COLOURS:
            raise ValueError(f"a bar of kind {self.kind!r:.80}; known here: {', '.join(COLOURS)}")


def timeline_svg(lanes: Mapping[str, Sequence[Bar]], *, title: str, seconds: tuple[float, float]) -> str:
    """A row for each lane, in the order given, with what of its bars lies within `seconds`; the axis begins there at 0.

    Errors: ValueError for a window without length.
    """
    if not (math.isfinite(seconds[0]) and math.isfinite(seconds[1]) and seconds[0] < seconds[1]):
        raise ValueError(f"a window from {seconds[0]} to {seconds[1]} s; give two finite times, the earlier one first")
    return "\n".join(_Drawing(lanes, title, seconds).lines()) + "\n"


class _Drawing:
    def __init__(self, lanes: Mapping[str, Sequence[Bar]], title: str, seconds: tuple[float, float]) -> None:
        self._title = title
        self._first, self._last = seconds
        self._lanes = {lane: [bar for bar in bars if self._shows(bar)] for lane, bars in lanes.items()}
        self._left = MARGIN + 8 + CHARACTER * max(map(len, lanes), default=0)
        self._scale = (WIDTH - MARGIN - self._left) / (self._last - self._first)
        self._bottom = TITLE + ROW * len(lanes)
        self._height = self._bottom + AXIS + LEGEND

    def _shows(self, bar: Bar) -> bool:
        if bar.start == bar.end:
            return self._first <= bar.start <= self._last
        return bar.start < self._last and bar.end > self._first

    def _x(self, time: float) -> float:
        return self._left + (min(max(time, self._first), self._last) - self._first) * self._scale

    def lines(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" width="{WIDTH}" '
            f'height="{self._height}" role="img">'
        )
        yield f"<title>{_text(self._title)}</title>"
        yield f"<style>{_STYLE}{_fills(self._kinds())}</style>"
        yield f'<rect class="back" width="{WIDTH}" height="{self._height}"/>'
        yield f'<text class="title" x="{MARGIN}" y="20">{_text(self._title)}</text>'
        for number, lane in enumerate(self._lanes):
            yield from self._row(lane, TITLE + ROW * number)
        yield from self._axis()
        for number, (lane, bars) in enumerate(self._lanes.items()):
            # milestones last: they stand in front of the bar from whose inside they come
            for bar in sorted(bars, key=lambda bar: (bar.start == bar.end, bar.start, bar.end)):
                yield self._bar(bar, lane, TITLE + ROW * number + (ROW - BAR) // 2)
        yield from self._legend()
        yield "</svg>"

    def _kinds(self) -> list[str]:
        occurring = {bar.kind for bars in self._lanes.values() for bar in bars}
        return [kind for kind in COLOURS if kind in occurring]

    def _row(self, lane: str, top: int) -> Iterator[str]:
        width = _number(WIDTH - MARGIN - self._left)
        yield f'<rect class="row" x="{_number(self._left)}" y="{top + 1}" width="{width}" height="{ROW - 2}"/>'
        yield f'<text x="{MARGIN}" y="{top + 17}">{_text(lane)}</text>'

    def _bar(self, bar: Bar, lane: str, top: int) -> str:
        begin, end = self._x(bar.start), self._x(bar.end)
        colour = f"{bar.kind}{bar.iteration % 2}"
        hover = f"<title>{_text(self._hover(bar, lane))}</title>"
        if bar.start == bar.end:
            foot = top + BAR
            corners = (
                f"{_number(begin)},{foot - 2 * MARK} {_number(begin - MARK)},{foot} {_number(begin + MARK)},{foot}"
            )
            return f'<polygon class="mark {colour}" points="{corners}">{hover}</polygon>'
        width = max(end - begin, MIN_BAR)
        label = ""
        if CHARACTER * len(bar.label) + 1 <= width:
            label = f'<text x="{_number(begin + width / 2)}" y="{top + 13}">{_text(bar.label)}</text>'
        shape = f'x="{_number(begin)}" y="{top}" width="{_number(width)}" height="{BAR}"'
        return f'<g class="bar {colour}">{hover}<rect {shape}/>{label}</g>'

    def _hover(self, bar: Bar, lane: str) -> str:
        times = f"{_duration(bar.end - bar.start)} from {_duration(bar.start - self._first)}"
        when = f"at {_duration(bar.start - self._first)}" if bar.start == bar.end else times
        return f"{bar.detail or bar.label}, iteration {bar.iteration}, {bar.kind} on {lane}: {when}"

    def _axis(self) -> Iterator[str]:
        step = tick_seconds(self._last - self._first)
        factor, unit = _unit(self._last - self._first)
        for number in range(math.floor((self._last - self._first) / step * (1 + 1e-9)) + 1):
            x = _number(self._x(self._first + number * step))
            text = _number(number * step * factor) + (f" {unit}" if number == 0 else "")
            yield f'<path class="grid" d="M{x} {TITLE}V{self._bottom + 4}"/>'
            yield f'<text class="tick" x="{x}" y="{self._bottom + 17}">{text}</text>'

    def _legend(self) -> Iterator[str]:
        x, y = self._left, self._bottom + AXIS
        for kind in self._kinds():
            for parity in (0, 1):
                box = f'x="{_number(x + 10 * parity)}" y="{y}" width="10" height="12"'
                yield f'<g class="bar {kind}{parity}"><rect {box}/></g>'
            yield f'<text x="{_number(x + 25)}" y="{y + 10}">{kind}</text>'
            x += 25 + CHARACTER * (len(kind) + 2)
        if any(bar.start == bar.end for bars in self._lanes.values() for bar in bars):
            yield f'<text x="{_number(x)}" y="{y + 10}">▴ milestone</text>'


def tick_seconds(seconds: float) -> float:
    """The least 1, 2 or 5 times a power of ten that divides `seconds` into at most MAX_TICKS."""
    power = 10.0 ** math.floor(math.log10(seconds / MAX_TICKS))
    return next(factor * power for factor in (1, 2, 5, 10) if seconds / (factor * power) <= MAX_TICKS * (1 + 1e-9))


def _unit(seconds: float) -> tuple[float, str]:
    return (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def _duration(seconds: float) -> str:
    factor, unit = _unit(abs(seconds)) if seconds else (1, "s")
    return f"{_number(seconds * factor)} {unit}"


def _number(value: float) -> str:
    """At most two decimals: a hundredth of a pixel, or of a unit that was chosen to suit."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _fills(kinds: Sequence[str]) -> str:
    return (
        "\n".join(f".{kind}{parity} {{ fill: {COLOURS[kind][parity]} }}" for kind in kinds for parity in (0, 1)) + "\n"
    )


def _text(text: str) -> str:
    """Escaped, without the characters that XML does not have."""
    return escape("".join(character if character.isprintable() else " " for character in text))
