"""Call: a job as a call from a script or a notebook. It blocks, shows how far it is, and returns what was trained.

def workload() -> weft.Workload: ...

if __name__ == "__main__":
    trained = weft.run(workload, batch_size=100, epochs=10, stages=2)
    trained.load_into(model)
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.client.client import Client, DaemonUnreachable
from weft.client.console import ended_sentence
from weft.client.embedded import Daemon, workers_for
from weft.client.entry import check_not_inside_an_entry, entry_of, taken_apart
from weft.client.foreground import run_in_foreground
from weft.client.trained import Trained
from weft.plan.schedules.given import problem_of_job
from weft.spec.field_errors import shown
from weft.spec.job_spec import JobSection, JobSpec, SpecError
from weft.spec.schedule_text import read_grid_file
from weft.spec.strategy import Strategy
from weft.transport.wire.frames import Message


class JobFailed(RuntimeError):
    """The job ended without a model. The text is what `weft run` prints; `result` has the reason and the files."""

    def __init__(self, result: Message) -> None:
        error = (result.get("error") or "").rstrip()
        super().__init__("\n".join(filter(None, (ended_sentence(result), error))))
        self.result = result


def run(
    workload: Callable[..., object],
    *,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    steps_per_epoch: int | None = None,
    seed: int = 0,
    args: Mapping[str, Any] | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    checkpoint_every: str | None = None,
    resume_from: Path | str | None = None,
    job: str | None = None,
    socket: Path | str | None = None,
    daemon: Daemon | None = None,
    **strategy: Any,
) -> Trained:
    """Trains what `workload(**args)` returns to the end, with progress on stderr. What interrupts it cancels the job.

    workload: a function at the top of a .py file, or one typed in a notebook that names nothing else defined there; or
    a `functools.partial` of one, whose values are arguments as those in args are. batch_size, epochs, steps,
    steps_per_epoch, seed: as in a spec's [job]; epochs or steps. stages, microbatches, strategy: axes of its
    [strategy]. checkpoint_every: such as "1 epoch". resume_from: a checkpoint to go on from, or the run directory of a
    job, whose newest it is then; a relative path begins where the script runs. job: an id for it. It runs in the daemon
    whose socket is given, in the `weft.Daemon(...)` that is given and started for it, else in the one that answers at
    the usual place, else in one of its own, with as many CPU workers and loaders as the strategy needs.

    Errors: SpecError for arguments that make no job, JobFailed for one that fails or is cancelled, and those of Client.
    """
    check_not_inside_an_entry()
    _check_names(strategy)
    _check_kinds(args, resume_from, socket, daemon)
    function, arguments = taken_apart(workload, args or {})
    given = {"stages": stages, "microbatches": microbatches} | strategy
    table = {
        "batch_size": batch_size,
        "epochs": epochs,
        "steps": steps,
        "steps_per_epoch": steps_per_epoch,
        "seed": seed,
        "args": arguments,
        "resume_from": None if resume_from is None else str(Path(resume_from).absolute()),
    }
    axes = {axis: value for axis, value in given.items() if value is not None}
    with entry_of(function) as (directory, entry):
        spec = _spec_of(directory, table | {"entry": entry}, axes, checkpoint_every)
        with _client(socket, daemon, spec.strategy) as client:
            result, _ = run_in_foreground(client, spec, job)
    if result["state"] != "completed":
        raise JobFailed(result)
    return Trained.of(result)


def _check_names(strategy: Mapping[str, Any]) -> None:
    """Errors: SpecError, a line for each keyword of `run` that is none."""
    own = [name for name, each in inspect.signature(run).parameters.items() if each.kind is each.KEYWORD_ONLY]
    known = [*own, *Strategy.model_fields]
    of_daemon = inspect.signature(Daemon).parameters
    of_spec = {*JobSpec.model_fields, *JobSection.model_fields} - {"strategy"}
    problems = []
    for name in strategy.keys() - known:
        if name in of_daemon:
            remedy = f"of a daemon; write daemon=weft.Daemon({name}=...)"
        elif name in of_spec:
            remedy = "of a job file; put all of the job in a weft.JobSpec, and submit that to a weft.Daemon"
        elif near := difflib.get_close_matches(name, known, n=1):
            remedy = f"unknown; did you mean {near[0]}?"
        else:
            remedy = (
                f"unknown; an argument of the function stands in args={{...}}, known here: {', '.join(sorted(known))}"
            )
        problems.append(f"weft.run: {name}: {remedy}")
    if problems:
        raise SpecError("\n".join(sorted(problems)))


def _check_kinds(args: object, resume_from: object, socket: object, daemon: object) -> None:
    """Of what is used before a spec is made of it. Errors: SpecError."""
    if not isinstance(args, Mapping | None):
        raise SpecError(f"weft.run: args: {shown(args)} is no dict; write for example args={{'hidden': 128}}")
    for name, path in {"resume_from": resume_from, "socket": socket}.items():
        if not isinstance(path, str | Path | None):
            raise SpecError(f"weft.run: {name}: {shown(path)} is no path; give a str or a pathlib.Path")
    if not isinstance(daemon, Daemon | None):
        raise SpecError(f"weft.run: daemon: {shown(daemon)} is no daemon; write for example weft.Daemon(workers=2)")


def _spec_of(directory: str, job: Mapping[str, Any], strategy: Mapping[str, Any], every: str | None) -> JobSpec:
    tables = {"job": _plain(job), "strategy": _plain(strategy), "directory": directory}
    tables |= {} if every is None else {"checkpoint": {"every": every}}
    read_grid_file(tables)
    spec = JobSpec.parse(tables, source="weft.run")
    if (problem := problem_of_job(spec)) is not None:
        raise SpecError(f"weft.run: {problem}")
    return spec


def _plain(value: Any) -> Any:
    """With Python's own numbers in the place of numpy's, which is what a script computes with."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value


@contextmanager
def _client(socket: Path | str | None, daemon: Daemon | None, strategy: Strategy) -> Iterator[Client]:
    if socket is not None and daemon is not None:
        raise SpecError("weft.run: socket names a daemon that runs, and daemon is one to be started; leave one out")
    running = Client(socket) if daemon is None else None
    if running is not None and (socket is not None or _answers(running)):
        yield running
        return
    with daemon or Daemon(workers=workers_for(strategy), loaders=strategy.loaders) as client:
        yield client


def _answers(client: Client) -> bool:
    try:
        client.status()
    except DaemonUnreachable:
        return False
    return True
