"""`preset = "auto"` and `weft plan` with a real daemon: what is chosen is trained, and to the plain loop's result."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, EXAMPLES, metrics_rows = _REAL["RealDaemon"], _REAL["EXAMPLES"], _REAL["metrics_rows"]

DOUBLE = """
import torch, weft

def workload():
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(96, 8)
    layers = [torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers)
    torch.set_default_dtype(torch.float32)
    data = inputs.double(), inputs[:, :1].double()
    return weft.Workload(model=model, loss=torch.nn.functional.mse_loss, train=data,
                         optimizer=lambda params: torch.optim.Adam(params, lr=0.01))
"""
GPT = {"layers": 2, "dim": 16, "heads": 2, "context": 8, "samples": 24, "validation_samples": 5, "dropout": 0.0}


@pytest.mark.parametrize(
    "given", [{}, {"stages": 2}, {"replicas": 2, "microbatches": 2}, {"threads": "all", "clip_norm": 0.1}]
)
def test_the_result_of_an_auto_job_is_that_of_the_plain_loop(daemon: RealDaemon, given: dict[str, Any]) -> None:
    """And what was chosen stands in the run directory, in `weft show`, and in three lines of the log."""
    spec = daemon.spec(DOUBLE, strategy={"preset": "auto"} | given, batch_size=24, steps=8)
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    chosen = json.loads(Path(result["run_dir"], "strategy.json").read_text())
    assert given.items() <= chosen.items()
    plain = JobSpec.parse(spec.to_wire() | {"strategy": chosen})
    expected = reference.train(plain)
    losses = [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row]
    assert losses == pytest.approx(expected.losses, rel=1e-12)
    for name, tensor in load_file(result["model"]).items():
        torch.testing.assert_close(tensor, expected.state[name], rtol=1e-12, atol=1e-12)
    shown = daemon.client.show(result["job"])
    assert shown["plan"]["strategy"] == chosen
    assert shown["spec"]["strategy"] == {"preset": "auto"} | given, "the ledger has what the user wrote"
    lines = [note for note in shown["plan"]["notes"] if note.startswith("auto: ")]
    assert len(lines) == 3
    assert all(line in daemon.log_of(result["job"]) for line in lines)


@pytest.mark.slow(seconds=2)
def test_a_model_that_is_cut_by_its_own_forward_is_chosen_for_too(daemon: RealDaemon) -> None:
    job = {"entry": "gpt.py:workload", "args": GPT, "epochs": 1, "batch_size": 8, "seed": 11}
    strategy = {"preset": "auto", "replicas": 1, "stages": 2}
    spec = JobSpec.parse({"job": job, "strategy": strategy, "directory": str(EXAMPLES)})
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    chosen = json.loads(Path(result["run_dir"], "strategy.json").read_text())
    expected = reference.train(JobSpec.parse(spec.to_wire() | {"strategy": chosen}))
    assert [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row] == expected.losses


@pytest.mark.days(3)
@pytest.mark.slow(seconds=3)
def test_a_plan_is_told_and_nothing_is_trained(daemon: RealDaemon) -> None:
    path = daemon.spec_file(daemon.spec(strategy={"preset": "auto"}, steps=2))
    before = {job["job"] for job in daemon.client.jobs()}
    told = daemon.weft("plan", path)
    assert told.returncode == 0, told.stderr
    for text in ("auto: ", "samples/s", "no iteration is shorter than", "cpu-0/compute", "shared memory", "candidate"):
        assert text in told.stdout
    picture = path.with_suffix(".svg")
    plan = json.loads(daemon.weft("plan", path, "--json", "--for", "memory", "--svg", picture).stdout)
    drawn = picture.read_text()
    assert all(f"<title>{task['task']}, " in drawn for lane in plan["timeline"] for task in lane["tasks"])
    assert plan["candidates"][0]["memory_bytes"] == min(each["memory_bytes"] for each in plan["candidates"])
    assert plan["predicted_iteration_seconds"] >= plan["limit_seconds"] > 0
    assert {each["lane"] for each in plan["timeline"]} >= {f"{each['worker']}/compute" for each in plan["stages"]}
    assert {job["job"] for job in daemon.client.jobs()} == before, "no job is left of it"


@pytest.mark.slow(seconds=2)
def test_what_cannot_be_planned_is_refused_with_a_sentence(daemon: RealDaemon) -> None:
    path = daemon.spec_file(daemon.spec(strategy={"stages": 3, "split": [1, 9]}, steps=2))
    told = daemon.weft("plan", path)
    assert told.returncode == 2
    assert "strategy.split: the model cannot be cut before unit 9" in told.stderr
    told = daemon.weft("plan", path, "--json", "--svg", "-")
    assert (told.returncode, told.stdout) == (2, "")
    assert "only one of --svg - and --json can have stdout; give the picture a file" in told.stderr
    told = daemon.weft("plan", path, "--for", "money")
    assert (told.returncode, told.stdout) == (2, "")
    assert "--for: 'money' is nothing to plan for; write time or memory" in told.stderr


@pytest.mark.days(3)
@pytest.mark.slow(seconds=9)
def test_weft_run_without_a_strategy_trains_what_the_plain_loop_does(daemon: RealDaemon, tmp_path: Path) -> None:
    """A short job is one worker's. A long one is chosen for, also where it goes on from the short one's checkpoint; it
    ends when its time is up. An empty table is an answer. The log of a job that went on from a checkpoint once had
    nothing of its plan. Its optimizer is one that contracts: Adam's steps make more of what the order of a sum leaves,
    5e-9 after 2,000 steps."""
    contracting = DOUBLE.replace("torch.optim.Adam(params, lr=0.01)", "torch.optim.SGD(params, lr=0.05)")
    path = daemon.spec_file(daemon.spec(contracting, batch_size=24, steps=8))
    path.write_text(path.read_text().partition("[strategy]")[0])

    def run(*more: str) -> tuple[dict[str, Any], list[str]]:
        """The result, and what is told of the choice."""
        done = daemon.weft("run", path, "--json", "--workers", "2", "--runs-dir", tmp_path / "runs", *more)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        expected = reference.train(JobSpec.load(path, [f"job.steps={result['steps']}"]))
        losses = [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row]
        assert losses == pytest.approx(expected.losses[-len(losses) :], rel=1e-9)
        for name, tensor in load_file(result["model"]).items():
            torch.testing.assert_close(tensor, expected.state[name], rtol=1e-9, atol=1e-9)
        return result, [line.partition("no [strategy]: ")[2] for line in done.stderr.splitlines() if "no [st" in line]

    short, (told,) = run("--checkpoint", "4 steps")
    assert told.startswith("one worker, since some ")
    long, (told,) = run("--steps", "2000000", "--set", "stop.max_time=0.2 s", "--resume", short["run_dir"])
    assert told.startswith(("auto chose ", "one worker, since other programs seem to have some of its cores"))
    assert long["steps"] > short["steps"]
    assert json.loads(Path(long["run_dir"], "strategy.json").read_text())["microbatches"] == 1
    with path.open("a") as file:
        file.write("[strategy]\n")
    given, told_of = run()
    assert (told_of, Path(given["run_dir"], "strategy.json").exists()) == ([], False)


@pytest.mark.slow(seconds=3)
def test_weft_plan_says_what_weft_run_would_do_without_a_strategy_and_submit_chooses_none(daemon: RealDaemon) -> None:
    path = daemon.spec_file(daemon.spec(DOUBLE, batch_size=24, steps=8))
    path.write_text(path.read_text().partition("[strategy]")[0])
    plan = json.loads(daemon.weft("plan", path, "--json").stdout)
    assert plan["lines"][0].startswith("no [strategy]: one worker, since some ")
    job = daemon.weft("submit", path).stdout.strip()
    assert daemon.client.wait(job)["state"] == "completed"
    shown = daemon.client.show(job)
    assert "by_default" not in shown["spec"]
    assert not [note for note in shown["plan"]["notes"] if "[strategy]" in note]
