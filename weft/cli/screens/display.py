"""Display: what the daemon knows, as sentences and tables for people. Scripts read `--json` instead.

What is told while a job runs, and the wording of numbers, is `weft.client.console`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.screens.time_summary import later_attempt
from weft.client.console import PIPE_WIDTH, ended_sentence, metrics, reason_text
from weft.plan.kinds import MODES
from weft.quantities import duration, number, percent, size
from weft.transport.wire.frames import Message

_STATE_STYLES = {"running": "green", "completed": "dim", "failed": "red", "cancelled": "dim", "recovering": "yellow"}
_NONE = "-"


def jobs_table(jobs: Sequence[Message], now: float) -> Table:
    """`weft ps`. now: unix seconds."""
    table = make_table("job", "state", "priority>", "step>", "loss>", "submitted", "took>", "why")
    for job in jobs:
        table.add_row(
            plain_text(job["job"]),
            state_text(job),
            str(job["priority"]),
            steps_text(job["step"], job["steps"]),
            number(job["loss"]),
            f"{duration(now - job['submitted_at'])} ago",
            duration(_elapsed(job, now)),
            plain_text(job["why"] or reason_text(job)),
        )
    return table


def lanes_table(lanes: Mapping[str, Mapping[str, float]]) -> Table:
    """Where each lane's time went: percent of the lane's own time for each mode."""
    seen = {mode for seconds in lanes.values() for mode in seconds}
    modes = [mode for mode in MODES if mode in seen] + sorted(seen.difference(MODES))
    table = make_table("lane", *(f"{mode.replace('_', ' ')}>" for mode in modes))
    for lane, seconds in sorted(lanes.items()):
        total = sum(seconds.values()) or 1.0
        shares = [percent(100 * seconds[mode] / total) if mode in seconds else _NONE for mode in modes]
        table.add_row(plain_text(lane), *shares)
    return table


def stages_table(stages: Sequence[Message]) -> Table:
    """The partition: which units of the model each worker holds."""
    table = make_table("stage>", "units", "worker", "parameters>", "memory>")
    for index, stage in enumerate(stages):
        first, end = stage["units"]
        units = f"{first}" if end - first == 1 else f"{first} to {end - 1}"
        memory = size(stage.get("memory_bytes"))
        table.add_row(str(index), units, plain_text(stage["worker"]), size(stage.get("parameter_bytes")), memory)
    return table


def workers_table(workers: Sequence[Message]) -> Table:
    table = make_table("worker", "kind", "device", "state", "pid>", "job")
    for worker in workers:
        job = plain_text(worker["job"] or _NONE)
        name, device = plain_text(worker["worker"]), plain_text(worker["device"])
        table.add_row(name, worker["kind"], device, worker["state"], str(worker["pid"] or _NONE), job)
    return table


def state_sentence(shown: Message) -> str:
    """Why the job waits, or what it does, in one sentence."""
    if shown["why"]:
        return str(shown["why"])
    reason = f" ({told})" if (told := reason_text(shown)) else ""
    step = steps_text(shown["step"], shown["steps"])
    return f"{shown['state']}{reason}" + ("" if step == _NONE else f", step {step}")


def show_page(console: Console, shown: Message, now: float) -> None:
    """`weft show`: the job, its plan and where its time went. now: unix seconds."""
    console.print(plain_text(f"{shown['job']}: {state_sentence(shown)}"))
    console.print(_facts(_history(shown, now)))
    if shown["plan"]:
        plan = shown["plan"]
        count = plan["microbatches"]
        console.print(
            f"\n{plan['schedule']}, {count} {'microbatch' if count == 1 else 'microbatches'}, "
            f"{duration(plan['predicted_iteration_seconds'])} an iteration predicted"
        )
        console.print(stages_table(plan["stages"]))
        for window in plan.get("windows", ()):
            console.print(plain_text(window))
        if len(plan.get("shares", ())) > 1:
            console.print("shares of a batch: " + ", ".join(percent(100 * share) for share in plan["shares"]))
        if plan.get("updates"):
            console.print(plain_text(f"updates: {plan['updates']}"))
        for line in (*plan.get("verdicts", ()), *plan.get("notes", ())):
            console.print(plain_text(line))
    _lanes_part(console, shown, "\nwhere the time went")
    if shown["error"]:
        console.print(plain_text(f"\n{shown['error']}"))


def result_page(console: Console, result: Message, shown: Message) -> None:
    """The end of `weft run`: state, validation metrics, where the time went, and the files. shown: of the job, empty
    where nobody has asked."""
    console.print(plain_text(ended_sentence(result)))
    if result.get("error") and not result.get("error_told"):
        console.print(plain_text(result["error"]))
    _lanes_part(console, shown, "")
    console.print(_facts(_outcome(result)))


def _lanes_part(console: Console, shown: Message, title: str) -> None:
    """Where the time went, if any did. title: unset, one stands there only where it is not the time of all the job."""
    if not shown.get("lanes"):
        return
    if attempt := later_attempt(shown.get("time") or {}):
        title = f"{title or 'where the time went'}, of {attempt}"
    if title:
        console.print(title)
    console.print(fitted(console, lanes_table(shown["lanes"])))


_WHY_NOT_AGREED = (
    "agrees, no: other microbatches draw other dropout and see other batch statistics; "
    "in long jobs rounding adds up, too"
)


_ANSWERS: Mapping[bool | None, str] = {True: "yes", False: "no", None: _NONE}


def comparison_page(console: Console, comparison: Message, *, check: bool) -> None:
    """`weft compare`: a row for each preset, then the reasons of those that have not completed."""
    rows = comparison["rows"]
    stalls = [share for row in rows for share in (row["stall_percent"] or {}).items()]
    seen = {f"stall_{cause}" for cause, share in stalls if percent(share) != percent(0.0)}
    causes = [mode.removeprefix("stall_") for mode in MODES if mode in seen]
    columns = ["preset", "workers", "state", "iteration>", "limit>", "ratio>", *(f"stall {cause}>" for cause in causes)]
    differ = len({row["compiled"] for row in rows} - {None}) > 1
    answers = [*(["compiled"] if differ else []), *(["agrees"] if check else [])]
    columns += ["hidden>", "exposed>", "peak memory>", "shared>", "loss>", *answers]
    table = make_table(*columns)
    for row in rows:
        table.add_row(*_comparison_cells(row, causes), *(_ANSWERS[row[each]] for each in answers))
    console.print(fitted(console, table))
    if check and any(row["agrees"] is False for row in rows):
        console.print(_WHY_NOT_AGREED, soft_wrap=True)
    for row in rows:
        if row["state"] != "completed":
            reason = f" ({row['reason']})" if row["reason"] else ""
            console.print(plain_text(f"{row['preset']} {row['state']}{reason}: {row['error'] or 'no more is known'}"))


def _comparison_cells(row: Message, causes: Sequence[str]) -> list[str | Text]:
    stalls = row["stall_percent"] or {}
    return [
        plain_text(row["preset"]),
        " + ".join(f"{count} {kind}" for kind, count in row["workers"].items()),
        Text(row["state"], style=_STATE_STYLES.get(row["state"], "")),
        duration(row["iteration_seconds"]),
        duration(row["limit_seconds"]),
        number(row["limit_ratio"], 3),
        *(percent(stalls.get(cause)) for cause in causes),
        *(_seconds_beside_compute(row["overlap_seconds"], name) for name in ("hidden", "exposed")),
        size(row["peak_bytes"]),
        size(row["shared_bytes"]),
        number(row["loss"], 6),
    ]


def _seconds_beside_compute(overlap: Mapping[str, Mapping[str, float]] | None, name: str) -> str:
    """Of sync, transfer and update together, the seconds of an iteration that were hidden, or exposed."""
    return _NONE if overlap is None else duration(sum(seconds[name] for seconds in overlap.values()))


def status_page(console: Console, status: Message) -> None:
    """`weft status`: the daemon, its workers and its jobs."""
    jobs = ", ".join(f"{count} {state}" for state, count in status["jobs"].items() if count) or "none"
    facts = {"daemon": f"{status['version']}, pid {status['pid']}", "jobs": jobs, "metrics": status["metrics"] or _NONE}
    console.print(_facts(facts))
    console.print(workers_table(status["workers"]))


def _history(shown: Message, now: float) -> dict[str, str]:
    facts = {
        name: f"{datetime.fromtimestamp(shown[key]):%Y-%m-%d %H:%M:%S}"
        for name, key in (("submitted", "submitted_at"), ("started", "started_at"), ("ended", "ended_at"))
        if shown[key] is not None
    }
    facts["took"] = duration(_elapsed(shown, now))
    if shown["state"] == "running" and shown.get("snapshot_step") is not None:
        facts["snapshot"] = f"after step {shown['snapshot_step']}: a lost worker costs what came since"
    if shown.get("stopped") is not None:
        facts["stopped"] = shown["stopped"].removeprefix("stopped ")
    if shown.get("checkpoint") is not None:
        facts["checkpoint"] = shown["checkpoint"]
    return facts | _outcome(shown)


def _outcome(result: Message) -> dict[str, str]:
    """What is known of the run, by name; `-` where nothing is, and nothing at all of one that has ended badly."""
    limit, measured = result["limit_seconds"], result["iteration_seconds"]
    ratio = f" ({measured / limit:.2f} × the limit of {duration(limit)})" if measured and limit else ""
    facts = {
        "loss": number(result["loss"]),
        "validation": metrics(result["validation"]) or _NONE,
        "iteration": duration(measured) + ratio,
        "model": result["model"] or _NONE,
        **({"best model": result["best"]} if result.get("best") else {}),
        "run directory": result["run_dir"] or _NONE,
    }
    ended_badly = result["state"] in ("failed", "cancelled")
    return {name: value for name, value in facts.items() if not (ended_badly and value == _NONE)}


def _facts(facts: Mapping[str, str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        table.add_row(name, Text(value, overflow="fold"))
    return table


def make_table(*columns: str) -> Table:
    """Columns that are aligned and not framed; a name that ends in > is aligned to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    return table


def fits(console: Console, table: Table) -> bool:
    """Whether no cell has to be broken."""
    return console.measure(table, options=console.options.update_width(PIPE_WIDTH)).maximum <= console.width


def fitted(console: Console, table: Table) -> Table:
    """The table; where it is too wide for the console, its first column with what the others say in words."""
    if fits(console, table):
        return table
    narrow = make_table(str(table.columns[0].header), "")
    narrow.columns[0].no_wrap = True
    names = [column.header for column in table.columns[1:]]
    for first, *cells in zip(*(column.cells for column in table.columns), strict=True):
        told = (f"{name} {cell}" for name, cell in zip(names, cells, strict=True) if str(cell) != _NONE)
        narrow.add_row(first, plain_text(", ".join(told)))
    return narrow


def plain_text(text: str, style: str = "") -> Text:
    """Text that is never read as markup."""
    return Text(str(text), style=style)


def state_text(job: Message) -> Text:
    return Text(job["state"], style=_STATE_STYLES.get(job["state"], ""))


def steps_text(step: int | None, steps: int | None) -> str:
    return _NONE if step is None else f"{step}/{_NONE if steps is None else steps}"


def _elapsed(job: Message, now: float) -> float | None:
    if job["started_at"] is None:
        return None
    end = now if job["ended_at"] is None else job["ended_at"]
    elapsed: float = end - job["started_at"]
    return elapsed
