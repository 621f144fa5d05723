"""Jobs by chance, of all that a job file may say at once: a number is a job, the same on any day."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.plan.schedules.greedy import PATIENCE, OrderRule, greedy
from weft.plan.schedules.grid import drawn
from weft.plan.schedules.schedule import Pass
from weft.spec.admission import problem_of_crew, problem_of_spec
from weft.spec.field_errors import SpecError
from weft.spec.job_spec import JobSpec
from weft.spec.presets import AUTO, PRESETS
from weft.spec.schedule_text import SCHEDULE_NAMES

TESTS = Path(__file__).resolve().parent
CREW = ("cpu",) * 4 + ("gpu",) * 2 + ("loader",) * 6  # of the daemon that they are for

BATCH_SIZES = (1, 3, 8, 8, 8, 16, 19, 40)  # of 19 or 20 samples
WITH_RUNNING_STATISTICS = ("cnn", "resnet18", "unet")
OPTIMIZERS = ("adamw", "sgd", "plain sgd", "adagrad", "trusting", "decayed")
OFTEN, SELDOM = 0.25, 0.1
AXES: Mapping[str, Sequence[Any]] = {
    "recompute": (True, False),
    "window": (1, 2, 7, 40),
    "threads": (1, 2, "all"),
    "sync": ("coarse", "fine"),
    "waits": ("layer", "stage"),
    "staleness": (0, 1, 2),
    "staleness_warmup": (1, 3),
    "update": ("local", "cpu", "balanced"),
    "share": ("fixed", "adaptive", "stealing"),
    "bucket_mib": (1e-4, 5e-4, 2e-3),
    "prefetch": ({"load": 1}, {"load": 3, "transfer": 1}, {"transfer": 4}),
    "loaders": (2, 3),
    "resident": (True,),
    "clip_norm": (0.5, 1.0, 5.0, 1e9),
    "recovery": ("iteration", "snapshot", "off"),
    "spares": (True, False),
    "verify": ("digest", "replay"),
    "replan": (True, False),
    "skip_nonfinite": (True,),
}


def any_job(number: int, models: Sequence[str], classes: Sequence[str]) -> JobSpec:
    """models: of replica_jobs.py. classes: of any_models.py. All in float64."""
    return next(_jobs(random.Random(number), models, classes))


def any_models_job(number: int) -> JobSpec:
    """Of the model of that number in chance_models.py. Nobody steals there: some of them have running statistics."""
    chance = random.Random(number)
    entry = {"entry": "chance_models.py:workload", "args": {"number": number}}
    while True:
        tables = {"job": _how(chance) | entry, "strategy": _strategy(chance), "directory": str(TESTS)}
        try:
            spec = JobSpec.parse(tables)
        except SpecError:
            continue
        if (problem_of_spec(spec) or problem_of_crew(spec, CREW)) is None and spec.strategy.share != "stealing":
            return spec


def _jobs(chance: random.Random, models: Sequence[str], classes: Sequence[str]) -> Iterator[JobSpec]:
    """Those that are refused for what stands in them are left out."""
    while True:
        tables = {"job": _job(chance, models, classes), "strategy": _strategy(chance)}
        if tables["job"]["args"].get("model") == "singular":  # whose gradients are not all finite
            tables["strategy"]["skip_nonfinite"] = True
        if chance.random() < OFTEN:
            tables["checkpoint"] = {"every": chance.choice(("1 step", "4 steps", "1 epoch", "0.2 seconds"))}
        by_class = tables["job"]["entry"].startswith("any_models")
        directory = TESTS if by_class else TESTS / "integration"
        try:
            spec = JobSpec.parse(tables | {"directory": str(directory)})
        except SpecError:
            continue
        if (problem_of_spec(spec) or problem_of_crew(spec, CREW)) is None and not _is_of_chance(spec):
            yield spec


def _is_of_chance(spec: JobSpec) -> bool:
    """Running statistics are of the microbatches that the first replica has had, and who steals may have any."""
    named = {*map(str, spec.job.args.values())}
    return spec.strategy.share == "stealing" and not named.isdisjoint(WITH_RUNNING_STATISTICS)


def _job(chance: random.Random, models: Sequence[str], classes: Sequence[str]) -> dict[str, Any]:
    how = _how(chance)
    if chance.random() < OFTEN:
        args: dict[str, Any] = {"name": chance.choice(classes), "double": True}
        return how | {"entry": "any_models.py:workload", "args": args, "epochs": min(how["epochs"], 2)}
    args = {
        "model": chance.choice(models),
        "optimizer": chance.choice(OPTIMIZERS),
        "schedules": chance.random() < OFTEN,
    }
    return how | {"entry": "replica_jobs.py:workload", "args": args}


def _how(chance: random.Random) -> dict[str, Any]:
    how = {
        "batch_size": chance.choice(BATCH_SIZES),
        "epochs": chance.choice((1, 3, 3, 12)),
        "seed": chance.choice((0, 3)),
    }
    return how | {"mode": "forward"} if chance.random() < SELDOM else how


def _strategy(chance: random.Random) -> dict[str, Any]:
    strategy: dict[str, Any] = {}
    match chance.choice(("preset", "stages", "replicas", "tables", "tables")):
        case "preset":
            strategy["preset"] = chance.choice((*PRESETS, AUTO))
        case "stages":
            strategy["stages"] = chance.randint(1, 4)
        case "replicas":
            strategy |= {"replicas": chance.randint(2, 4), "stages": chance.choice((1, 1, 2))}
        case "tables":
            strategy["replicas"] = [_replica(chance) for _ in range(chance.choice((1, 1, 2, 2, 3)))]
    if chance.random() < 1 - OFTEN:
        strategy["microbatches"] = chance.randint(1, 6)
    if chance.random() < 0.5:
        strategy["schedule"] = chance.choice(SCHEDULE_NAMES)
    if "stages" in strategy and "microbatches" in strategy and chance.random() < OFTEN:
        strategy["schedule"] = _grid(chance, strategy["stages"], strategy["microbatches"])
    return strategy | {axis: chance.choice(values) for axis, values in AXES.items() if chance.random() < OFTEN}


def _grid(chance: random.Random, stages: int, microbatches: int) -> str:
    """Some backwards whole, some in parts."""
    times: dict[Pass, float] = {}
    rule = OrderRule(
        limits=tuple(chance.randint(1, 6) for _ in range(stages)),
        whole=chance.choice((None, *range(microbatches))),
        patience=chance.choice(PATIENCE),
    )
    made = greedy(stages, microbatches, lambda each: times.setdefault(each, chance.choice((0.0, 1.0, 3.0))), rule)
    return drawn(made, "by chance")


def _replica(chance: random.Random) -> dict[str, Any]:
    replica: dict[str, Any] = {"device": chance.choice(("cpu", "gpu"))}
    if chance.random() < 0.5:
        replica["microbatches"] = chance.randint(1, 5)
    if replica["device"] == "cpu":
        return replica | {"stages": chance.choice((1, 1, 2, 3, 4))}
    if chance.random() < OFTEN:
        return replica | {"working_window": chance.choice((1, 2, "auto"))}
    replica["stages"] = chance.choice((1, 2, 3, 4, "all"))
    if replica["stages"] not in (1, "all") and chance.random() < 0.5:
        replica["gpus"] = chance.choice((1, 2))
    return replica
