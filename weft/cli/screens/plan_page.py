"""Plan page: what `weft plan` prints of a plan: what it is and why, where it computes, what it needs, and a picture.

cpu-0/compute  F0──F1──B0──────F2──B1────── ...     one iteration of the steady state, as it is predicted
cpu-1/compute      F0──B0──F1──B1──────
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.screens.display import make_table, plain_text
from weft.cli.screens.lane_bar import STYLES
from weft.plan.kinds import is_compute_lane
from weft.quantities import duration, number, percent, size
from weft.transport.wire.frames import Message

MAX_CANDIDATES: Final = 8  # told beside the chosen one; --json has all
MAX_LANES: Final = 16  # of a picture
MAX_CELLS: Final = 120  # of its width


def plan_page(console: Console, planned: Message) -> None:
    """planned: as weft/scheduler/planning/choosing/told.py has it."""
    for line in planned["lines"] or (planned["title"],):
        console.print(plain_text(line), soft_wrap=True)
    for note in planned["notes"]:
        console.print(plain_text(note), soft_wrap=True)
    console.print()
    console.print(
        plain_text(
            f"predicted {duration(planned['predicted_iteration_seconds'])} an iteration, "
            f"{number(planned['samples_per_second'], 4)} samples/s; {planned['bottleneck']} is busy "
            f"{percent(100 * planned['bottleneck_busy'])} of it"
        ),
        soft_wrap=True,
    )
    console.print(plain_text(_pace(planned)), soft_wrap=True)
    console.print()
    console.print(_stages(planned))
    console.print(
        f"shared memory {size(planned['shared_bytes'])} of {size(planned['shared_bytes_free'])} that are free"
    )
    console.print()
    for row in _timeline(
        planned["timeline"], min(console.width, MAX_CELLS), colour=console.is_terminal and not console.no_color
    ):
        console.print(row, soft_wrap=True)
    if planned["roles"] is not None:
        console.print()
        console.print(plain_text(_worth(planned["roles"])), soft_wrap=True)
        console.print(_roles(planned["roles"]))
    if len(planned["candidates"]) > 1:
        console.print()
        console.print(_candidates(planned["candidates"]))


def _pace(planned: Message) -> str:
    """The critical cycle, in words."""
    lanes = planned["critical_lanes"]
    if lanes is None:
        return "what sets the pace was not sought: there are too many tasks"
    limit = f"no iteration is shorter than {duration(planned['limit_seconds'])}"
    if len(lanes) == 1:
        return f"{limit}: {lanes[0]} sets the pace, whose own work that is"
    return f"{limit}: what sets the pace goes round through {', '.join(lanes)} ({planned['critical_cycle']})"


def _stages(planned: Message) -> Table:
    table = make_table("worker", "units", "parameters>", "activations>", "memory>", "free>")
    memory = {each["worker"]: each for each in planned["memory"]}
    for stage in planned["stages"]:
        first, last = stage["units"]
        about = memory.pop(stage["worker"], None)  # told with the first of a worker's stages
        table.add_row(
            stage["worker"],
            f"{first}-{last - 1}" if last - first > 1 else str(first),
            size(stage["parameter_bytes"]),
            size(about["activation_bytes"]) if about else "",
            size(about["bytes"]) if about else "",
            size(about["free_bytes"]) if about else "",
        )
    for worker, about in memory.items():  # what updates alone
        table.add_row(worker, "-", "-", "-", size(about["bytes"]), size(about["free_bytes"]))
    return table


def _worth(roles: Mapping[str, Any]) -> str:
    """Before their table."""
    begin = f"the CPU beside {roles['title']}, {duration(roles['predicted_iteration_seconds'])} an iteration"
    best = roles["best"]
    return begin if best is None else f"{begin}: worth most {'for a' if best == 'second job' else 'as'} {best}"


def _roles(roles: Mapping[str, Any]) -> Table:
    table = make_table("role", "brings>", "by", "iteration>")
    for each in roles["roles"]:
        brings, seconds = each["brings"], each["predicted_iteration_seconds"]
        told = "-" if brings is None else percent(100 * brings)
        if each["role"] == "replica" and roles["at_most"] is not None:
            told += f", at most {percent(100 * roles['at_most'])}"
        by = each["title"] if each["why_not"] is None else each["why_not"]
        table.add_row(each["role"], told, plain_text(by), "-" if seconds is None else duration(seconds))
    return table


def _candidates(candidates: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table("candidate", "iteration>", "samples/s>", "memory>")
    simulated = [each for each in candidates if each["predicted_iteration_seconds"] is not None]
    for each in simulated[: 1 + MAX_CANDIDATES]:
        table.add_row(
            plain_text(each["title"]),
            duration(each["predicted_iteration_seconds"]),
            number(each["samples_per_second"], 4),
            size(each["memory_bytes"]),
        )
    return table


def _timeline(lanes: Sequence[Mapping[str, Any]], width: int, *, colour: bool) -> list[Text]:
    """The lanes that compute first; no row for one that does nothing."""
    shown = [lane for lane in lanes if lane["tasks"]]
    shown = sorted(shown, key=lambda lane: not is_compute_lane(lane["lane"]))[:MAX_LANES]
    end = max((task["end"] for lane in shown for task in lane["tasks"]), default=0.0)
    if not end:
        return []
    name_cells = max(len(lane["lane"]) for lane in shown) + 2
    cells = max(20, width - name_cells - 1)
    rows = []
    for lane in shown:
        row = Text(lane["lane"].ljust(name_cells), no_wrap=True)
        for task in lane["tasks"]:
            first, last = (name_cells + round(cells * task[at] / end) for at in ("start", "end"))
            row.append(" " * (first - row.cell_len))
            if (num_cells := last - row.cell_len) > 0:
                style = STYLES.get(task["mode"], "") if colour else ""
                row.append(task["label"][:num_cells].ljust(num_cells, "─"), style)
        rows.append(row)
    return rows
