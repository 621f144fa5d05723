"""The verbs of the `weft` command. stdout is data, stderr is progress; exit codes are those of `weft.cli.exits`.

A verb imports what it needs when it runs, and no verb but `run --reference` imports torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft.cli.exits import guarded, leave, of_result, termination_raises
from weft.cli.screens.ledger_trouble import ledger_trouble
from weft.cli.verbs.completion import complete_job, complete_live_job, completion
from weft.cli.verbs.doctor import doctor
from weft.cli.verbs.ended_jobs import restart, resume, rm
from weft.cli.verbs.init import init
from weft.cli.verbs.job_list import list_jobs
from weft.cli.verbs.options import (
    Arg,
    BatchSize,
    Epochs,
    Gpus,
    JobOptions,
    Json,
    Loaders,
    Metrics,
    RunsDir,
    Seed,
    Set,
    Source,
    StandIns,
    Threads,
    Workers,
)
from weft.cli.verbs.plan import plan
from weft.cli.verbs.recordings import plot, trace
from weft.cli.verbs.replacing import replace_daemon
from weft.cli.verbs.schedule import schedule
from weft.cli.verbs.top import top
from weft.cli.verbs.training import finish, follow_job, run, submit
from weft.cli.verbs.whatif import whatif
from weft.client.client import Client
from weft.client.result import to_json
from weft.spec.presets import AUTO, PRESETS
from weft.transport.wire.frames import Message
from weft.version import __version__


class _Verbs(TyperGroup):
    """Help and version are printed while the line is read, before a verb is guarded."""

    make_context = guarded(TyperGroup.make_context)

    @guarded
    def invoke(self, ctx: Any) -> Any:
        return super().invoke(ctx)


app = typer.Typer(
    name="weft",
    cls=_Verbs,
    help="Trains deep networks on every core and GPU of this machine, and shows where the time went.",
    no_args_is_help=True,
    add_completion=False,  # a verb has it
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Job = Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete_job, help="The job's id.")]
LiveJob = Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete_live_job, help="The job's id.")]

app.command(epilog="Example: weft run digits.toml --set strategy.stages=2 --workers 2")(run)


def _complete_presets(incomplete: str) -> list[str]:
    """What the shell offers: the list so far with each name that its last one may become."""
    begun, comma, last = incomplete.rpartition(",")
    return [f"{begun}{comma}{name}" for name in ("as-is", AUTO, *PRESETS) if name.startswith(last)]


@app.command(epilog="Example: weft compare digits.toml --presets 1f1b,ddp,hybrid-fine --check")
@guarded
def compare(
    spec: Source,
    presets: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            autocompletion=_complete_presets,
            help="In this order; as-is (or none): the spec as it stands. By default every preset.",
        ),
    ] = None,
    set_: Set = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Training steps of each job, instead of the spec's.")
    ] = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    seed: Seed = None,
    arg: Arg = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also say whether the final losses agree with the first one's.")
    ] = False,
    workers: Workers = None,
    threads: Threads = None,
    stand_ins: StandIns = None,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Train one job under several presets, one after another, and compare where the time went.

    A preset replaces the spec's own strategy, as --set strategy.preset=NAME does, and --set counts before it. Unless
    --workers and --stand-ins say otherwise, each preset has as many workers as it needs. Ctrl-C cancels the running job
    and prints the table so far.
    """
    from weft.cli.comparing.compare import DaemonOptions, comparison, run_trials, set_agreement, tell_what_differs
    from weft.cli.comparing.trial import make_trials

    names = list(PRESETS) if presets is None else [name.strip() for name in presets.split(",")]
    told = JobOptions(steps=steps, batch_size=batch_size, epochs=epochs, seed=seed, arg=arg, set_=set_)
    trials = make_trials(spec, told.overrides(spec), names)
    options = DaemonOptions.of(workers=workers, threads=threads, stand_ins=stand_ins, runs_dir=runs_dir)
    tell_what_differs(trials, options)
    rows: list[Message] = []
    try:
        with termination_raises():
            run_trials(trials, options, rows)
    finally:
        if check:
            set_agreement(trials, rows)
        _print_comparison(comparison(spec, trials, rows), check, json)
    leave(0 if any(row["state"] == "completed" for row in rows) else 1)


@app.command(epilog="Example: weft daemon --workers 4 --metrics 127.0.0.1:9464")
@guarded
def daemon(
    workers: Workers = None,
    threads: Threads = None,
    stand_ins: StandIns = None,
    gpus: Gpus = None,
    loaders: Loaders = None,
    runtime_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the socket is made.")] = None,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the ledger is kept.")] = None,
    runs_dir: RunsDir = None,
    metrics: Metrics = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="By default ./weft.toml, if any.")] = None,
    drain_seconds: Annotated[float | None, typer.Option(metavar="S", help="Budget of a drain at SIGTERM.")] = None,
    accept_empty_ledger: Annotated[
        bool, typer.Option("--accept-empty-ledger", help="Start although the ledger is lost, without its jobs.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Have the daemon that runs go on as this Weft; its jobs train on meanwhile."),
    ] = False,
    tell_shape: Annotated[bool, typer.Option("--tell-shape", hidden=True)] = False,
    parent: Annotated[int | None, typer.Option(metavar="PID", help="Stop when it ends.", hidden=True)] = None,
    home: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Remove it in the end, should the parent be gone.", hidden=True)
    ] = None,
) -> None:
    """Run the daemon in the foreground until SIGTERM.

    With --replace, the one that runs becomes this Weft, with the settings that it has: after an upgrade, for example.
    """
    flags: dict[str, object] = {"workers": workers, "threads": threads, "stand_ins": stand_ins, "metrics": metrics}
    flags |= {
        "gpus": gpus,
        "loaders": loaders,
        "runtime_dir": runtime_dir,
        "state_dir": state_dir,
        "runs_dir": runs_dir,
        "drain_seconds": drain_seconds,
    }
    if replace:
        return replace_daemon(flags | {"config": config})
    if tell_shape:
        from weft.scheduler.daemon.replacing.shape import shape

        return _print_json({"version": __version__, "shape": shape()})
    from weft.client.embedded import ending_with

    with contextlib.nullcontext() if parent is None else ending_with(parent, home):
        raise SystemExit(_serve(flags, config, accept_empty_ledger))


def _serve(flags: dict[str, object], config: Path | None, accept_empty_ledger: bool) -> int:
    """The handover comes first: where it cannot be read, every descriptor is closed that this process has by then."""
    from weft.scheduler.daemon.replacing.handover import Handover

    handover = Handover.inherited(os.environ)
    handed = None if handover is None else handover.settings()
    from weft.scheduler.daemon.daemon import main as daemon_main
    from weft.spec.settings import load_settings

    settings = load_settings(flags, os.environ, config) if handed is None else handed
    return daemon_main(settings, accept_empty_ledger=accept_empty_ledger, handover=handover)


app.command(epilog="Example: weft submit digits.toml --set job.seed=8 --id digits-seed-8 -f")(submit)


@app.command(epilog="Example: weft ps --all --json")
@guarded
def ps(all_: Annotated[bool, typer.Option("--all", help="Finished jobs too.")] = False, json: Json = False) -> None:
    """List the jobs that wait or run."""
    list_jobs(finished=all_, json=json)


@app.command(epilog="Example: weft show digits-1 --time")
@guarded
def show(
    job: Job,
    time_: Annotated[
        bool, typer.Option("--time", help="Say where its time went: lanes, stalls, overlap, critical path.")
    ] = False,
    json: Json = False,
) -> None:
    """Say what a job does or why it waits, its plan, and where its time went."""
    shown = Client().show(job, path=time_)
    if time_:
        from weft.cli.screens.time_summary import time_summary

        summary = time_summary(shown)
        if json:
            return _print_json(summary)
        from weft.cli.screens.time_display import time_page
        from weft.client.console import make_console

        return time_page(make_console(sys.stdout), summary)
    if json:
        return _print_json(shown)
    from weft.cli.screens.display import show_page
    from weft.client.console import make_console

    return show_page(make_console(sys.stdout), shown, time.time())


@app.command(epilog="Example: weft logs -f digits-1")
@guarded
def logs(
    job: Job,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow it, with progress on stderr; Ctrl-C detaches.")
    ] = False,
) -> None:
    """Print a job's log so far, or follow it to the job's end."""
    client = Client()
    if not follow:
        for text in client.log(job):
            sys.stdout.write(text)
        return
    leave(of_result(follow_job(client, job, log=sys.stdout)))


@app.command(epilog="Example: weft wait digits-1 --timeout 600 --json")
@guarded
def wait(
    job: Job,
    timeout: Annotated[float | None, typer.Option(metavar="S", min=0.0, help="Give up (exit code 124).")] = None,
    json: Json = False,
) -> None:
    """Wait for a job's end and exit with its exit code."""
    finish(Client().wait(job, timeout), {}, json, sys.stdout)


@app.command(epilog="Example: weft cancel digits-1")
@guarded
def cancel(
    job: LiveJob,
    discard: Annotated[bool, typer.Option("--discard", help="Leave no checkpoint.")] = False,
    json: Json = False,
) -> None:
    """Stop a job. Its newest snapshot is written as a checkpoint, from which `weft resume` goes on.

    That is of a moment before; `weft pause` loses no step.
    """
    state = Client().cancel(job, discard=discard)
    _print_json({"job": job, "state": state}) if json else print(state)


@app.command(epilog="Example: weft pause digits-1")
@guarded
def pause(job: LiveJob, json: Json = False) -> None:
    """Stop a job at the end of an iteration, and free its workers and memory, until `weft resume` goes on with it.

    What it has come to goes to the disk. It stays paused over restarts of the daemon, and loses no step. Where the disk
    does not take that, this ends with 74: it stays in memory, and is tried again.
    """
    state = Client().pause(job)
    _print_json({"job": job, "state": state}) if json else print(state)


@app.command(epilog="Example: weft status")
@guarded
def status(json: Json = False) -> None:
    """Describe the daemon: its workers, how many jobs are in each state, where its metrics are."""
    answer = Client().status()
    for line in ledger_trouble(answer.get("ledger")):
        print(f"weft: {line}", file=sys.stderr)
    if json:
        return _print_json(answer)
    from weft.cli.screens.display import status_page
    from weft.client.console import make_console

    return status_page(make_console(sys.stdout), answer)


app.command(epilog="Example: weft restart digits-1")(restart)
app.command(epilog="Example: weft resume digits-1")(resume)
app.command(epilog="Example: weft rm --older-than 30d --dry-run")(rm)
app.command(epilog="Example: weft top digits-1 --interval 2")(top)
app.command(epilog="Example: weft trace digits-1 -o trace.json --svg digits.svg")(trace)
app.command(epilog="Example: weft plot digits-1 -o digits.png")(plot)
app.command(epilog="Example: weft whatif digits-1 --set workers.cpu-1.speed=2 --set strategy.microbatches=8")(whatif)
app.command(epilog="Example: weft plan digits.toml --set strategy.preset=auto")(plan)
app.command(epilog="Example: weft schedule 1f1b --stages 4 --microbatches 8 > my.grid")(schedule)
app.command(epilog="Example: weft doctor --no-measure")(doctor)
app.command(epilog="Example: weft init train.py && weft run train.toml")(init)
app.command(epilog="Example: weft completion bash --install")(completion)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _print_comparison(compared: Message, check: bool, json: bool) -> None:
    if json:
        return _print_json(compared)
    from weft.cli.screens.display import comparison_page
    from weft.client.console import make_console

    return comparison_page(make_console(sys.stdout), compared, check=check)


def _print_json(value: Message) -> None:
    print(to_json(value))
