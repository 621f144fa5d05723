"""How much of synchronisation, transfer and update is hidden behind computation: coarse against fine, and forwards that
wait for each layer's update against those that wait for their stage's.

The shape of Fig. 6 in Li et al., PyTorch Distributed (VLDB 2020): an iteration's time in forward, backward, exposed
communication and the optimizer, with and without overlap, and over bucket sizes. Four jobs train the same GPT:

    ddp        two CPU replicas; coarse, and fine with buckets of 1, 5, 25 (the default: ddp_fine) and 100 MiB
    offload    a stand-in device; gradients come down to a host that updates, and parameters go up again
    pipeline   two stages whose gradient is clipped, so that fine updates are speculative and go into the bubbles
    hybrid     two stages on a stand-in beside a CPU replica, the presets hybrid-coarse and hybrid-fine with fixed
               shares; what counts as hidden is sync and update, which both sides have

`--only layered` has the second comparison alone, with strategy.waits = "stage" and "layer": two CPU replicas (ddp), two
whose updates wait for the norm of the gradient (ddp_clipped), a device (offload), and hybrid-fine. Their batches are
smaller, so that updates are not over when the next forward begins. In offload_wide, a wide MLP with an optimizer that
takes longer than its backward, they are far from it. Both jobs of a pair run at once and take turns in slices
(slices.py), since what is to be told apart is less than what the machine's speed drifts by within seconds.

Every number is from the accounts that the daemon keeps of each worker's stamped rows. Times are those of one worker
and one iteration, the mean over the workers that have any. Where lanes share a core, as on a machine with no more cores
than workers, hidden time is not free: it shows in a longer backward, and a backward that waits for its core hides too.
Coarse holds back synchronisation only; a device's gradients come down, and its next microbatch comes in, all the same.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import Result, main, number, ratio_result, value_result
from slices import ENDLESS, medians, sliced_job, take_turns

import weft.client.embedded
from weft.client.client import Client
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
GPT = {"layers": 8, "dim": 256, "heads": 4, "context": 32, "vocabulary": 4096, "samples": 256}  # 32 MiB of gradients
BATCH_SIZE = 4  # small, so that gradients weigh against computation
TURNS = 5
LAYERED_TURNS = 3  # of whole jobs, which say what is hidden
STARTS, ROUNDS = 3, 10  # of both jobs of a pair, for their ratio; of slices, from each start on
WARM_ITERATIONS = 10
STEPS = 150
QUICK_STEPS = 40
COMMUNICATION = ("sync", "transfer")
LAYERED_BATCH_SIZE = 2
WIDE = {"layers": 8, "width": 1448, "samples": 256, "optimizer": "NAdam"}  # 64 MiB of gradients
WIDE_BATCH_SIZE = 16
HYBRID_BATCH_SIZE, HYBRID_SHARES = 24, [2.0, 1.0]  # the pipeline has two threads, the CPU replica one
HYBRID_MICROBATCHES = 2  # gradients are complete in the last one's backward, which what is to be hidden has to fit in
FREE_CORES = 4  # two stages, a CPU replica, and one for what is to be hidden: with fewer nothing can be won
PARTS = {  # of an iteration's time, as the columns of the table and the segments of a bar
    "forward": "forward",
    "backward": "backward",
    "exposed_communication": "exposed sync and transfer",
    "exposed_update": "exposed update",
}


@dataclass(frozen=True, slots=True)
class Job:
    """what: in words."""

    entry: str
    args: Mapping[str, Any]
    what: str


GPT_JOB = Job("gpt_job.py:workload", GPT, f"GPT of {GPT['layers']} layers of {GPT['dim']}")
WIDE_JOB = Job(
    "wide_mlp_job.py:workload", WIDE, f"MLP of {WIDE['layers']} layers of {WIDE['width']}, {WIDE['optimizer']}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """name of its results; what the job is, in words; its strategy. hides: what counts as hidden. goal: of that."""

    name: str
    what: str
    strategy: Mapping[str, Any]
    hides: tuple[str, ...] = ("sync", "transfer", "update")
    goal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Cases that take turns on one daemon: its CPU workers and stand-in devices. slice_seconds: for some iterations."""

    workers: int
    stand_ins: int
    cases: tuple[Case, ...]
    batch_size: int = BATCH_SIZE
    job: Job = GPT_JOB
    turns: int = TURNS
    slice_seconds: float = 0.8


@dataclass(slots=True)
class Runs:
    """Of one case: a value for each turn. hidden: shares. iterations: their seconds. seconds: by part of one."""

    hidden: list[float] = field(default_factory=list)
    iterations: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})


def _cases(name: str, what: str, **strategy: Any) -> tuple[Case, Case]:
    coarse = Case(name=f"{name}_coarse", what=f"{what}, coarse", strategy=strategy | {"sync": "coarse"})
    return coarse, Case(name=f"{name}_fine", what=f"{what}, fine", strategy=strategy | {"sync": "fine"})


SIZES = tuple(
    Case(
        name=f"ddp_fine_{size}MiB",
        what=f"two CPU replicas, fine, buckets of {size} MiB",
        strategy={"replicas": 2, "bucket_mib": float(size)},
    )
    for size in (1, 5, 100)
)


def _hybrid(sync: str, goal: str | None = None) -> Case:
    return Case(
        name=f"hybrid_{sync}",
        what=f"a pipeline of two stages on a device beside a CPU replica, {sync}",
        strategy={
            "preset": f"hybrid-{sync}",
            "microbatches": HYBRID_MICROBATCHES,
            "share": "fixed",
            "shares": HYBRID_SHARES,
            "bucket_mib": 5.0,
        },
        hides=("sync", "update"),
        goal=goal,
    )


SETTINGS = (
    Setting(
        workers=2,
        stand_ins=0,
        cases=(
            *_cases("ddp", "two CPU replicas", replicas=2),
            *SIZES,
            *_cases("pipeline", "two stages, clipped", stages=2, microbatches=4, clip_norm=1.0, bucket_mib=5.0),
        ),
    ),
    Setting(
        workers=1,
        stand_ins=1,
        cases=_cases(
            "offload", "a device, updates on the host", replicas=[{"device": "gpu"}], update="cpu", bucket_mib=5.0
        ),
    ),
    Setting(
        workers=1,
        stand_ins=1,
        cases=(_hybrid("coarse"), _hybrid("fine", goal=">= 80")),
        batch_size=HYBRID_BATCH_SIZE,
    ),
)


def _by(waits: str) -> tuple[Case, ...]:
    strategies: dict[str, tuple[str, Mapping[str, Any]]] = {
        "ddp": ("two CPU replicas", {"replicas": 2}),
        "ddp_clipped": ("two CPU replicas, clipped", {"replicas": 2, "clip_norm": 1.0}),
        "offload": ("a device, updates on the host", {"replicas": [{"device": "gpu"}], "update": "cpu"}),
        "offload_wide": ("a device, updates on the host", {"replicas": [{"device": "gpu"}], "update": "cpu"}),
        "hybrid_fine": ("a pipeline of two stages on a device beside a CPU replica", _hybrid("fine").strategy),
    }
    return tuple(
        Case(
            name=f"{name}_by_{waits}",
            what=f"{what}, by {waits}",
            strategy={**strategy, "waits": waits, "bucket_mib": 5.0},
        )
        for name, (what, strategy) in strategies.items()
    )


def _layered(*names: str, workers: int, stand_ins: int, batch_size: int = LAYERED_BATCH_SIZE, **how: Any) -> Setting:
    pairs = zip(_by("stage"), _by("layer"), strict=True)
    cases = tuple(case for pair in pairs for case in pair if case.name.rpartition("_by_")[0] in names)
    machine = {"workers": workers, "stand_ins": stand_ins}
    return Setting(**machine, cases=cases, batch_size=batch_size, turns=LAYERED_TURNS, **how)


LAYERED = (
    _layered("ddp", "ddp_clipped", workers=2, stand_ins=0),
    _layered("offload", workers=1, stand_ins=1),
    _layered("offload_wide", workers=1, stand_ins=1, batch_size=WIDE_BATCH_SIZE, job=WIDE_JOB),
    _layered("hybrid_fine", workers=1, stand_ins=1, batch_size=HYBRID_BATCH_SIZE, slice_seconds=1.6),
)


def collect(quick: bool) -> list[Result]:
    return [*_coarse_and_fine(quick), *_by_stage_and_layer(quick)]


def _coarse_and_fine(quick: bool) -> list[Result]:
    return [result for setting in SETTINGS for result in _measure(setting, quick=quick)]


def _by_stage_and_layer(quick: bool) -> list[Result]:
    measured = [result for setting in LAYERED for result in _measure(setting, quick=quick)]
    return [*measured, *(result for setting in LAYERED for result in _layered_vs_stage(setting, quick=quick))]


def _measure(setting: Setting, *, quick: bool) -> list[Result]:
    runs = {case.name: Runs() for case in setting.cases}
    order = list(setting.cases)
    with (
        tempfile.TemporaryDirectory(prefix="weft-bench-") as runs_dir,
        weft.client.embedded.Daemon(
            workers=setting.workers, stand_ins=setting.stand_ins, threads=1, runs_dir=runs_dir
        ) as client,
    ):
        for _ in range(1 if quick else setting.turns):
            for case in order:
                _run(client, case, setting, QUICK_STEPS if quick else STEPS, runs[case.name])
            order.reverse()
    results = [result for case in setting.cases for result in _results(case, setting, runs[case.name])]
    return [*results, *([_fine_vs_coarse(runs)] if "hybrid_coarse" in runs else [])]


def _fine_vs_coarse(runs: Mapping[str, Runs]) -> Result:
    return ratio_result(
        "hybrid_fine_vs_coarse",
        runs["hybrid_coarse"].iterations,
        runs["hybrid_fine"].iterations,
        how="an iteration of hybrid-coarse ÷ one of hybrid-fine; a goal where a core is free for what is hidden",
        goal=">= 1.1" if len(os.sched_getaffinity(0)) >= FREE_CORES else None,
    )


def _layered_vs_stage(setting: Setting, *, quick: bool) -> list[Result]:
    pairs = zip(setting.cases[::2], setting.cases[1::2], strict=True)
    return [_ratio(setting, *pair, *((1, 3) if quick else (STARTS, ROUNDS))) for pair in pairs]


def _ratio(setting: Setting, by_stage: Case, by_layer: Case, starts: int, rounds: int) -> Result:
    machine = {"workers": setting.workers, "stand_ins": setting.stand_ins}
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(starts):
        with ExitStack() as stack:
            specs = [_spec(case, setting, ENDLESS) for case in (by_stage, by_layer)]
            jobs = [stack.enter_context(sliced_job(spec, warm=WARM_ITERATIONS, **machine)) for spec in specs]
            beside = take_turns(jobs, rounds, setting.slice_seconds)
            for kept, found in zip(seconds, medians(*(job.slices() for job in jobs)), strict=True):
                kept += found
    name = by_layer.name.rpartition("_by_")[0]
    return ratio_result(
        f"{name}_layered_vs_stage",
        *seconds,
        how=f"an iteration of {name} whose forwards wait for all of their stage's updates ÷ one whose forwards wait "
        f"for each layer's; {beside}",
        goal=">= 0.98",
    )


def _run(client: Client, case: Case, setting: Setting, steps: int, runs: Runs) -> None:
    job = client.submit(_spec(case, setting, steps))["job"]
    result = client.wait(job, timeout=600)
    assert result["state"] == "completed", result
    shown = client.show(job)
    kinds = [parts for worker in shown["overlap"].values() for parts in worker.items() if parts[0] in case.hides]
    hidden, exposed = (sum(seconds[which] for _, seconds in kinds) for which in ("hidden", "exposed"))
    runs.iterations.append(shown["iteration_seconds"])
    runs.hidden.append(hidden / (hidden + exposed))
    for part in ("forward", "backward"):
        runs.seconds[part].append(_mean(lane.get(part, 0.0) for lane in shown["lanes"].values()) / steps)
    for part, ours in (("exposed_communication", COMMUNICATION), ("exposed_update", ("update",))):
        each = [
            sum(seconds["exposed"] for kind, seconds in worker.items() if kind in ours)
            for worker in shown["overlap"].values()
        ]
        runs.seconds[part].append(_mean(each) / steps)


def _spec(case: Case, setting: Setting, steps: int) -> JobSpec:
    own = {"entry": setting.job.entry, "args": setting.job.args, "batch_size": setting.batch_size}
    job = own | {"steps": steps, "seed": 1}
    return JobSpec.parse({"job": job, "strategy": case.strategy, "directory": str(HERE)})


def _mean(seconds: Iterable[float]) -> float:
    """Over the workers that have any; 0 where none has."""
    some = [value for value in seconds if value]
    return statistics.mean(some) if some else 0.0


def _results(case: Case, setting: Setting, runs: Runs) -> list[Result]:
    how = f"{case.what}; {setting.job.what}, batch {setting.batch_size}, one thread for each worker"
    *others, last = case.hides
    hidden = f"share of {', '.join(others)} and {last} that ran while the same worker computed; {how}"
    return [
        value_result(f"{case.name}_hidden", runs.hidden, "%", scale=100, how=hidden, goal=case.goal),
        *(
            value_result(f"{case.name}_{part}", seconds, "ms", scale=1e3, how=f"{PARTS[part]} of an iteration; {how}")
            for part, seconds in runs.seconds.items()
        ),
    ]


def table(results: Sequence[Result]) -> str:
    """A row for each case: its parts in milliseconds of an iteration and the share that is hidden. Then ratios."""
    columns = [*PARTS, "hidden"]
    rows = [["", *(PARTS.get(column, column) for column in columns)]]
    for name, values in _by_case(results).items():
        cells = [f"{number(values[column])} {'%' if column == 'hidden' else 'ms'}" for column in columns]
        rows.append([name, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join([*lines, *(f"{each.name} {number(each.value)}" for each in results if "_vs_" in each.name)])


def draw(results: Sequence[Result], path: Path) -> None:
    """A bar for each case, stacked from the parts of its iteration, with the hidden share above it."""
    from matplotlib.figure import Figure

    cases = _by_case(results)
    names = [name.replace("_", "\n") for name in cases]
    figure = Figure(figsize=(1.2 * len(cases) + 2, 4.5), layout="constrained")
    axes = figure.subplots()
    bottoms = [0.0] * len(cases)
    for part, label in PARTS.items():
        heights = [values[part] for values in cases.values()]
        axes.bar(names, heights, bottom=bottoms, label=label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for position, (top, values) in enumerate(zip(bottoms, cases.values(), strict=True)):
        axes.annotate(f"{values['hidden']:.0f} %\nhidden", (position, top), ha="center", va="bottom")
    axes.set_ylabel("ms of an iteration, per worker")
    axes.margins(y=0.15)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, format="png", dpi=150)


def _by_case(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Values by case and then by what follows the case's name in a result's."""
    by_name = {result.name: result.value for result in results}
    measured = [case for setting in (*SETTINGS, *LAYERED) for case in setting.cases]
    cases = [case for case in measured if f"{case.name}_hidden" in by_name]
    return {case.name: {what: by_name[f"{case.name}_{what}"] for what in (*PARTS, "hidden")} for case in cases}


if __name__ == "__main__":
    main(
        "overlap",
        collect,
        table=table,
        draw=draw,
        parts={"coarse": _coarse_and_fine, "layered": _by_stage_and_layer},
    )
