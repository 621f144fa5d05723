"""Writes the pages that are made from the code: cli.md and job.schema.json.

`python -m weft.metrics.prometheus.declared` makes metrics.md.

python docs/generate.py            writes them
python docs/generate.py --check    exits with 1 and names those that are not current
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer.main

from weft.cli import exits
from weft.cli.verbs.app import app
from weft.client.result import RESULT
from weft.spec.job_spec import JobSpec

FOLDER = Path(__file__).resolve().parent


def pages() -> dict[str, str]:
    return {"cli.md": cli_page(), "job.schema.json": json.dumps(JobSpec.model_json_schema(), indent=2) + "\n"}


def cli_page() -> str:
    """Every verb with its arguments, options and example, then the result line and the exit codes."""
    group: Any = typer.main.get_command(app)
    lines = [
        "# The `weft` command",
        "",
        "Made by `python docs/generate.py` from `weft/cli/verbs`, `weft/client/result.py` and `weft/cli/exits.py`.",
        "",
    ]
    lines += [
        "stdout is data, stderr is progress. A flag counts before its `WEFT_*` variable, that before `weft.toml`.",
        "",
    ]
    for name, command in group.commands.items():
        lines += [f"## weft {name}", "", command.help.strip(), ""]
        rows = [row for parameter in command.params if (row := _row(parameter)) is not None]
        if rows:
            lines += ["| | |", "| --- | --- |", *rows, ""]
        lines += [command.epilog.replace("Example: ", "Example: `", 1) + "`", ""]
    lines += [
        "## The result",
        "",
        "The line of JSON that `run`, `wait` and `submit -f` print with `--json`. What does not apply is null.",
        "",
    ]
    lines += ["| | |", "| --- | --- |", *(f"| `{key}` | {text} |" for key, text in RESULT.items()), ""]
    codes = (exits.__doc__ or "").partition("\n\n")[2].rstrip()
    return "\n".join([*lines, "## Exit codes", "", "```", codes, "```", ""])


def _row(parameter: Any) -> str | None:
    if getattr(parameter, "hidden", False):
        return None
    if parameter.param_type_name == "argument":
        name = parameter.metavar
    else:
        metavar = "" if parameter.is_flag else f" {parameter.metavar}"
        name = f"{', '.join(parameter.opts)}{metavar}"
    return f"| `{name}` | {parameter.help} |"


def main() -> int:
    stale = [name for name, text in pages().items() if not _is_current(FOLDER / name, text)]
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"not current: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (FOLDER / name).write_text(pages()[name], encoding="utf-8")
    return 0


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
