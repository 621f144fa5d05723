"""Top view: one screen of `weft top`, from its report and what the user has chosen.

the daemon, its workers, jobs by state                          always
jobs                                                            a third of the height at most
the selected job: step, loss, pace, iteration and limit
the bottleneck, in a sentence
lanes over the last seconds, each a bar of 100 %
stalls of the last seconds                                      what is left of the height
keys                                                            the last line
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.table import Table
from rich.text import Text

from weft.cli.screens.display import make_table, plain_text, state_text, steps_text
from weft.cli.screens.lane_bar import lane_bar
from weft.cli.screens.path_chart import path_chart
from weft.cli.screens.time_display import LEAST_PERCENT, iteration_sentence
from weft.cli.top.state import View, num_busy, selected
from weft.client.console import reason_text
from weft.quantities import duration, number, percent
from weft.transport.wire.frames import Message

KEYS: Final = "q quit   ↑ ↓ select a job   p pause   ? help"
MIN_BAR_CELLS: Final = 10
MIN_STALLS: Final = 3  # are shown before there is room for the critical path
ROOMY_CELLS: Final = 100  # a terminal that is narrower gets a shorter bar of progress
_SHARE_CELLS: Final = 9  # " 100.0 % "

_HELP: Final = """\
q            leave
↑ ↓, k j     select the job that is looked at; until then it is the first one that runs
p, space     pause: the screen stands still, the jobs go on
?            this help; any key closes it

A bar is all of a lane's time in the last seconds. What works stands left, what waits stands right, with its cause:
data         samples that are not loaded yet
activation   the output of the stage before
gradient     the gradient from the stage after, or of a bucket
sync         gradients that others have to reduce
update       parameters that are not updated yet
slot         a place to write to, which is still read
dispatch     the daemon's next tasks

Lanes beside compute wait as a matter of course; only compute lanes' waits cost time.
docs/top.md has more, `weft show JOB --time` the whole job."""


def screen(report: Mapping[str, Any], view: View, trouble: str, size: tuple[int, int], *, colour: bool) -> Layout:
    """trouble: why the report is old, "" where it is not. size: columns and lines of the terminal."""
    width, height = size
    body = Group(plain_text(_HELP)) if view.help else page(report, view.selected, width, height - 2, colour=colour)
    layout = Layout()
    layout.split_column(
        Layout(_header(report, view, trouble), size=1, name="header"),
        Layout(body, name="body"),
        Layout(plain_text("any key closes this help" if view.help else KEYS, style="dim"), size=1, name="keys"),
    )
    return layout


def page(report: Mapping[str, Any], chosen: str | None, width: int, height: int, *, colour: bool) -> Group:
    """Everything between the first line and the last. height: how many lines there are for it."""
    jobs, job = report["jobs"], report["job"]
    name = selected(jobs, chosen)
    num_jobs = max(3, (height - 4) // 3)
    parts: list[RenderableType] = [Text(), _jobs_table(jobs, name, num_jobs), Text()]
    if job is None:
        parts.append(plain_text("No job yet: `weft submit SPEC.toml` hands one to the daemon." if not jobs else ""))
        return Group(*parts)
    left = height - min(len(jobs), num_jobs) - 3
    parts += _job_lines(job, width)
    if job["nothing"]:
        return Group(*parts, plain_text(job["nothing"]))
    if diagnosis := job["diagnosis"]:
        parts.append(plain_text(diagnosis["sentence"], style="bold"))
        left -= -(-len(diagnosis["sentence"]) // max(width, 1))
    left -= 5
    num_lanes = max(2, left if len(job["lanes"]) <= left else left - 1)
    parts += [Text(), *_lane_lines(job, width, num_lanes, colour=colour)]
    left -= min(len(job["lanes"]), num_lanes)
    path = _path_lines(job, width, colour=colour)
    if len(path) + MIN_STALLS + 3 > left:
        path = []
    stalls = [stall for stall in job["stalls"] if stall["percent"] >= LEAST_PERCENT]
    if stalls and left > 2:
        parts += [Text(), _stalls_table(stalls[: left - 2 - len(path)])]
    return Group(*parts, *path)


def header_text(report: Mapping[str, Any]) -> str:
    daemon = report["daemon"]
    workers = ", ".join(f"{busy} of {every} {kind}" for kind, (busy, every) in num_busy(daemon["workers"]).items())
    down = sum(worker["state"] == "down" for worker in daemon["workers"])
    jobs = ", ".join(f"{count} {state}" for state, count in daemon["jobs"].items() if count) or "none"
    missing = f", {down} down" if down else ""
    return f"weft {daemon['version']}  pid {daemon['pid']}  workers busy: {workers}{missing}  jobs: {jobs}"


def _header(report: Mapping[str, Any], view: View, trouble: str) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    if trouble:
        line.append(f" {trouble} ", style="bold reverse")
        line.append(" ")
    if view.paused:
        line.append(" paused ", style="reverse")
        line.append(" ")
    return line.append(header_text(report))


def _jobs_table(jobs: Sequence[Message], name: str | None, num_rows: int) -> Table:
    """The rows around the selected one."""
    table = make_table("", "job", "state", "step>", "loss>", "why")
    _keep_whole(table, but=len(table.columns) - 1)
    at = next((index for index, job in enumerate(jobs) if job["job"] == name), 0)
    first = max(0, min(at - num_rows // 2, len(jobs) - num_rows))
    for job in jobs[first : first + num_rows]:
        marked = job["job"] == name
        table.add_row(
            ">" if marked else "",
            plain_text(job["job"], style="bold" if marked else ""),
            state_text(job),
            steps_text(job["step"], job["steps"]),
            number(job["loss"]),
            _cut(job["why"] or reason_text(job)),
        )
    return table


def _job_lines(job: Mapping[str, Any], width: int) -> list[RenderableType]:
    step, steps = job["step"] or 0, job["steps"]
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(str(job["job"]), style="bold")
    line.append(f"  {job['state']}  step {steps_text(job['step'], steps)}  ")
    if steps:
        num_cells = 24 if width >= ROOMY_CELLS else 8
        done = min(num_cells, num_cells * step // steps)
        line.append("━" * done, style="green").append("┄" * (num_cells - done), style="dim")
        line.append(f" {100 * step // steps} %  ")
    line.append(f"loss {number(job['loss'])}")
    if job["samples_per_second"] is not None:
        line.append(f"  {number(job['samples_per_second'])} samples/s")
    if job["eta_seconds"] is not None:
        line.append(f"  ETA {duration(job['eta_seconds'])}")
    return [line] if job["nothing"] else [line, _cut(iteration_sentence(job))]


def _beginning(job: Mapping[str, Any]) -> str:
    number = job["attempt"] or 1
    return f"attempt {number}" if number > 1 else "the job"


def _lane_lines(job: Mapping[str, Any], width: int, num_rows: int, *, colour: bool) -> list[RenderableType]:
    window, lanes = job["window_seconds"], job["lanes"]
    when = f"the last {duration(window)}" if window is not None else f"since {_beginning(job)} began"
    name_cells, bar_cells = _cells(lanes, width)
    lines: list[RenderableType] = [plain_text(f"lanes, {when}{'works'.rjust(width - len(when) - 8)}", style="dim")]
    for lane in lanes[:num_rows]:
        line = Text(lane["lane"].ljust(name_cells), no_wrap=True)
        line.append_text(lane_bar(lane["lane"], lane["seconds"], bar_cells, colour=colour))
        works = 100 - lane["wait_percent"] if lane["wall_seconds"] else None
        lines.append(line.append(percent(works).rjust(_SHARE_CELLS - 1)))
    if len(lanes) > num_rows:
        lines.append(plain_text(f"and {len(lanes) - num_rows} lanes more", style="dim"))
    return lines


def _path_lines(job: Mapping[str, Any], width: int, *, colour: bool) -> list[RenderableType]:
    path = job["critical_path"]
    if path is None or not path["steps"]:
        return []
    name_cells, bar_cells = _cells(job["lanes"], width)
    rows = path_chart(path["steps"], bar_cells, colour=colour)
    if not rows:
        return []
    first, last = path["steps"][0], path["steps"][-1]
    seconds = last["start_seconds"] + last["seconds"] - first["start_seconds"]
    which = last.get("label", f"iteration {last['iteration']}")  # of a job that an older Weft ran
    title = f"critical path of {which}, {duration(seconds)}"
    return [
        Text(),
        plain_text(title, style="dim"),
        *(Text(lane.ljust(name_cells), no_wrap=True).append_text(row) for lane, row in rows.items()),
    ]


def _cells(lanes: Sequence[Mapping[str, Any]], width: int) -> tuple[int, int]:
    """Of a lane's name and of its bar."""
    name_cells = max(len(lane["lane"]) for lane in lanes) + 2
    return name_cells, max(MIN_BAR_CELLS, width - name_cells - _SHARE_CELLS)


def _stalls_table(stalls: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table("stalls of", "cause", "waits for", "on", "of its time>", "seconds>")
    for stall in stalls:
        task, on = _cut(stall["task"] or "-"), plain_text(stall["on"] or "-")
        share = percent(stall["percent"])
        table.add_row(plain_text(stall["lane"]), stall["cause"], task, on, share, duration(stall["seconds"]))
    _keep_whole(table, but=2)
    return table


def _keep_whole(table: Table, but: int) -> None:
    """No column but this one gives way in a narrow terminal, and that one stays in its line."""
    for index, column in enumerate(table.columns):
        column.no_wrap = index != but


def _cut(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")
