"""Jobs whose learning rate follows from their validations: ReduceLROnPlateau, with the bits of the plain loop."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference.loop import train

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
SOURCE, STEPS, PIPELINE = (_RECOVERY[name] for name in ("SOURCE", "STEPS", "PIPELINE"))
held_behind_a_snapshot, lines_of, kill_worker = (
    _RECOVERY[name] for name in ("held_behind_a_snapshot", "lines_of", "kill_worker")
)

# The first validation is the best, so the rate falls after every ninth epoch.
PLATEAU = "ReduceLROnPlateau(optimizer, factor=0.7, patience=8, threshold=1e3, threshold_mode='abs')"
MEASURED = re.sub(r"OneCycleLR\(.*?total_steps=100_000\)", PLATEAU, SOURCE, flags=re.DOTALL)
BUCKETS = {"replicas": 1, "microbatches": 2, "clip_norm": 1e6, "window": 16}


@pytest.mark.days(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "other"), [pytest.param(PIPELINE, BUCKETS, id="stages"), pytest.param(BUCKETS, PIPELINE, id="owners")]
)
def test_a_job_that_loses_a_worker_and_goes_on_under_another_plan_has_the_rates_of_the_plain_loop(
    daemon: Any, strategy: dict[str, Any], other: dict[str, Any]
) -> None:
    assert MEASURED != SOURCE
    with held_behind_a_snapshot(daemon, strategy, source=MEASURED) as (job, spec, gate):
        kill_worker(daemon, job, "cpu")
        daemon.until_logged(job, "goes on after step")
        assert daemon.client.cancel(job) == "cancelled"
        gate.open()
    begun = daemon.client.show(job)["run_dir"]
    result = daemon.run(daemon.spec(MEASURED, strategy=other, steps=STEPS, resume_from=begun))
    assert result["state"] == "completed", result["error"]
    plain = train(spec)
    ours = load_file(result["model"])
    assert [name for name in ours if not torch.equal(ours[name], plain.state[name])] == []
    for each in (job, result["job"]):
        rates = {line["step"]: line["lr"] for line in lines_of(daemon, each) if "validation" not in line}
        assert rates == {step: plain.learning_rates[step - 1] for step in rates}
        assert len(set(rates.values())) > 2
