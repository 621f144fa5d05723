"""The verb `weft doctor`: what this machine has, what it can run, how fast it is, and what is amiss with it."""

from __future__ import annotations

import json as json_text
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.exits import guarded, leave
from weft.cli.verbs.options import Json
from weft.client.result import to_json
from weft.transport.wire.frames import Message

if TYPE_CHECKING:
    from weft.cli.doctor.facts import Facts
    from weft.cli.doctor.finding import Finding

VERSION = 1  # of the JSON; a key that is renamed, goes away or changes its meaning makes it another
MEASURE_SECONDS = 120.0  # it takes some three, most of them torch's import; many GPUs or a cold disk take longer
LAST_CHARS = 300  # of what a measurement that died wrote


@guarded
def doctor(
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Leave out the speeds, which take some three seconds.")
    ] = False,
    json: Json = False,
) -> None:
    """Say what this machine has and can run, how fast it is, and what is amiss with it; needs no daemon.

    Exits with 1 where a check found a problem.
    """
    from weft.cli.doctor.facts import gather
    from weft.cli.doctor.machine_findings import findings
    from weft.spec.settings import load_settings

    settings = load_settings({}, os.environ, None)
    speeds = None if no_measure else measure_speeds()
    facts = gather(settings, speeds)
    found = findings(facts)
    if json:
        print(to_json(report(facts, found)))
    else:
        from weft.cli.doctor.page import doctor_page
        from weft.client.console import make_console

        doctor_page(make_console(sys.stdout), facts, found)
    leave(1 if any(finding.level == "problem" for finding in found) else 0)


def measure_speeds() -> Message:
    """What `weft.transport.memory.speeds` measured; `error` says what became of the rest, None where nothing did."""
    print("weft: measuring memory, wake-ups and links (--no-measure leaves it out)", file=sys.stderr, flush=True)
    # -P: a file in this directory that is called like a module of ours must not be taken for it.
    command = [sys.executable, "-P", "-m", "weft.transport.memory.speeds"]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # numpy's would start threads, and it forks
    error = None
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=MEASURE_SECONDS,
            check=False,
        )
        output = done.stdout
        if done.returncode:
            how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
            error = f"{how}: {done.stderr.decode(errors='replace').strip()[-LAST_CHARS:]}"
    except subprocess.TimeoutExpired as expired:
        output, error = expired.stdout or b"", f"no end within {MEASURE_SECONDS:.0f} s"
    return speeds_of(output) | {"error": error}


def speeds_of(output: bytes) -> Message:
    """One object of the lines that were written in full."""
    speeds: Message = {}
    gpus = []
    for line in output.splitlines(keepends=True):
        if not (line.startswith(b"{") and line.endswith(b"\n")):  # a library's chatter, or cut off
            continue
        part = json_text.loads(line)
        if "gpu" in part:
            gpus.append(part["gpu"])
        else:
            speeds |= part
    return speeds | {"gpus": gpus}


def report(facts: Facts, found: Sequence[Finding]) -> dict[str, Any]:
    """What `weft doctor --json` prints; docs/doctor.md describes it."""
    from dataclasses import asdict

    gathered = asdict(facts)
    presets = [asdict(fit) | {"runs": fit.runs} for fit in facts.presets]
    return {"version": VERSION, **gathered, "presets": presets, "findings": [asdict(finding) for finding in found]}
