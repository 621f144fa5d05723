"""Batches whose shapes differ from one to the next give the result of the plain loop, and leave nothing behind."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec

KnownKeyDaemon = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))["KnownKeyDaemon"]
_SAME = runpy.run_path(str(Path(__file__).with_name("test_same_result.py")))
RealDaemon, same_as_the_plain_loop, plain_loop, metrics_rows = (
    _SAME[name] for name in ("RealDaemon", "same_as_the_plain_loop", "plain_loop", "metrics_rows")
)
TESTS = Path(__file__).resolve().parents[1]
NAMES = runpy.run_path(str(TESTS / "varying_models.py"))["NAMES"]


@pytest.fixture(scope="module")
def with_devices() -> Iterator[Any]:
    with KnownKeyDaemon(workers=2, stand_ins=2).serving() as daemon:
        yield daemon


def varying_spec(name: str, **strategy: Any) -> JobSpec:
    job = {"entry": "varying_models.py:workload", "args": {"name": name}, "batch_size": 8, "epochs": 2, "seed": 11}
    return JobSpec.parse({"job": job, "strategy": strategy, "directory": str(TESTS)})


@pytest.mark.slow
@pytest.mark.pairs(
    3,
    name=NAMES,
    stages=(1, 2, 3),
    microbatches=(1, 2),
    schedule=("gpipe", "1f1b"),
    recompute=(False, True),
    loaders=(1, 2),
)
def test_batches_of_varying_shape_give_the_result_of_the_plain_loop(
    daemon: RealDaemon, name: str, stages: int, microbatches: int, schedule: str, recompute: bool, loaders: int
) -> None:
    how = {"schedule": schedule, "recompute": recompute, "loaders": loaders}
    spec = varying_spec(name, stages=stages, microbatches=microbatches, **how)
    assert same_as_the_plain_loop(daemon, spec)


def run(daemon: Any, spec: JobSpec) -> tuple[dict[str, Any], str]:
    """(the result, the log) of a job that leaves no memory behind."""
    result = daemon.run(spec)
    assert result["state"] == "completed", daemon.log_of(result["job"])
    daemon.until_idle()
    assert daemon.directory().num_bytes() == {}
    return result, daemon.log_of(result["job"])


@pytest.mark.days(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_slots_grow_and_it_is_told(with_devices: Any, name: str) -> None:
    _, log = run(with_devices, varying_spec(name, stages=2, microbatches=2))
    assert re.search(r"shapes: a tensor of the batch came as \(.*\) and \(.*\) in microbatches of one size", log, re.M)
    grown = re.findall(
        r"^(.*): slots have grown (\d+) times?, for batches larger than those inspected: (.*)$", log, re.M
    )
    told = {worker: rings for worker, _, rings in grown}
    if name in {"images", "few"}:
        assert "loader-0" not in told, "those of all sizes were among the first"
        return
    assert re.fullmatch(r"batch-0 from \S+ (B|KiB) to \S+ KiB", told["loader-0"])
    assert told["cpu-0"].startswith("activation-0-0 from ")
    assert all(0 < int(count) < 20 for _, count, _ in grown)


@pytest.mark.slow
@pytest.mark.pairs(4, name=NAMES, replica=({"stages": 1}, {"stages": 2}, {"working_window": 2}))
def test_on_devices_slots_grow_in_memory_of_their_own_kind(
    with_devices: Any, name: str, replica: dict[str, Any]
) -> None:
    """A device's own, and what it lends to another one."""
    update = "cpu" if "working_window" in replica else "local"
    spec = varying_spec(name, replicas=[{"device": "gpu", **replica}], microbatches=2, update=update)
    expected = plain_loop(spec)
    result, log = run(with_devices, spec)
    assert [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row] == pytest.approx(expected.losses)
    state = load_file(result["model"])
    assert all(state[key].allclose(tensor, rtol=1e-4, atol=1e-6) for key, tensor in expected.state.items())
    if name not in {"images", "few"}:
        assert "gpu-0: slots have grown" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share", "microbatches"), [("tokens", "fixed", 1), ("few", "fixed", 2), ("few", "stealing", 2)]
)
def test_replicas_read_what_has_grown(with_devices: Any, name: str, share: str, microbatches: int) -> None:
    spec = varying_spec(name, replicas=2, share=share, microbatches=microbatches)
    expected = reference.train(spec)
    result, log = run(with_devices, spec)
    losses = [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row]
    assert losses == pytest.approx(expected.losses, rel=1e-3)
    assert ("loader-0: slots have grown" in log) == (name != "few")


GROUPED = """
import torch, weft
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

class Grouped:
    def __init__(self, sizes):
        self.batches = torch.arange(sum(sizes)).split(sizes)
    def __len__(self):
        return len(self.batches)
    def __iter__(self):
        return iter([self.batches[number].tolist() for number in torch.randperm(len(self.batches))])

def workload(ready):
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "y": torch.randn(1)} for _ in range(23)]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    train, held_out = (DataLoader(data, batch_sampler=Grouped(sizes)) for sizes in ([4, 1, 6, 5, 7], [9, 1, 13]))
    if ready:  # as data come that somebody else has divided; shuffled by what a DataLoader shuffles by
        train = DataLoader(list(train), batch_size=None, shuffle=True)
        held_out = DataLoader(list(held_out), batch_size=None)
    return weft.Workload(model, train, step=lambda m, b: mse_loss(m(b["x"]), b["y"]), validation=held_out,
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
                         on_epoch=lambda values: {"mean": values["loss"]}, epoch_metrics=["mean"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("how", [{}, {"stages": 2, "microbatches": 3, "loaders": 2}], ids=str)
def test_batches_that_the_user_makes_are_those_of_the_loop_that_was(
    with_devices: Any, tmp_path: Path, how: dict[str, Any], ready: bool
) -> None:
    (tmp_path / "job.py").write_text(GROUPED)
    made = runpy.run_path(str(tmp_path / "job.py"))["workload"](ready)
    optimizer = made.optimizer(made.model.parameters())
    expected, held_out, means, sizes = list[float](), list[float](), list[float](), list[int]()
    for epoch in range(3):
        of_epoch = 0.0
        torch.manual_seed(5 + epoch)
        order = torch.randperm(5, generator=torch.Generator().manual_seed(5 + epoch)) if ready else ()
        for batch in [made.train.dataset[number] for number in order] or list(made.train):
            loss = made.step(made.model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
            of_epoch += len(batch["x"]) * loss.item()
            sizes.append(len(batch["x"]))
        means.append(of_epoch / 23)
        with torch.no_grad():
            weighed = [(len(batch["x"]), made.step(made.model, batch).item()) for batch in made.validation]
        held_out.append(sum(size * loss for size, loss in weighed) / 23)
    job = {"entry": "job.py:workload", "args": {"ready": ready}, "batch_size": 5, "epochs": 3, "seed": 5}
    spec = JobSpec.parse({"job": job, "strategy": how, "directory": str(tmp_path)})
    result, _ = run(with_devices, spec)
    rows = metrics_rows(result["run_dir"])
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == (pytest.approx(expected, rel=1e-5) if how else expected)
    assert [row["on_epoch"]["mean"] for row in rows if "on_epoch" in row] == pytest.approx(means, rel=1e-5)
    lines = list[dict[str, Any]]()
    plain = reference.train(spec, on_line=lines.append)
    assert [values["mean"] for values in plain.validations] == pytest.approx(means, rel=1e-5)
    assert [row["samples"] for row in rows if "loss" in row] == sizes
    assert [line["samples"] for line in lines if "loss" in line] == sizes
    assert [row["validation"]["loss"] for row in rows if "validation" in row] == pytest.approx(held_out, rel=1e-5)


SCALED = """
import torch, weft
from torch import nn
from torch.nn.functional import mse_loss

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        y = self.b(self.a(x))
        if len(x) < 2 or x[0, 0] > 0.5:  # the ragged last batch, and some that no inspection has seen
            y = y * x.abs()
            y += 1
        return self.head(y)

def workload():
    torch.manual_seed(0)
    x = torch.randn(22, 4)
    return weft.Workload(Net(), {"x": x, "y": x[:, 1:2].clone()}, step=lambda m, b: mse_loss(m(b["x"]), b["y"]),
                         validation={"x": x[:7], "y": x[:7, 1:2]},
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{}, {"recompute": True}, {"schedule": "zero-bubble"}, {"stages": 3, "split": ["b", "head"]}],
    ids=str,
)
def test_a_line_before_a_stage_that_only_some_batches_run_is_run_by_that_stage(
    daemon: Any, how: dict[str, Any]
) -> None:
    """The job ended at the first batch that ran it."""
    strategy = {"stages": 2, "split": ["head"], "microbatches": 2} | how
    assert same_as_the_plain_loop(daemon, daemon.spec(SCALED, strategy=strategy, batch_size=4, epochs=2, seed=3))
