"""What a job's own function tells of an epoch counts as what validations report: for `[stop]`, the best model, a
ReduceLROnPlateau and the logs, as in the plain loop, whatever the strategy, also where something dies on the way."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.metrics.recording.step_log import read_step_log
from weft.reference.loop import train

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
lines_of, until = _RECOVERY["lines_of"], _RECOVERY["until"]

SECONDS = 90
SOURCE = """
import os
import signal

import torch
from torch import nn

import weft

FILES = {files}


def workload(validates, dies_at=-1, waits=False):
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)).double()
    y = torch.arange(24) % 3
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    @torch.no_grad()
    def on_epoch(values):
        epoch = values["epoch"]
        mark = os.path.join(FILES, f"{{os.environ.get('WEFT_RUN_DIR', 'plain').rpartition('/')[2]}}-died")
        if epoch == dies_at and "WEFT_RUN_DIR" in os.environ and not os.path.exists(mark):
            open(mark, "w").close()
            while waits:
                signal.pause()  # for the end of its daemon
            os.kill(os.getpid(), 9)
        assert "margin" not in values["validation"], values
        if epoch % 2:
            return None  # looked at every other epoch
        best = model(x).topk(2).values
        return {{"margin": (best[:, 0] - best[:, 1]).mean(), "peak": [0.1, 0.9, 0.3, 0.2, 0.1, 0.0][epoch // 2]}}

    return weft.Workload(
        model,
        (x, y),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0),
        scheduler_metric="peak",
        validation=(x[:9], y[:9]) if validates else None,
        on_epoch=on_epoch,
        epoch_metrics=["margin", "peak"],
    )
"""
STRATEGIES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "two stages": {"stages": 2, "microbatches": 2},
    "replicas": {"preset": "ddp", "microbatches": 1},
    "offloaded": {"preset": "zero-offload"},
}
RULES = {
    "stop": {"metric": "peak", "patience": 3},
    "checkpoint": {"every": "1 epoch", "keep": 2, "keep_best": "peak", "best": "max"},
}


def spec_of(machine: Any, tmp_path: Path, strategy: str, **args: Any) -> Any:
    source = SOURCE.format(files=repr(str(tmp_path)))
    spec = machine.spec(source, strategy=STRATEGIES[strategy], args=args, epochs=11, batch_size=12)
    return type(spec).parse(spec.to_wire() | RULES)


def check_is_the_plain_loops(machine: Any, spec: Any, ended: dict[str, Any]) -> None:
    plain = train(spec)
    job = ended["job"]
    assert ended["state"] == "completed", machine.log_of(job)
    assert (plain.stopped, len(plain.losses)) == ("peak has not improved on 0.9 of epoch 3 for 3 epochs", 18)
    assert ended["stopped"] == f"stopped early after step 18: {plain.stopped}"
    run_dir = Path(ended["model"]).parent
    log = read_step_log(run_dir / "metrics.jsonl")
    assert [each.keys() for each in plain.validations] == [each.values.keys() for each in log.validations]
    for theirs, ours in zip(plain.validations, log.validations, strict=True):
        assert ours.values == pytest.approx(theirs, rel=1e-9)
    assert [step.lr for step in log.steps] == plain.learning_rates
    assert len(set(plain.learning_rates)) == 3, "the plateau was seen by what is told, and by nothing else"
    told = [line["epoch"] for line in lines_of(machine, job) if "on_epoch" in line]
    assert told == [0, 2, 4, 6, 8], "once each"
    _check_is(load_file(ended["model"]), plain.state)
    until(lambda: machine.client.show(job)["best"] is not None, "the best")
    assert plain.best is not None
    _check_is(load_file(machine.client.show(job)["best"]), plain.best)
    assert ended["validation"]["peak"] == 0.1
    assert "epoch 3: step 6  margin" in machine.log_of(job)


def _check_is(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=1e-9, atol=1e-9), name


@pytest.mark.pairs(2, validates=(True, False), dies_at=(-1, 2, 4), strategy=tuple(STRATEGIES))
@pytest.mark.slow(seconds=4)
def test_it_is_as_in_the_plain_loop(machine: Any, tmp_path: Path, validates: bool, dies_at: int, strategy: str) -> None:
    """A worker that dies while it is asked is asked again, of the epoch at which the others stand."""
    spec = spec_of(machine, tmp_path, strategy, validates=validates, dies_at=dies_at)
    check_is_the_plain_loops(machine, spec, machine.client.wait(machine.submit(spec), SECONDS))
    assert len(list(tmp_path.glob("*-died"))) == (dies_at >= 0)


@pytest.mark.pairs(validates=(True, False))  # one a day
@pytest.mark.slow(seconds=6)
def test_who_goes_on_from_a_checkpoint_tells_each_epoch_once(restarting: Any, tmp_path: Path, validates: bool) -> None:
    """The daemon is killed while an epoch is asked about; of those before it one may be made again."""
    spec = spec_of(restarting, tmp_path, "two stages", validates=validates, dies_at=6, waits=True)
    job = restarting.submit(spec)
    until(lambda: restarting.client.show(job)["checkpoint"], "a checkpoint")
    until(lambda: list(tmp_path.glob("*-died")), "the epoch that is asked about")
    restarting.kill()
    restarting.until_nothing_lives()
    restarting.start()
    check_is_the_plain_loops(restarting, spec, restarting.client.wait(job, SECONDS))
    assert "goes on from" in restarting.log_of(job)


@pytest.mark.slow(seconds=2)
def test_of_a_name_that_validations_report_too_the_job_says_so_before_it_trains(daemon: Any, tmp_path: Path) -> None:
    source = SOURCE.format(files=repr(str(tmp_path))).replace(
        "loss=nn.CrossEntropyLoss()",
        "step=lambda model, batch: {'loss': nn.functional.cross_entropy(model(batch[0]), batch[1]), 'peak': 0.5}",
    )
    result = daemon.run(daemon.spec(source, args={"validates": True}, epochs=1, batch_size=12))
    assert (result["state"], result["reason"], result["exit_code"]) == ("failed", "invalid-plan", 2)
    assert "Workload.epoch_metrics: validations report 'peak', too; give it another name" in result["error"]


@pytest.mark.slow(seconds=2)
def test_names_that_it_has_not_given_fail_the_job_with_the_remedy(daemon: Any, tmp_path: Path) -> None:
    source = SOURCE.format(files=repr(str(tmp_path))).replace('"margin": (', '"margins": (')
    result = daemon.run(daemon.spec(source, args={"validates": False}, epochs=1, batch_size=12))
    assert (result["state"], result["reason"]) == ("failed", "invalid-workload")
    assert "Workload.on_epoch returned 'margins', not in Workload.epoch_metrics; let these be" in result["error"]
    assert json.dumps(lines_of(daemon, result["job"])[-1]).count("loss") == 1, "the steps are told"
