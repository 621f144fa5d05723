"""The jobs of a soak: small, of every preset and of several kinds of models, and what each comes to undisturbed.

A job sleeps in its loss, so it lasts about as long on a machine with much else to do, and leaves that its cores.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.spec.job_spec import JobSpec
from weft.spec.presets import PRESETS

TESTS = Path(__file__).resolve().parents[1]
_RECOVERY = runpy.run_path(str(TESTS / "integration" / "test_recovery.py"))
_REPLANNING = runpy.run_path(str(TESTS / "integration" / "test_replanning.py"))
PAUSE_SECONDS = 0.004  # in each call of the loss
STEPS = 160
EPOCHS = 40  # of models of any class, which have three steps in each

# Training as the tests of recovery have it, with a pause in the workload and in each call of the loss, and a statement
# that one call runs: 0 is the workload's.
_CHANGES = {
    "def workload(": "def workload(pause=0.0, fault='', fault_at=-1, ",
    "    torch.manual_seed(5)\n": (
        "    time.sleep(40 * pause)\n    exec(fault * (fault_at == 0))\n    torch.manual_seed(5)\n"
    ),
    "        calls += 1\n": (
        "        calls += 1\n        time.sleep(pause)\n        exec(fault * (calls == fault_at))\n"
    ),
}
PACED: str = _RECOVERY["SOURCE"]
for _old, _new in _CHANGES.items():
    assert PACED.count(_old) == 1, _old
    PACED = PACED.replace(_old, _new)


PACED_ARGUMENTS = {"pause": PAUSE_SECONDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakJob:
    strategy: Mapping[str, Any]
    model: str | None = None  # a name of tests/any_models.py; None: the source's
    source: str = PACED
    steps: int = STEPS
    arguments: Mapping[str, Any] = field(default_factory=lambda: PACED_ARGUMENTS)  # of the source
    tables: Mapping[str, Any] = field(default_factory=dict)  # others of the spec

    def spec(self, daemon: Any) -> JobSpec:
        if self.model is None:
            spec: JobSpec = daemon.spec(self.source, strategy=self.strategy, steps=self.steps, args=self.arguments)
            return JobSpec.parse(spec.to_wire() | dict(self.tables))
        job = {"entry": "any_models.py:workload", "args": {"name": self.model}, "batch_size": 8, "epochs": EPOCHS}
        tables = {"job": job | {"seed": 11}, "strategy": dict(self.strategy), "directory": str(TESTS)}
        return JobSpec.parse(tables | dict(self.tables))


TWO_STAGES = {"stages": 2, "microbatches": 2}
EVERY_40 = {"checkpoint": {"every": "40 steps"}}
WIDE = PACED_ARGUMENTS | _RECOVERY["WIDE"]  # so wide that snapshots are copied beside lanes
FIXED = {"share": "fixed"}  # shares that are measured are others each time, and so are the bits

_OF_PRESETS = {
    name: SoakJob(strategy={"preset": name, "microbatches": 1 if name == "model-parallel" else 2} | FIXED)
    for name in PRESETS
}
_OTHERS = {
    "one stage": SoakJob(strategy={"microbatches": 2}),
    "pipeline": SoakJob(strategy=TWO_STAGES),
    "recompute": SoakJob(strategy=TWO_STAGES | {"recompute": True, "schedule": "gpipe"}),
    "central dispatch": SoakJob(strategy=TWO_STAGES | {"window": 1}),
    "clipped replicas": SoakJob(strategy={"replicas": 2, "microbatches": 2, "clip_norm": 0.1}),
    "clipped pipeline": SoakJob(strategy=TWO_STAGES | {"clip_norm": 0.1, "split": [4]}),
    "small buckets": SoakJob(strategy={"replicas": 2, "microbatches": 2, "bucket_mib": 1e-4}),
    "several loaders": SoakJob(strategy=TWO_STAGES | {"loaders": 2}),
    "each iteration, pipeline": SoakJob(strategy=TWO_STAGES | {"recovery": "iteration"}, tables=EVERY_40),
    "each iteration, replicas": SoakJob(
        strategy={"replicas": 2, "microbatches": 2, "clip_norm": 0.1, "recovery": "iteration"}
    ),
    "each iteration, replayed": SoakJob(strategy=TWO_STAGES | {"recovery": "iteration", "verify": "replay"}),
    "each iteration, offloaded": SoakJob(
        strategy={"preset": "zero-offload", "microbatches": 2, "recovery": "iteration"}
    ),
    "without recovery": SoakJob(strategy=TWO_STAGES | {"recovery": "off"}),
    "a pipeline of devices": SoakJob(strategy={"replicas": [{"device": "gpu", "stages": 2}], "microbatches": 2}),
    "checkpoints, one stage": SoakJob(strategy={"microbatches": 2}, tables=EVERY_40),
    "checkpoints, pipeline": SoakJob(strategy=TWO_STAGES, tables=EVERY_40),
    "checkpoints, offload": SoakJob(strategy={"preset": "zero-offload", "microbatches": 2}, tables=EVERY_40),
    "checkpoints, clipped replicas": SoakJob(
        strategy={"replicas": 2, "microbatches": 2, "clip_norm": 0.1}, tables=EVERY_40
    ),
    "wide, one stage": SoakJob(strategy={"microbatches": 2}, arguments=WIDE, tables=EVERY_40),
    "wide, pipeline": SoakJob(strategy=TWO_STAGES, arguments=WIDE),
    "wide, clipped replicas": SoakJob(
        strategy={"replicas": 2, "microbatches": 2, "clip_norm": 0.1}, arguments=WIDE, tables=EVERY_40
    ),
    "verified, one stage": SoakJob(strategy={"microbatches": 2, "verify": "digest"}),
    "verified, pipeline": SoakJob(strategy=TWO_STAGES | {"verify": "digest"}),
    "verified, clipped": SoakJob(strategy={"microbatches": 2, "clip_norm": 0.1, "verify": "digest"}),
    "replayed, pipeline": SoakJob(strategy=TWO_STAGES | {"verify": "replay"}),
    "replayed, replicas": SoakJob(strategy={"replicas": 2, "microbatches": 2, "verify": "replay"}),
    "model mlp": SoakJob(strategy=TWO_STAGES, model="mlp"),
    "model unet": SoakJob(strategy=TWO_STAGES, model="unet", tables=EVERY_40),
    "model lstm": SoakJob(strategy={"microbatches": 2}, model="lstm"),
    "model vae": SoakJob(strategy=TWO_STAGES | {"recompute": True}, model="vae"),
    "model gated, offloaded": SoakJob(strategy={"preset": "zero-offload", "microbatches": 2}, model="gated"),
}


def _with_spares(jobs: Mapping[str, SoakJob]) -> Mapping[str, SoakJob]:
    """Every second one: they are shorter than those that have spares by themselves."""
    return {
        name: replace(job, strategy={**job.strategy, "spares": True})
        if number % 2 and job.strategy.get("recovery") != "off"
        else job
        for number, (name, job) in enumerate(jobs.items())
    }


JOBS: Mapping[str, SoakJob] = _with_spares(_OF_PRESETS | _OTHERS)

# Half of their units grow slow after some steps, as no inspection can know, so they go on with another plan.
_TIRED = {"source": _REPLANNING["TIRED"], "steps": _REPLANNING["STEPS"], "arguments": {}}
_REPLANS = TWO_STAGES | {"window": 16, "replan": True}
REPLANNED: Mapping[str, SoakJob] = _with_spares(
    {
        "tired": SoakJob(strategy=_REPLANS, **_TIRED),
        "tired, measured order": SoakJob(strategy=_REPLANS | {"schedule": "measured"}, **_TIRED),
        "tired, checkpoints": SoakJob(strategy=_REPLANS, tables=EVERY_40, **_TIRED),
        "tired, each iteration": SoakJob(strategy=_REPLANS | {"recovery": "iteration"}, **_TIRED),
        "tired, verified": SoakJob(strategy=_REPLANS | {"verify": "digest"}, **_TIRED),
    }
)
KNOWN: Mapping[str, SoakJob] = JOBS | REPLANNED
WITH_CHECKPOINTS = [name for name, job in JOBS.items() if "checkpoint" in job.tables]
VERIFIED = [name for name, job in JOBS.items() if job.strategy.get("verify") == "digest"]
REPLAYED = [name for name, job in JOBS.items() if job.strategy.get("verify") == "replay"]
