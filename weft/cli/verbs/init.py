"""The verb `weft init`: a job file for a model that it is shown."""

from __future__ import annotations

import json as json_text
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.exits import guarded, leave, termination_raises
from weft.cli.verbs.options import Arg, override_of_arg
from weft.spec.source import working_directory
from weft.transport.wire.frames import Message


@guarded
def init(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="FILE.py[:FUNCTION] or MODULE:FUNCTION: what makes the workload.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="By default FILE.toml beside FILE.py.")
    ] = None,
    arg: Arg = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    print_: Annotated[bool, typer.Option("--print", help="Print the file on stdout, and write none.")] = False,
) -> None:
    """Write a job file for a model: every key with what it is for, and those that the model asks for filled in.

    The function is called once, in a process of its own, to count parameters, units and samples.
    """
    from weft.cli.screens.job_file import JobFile
    from weft.spec.field_errors import SpecError

    file, function, directory = _python_file(source)
    path = output or Path(directory, f"{Path(file).stem}.toml")
    if path.exists() and not (force or print_):
        raise SpecError(f"{path}: is there already; give --force to write over it, or another file with -o")
    home = path.absolute().parent
    if not home.is_dir():
        raise SpecError(f"{path}: its directory is not there; make it, or give another file with -o")
    entry = f"{os.path.relpath(file, home)}:{function}"
    args = _arguments(arg or ())
    facts = described(entry, str(home), args)
    made = JobFile(entry=entry, args=args, facts=facts, num_cores=len(os.sched_getaffinity(0)))
    text = made.text(path.name)
    print(f"weft: {made.headline()}", file=sys.stderr)
    if print_:
        sys.stdout.write(text)
        return
    from weft.cli.recordings.whole_file import write_whole

    write_whole(path, [text.encode()])
    print(path)


def _python_file(source: str) -> tuple[str, str, str]:
    """The file that a source names, its function, and where the job file goes. Errors: SpecError."""
    from weft.spec.field_errors import SpecError
    from weft.spec.source import module_function, python_function, read_source

    file, function = module_function(source)
    if file:
        return file, function, ""
    file, function = python_function(source)
    if not file:
        raise SpecError(
            f"{source}: no such module below this directory; give FILE.py, FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    read_source(source)
    return file, function, os.path.dirname(file)


def _arguments(given: Sequence[str]) -> Mapping[str, Any]:
    from weft.spec.job_spec import apply_override

    tables: dict[str, Any] = {"job": {"args": {}}}
    for text in given:
        apply_override(tables, override_of_arg(text))
    args: Mapping[str, Any] = tables["job"]["args"]
    return args


def described(entry: str, directory: str, args: Mapping[str, Any]) -> Message:
    """What `weft.workload.description` tells. Ends the command with the sentence of a workload that cannot be had."""
    from weft.spec.job_spec import JobSpec

    working_directory()  # before torch, which would end its process without one
    job = {"entry": entry, "args": args, "batch_size": 1, "steps": 1}
    spec = JobSpec.parse({"job": job, "directory": directory}, source="weft init")
    print(f"weft: calling {spec.entry_function} of {spec.entry_file}", file=sys.stderr, flush=True)
    # -P: a file in this directory that is called like a module of ours must not be taken for it.
    command = [sys.executable, "-P", "-m", "weft.workload.description", json_text.dumps(spec.to_wire())]
    with termination_raises():  # or the process would go on without anybody to tell
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if not done.stdout:
        how = f"exit code {done.returncode}" if done.returncode >= 0 else f"signal {-done.returncode}"
        leave(1, f"the process that called {spec.entry_function} died ({how}); what it last wrote stands above")
    facts: Message = json_text.loads(done.stdout)
    if "error" in facts:
        leave(facts["exit_code"], facts["error"])
    return facts
