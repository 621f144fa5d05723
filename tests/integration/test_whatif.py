"""`weft whatif` on real runs: the recorded job, and the changed one that it predicts."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, metrics_rows = _REAL["RealDaemon"], _REAL["metrics_rows"]

RIGHT_ORDER = 3.0  # times; how near it really comes is benchmarks/whatif.py's to say
STEPS = 60
BASE = {"stages": 2, "microbatches": 4, "schedule": "gpipe"}

# A model whose tasks take far longer than waking a lane: products of matrices of 256 x 256.
HEAVY = """
import torch, weft

class Heavy(torch.nn.Linear):
    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(super().forward(x))
        return x

def workload():
    inputs = torch.randn(256, 256)
    model = torch.nn.Sequential(*(Heavy(256, 256) for _ in range(4)))
    return weft.Workload(model=model, loss=torch.nn.functional.mse_loss, train=(inputs, inputs.sin()),
                         optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
"""


def run(daemon: RealDaemon, **strategy: Any) -> dict[str, Any]:
    spec = daemon.spec(HEAVY, strategy=BASE | strategy, batch_size=128, steps=STEPS)
    result: dict[str, Any] = daemon.run(spec)
    assert result["state"] == "completed", result
    return result


def ask(daemon: RealDaemon, job: str | Path, *settings: str) -> dict[str, Any]:
    arguments = [word for setting in settings for word in ("--set", setting)]
    done = daemon.weft("whatif", job, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def iteration_seconds(result: dict[str, Any]) -> list[float]:
    return [row["seconds"] for row in metrics_rows(result["run_dir"]) if row.get("seconds")]


@pytest.mark.days(3)
@pytest.mark.slow(seconds=5)
def test_a_change_is_predicted_in_the_right_order_of_what_it_then_takes(daemon: RealDaemon) -> None:
    recorded = run(daemon)
    for setting, changed in [
        ("strategy.microbatches=8", {"microbatches": 8}),
        ("strategy.schedule=1f1b", {"schedule": "1f1b"}),
        ("strategy.stages=1", {"stages": 1}),
    ]:
        answer = ask(daemon, recorded["job"], setting)
        measured = iteration_seconds(run(daemon, **changed))
        # from the fastest to the slowest: whatever else the machine does meanwhile, both jobs may get a part of it; and
        # where it does more than it did, the unchanged job is slower by now, too
        slower = max(1.0, max(iteration_seconds(run(daemon))) / min(iteration_seconds(recorded)))
        predicted = answer["predicted_seconds"]
        assert answer["settings"] == [setting]
        outlooks = [answer["before"]]
        if predicted is None:  # the recorded job had to share its cores, and the simulation does not explain it
            assert "cannot be told" in answer["doubt"]
            assert answer["after"] is None
        else:
            assert min(measured) / slower / RIGHT_ORDER < predicted < max(measured) * RIGHT_ORDER, (setting, answer)
            assert answer["predicted_low_seconds"] <= predicted <= answer["predicted_high_seconds"]
            assert answer["ratio"] == pytest.approx(predicted / answer["measured_seconds"])
            outlooks.append(answer["after"])
        for outlook in outlooks:
            assert 0 < outlook["limit_seconds"] <= outlook["iteration_seconds"] * (1 + 1e-6)
            assert 0 <= outlook["bubble_ratio"] < 1
            assert outlook["bottleneck"].endswith("/compute")


@pytest.mark.slow(seconds=5)
def test_without_a_change_the_answer_explains_how_far_the_simulation_is_off(daemon: RealDaemon) -> None:
    result = run(daemon)
    answer = ask(daemon, result["job"])
    assert answer["ratio"] == 1
    assert answer["predicted_seconds"] == answer["measured_seconds"]
    measured = iteration_seconds(result)
    assert min(measured) <= answer["measured_seconds"] <= max(measured)
    assert -1 < answer["baseline_error"] < RIGHT_ORDER
    assert answer == ask(daemon, Path(result["run_dir"], "recording.msgpack")), "the same from the file"
    page = daemon.weft("whatif", result["job"], "--set", "workers.cpu-1.speed=2", "--set", "load.speed=3").stdout
    assert page.splitlines()[1].startswith(("predicted: ", "no prediction: "))
    for word in ("measured iteration", "limit", "bubble", "bottleneck", "critical cycle as it ran"):
        assert word in page


@pytest.mark.slow(seconds=5)
def test_what_makes_no_sense_and_who_is_not_there_have_their_exit_codes(daemon: RealDaemon) -> None:
    job = run(daemon)["job"]
    for setting, text in [
        ("workers.cpu-9.speed=2", "the job has no worker 'cpu-9'; it has cpu-"),
        ("strategy.microbatches=many", "strategy.microbatches: "),
        ("job.seed=2", "unknown key"),
    ]:
        done = daemon.weft("whatif", job, "--set", setting)
        assert (done.returncode, done.stdout) == (2, "")
        assert text in done.stderr
    missing = daemon.weft("whatif", "nobody-1")
    assert missing.returncode == 4
    assert "nobody-1" in missing.stderr


@pytest.mark.slow(seconds=5)
def test_more_workers_than_the_daemon_has_is_an_answer_with_a_note(daemon: RealDaemon) -> None:
    answer = ask(daemon, run(daemon)["job"], "strategy.replicas=4")
    assert any("needs 8 cpu workers and the daemon has 3" in note for note in answer["notes"])
