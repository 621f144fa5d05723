"""Timeline: lanes of bars as one SVG, the picture of who did what when. Pure: the same bars give the same text.

    cpu-0/compute   ▐█ F0 █▌▐█ B0 █▌   ▐░ F0 ░▌▐░ B0 ░▌      a row for each lane, a colour for each kind,
    cpu-0/sync               ▴  ▐S▌▐U▌          ▴  ▐S▌▐U▌    lighter in every second iteration
                    0 ms     5      10      15      20       ▴ takes no time: a milestone

A wait can be a bar too, hatched; a bar on the critical path is underlined; and what was planned can stand as a thin
strip above what happened.

The SVG holds no script and refers to nothing outside itself. It follows the reader's light or dark theme; bars keep
their colours in both, since the text on them must stay readable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from weft.plan.kinds import KINDS, Kind

# Okabe and Ito's palette, which colour-blind readers tell apart; the second is the first, half white. Black text has a
# contrast of at least 5 to 1 on each.
COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "forward": ("#56b4e9", "#abdaf4"),
    "backward": ("#009e73", "#80cfb9"),
    "sync": ("#f0e442", "#f8f2a1"),
    "update": ("#e69f00", "#f3cf80"),
    "transfer": ("#cc79a7", "#e6bcd3"),
    "load": ("#a0a0a0", "#d0d0d0"),
    "snapshot": ("#d8a48f", "#ecd2c7"),
}

STALL: Final = "stall"  # the kind of a bar that is a wait
WIDTH, MARGIN = 960, 12
ROW, BAR, TITLE, AXIS, LEGEND = 26, 20, 30, 34, 26  # heights
CHARACTER = 6.7  # width of one in the font of 11 px, rounded up: monospace, so that texts need no measuring
MIN_BAR = 0.75  # what is shorter than this is drawn this wide, so that nothing that ran is invisible
STRIP = 7  # height of a planned bar
UNDERLINE = 3  # height of the critical path's mark, below its bar
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

_STALL_STYLE: Final = ".wait rect { fill: url(#stall); stroke: #777; stroke-width: .4 }\n"
_CRITICAL_STYLE: Final = ".critical { fill: #d55e00 }\n"
_PLANNED_STYLE: Final = ".planned rect { stroke: #777; stroke-width: .3 }\n"
_HATCHING: Final = (
    '<defs><pattern id="stall" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<path d="M-1 6L6 -1M-1 1L1 -1M4 6L6 4" stroke="#888" stroke-width=".9"/></pattern></defs>'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One interval of a lane, in seconds; one without length is a milestone. Errors: ValueError."""

    start: float
    end: float
    kind: str  # one of COLOURS, or STALL
    label: str  # shown where it fits
    iteration: int
    detail: str = ""  # what hovering says before the times; unset, the label
    moment: str = ""  # what it says of the iteration; unset, its number
    critical: bool = False  # it is a step of the critical path

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and math.isfinite(self.end) and self.start <= self.end):
            raise ValueError(f"a bar from {self.start} to {self.end} s; give finite times, the earlier one first")
        if self.kind not in COLOURS and self.kind != STALL:
            raise ValueError(f"a bar of kind {self.kind!r:.80}; known here: {', '.join(COLOURS)}, {STALL}")


def bar_label(kind: Kind, microbatch: int | None, bucket: int | None) -> str:
    """A task's letter and the number of what it is about: F0, S2."""
    number = bucket if microbatch is None else microbatch
    return KINDS[kind].letter + ("" if number is None else str(number))


def timeline_svg(
    lanes: Mapping[str, Sequence[Bar]],
    *,
    title: str,
    seconds: tuple[float, float],
    planned: Mapping[str, Sequence[Bar]] | None = None,
) -> str:
    """A row for each lane, in the order given, with what of its bars lies within `seconds`; the axis begins there at 0.

    planned: bars of the same lanes, drawn as a strip above the others.
    Errors: ValueError for a window without length.
    """
    if not (math.isfinite(seconds[0]) and math.isfinite(seconds[1]) and seconds[0] < seconds[1]):
        raise ValueError(f"a window from {seconds[0]} to {seconds[1]} s; give two finite times, the earlier one first")
    return "\n".join(_Drawing(lanes, title, seconds, planned or {}).lines()) + "\n"


class _Drawing:
    def __init__(
        self,
        lanes: Mapping[str, Sequence[Bar]],
        title: str,
        seconds: tuple[float, float],
        planned: Mapping[str, Sequence[Bar]],
    ) -> None:
        self._title = title
        self._first, self._last = seconds
        self._lanes = {lane: [bar for bar in bars if self._shows(bar)] for lane, bars in lanes.items()}
        self._planned = {lane: [bar for bar in bars if self._shows(bar)] for lane, bars in planned.items()}
        self._all = [bar for bars in (*self._lanes.values(), *self._planned.values()) for bar in bars]
        self._above = STRIP + 2 if planned else 0
        self._row_height = ROW + self._above
        self._left = MARGIN + 8 + CHARACTER * max(map(len, lanes), default=0)
        self._scale = (WIDTH - MARGIN - self._left) / (self._last - self._first)
        self._bottom = TITLE + self._row_height * len(lanes)
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
        yield f"<style>{_STYLE}{self._extra_style()}{_fills(self._kinds())}</style>"
        if self._has_stalls():
            yield _HATCHING
        yield f'<rect class="back" width="{WIDTH}" height="{self._height}"/>'
        yield f'<text class="title" x="{MARGIN}" y="20">{_text(self._title)}</text>'
        for number, lane in enumerate(self._lanes):
            yield from self._row(lane, TITLE + self._row_height * number)
        yield from self._axis()
        for number, (lane, bars) in enumerate(self._lanes.items()):
            top = TITLE + self._row_height * number
            for bar in self._planned.get(lane, ()):
                yield self._strip(bar, lane, top + 2)
            # milestones last: they stand in front of the bar from whose inside they come
            for bar in sorted(bars, key=lambda bar: (bar.start == bar.end, bar.start, bar.end)):
                yield self._bar(bar, lane, top + self._above + (ROW - BAR) // 2)
        yield from self._legend()
        yield "</svg>"

    def _kinds(self) -> list[str]:
        occurring = {bar.kind for bar in self._all}
        return [kind for kind in COLOURS if kind in occurring]

    def _has_stalls(self) -> bool:
        return any(bar.kind == STALL for bar in self._all)

    def _has_critical(self) -> bool:
        return any(bar.critical for bar in self._all)

    def _extra_style(self) -> str:
        """Only what the picture has need of."""
        style = _STALL_STYLE if self._has_stalls() else ""
        style += _CRITICAL_STYLE if self._has_critical() else ""
        return style + (_PLANNED_STYLE if self._above else "")

    def _row(self, lane: str, top: int) -> Iterator[str]:
        width = _number(WIDTH - MARGIN - self._left)
        shape = f'x="{_number(self._left)}" y="{top + 1}" width="{width}" height="{self._row_height - 2}"'
        yield f'<rect class="row" {shape}/>'
        yield f'<text x="{MARGIN}" y="{top + self._above + 17}">{_text(lane)}</text>'

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
        if bar.kind == STALL:
            return f'<g class="wait">{hover}<rect {shape}/></g>'
        if bar.critical:
            line = f"M{_number(begin)} {top + BAR - 1}h{_number(width)}v{UNDERLINE}h-{_number(width)}z"
            label += f'<path class="critical" d="{line}"/>'
        return f'<g class="bar {colour}">{hover}<rect {shape}/>{label}</g>'

    def _strip(self, bar: Bar, lane: str, top: int) -> str:
        begin, end = self._x(bar.start), self._x(bar.end)
        shape = f'x="{_number(begin)}" y="{top}" width="{_number(max(end - begin, MIN_BAR))}" height="{STRIP}"'
        hover = f"<title>{_text('planned: ' + self._hover(bar, lane))}</title>"
        return f'<g class="planned {bar.kind}{bar.iteration % 2}">{hover}<rect {shape}/></g>'

    def _hover(self, bar: Bar, lane: str) -> str:
        times = f"{_duration(bar.end - bar.start)} from {_duration(bar.start - self._first)}"
        when = f"at {_duration(bar.start - self._first)}" if bar.start == bar.end else times
        moment = bar.moment or f"iteration {bar.iteration}"
        return f"{bar.detail or bar.label}, {moment}, {bar.kind} on {lane}: {when}"

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
            x += CHARACTER * 13
        if self._has_stalls():
            yield f'<g class="wait"><rect x="{_number(x)}" y="{y}" width="20" height="12"/></g>'
            yield f'<text x="{_number(x + 25)}" y="{y + 10}">stall</text>'
            x += 25 + CHARACTER * 7
        if self._has_critical():
            yield f'<path class="critical" d="M{_number(x)} {y + 8}h20v{UNDERLINE}h-20z"/>'
            yield f'<text x="{_number(x + 25)}" y="{y + 10}">critical path</text>'
            x += 25 + CHARACTER * 15
        if self._above:
            yield f'<text x="{_number(x)}" y="{y + 10}">thin: as planned</text>'


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
