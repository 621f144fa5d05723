"""F1 where shares are measured: two undisturbed runs differ, so a job is compared with the plain loop of its shares."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deck import Row
from jobs import PACED, PAUSE_SECONDS, STEPS
from safetensors.torch import load_file
from stage import SECONDS, Stage, metrics_rows
from worker_faults import NUM_KILLS, kill_one, phases_of, without_misfires

from weft.reference import loop as reference

TOLERANCE = 1e-6  # in float64, over all steps; sums of another order are far below, another sample is far above

_CHANGES = {"model=model,": "model=model.double(),", "reshape(48, 1)": "reshape(48, 1).double()"}
IN_FLOAT64 = PACED
for _old, _new in _CHANGES.items():
    assert IN_FLOAT64.count(_old) == 1, _old
    IN_FLOAT64 = IN_FLOAT64.replace(_old, _new)

MEASURED: Mapping[str, Mapping[str, Any]] = {
    "hyscale": {"preset": "hyscale", "microbatches": 2},
    "hybrid-coarse": {"preset": "hybrid-coarse", "microbatches": 2},
    "hybrid-fine": {"preset": "hybrid-fine", "microbatches": 2},
    "adaptive replicas": {"replicas": 2, "microbatches": 2, "share": "adaptive"},
}
_of_this_process = threading.Lock()  # the plain loop trains by this process's generators


def kill_workers(stage: Stage, chance: random.Random) -> Counter[str]:
    arguments = {"pause": PAUSE_SECONDS}
    strategy = MEASURED[chance.choice(list(MEASURED))]
    spec = stage.daemon.spec(IN_FLOAT64, strategy=strategy, steps=STEPS, args=arguments)
    job = stage.daemon.submit(spec)
    fired = Counter(kill_one(stage, job, phase, chance) for phase in phases_of(chance, chance.choice(NUM_KILLS)))
    check(stage, job, spec)
    return without_misfires(fired)


def check(stage: Stage, job: str, spec: Any) -> None:
    """Errors: AssertionError."""
    result = stage.daemon.client.wait(job, SECONDS)
    assert result["state"] == "completed", stage.daemon.log_of(job)
    rows = [row for row in metrics_rows(result["run_dir"]) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "each step once"
    shares = [row["shares"] for row in rows]
    with _of_this_process:
        expected = reference.train(spec, shares=shares.__getitem__)
    model = load_file(result["model"])
    assert model.keys() == expected.state.keys()
    away = {name: float((model[name] - tensor).abs().max()) for name, tensor in expected.state.items()}
    assert max(away.values()) < TOLERANCE, (away, shares, stage.daemon.log_of(job))


ROWS: Sequence[Row] = (
    Row(
        id="F1",
        variant="measured",
        what="SIGKILL of workers of jobs whose shares are measured",
        asked=50,
        unit="kills",
        each=2,
        play=kill_workers,
    ),
)
