"""Time display: `weft show JOB --time` for people. Each table stands under a sentence that says what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from weft.cli.screens.display import fits, make_table, plain_text
from weft.cli.screens.time_summary import later_attempt
from weft.plan.kinds import MODES
from weft.quantities import duration, percent

MAX_STEPS: Final = 60  # of the critical path; arbitrary: two screens, and --json has all of them
LEAST_PERCENT: Final = 0.05  # of a lane's time: what rounds to 0.0 % is left out


def time_page(console: Console, summary: Mapping[str, Any]) -> None:
    """summary: of `weft.cli.screens.time_summary`."""
    if summary["nothing"]:
        _say(console, summary["nothing"])
        return
    _say(console, f"{summary['job']}, {summary['state']}: {iteration_sentence(summary)}")
    if diagnosis := summary["diagnosis"]:
        _say(console, diagnosis["sentence"], style="bold")
        _say(console, diagnosis["remedy"])
    if attempt := later_attempt(summary):
        _say(console, f"All of this is of {attempt}; what ran before is not in it.")
    _begin(console, "Lanes: percent of each lane's wall time by what it did; residual is what no mode accounts for.")
    table = lanes_time_table(summary["lanes"])
    console.print(table if fits(console, table) else narrow_lanes_table(summary["lanes"]))
    _say(console, _balance_sentence(summary))
    if stalls := [stall for stall in summary["stalls"] if stall["percent"] >= LEAST_PERCENT]:
        _begin(
            console,
            "Stalls: the longest waits, and the task whose end was waited for. Compute lanes first: the others wait "
            "as a matter of course.",
        )
        console.print(stalls_table(stalls))
    if summary["overlap"]:
        _begin(
            console,
            "Overlap: hidden ran beside compute and cost nothing, exposed ran while the worker computed nothing.",
        )
        console.print(overlap_table(summary["overlap"]))
    _print_path(console, summary["critical_path"])


def iteration_sentence(summary: Mapping[str, Any]) -> str:
    """The iteration's time beside the limit of the graph and what the plan promised."""
    seconds, limit = summary.get("iteration_seconds"), summary.get("limit_seconds")
    if not seconds:
        return "no iteration has ended yet"
    beside = f", {seconds / limit:.2f} × the limit of {duration(limit)}" if limit else ""
    predicted = summary.get("predicted_iteration_seconds")
    promised = f"; the plan predicted {duration(predicted)}" if predicted else ""
    return f"{duration(seconds)} an iteration{beside}{promised}"


def lanes_time_table(lanes: Sequence[Mapping[str, Any]]) -> Table:
    seen = {mode for lane in lanes for mode in lane["percent"]}
    modes = [mode for mode in MODES if mode in seen] + sorted(seen.difference(MODES))
    table = make_table("lane", "wall>", "waits>", *(f"{mode.replace('_', ' ')}>" for mode in modes), "residual>")
    for lane in lanes:
        shares = lane["percent"]
        table.add_row(
            plain_text(lane["lane"]),
            duration(lane["wall_seconds"]),
            percent(lane["wait_percent"]),
            *(percent(shares.get(mode)) for mode in modes),
            duration(lane["residual_seconds"]),
        )
    return table


def narrow_lanes_table(lanes: Sequence[Mapping[str, Any]]) -> Table:
    """The same without a column for each mode: what takes most of a lane's time comes first."""
    table = make_table("lane", "wall>", "waits>", "of its time")
    for lane in lanes:
        shares = sorted(lane["percent"].items(), key=lambda share: -share[1])
        modes = ", ".join(
            f"{mode.replace('_', ' ')} {percent(share)}" for mode, share in shares if share >= LEAST_PERCENT
        )
        residual = f", residual {duration(lane['residual_seconds'])}" if lane["residual_seconds"] else ""
        wall, waits = duration(lane["wall_seconds"]), percent(lane["wait_percent"])
        table.add_row(plain_text(lane["lane"]), wall, waits, plain_text(modes + residual))
    for column in table.columns[:-1]:
        column.no_wrap = True
    return table


def stalls_table(stalls: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table("lane", "cause", "waits for", "on", "seconds>", "of its time>")
    for stall in stalls:
        table.add_row(
            plain_text(stall["lane"]),
            stall["cause"],
            plain_text(stall["task"] or "-"),
            plain_text(stall["on"] or "-"),
            duration(stall["seconds"]),
            percent(stall["percent"]),
        )
    return table


def overlap_table(overlap: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table("worker", "kind", "exposed>", "hidden>", "hidden of it>")
    for row in overlap:
        table.add_row(
            plain_text(row["worker"]),
            row["kind"],
            duration(row["exposed_seconds"]),
            duration(row["hidden_seconds"]),
            percent(row["hidden_percent"]),
        )
    return table


def _balance_sentence(summary: Mapping[str, Any]) -> str:
    bubble, imbalance = summary["bubble_ratio"], summary["imbalance"]
    if bubble is None or imbalance is None:
        return "No compute lane has computed yet."
    return (
        f"Bubble: compute lanes waited for one another's activations and gradients {percent(100 * bubble)} of their "
        f"time. Imbalance: the busiest computed {percent(100 * imbalance)} longer than their mean."
    )


def _print_path(console: Console, path: Mapping[str, Any] | None) -> None:
    if path is None:
        _begin(console, "Critical path: no iteration is complete yet.")
        return
    _begin(
        console,
        f"Critical path of the last {path['iterations']} iterations ({duration(path['seconds'])}): only what stands "
        "here makes them shorter.",
    )
    table = make_table("kind", "lane", "seconds>", "of it>")
    for each in path["parts"]:
        table.add_row(each["kind"], plain_text(each["lane"]), duration(each["seconds"]), percent(each["percent"]))
    table.add_row("gaps", "between tasks", duration(path["gap_seconds"]), percent(path["gap_percent"]))
    console.print(table)
    steps = path["steps"]
    if not steps:
        return
    _begin(console, "The last iteration, step by step: each began when the one before it had ended and its gap passed.")
    table = make_table("at>", "gap>", "task", "lane", "seconds>")
    for step in steps[:MAX_STEPS]:
        table.add_row(
            duration(step["start_seconds"] - steps[0]["start_seconds"]),
            duration(step["gap_seconds"]),
            plain_text(step["task"]),
            plain_text(step["lane"]),
            duration(step["seconds"]),
        )
    console.print(table)
    if len(steps) > MAX_STEPS:
        console.print(f"and {len(steps) - MAX_STEPS} more, which --json has")


def _begin(console: Console, sentence: str) -> None:
    """Begins a section."""
    console.print()
    _say(console, sentence)


def _say(console: Console, sentence: str, style: str = "") -> None:
    console.print(plain_text(sentence, style=style), soft_wrap=False)
