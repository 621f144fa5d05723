"""Lane bar: what a lane did, as one row of cells in the proportions of its time; each part bears its name if it fits.

│forward──────────────│backward─────────────│gradient········      without colour: ─ works, · waits
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rich.text import Text

from weft.cli.screens.diagnosis import is_wait
from weft.plan.kinds import MODES, is_compute_lane

MIN_NAMED_CELLS: Final = 5  # a name that is cut below this says nothing

STYLES: Final = {
    "forward": "black on green",
    "backward": "white on blue",
    "sync": "black on magenta",
    "update": "black on yellow",
    "load": "black on cyan",
    "transfer": "black on bright_cyan",
    "snapshot": "black on white",
    "idle": "white on bright_black",
}
_WAITS: Final = ("white on red", "black on bright_red")  # in turn, so that neighbours differ
_QUIET: Final = ("white on bright_black", "black on white")  # waits of a lane beside compute are no alarm


def lane_bar(lane: str, seconds: Mapping[str, float], width: int, *, colour: bool) -> Text:
    """seconds: by mode. An empty lane is a row of spaces."""
    shown = [mode for mode in MODES if seconds.get(mode, 0.0) > 0]
    cells = apportion([seconds[mode] for mode in shown], width)
    bar, waits = Text(no_wrap=True), _WAITS if is_compute_lane(lane) else _QUIET
    num_waits = 0
    for mode, num_cells in zip(shown, cells, strict=True):
        if num_cells == 0:
            continue
        style = STYLES.get(mode, "")
        if is_wait(mode) and mode != "idle":
            style = waits[num_waits % len(waits)]
            num_waits += 1
        bar.append(_coloured(mode, num_cells) if colour else _drawn(mode, num_cells), style if colour else "")
    bar.append(" " * (width - bar.cell_len))
    return bar


def apportion(amounts: list[float], total: int) -> list[int]:
    """Whole parts of `total` in the proportions of the amounts, by largest remainders: they add up to it."""
    of = sum(amounts)
    if not of:
        return [0] * len(amounts)
    exact = [total * amount / of for amount in amounts]
    parts = [int(each) for each in exact]
    by_remainder = sorted(range(len(amounts)), key=lambda i: parts[i] - exact[i])
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def _coloured(mode: str, num_cells: int) -> str:
    name = mode.removeprefix("stall_") if num_cells >= MIN_NAMED_CELLS else ""
    return f" {name}"[: num_cells - 1].ljust(num_cells)


def _drawn(mode: str, num_cells: int) -> str:
    name = mode.removeprefix("stall_") if num_cells >= MIN_NAMED_CELLS else ""
    return f"│{name}"[:num_cells].ljust(num_cells, "·" if is_wait(mode) else "─")
