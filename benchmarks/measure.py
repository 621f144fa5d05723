"""What every benchmark shares: interleaved runs, results, the table and the JSON that they are printed as.

A benchmark is a script of this folder that ends with `main("NAME", collect)`; `collect(quick)` measures and returns
results. A value is the median of paired runs: ours and the peer's take turns, so that a machine that is slow for a
while is slow for both. low and high are the extremes.

    python benchmarks/NAME.py            a table
    python benchmarks/NAME.py --json     {"benchmark", "machine", "versions", "results": [...]}
    python benchmarks/NAME.py --quick    fewer runs: to see that it works, not to quote
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "weft",
    "torch",
    "uvloop",
    "msgpack",
    "ray",
    "deepspeed",
)  # whose versions are recorded, where they are installed
CANNOT_RUN_HERE = 69  # exit code of a script that needs a device which is not here; EX_UNAVAILABLE of sysexits.h
STAND_IN = "stand-in"  # the device of a report whose numbers say nothing
_GOAL = re.compile(r"(<=|>=) ([0-9.]+)")
_COMPARE = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One number. goal: such as "<= 1.03", None for a number that only explains others. how: what was measured."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    runs: int
    goal: str | None
    how: str

    def __post_init__(self) -> None:
        if self.goal is not None and _GOAL.fullmatch(self.goal) is None:
            raise ValueError(f"goal {self.goal!r}: write '<= NUMBER' or '>= NUMBER'")

    def is_reached(self) -> bool | None:
        """None without a goal."""
        if self.goal is None:
            return None
        sign, bound = self.goal.split()
        return bool(_COMPARE[sign](self.value, float(bound)))


def value_result(
    name: str, values: Sequence[float], unit: str, *, how: str, goal: str | None = None, scale: float = 1.0
) -> Result:
    """The median of the values, each times `scale`."""
    scaled = [scale * value for value in values]
    return Result(
        name=name,
        value=statistics.median(scaled),
        unit=unit,
        low=min(scaled),
        high=max(scaled),
        runs=len(scaled),
        goal=goal,
        how=how,
    )


def ratio_result(
    name: str, ours: Sequence[float], theirs: Sequence[float], *, how: str, goal: str | None = None
) -> Result:
    """The median of ours[i] / theirs[i]; raises ValueError unless run i of the one has a partner in the other."""
    ratios = [mine / yours for mine, yours in zip(ours, theirs, strict=True)]
    return value_result(name, ratios, "x", how=how, goal=goal)


def interleave(runs: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Calls each measure `runs` times, in turn, each round in the reverse order of the one before.

    The values of each measure, by round, so that they are pairs for `ratio_result`.
    """
    values: list[list[float]] = [[] for _ in measures]
    order = list(range(len(measures)))
    for _ in range(runs):
        for number in order:
            values[number].append(measures[number]())
        order.reverse()
    return values


def main(
    name: str,
    collect: Callable[[bool], list[Result]],
    *,
    table: Callable[[Sequence[Result]], str] | None = None,
    draw: Callable[[Sequence[Result], Path], None] | None = None,
    parts: Mapping[str, Callable[[bool], list[Result]]] | None = None,
) -> None:
    """The body of a benchmark's script: measures, then prints a table or JSON. draw: what `--png PATH` asks for. parts:
    of what is collected, what `--only NAME` asks for."""
    parser = make_parser(name)
    parser.set_defaults(png=None, only=None)
    if parts is not None:
        parser.add_argument("--only", choices=parts, help="a part of it")
    if draw is not None:
        parser.add_argument(
            "--png", type=Path, metavar="PATH", help="draw the results; needs pip install 'weft[plots]'"
        )
    arguments = parser.parse_args()
    if parts is not None and arguments.only is not None:
        collect = parts[arguments.only]
    os.environ.setdefault("WEFT_KEEP_INSPECTIONS", "false")  # of another hour, of a machine that was faster then
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as scratch:
        tempfile.tempdir = scratch  # of whatever is made meanwhile, as runs are
        results = collect(arguments.quick)
        tempfile.tempdir = None
    print(json.dumps(report(name, results), indent=1) if arguments.json else (table or text_table)(results))
    if draw is not None and arguments.png is not None:
        draw(results, arguments.png)


def make_parser(name: str) -> argparse.ArgumentParser:
    """With the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=f"The benchmark {name}; benchmarks/README.md says how to read it.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer runs: to see that it works, not to quote")
    return parser


def report(name: str, results: Sequence[Result], **facts: Any) -> dict[str, Any]:
    """What `--json` prints, and run.py keeps. facts: beside what every benchmark tells."""
    return {
        "benchmark": name,
        **facts,
        "machine": machine(),
        "versions": versions(),
        "results": [asdict(result) for result in results],
    }


def machine() -> dict[str, Any]:
    """What the numbers depend on most."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": _gpus(),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass  # a peer that is not there has no row either
    return found


def text_table(results: Sequence[Result]) -> str:
    rows = [("", "value", "unit", "low", "high", "runs", "goal", "")]
    rows += [(*cells(result), _verdict(result)) for result in results]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(_aligned(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    )


def cells(result: Result) -> tuple[str, str, str, str, str, str, str]:
    """name, value, unit, low, high, runs, goal, as they stand in a table."""
    numbers = [number(each) for each in (result.value, result.low, result.high)]
    return result.name, numbers[0], result.unit, numbers[1], numbers[2], str(result.runs), result.goal or ""


def number(value: float) -> str:
    """Three significant digits, and never in powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def pin(core: int) -> None:
    """Ties this process to the core of that number among those that it may use, where there are as many."""
    cores = sorted(os.sched_getaffinity(0))
    if core < len(cores):
        os.sched_setaffinity(0, {cores[core]})


def _verdict(result: Result) -> str:
    return {True: "reached", False: "NOT REACHED", None: ""}[result.is_reached()]


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column in (1, 3, 4, 5) else cell.ljust(width)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    import torch  # here: a benchmark without torch should not wait for its import

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
