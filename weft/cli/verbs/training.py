"""The verbs that begin a job: `run` and `submit`, and how a job that is followed ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn, TextIO

import typer

from weft.cli.exits import guarded, leave, of_interrupt, of_result, termination_raises
from weft.cli.verbs.options import (
    Gpus,
    JobOptions,
    Json,
    Metrics,
    RunsDir,
    Source,
    StandIns,
    Threads,
    Workers,
    takes_job_options,
)
from weft.client.client import Client
from weft.client.result import result_json, to_json
from weft.spec.source import working_directory
from weft.spec.strategy import Strategy
from weft.transport.wire.frames import Message


@guarded
@takes_job_options
def run(
    spec: Source,
    told: JobOptions,
    *,
    workers: Workers = None,
    threads: Threads = None,
    stand_ins: StandIns = None,
    gpus: Gpus = None,
    runs_dir: RunsDir = None,
    metrics: Metrics = None,
    json: Json = False,
    reference: Annotated[
        bool, typer.Option("--reference", help="Train by the plain PyTorch loop, in this process, instead.")
    ] = False,
) -> None:
    """Train one job here and now: start a daemon, run the job, stop the daemon.

    Of FILE.py the function `workload` is trained, and needs no TOML: weft run train.py --batch-size 100 --epochs 10.
    Where the spec has no [strategy] one is chosen, if the job is long enough for that; an empty table is one worker.
    Run directories are made in ./runs unless --runs-dir says otherwise. Without --workers there are as many as cores,
    or as the strategy needs, if that is more.
    """
    job_spec = told.load(spec)
    if reference:
        working_directory()  # before torch, which would end the process without one
        from weft.reference.run import run_reference
        from weft.spec.settings import load_settings

        compiled = load_settings({}, os.environ, None).compiled_path
        result = run_reference(job_spec, threads=threads or 1, runs_dir=runs_dir or Path("runs"), compiled=compiled)
        result |= {"error_told": True}  # on stderr
        shown: Message = {}
    else:
        from weft.client.embedded import Daemon
        from weft.client.foreground import run_in_foreground
        from weft.spec.candidates import or_auto

        job_spec = or_auto(job_spec)
        daemon = Daemon(
            workers=_enough(job_spec.strategy, threads, stand_ins) if workers is None else workers,
            threads=threads,
            stand_ins=stand_ins,
            gpus=gpus,
            loaders=job_spec.strategy.loaders,
            runs_dir=runs_dir,
            metrics=metrics or "",
        )
        with termination_raises(), daemon as client:
            result, shown = run_in_foreground(client, job_spec)
    finish(result, shown, json, sys.stdout)


def _enough(strategy: Strategy, threads: int | None, stand_ins: int | None) -> int | None:
    """CPU workers, where the job needs more than there are cores for; None otherwise."""
    from weft.client.embedded import workers_for
    from weft.spec.settings import load_settings

    usual = load_settings({"threads": threads, "stand_ins": stand_ins}, os.environ, None)
    needed = workers_for(strategy)
    return needed if needed and needed > usual.num_workers(len(os.sched_getaffinity(0))) else None


@guarded
@takes_job_options
def submit(
    spec: Source,
    told: JobOptions,
    *,
    id_: Annotated[
        str | None, typer.Option("--id", metavar="NAME", help="The job's id; submitting it again changes nothing.")
    ] = None,
    priority: Annotated[int | None, typer.Option(metavar="N", min=-1000, max=1000, help="Higher runs first.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow it to its end; Ctrl-C detaches.")] = False,
    json: Json = False,
) -> None:
    """Hand a job to the daemon and print its id."""
    job_spec = told.load(spec)
    client = Client()
    submitted = client.submit(job_spec, job=id_, priority=priority)
    job = submitted["job"]
    if json and not follow:
        print(to_json(submitted))
        return
    print(job, file=sys.stderr if json else sys.stdout, flush=True)
    if follow:
        finish(follow_job(client, job, log=sys.stderr), {}, json, sys.stderr)


def follow_job(client: Client, job: str, log: TextIO) -> Message:
    """Shows the job to its end; Ctrl-C leaves it alone and says how to come back to it."""
    from weft.client.follower import follow

    try:
        with termination_raises():
            return follow(client.follow(job), log=log)
    except KeyboardInterrupt as interrupt:
        leave(of_interrupt(interrupt), f"detached; the job goes on. Follow it again with: weft logs -f {job}")


def finish(result: Message, shown: Message, json: bool, stream: TextIO) -> NoReturn:
    """Prints the result, JSON always on stdout, and exits with the job's code."""
    if json:
        print(result_json(result))
    else:
        from weft.cli.screens.display import result_page
        from weft.client.console import make_console

        result_page(make_console(stream), result, shown)
    leave(of_result(result))
