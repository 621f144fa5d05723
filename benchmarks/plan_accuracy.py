"""Plans against real runs: what `weft plan` predicts of an iteration, what it then takes, and whether auto chose well.

Four models, each by the same plans, and by the one that auto chooses. Each plan is predicted, from an inspection
of its own, and then run at once, on the same daemon, so a machine that is slow for a while is slow for both; and so
again, some turns later. An error is |ratio - 1| of the median of a plan's ratios, predicted ÷ measured median
iteration: what the planner gets wrong. What a single prediction is off by has the machine's own changes in it and
stands beside that. With compiled units it is asked whether auto chooses well that may compile them
(`compile = "auto"`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measure import Result, main, value_result

import weft.client.embedded
from weft.client.client import Client
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
TURNS = 5
STEPS, QUICK_STEPS = 40, 8
ASKED_STEPS = 1_000_000  # planned for: kernels are made for a long job alone
GPT = {"layers": 4, "dim": 128, "heads": 2, "context": 64, "vocabulary": 1024, "samples": 128}
ONE_PROCESS = "one process"
COMPILED: Mapping[str, Any] = {"threads": "all", "compile": True}
LEFT_OPEN: Mapping[str, Any] = {"preset": "auto", "compile": "auto"}
PLANS: Mapping[str, Mapping[str, Any]] = {
    ONE_PROCESS: {"threads": "all"},
    "1f1b": {"stages": 2, "microbatches": 4},
    "zero-bubble": {"stages": 2, "microbatches": 8, "schedule": "zero-bubble"},
    "replicas": {"replicas": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    entry: str
    args: Mapping[str, Any]
    batch_size: int


MODELS = (
    Model(name="gpt", entry="gpt_job.py:workload", args=GPT, batch_size=16),
    Model(name="gpt_own_forward", entry="any_model_job.py:workload", args=GPT, batch_size=16),
    Model(name="wide_mlp", entry="wide_mlp_job.py:workload", args={"width": 1024, "samples": 512}, batch_size=128),
    Model(name="resnet", entry="resnet_job.py:workload", args={"samples": 64, "width": 32}, batch_size=16),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    predicted_seconds: float
    seconds: float

    @property
    def ratio(self) -> float:
        return self.predicted_seconds / self.seconds


def collect(quick: bool) -> list[Result]:
    turns, steps = (1, QUICK_STEPS) if quick else (TURNS, STEPS)
    ratios: dict[tuple[str, str], list[float]] = {}
    against_best: list[float] = []
    against_one: list[float] = []
    against_compiled: list[float] = []
    cores = len(os.sched_getaffinity(0))
    os.environ["WEFT_KEEP_INSPECTIONS"] = "false"
    with weft.client.embedded.Daemon(
        workers=max(2, cores), threads=1, runs_dir=tempfile.mkdtemp(prefix="weft-bench-")
    ) as client:
        for _ in range(turns):
            for model in MODELS:
                ran = {name: _plan_and_run(client, model, axes, steps) for name, axes in PLANS.items()}
                auto = _plan_and_run(client, model, {"preset": "auto"}, steps)
                for name, each in (*ran.items(), ("auto", auto)):
                    ratios.setdefault((model.name, name), []).append(each.ratio)
                against_best.append(auto.seconds / min(each.seconds for each in (*ran.values(), auto)))
                against_one.append(ran[ONE_PROCESS].seconds / auto.seconds)
                compiled, left_open = (_plan_and_run(client, model, axes, steps) for axes in (COMPILED, LEFT_OPEN))
                against_compiled.append(compiled.seconds / left_open.seconds)
    by_plan = {where: abs(median(found) - 1) for where, found in ratios.items()}
    how = f"|ratio - 1| over {len(by_plan)} plans of {len(MODELS)} models, of the median of each plan's {turns} ratios"
    worst = max(by_plan, key=lambda where: by_plan[where])
    return [
        value_result("median_error", list(by_plan.values()), "of 1", goal="<= 0.05", how=how),
        value_result(
            "worst_error", [by_plan[worst]], "of 1", goal="<= 0.15", how=f"the largest of these: {' by '.join(worst)}"
        ),
        value_result(
            "single_error",
            [abs(ratio - 1) for found in ratios.values() for ratio in found],
            "of 1",
            how="of one prediction and one run each",
        ),
        value_result(
            "auto_vs_best",
            against_best,
            "x",
            goal="<= 1.03",
            how=f"measured iteration of auto ÷ the shortest of {', '.join(PLANS)} and itself",
        ),
        value_result(
            "auto_vs_one_process",
            against_one,
            "x",
            goal=">= 1.0",
            how=f"measured iteration of one process with all {cores} threads ÷ that of auto",
        ),
        value_result(
            "auto_vs_one_process_compiled",
            against_compiled,
            "x",
            goal=">= 1.0",
            how="the same, the one process with compiled units, and auto with compile = 'auto', asked of a long job",
        ),
        *(
            value_result(
                "_".join((*where, "predicted")).replace(" ", "_").replace("-", "_"),
                found,
                "x",
                how="predicted ÷ measured iteration",
            )
            for where, found in ratios.items()
        ),
    ]


def _plan_and_run(client: Client, model: Model, axes: Mapping[str, Any], steps: int) -> Ran:
    job = {
        "entry": model.entry,
        "args": dict(model.args),
        "steps": steps,
        "batch_size": model.batch_size,
        "seed": 1,
    }
    spec = JobSpec.parse({"job": job, "strategy": dict(axes), "directory": str(HERE)})
    long = spec.model_copy(update={"plan_for": "time", "job": spec.job.model_copy(update={"steps": ASKED_STEPS})})
    asked = client.submit(long)["job"]
    client.wait(asked, timeout=600)
    planned = client.show(asked)["planned"]
    assert planned is not None, client.show(asked)
    chosen = JobSpec.parse(spec.to_wire() | {"strategy": planned["strategy"]})
    result = client.wait(client.submit(chosen)["job"], timeout=600)
    assert result["state"] == "completed", result
    return Ran(predicted_seconds=planned["predicted_iteration_seconds"], seconds=result["iteration_seconds"])


if __name__ == "__main__":
    main("plan_accuracy", collect)
