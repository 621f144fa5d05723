"""Runs the benchmarks of this folder in turn, keeps what they find and brings the tables of README.md up to date.

python benchmarks/run.py             all        (make bench)
python benchmarks/run.py pipeline    one        (make bench ONLY=pipeline)
python benchmarks/run.py --quick     prints only: quick numbers are not to be kept
python benchmarks/run.py --keep FILE ...    keeps what `NAME.py --json` printed on another machine, or part by part

What needs a device that is not here (exit code 69) is passed over. What was measured last on another kind of machine
stays beside the new rows, in a column of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import CANNOT_RUN_HERE, STAND_IN, Result, cells, text_table

FOLDER = Path(__file__).resolve().parent
README = FOLDER / "README.md"
RESULTS = FOLDER / "results"
END = "<!-- end of results -->"
ELSEWHERE = "elsewhere"  # reports of other kinds of machines, in a report that is kept
COLUMNS = ("name", "value", "unit", "low", "high", "runs", "goal", "reached")


def benchmarks() -> list[str]:
    """The scripts here, this one apart."""
    scripts = (path for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8"))
    return sorted(path.stem for path in scripts if path.stem != "run")


def main() -> None:
    known = benchmarks()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("only", nargs="?", choices=known, help="one benchmark; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer runs, nothing is written")
    parser.add_argument("--keep", nargs="+", type=Path, metavar="FILE", help="reports to keep instead of measuring")
    arguments = parser.parse_args()
    for path in arguments.keep or ():
        _keep_from(path)
    for name in () if arguments.keep else [arguments.only] if arguments.only else known:
        report = _measured(name, quick=arguments.quick)
        if report is None:
            if arguments.only:
                raise SystemExit(CANNOT_RUN_HERE)
            continue
        print(f"{name}\n{text_table(_results(report))}\n", flush=True)
        if not arguments.quick:
            _keep(name, report)


def _measured(name: str, *, quick: bool) -> dict[str, Any] | None:
    """None where it cannot run here; it has said why."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", *(["--quick"] if quick else [])]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode == CANNOT_RUN_HERE:
        return None
    if finished.returncode != 0:
        raise SystemExit(f"benchmarks/{name}.py failed with exit code {finished.returncode}")
    report: dict[str, Any] = json.loads(finished.stdout)
    return report


def _keep_from(path: Path) -> None:
    """A report of a script. Its rows go among those that are kept, if these are of the same machine and software."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        device, rows = report.get("device"), report["results"]
        if device == STAND_IN or not rows:
            raise SystemExit(f"{path}: nothing to keep: {device or 'no device'}, {len(rows)} rows")
        _results(report), _where(report)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise SystemExit(f"{path} is no report ({why}); give what a benchmark has printed with --json") from error
    name = report["benchmark"]
    old = _kept(name)
    _keep(name, report if old is None else merged(old, report))


def _kept(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new report, with the old ones' other rows where both are of the same kind of machine and software."""
    same = next((each for each in (old, *old.get(ELSEWHERE, ())) if _where(each) == _where(new)), None)
    if same is None:
        return new
    rows = {row["name"]: row for row in (*same["results"], *new["results"])}
    notes = list(dict.fromkeys((*same.get("notes", ()), *new.get("notes", ()))))
    return new | {"results": list(rows.values())} | ({"notes": notes} if notes else {})


def beside(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new report, with the old ones that are of other kinds of machines."""
    others = [
        {key: value for key, value in each.items() if key != ELSEWHERE}
        for each in (old, *old.get(ELSEWHERE, ()))
        if _machine(each) != _machine(new)
    ]
    return new | ({ELSEWHERE: others} if others else {})


def _where(report: dict[str, Any]) -> tuple[Any, ...]:
    return *_machine(report), report["versions"]


def _machine(report: dict[str, Any]) -> tuple[Any, ...]:
    machine = report["machine"]
    return report.get("device"), machine["cpu"], machine["cores"], machine["gpus"]


def _keep(name: str, report: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    old = _kept(name)
    dated = report | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    kept = dated if old is None else beside(old, dated)
    _write(RESULTS / f"{name}.json", json.dumps(kept, indent=1) + "\n")
    _write(README, with_section(README.read_text(encoding="utf-8"), name, section(kept)))


def with_section(page: str, name: str, text: str) -> str:
    """The page with the benchmark's section replaced, or added after the others."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    block = f"{begin}\n{text}\n{end}"
    if begin in page:
        before, _, rest = page.partition(begin)
        return before + block + rest.partition(end)[2]
    return page.replace(END, f"{block}\n\n{END}")


def section(report: dict[str, Any]) -> str:
    """One benchmark's table in Markdown, with where and when it was measured."""
    machine, versions, results = report["machine"], report["versions"], _results(report)
    others = [(_head(other), {row.name: row for row in _results(other)}) for other in report.get(ELSEWHERE, ())]
    gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ", no GPU"
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpus}, Linux {machine['kernel']}"
    lines = [
        f"### {report['benchmark']}",
        "",
        f"{report['date']}; {where}; {', '.join(f'{name} {number}' for name, number in versions.items())}.",
        "",
        "| " + " | ".join([*COLUMNS, *(head for head, _ in others)]) + " |",
        "| " + " | ".join(["---", "---:", "---", *["---:"] * 3, "---", "---", *["---:"] * len(others)]) + " |",
    ]
    here = {result.name: result for result in results}
    described = {name: row for _, rows in reversed(others) for name, row in rows.items()} | here
    for name in dict.fromkeys((*here, *described)):
        row = described[name]
        reached = {True: "yes", False: "**no**", None: ""}[row.is_reached()]
        own = [*cells(row)[1:], reached] if name in here else ["", row.unit, "", "", "", row.goal or "", ""]
        there = [cells(rows[name])[1] if name in rows else "" for _, rows in others]
        lines.append("| " + " | ".join([f"`{name}`", *own, *there]) + " |")
    lines += ["", *(f"- `{name}`: {described[name].how}" for name in dict.fromkeys((*here, *described)))]
    return "\n".join([*lines, *(f"- {note}" for note in report.get("notes", ()))])


def _head(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["gpus"], report["date"]])


def _results(report: dict[str, Any]) -> list[Result]:
    return [Result(**result) for result in report["results"]]


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    main()
