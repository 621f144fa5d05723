"""What-if against real runs: a job runs, `what_if` predicts a change from its recording, and the changed job runs.

An error is |predicted ÷ measured - 1| of the changed job's median iteration. Both jobs of a turn run one
after another on the same daemon, so a machine that is slow for a while is slow for both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import Result, main, value_result

import weft.client.embedded
from weft.client.client import Client
from weft.metrics.recording.recording import Recording
from weft.scheduler.whatif.answer import what_if
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
GOAL = "<= 0.10"
TURNS = 7
GPT = {"layers": 4, "dim": 128, "heads": 2, "context": 64, "vocabulary": 1024, "samples": 128}
SLOWER = 3.0  # times; what is planted in one worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job, a change of it as --set has it, and the changed job's strategy and arguments."""

    name: str
    entry: str
    args: Mapping[str, Any]
    strategy: Mapping[str, Any]
    settings: tuple[str, ...]
    then: Mapping[str, Any] = field(default_factory=dict)
    then_args: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 16
    steps: int = 40
    goal: str | None = GOAL


def _gpt(name: str, strategy: Mapping[str, Any], then: Mapping[str, Any], **changes: Any) -> Case:
    return Case(
        name=name,
        entry="gpt_job.py:workload",
        args=GPT,
        strategy=strategy,
        settings=tuple(f"strategy.{axis}={value}" for axis, value in then.items()),
        then=then,
        **changes,
    )


def _spin(name: str, strategy: Mapping[str, Any], times: float) -> Case:
    return Case(
        name=name,
        entry="spin_job.py:workload",
        args={},
        strategy=strategy,
        settings=(f"workers.cpu-1.speed={1 / times}",),
        then_args={"slow_worker": "cpu-1", "times": times},
        batch_size=32,
        steps=60,
    )


PIPELINE = {"stages": 2, "microbatches": 4, "schedule": "1f1b"}
CASES = (
    _gpt("microbatches_error", PIPELINE, {"microbatches": 8}),
    _gpt("fewer_microbatches_error", PIPELINE, {"microbatches": 1}),
    _gpt("schedule_error", PIPELINE | {"schedule": "gpipe"}, {"schedule": "1f1b"}),
    _gpt("stages_error", PIPELINE, {"stages": 1}),
    _gpt("more_stages_error", PIPELINE | {"stages": 1}, {"stages": 2}),
    _spin("speed_error", PIPELINE, SLOWER),
    _spin("replica_speed_error", {"replicas": 2, "microbatches": 2}, SLOWER),
    _gpt("replicas_error", {"microbatches": 4}, {"replicas": 2, "microbatches": 2}, goal=None),
)


def collect(quick: bool) -> list[Result]:
    errors: dict[str, list[float]] = {case.name: [] for case in CASES}
    baselines: list[float] = []
    unpredicted = 0
    with weft.client.embedded.Daemon(workers=2, threads=1, runs_dir=tempfile.mkdtemp(prefix="weft-bench-")) as client:
        for _ in range(1 if quick else TURNS):
            for case in CASES:
                answer = what_if(_record(client, case, case.strategy, case.args), case.settings)
                changed = _record(client, case, {**case.strategy, **case.then}, {**case.args, **case.then_args})
                if answer.predicted_seconds is None:
                    unpredicted += 1
                else:
                    errors[case.name].append(abs(answer.predicted_seconds / what_if(changed).measured_seconds - 1))
                baselines.append(abs(answer.baseline_error))
    results = [
        value_result(case.name, errors[case.name], "of 1", goal=case.goal, how=_how(case))
        for case in CASES
        if errors[case.name]
    ]
    how = "answers without a prediction, since the simulation was too far from the recorded job"
    results.append(value_result("unpredicted", [float(unpredicted)], "answers", how=how))
    how = "|simulated ÷ measured - 1| of the recorded jobs themselves, all rows; the prediction does without it"
    return [*results, value_result("baseline_error", baselines, "of 1", how=how)]


def _how(case: Case) -> str:
    ran = ", ".join(f"{axis} {value}" for axis, value in case.strategy.items())
    of = "GPT " + ", ".join(f"{k} {v}" for k, v in GPT.items()) if "gpt" in case.entry else "units of a planted time"
    return f"|predicted ÷ measured - 1|; {of}; ran with {ran}; asked for {' '.join(case.settings)}"


def _record(client: Client, case: Case, strategy: Mapping[str, Any], args: Mapping[str, Any]) -> Recording:
    spec = JobSpec.parse(
        {
            "job": {
                "entry": case.entry,
                "args": dict(args),
                "steps": case.steps,
                "batch_size": case.batch_size,
                "seed": 1,
            },
            "strategy": dict(strategy),
            "directory": str(HERE),
        }
    )
    job = client.submit(spec)["job"]
    result = client.wait(job, timeout=600)
    assert result["state"] == "completed", result
    return Recording.load(client.record(job))


if __name__ == "__main__":
    main("whatif", collect)
