"""Runs the benchmarks of this folder in turn, keeps what they find and brings the tables of README.md up to date.

python benchmarks/run.py             all        (make bench)
python benchmarks/run.py pipeline    one        (make bench ONLY=pipeline)
python benchmarks/run.py --quick     prints only: quick numbers are not to be kept
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

from measure import NO_GPU, Result, cells, text_table

FOLDER = Path(__file__).resolve().parent
README = FOLDER / "README.md"
RESULTS = FOLDER / "results"
END = "<!-- end of results -->"


def benchmarks() -> list[str]:
    """The scripts here, this one apart."""
    scripts = (path for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8"))
    return sorted(path.stem for path in scripts if path.stem != "run")


def main() -> None:
    known = benchmarks()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("only", nargs="?", choices=known, help="one benchmark; default: all")
    parser.add_argument("--quick", action="store_true", help="fewer runs, nothing is written")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else known:
        report = _measured(name, quick=arguments.quick)
        if report is None:
            continue
        print(f"{name}\n{text_table(_results(report))}\n", flush=True)
        if not arguments.quick:
            _keep(name, report)


def _measured(name: str, *, quick: bool) -> dict[str, Any] | None:
    """None where it needs a GPU, and has said so."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", *(["--quick"] if quick else [])]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if finished.returncode == NO_GPU:
        return None
    if finished.returncode != 0:
        raise SystemExit(f"benchmarks/{name}.py failed with exit code {finished.returncode}")
    report: dict[str, Any] = json.loads(finished.stdout)
    return report


def _keep(name: str, report: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    _write(RESULTS / f"{name}.json", json.dumps(report, indent=1) + "\n")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    _write(README, with_section(README.read_text(encoding="utf-8"), name, section(report, today)))


def with_section(page: str, name: str, text: str) -> str:
    """The page with the benchmark's section replaced, or added after the others."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    block = f"{begin}\n{text}\n{end}"
    if begin in page:
        before, _, rest = page.partition(begin)
        return before + block + rest.partition(end)[2]
    return page.replace(END, f"{block}\n\n{END}")


def section(report: dict[str, Any], date: str) -> str:
    """One benchmark's table in Markdown, with where and when it was measured."""
    machine, versions, results = report["machine"], report["versions"], _results(report)
    gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ", no GPU"
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpus}, Linux {machine['kernel']}"
    lines = [
        f"### {report['benchmark']}",
        "",
        f"{date}; {where}; {', '.join(f'{name} {number}' for name, number in versions.items())}.",
        "",
        "| name | value | unit | low | high | runs | goal | reached |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- | --- |",
    ]
    for result in results:
        reached = {True: "yes", False: "**no**", None: ""}[result.is_reached()]
        lines.append("| " + " | ".join([f"`{result.name}`", *cells(result)[1:], reached]) + " |")
    return "\n".join([*lines, "", *(f"- `{result.name}`: {result.how}" for result in results)])


def _results(report: dict[str, Any]) -> list[Result]:
    return [Result(**result) for result in report["results"]]


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    main()
