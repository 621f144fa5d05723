"""What several verbs take: their arguments and options, and the spec that those of a job come to."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.spec.presets import AUTO, PRESETS

if TYPE_CHECKING:
    from weft.spec.job_spec import JobSpec

STDOUT = "-"  # for a FILE
Source = Annotated[
    Path,
    typer.Argument(
        metavar="SPEC",
        help="The job spec in TOML, or FILE.py[:FUNCTION] or MODULE:FUNCTION beside options for the rest.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Overrides a key of the spec; repeatable. strategy.preset=NAME replaces the spec's strategy.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Workers = Annotated[int | None, typer.Option(metavar="N", help="CPU workers; 0: one for each THREADS usable cores.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="Compute threads of each CPU worker.")]
StandIns = Annotated[int | None, typer.Option(metavar="N", help="GPU workers that compute on the CPU.")]
Gpus = Annotated[int | None, typer.Option(metavar="N", help="GPUs to use; by default all, or none beside stand-ins.")]
Loaders = Annotated[
    int | None, typer.Option(metavar="N", help="Workers that load data; at least one for each of the others.")
]
RunsDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Where run directories are made.")]
Metrics = Annotated[str | None, typer.Option(metavar="HOST:PORT", help='Address of /metrics; "" for none.')]
Profile = Annotated[
    int | None,
    typer.Option(metavar="N", help="Profile N iterations, for weft trace; --set profile.first=N: from which on."),
]
BatchSize = Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples in one global batch.")]
Epochs = Annotated[int | None, typer.Option(metavar="N", min=1, help="Passes over the training data; or give --steps.")]
StepsPerEpoch = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="What an epoch is in place of a pass over the training data.")
]
Steps = Annotated[int | None, typer.Option(metavar="N", min=1, help="Training steps; or give --epochs.")]
Seed = Annotated[int | None, typer.Option(metavar="N", min=0, help="Seed of the model, the data order and dropout.")]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A checkpoint to go on from, or a run directory: its newest."),
]
CheckpointEvery = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="EVERY", help="Write checkpoints: '500 steps', '1 epoch', '10 min'."),
]
Arg = Annotated[
    list[str] | None,
    typer.Option(
        "--arg", metavar="NAME=VALUE", help="An argument of the function that makes the workload; repeatable."
    ),
]
Stages = Annotated[int | None, typer.Option(metavar="N", min=1, help="Parts of the model, a worker for each.")]
Microbatches = Annotated[int | None, typer.Option(metavar="N", min=1, help="Parts of one batch.")]


def complete_preset(incomplete: str) -> list[str]:
    """What the shell offers."""
    return [name for name in (AUTO, *PRESETS) if name.startswith(incomplete)]


Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", autocompletion=complete_preset, help="The strategy, in place of the spec's own."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What the flags of a verb say of a job; None is not given."""

    batch_size: BatchSize = None
    epochs: Epochs = None
    steps: Steps = None
    steps_per_epoch: StepsPerEpoch = None
    seed: Seed = None
    resume: Resume = None
    checkpoint: CheckpointEvery = None
    arg: Arg = None
    stages: Stages = None
    microbatches: Microbatches = None
    preset: Preset = None
    profile: Profile = None
    set_: Set = None  # counts before the flags

    def overrides(self, source: Path) -> list[str]:
        """As `JobSpec.load` takes them. Errors: SpecError for an --arg without a value, and for what nobody says."""
        job = {name: getattr(self, name) for name in ("batch_size", "epochs", "steps", "steps_per_epoch", "seed")}
        job["resume_from"] = None if self.resume is None else self.resume.absolute()
        strategy = {name: getattr(self, name) for name in ("stages", "microbatches", "preset")}
        tables = {"job": job, "strategy": strategy, "profile": {"iterations": self.profile}}
        tables["checkpoint"] = {"every": self.checkpoint}
        flags = [
            f"{table}.{key}={value}"
            for table, keys in tables.items()
            for key, value in keys.items()
            if value is not None
        ]
        overrides = [*flags, *map(override_of_arg, self.arg or ()), *(self.set_ or ())]
        _check_says_enough(source, overrides)
        return overrides

    def load(self, source: Path) -> JobSpec:
        """The job that a source and the flags come to. Errors: SpecError."""
        from weft.plan.schedules.given import problem_of_job
        from weft.spec.job_spec import JobSpec, SpecError

        spec, replaced = JobSpec.load_replacing(source, self.overrides(source))
        if replaced:
            print(f"weft: preset {spec.strategy.preset} replaces {', '.join(replaced)} of {source}", file=sys.stderr)
        spec.check_files()
        _check_checkpoint(spec)
        if (problem := problem_of_job(spec)) is not None:
            raise SpecError(f"{source}: {problem}")
        return spec


def _check_checkpoint(spec: JobSpec) -> None:
    """That there is what the job is to go on from; whether it is whole and of this training shows when it is read.
    Errors: SpecError."""
    from weft.machine.checkpoint_files import CheckpointError, checkpoints, read_manifest
    from weft.spec.field_errors import SpecError

    if spec.job.resume_from is None:
        return
    path = Path(spec.directory, spec.job.resume_from)
    try:
        read_manifest((checkpoints(path) or [path.resolve()])[-1])
    except CheckpointError as error:
        raise SpecError(f"job.resume_from: {error}") from None


def takes_job_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as typer is to see it: with an option for each of `JobOptions` in the place of its parameter `told`."""
    signature = inspect.signature(verb, eval_str=True)
    options = inspect.signature(JobOptions, eval_str=True).parameters

    @functools.wraps(verb)
    def run(**given: Any) -> None:
        verb(told=JobOptions(**{name: given.pop(name) for name in options}), **given)

    seen: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        seen += options.values() if name == "told" else [parameter]
    run.__signature__ = signature.replace(parameters=seen)  # type: ignore[attr-defined]  # inspect looks for it
    return run


def override_of_arg(text: str) -> str:
    from weft.spec.field_errors import SpecError

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise SpecError(f"--arg {text!r:.80}: write NAME=VALUE, for example hidden=128")
    return f"job.args.{name}={value}"


def _check_says_enough(source: Path, overrides: Sequence[str]) -> None:
    """That all is given of what a Python file does not say. Errors: SpecError, which names the flags."""
    from weft.spec.field_errors import SpecError
    from weft.spec.job_spec import key_of
    from weft.spec.source import module_function, python_function, read_source

    given = {key_of(override) for override in overrides}
    missing = [] if ("job", "batch_size") in given else ["give --batch-size N, the samples in one global batch"]
    if given.isdisjoint([("job", "epochs"), ("job", "steps")]):
        missing.append("give --epochs N, passes over the training data, or --steps N, training steps")
    if missing and (module_function(source)[0] or python_function(source)[0]):
        read_source(source)  # that there is none is to be told first
        raise SpecError("\n".join(f"{source} does not say how to train it: {remedy}" for remedy in missing))
