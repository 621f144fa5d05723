"""Units that are compiled: a job's result is that of the plain loop with the same units compiled, bit for bit; what was
compiled is found again; and what cannot be is told with a remedy."""

from __future__ import annotations

import json
import runpy
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, metrics_rows = _REAL["RealDaemon"], _REAL["metrics_rows"]
TESTS = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealDaemon, Path]]:
    """A daemon, and the directory of what it compiles."""
    cache = tmp_path_factory.mktemp("cache")
    with RealDaemon({"WEFT_CACHE_DIR": str(cache)}, workers=2).serving() as running:
        yield running, cache / "compiled"


def compiled_spec(name: str, **strategy: Any) -> JobSpec:
    """Of 12 samples: batches of 8 and 4."""
    job = {"entry": "compiled_models.py:workload", "args": {"name": name}, "batch_size": 8, "epochs": 2, "seed": 5}
    return JobSpec.parse({"job": job, "strategy": {"compile": True, **strategy}, "directory": str(TESTS)})


def graphs_in(directory: Path) -> set[str]:
    """Of which kernels are kept, by torch's own name."""
    return {path.name for path in directory.glob("fxgraph/*/*")}


@pytest.mark.days(6)
@pytest.mark.slow(seconds=45)
@pytest.mark.filterwarnings("ignore")  # torch's own, where it compiles
@pytest.mark.pairs(8, name=("rows", "attends"), recompute=(False, True))
def test_compiled_units_give_the_result_of_the_plain_loop_that_compiles_them_and_are_compiled_once(
    compiling: tuple[RealDaemon, Path], name: str, recompute: bool
) -> None:
    daemon, cache = compiling
    results, kept = [], []
    for stages in (1, 2):
        spec = compiled_spec(name, stages=stages, microbatches=2, recompute=recompute)
        results.append(daemon.run(spec))
        log = daemon.log_of(results[-1]["job"])
        assert results[-1]["state"] == "completed", log
        assert f"compiled: {'0, 1' if name == 'rows' else 'blocks.0, blocks.1'}\n" in log
        kept.append(graphs_in(cache))
    assert kept[0] == kept[1] != set()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    expected = reference.train(spec, compiled=cache)
    for result in results:
        rows = metrics_rows(result["run_dir"])
        assert [row["loss"] for row in rows if "loss" in row] == expected.losses
        assert [row["validation"] for row in rows if "validation" in row] == expected.validations
        state = load_file(result["model"])
        assert state.keys() == expected.state.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.state.items())


CHAINS = """
import torch, weft

class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x).repeat(1, 8192)
        for _ in range(20):  # passes over 2 MB, which one kernel makes one of: milliseconds, on a busy machine, too
            x = x * 1.0001 + 0.01
        return x.view(len(x), -1, 8).mean(dim=1)

def workload(last=1):
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    model = torch.nn.Sequential(Chain(), Chain(), torch.nn.Dropout(0.1))
    return weft.Workload(model=model, loss=torch.nn.functional.mse_loss, train=(x, y),
                         optimizer=lambda params: torch.optim.Adam(params, lr=0.01),
                         on_epoch=lambda values: "stop" if values["epoch"] >= last else None)
"""
LONG = {"batch_size": 8, "epochs": 1_000_000}  # of which nobody knows that few are made


@pytest.mark.days(6)
@pytest.mark.slow(seconds=35)
@pytest.mark.filterwarnings("ignore")  # torch's own, where it compiles
def test_where_it_is_left_open_units_are_compiled_if_that_is_faster_and_stay_so(
    compiling: tuple[RealDaemon, Path],
) -> None:
    """Planned, trained, and gone on with under another plan from a checkpoint: once it is decided, the bits are those
    of the plain loop with the same decision."""
    daemon, cache = compiling
    spec = daemon.spec(CHAINS, strategy={"compile": "auto"}, **LONG)
    plan = json.loads(daemon.weft("plan", daemon.spec_file(spec), "--json").stdout)
    assert plan["strategy"]["compile"] is True
    assert [each["title"] for each in plan["candidates"]] == ["one process (compiled)", "one process"]
    spec = JobSpec.parse(spec.to_wire() | {"checkpoint": {"every": "1 epoch"}})
    first = daemon.run(spec)
    log = daemon.log_of(first["job"])
    assert first["state"] == "completed", log
    assert "compile: units are compiled: 2000000 steps are predicted to take" in log
    assert "compiled: 0, 1\n" in log
    chosen = json.loads(Path(first["run_dir"], "strategy.json").read_text())
    assert chosen["compile"] is True
    assert daemon.client.show(first["job"])["spec"]["strategy"]["compile"] == "auto", "the ledger has what was written"
    on = {"entry": spec.job.entry, "args": {"last": 3}, "seed": 3, **LONG, "resume_from": first["run_dir"]}
    cut = JobSpec.parse(spec.to_wire() | {"job": on, "strategy": {"compile": "auto", "stages": 2}})
    second = daemon.run(cut)
    assert second["state"] == "completed", daemon.log_of(second["job"])
    assert "units are compiled: " not in daemon.log_of(second["job"]), "it is not decided anew"
    whole = {name: value for name, value in on.items() if name != "resume_from"}
    expected = reference.train(JobSpec.parse(spec.to_wire() | {"job": whole, "strategy": chosen}), compiled=cache)
    losses = [[row["loss"] for row in metrics_rows(each["run_dir"]) if "loss" in row] for each in (first, second)]
    assert losses[0] == expected.losses[:4]
    assert losses[1] == expected.losses[-len(losses[1]) :]
    assert len(losses[1]) >= 4
    state = load_file(second["model"])
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state.items())


@pytest.mark.days(3)
@pytest.mark.slow(seconds=8)
def test_where_it_is_left_open_units_stay_eager_without_a_compiler_and_in_a_short_job(
    own_daemon: Callable[..., RealDaemon], tmp_path: Path
) -> None:
    """Which the log says; and they are eager in the plain loop, where nothing is measured."""
    daemon = own_daemon(environment={"WEFT_CACHE_DIR": str(tmp_path / "cache"), "CXX": "/nowhere/g++"})
    left_open = {"compile": "auto", "microbatches": 2}
    told = {
        "strategy.compile = true needs a C++ compiler, and '/nowhere/g++' is none that runs here\n": LONG,
        "s of training are too few to make kernels for (from 60 s on)\n": {"batch_size": 8, "epochs": 9},
    }
    for why, job in told.items():
        spec = daemon.spec(CHAINS, strategy=left_open, **job)
        result = daemon.run(spec)
        log = daemon.log_of(result["job"])
        assert result["state"] == "completed", log
        assert "compile: units stay eager, since " in log
        assert why in log
        assert json.loads(Path(result["run_dir"], "strategy.json").read_text())["compile"] is False
    run = daemon.weft("run", daemon.spec_file(spec), "--reference", "--json", "--runs-dir", tmp_path / "runs")
    assert "strategy.compile = 'auto': nothing is measured here, and units run eager" in run.stderr
    plain, state = load_file(json.loads(run.stdout)["model"]), load_file(result["model"])
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.items())


@pytest.mark.days(3)
@pytest.mark.slow(seconds=7)
def test_a_compiler_that_is_missing_or_fails_is_told_with_the_unit_and_a_remedy(
    own_daemon: Callable[..., RealDaemon], tmp_path: Path
) -> None:
    """Another daemon for each: torch looks once."""
    fails = tmp_path / "g++"
    fails.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "g++ (Debian 12.2.0) 12.2.0"\n')
    fails.chmod(0o700)
    told = {
        "/nowhere/g++": "strategy.compile = true needs a C++ compiler, and '/nowhere/g++' is none that runs here; ",
        str(fails): "0 (Sequential) cannot be compiled: C++ compile error; ",
    }
    for compiler, text in told.items():
        daemon = own_daemon(environment={"WEFT_CACHE_DIR": str(tmp_path / "cache"), "CXX": compiler})
        result = daemon.run(compiled_spec("rows"))
        assert (result["state"], result["reason"]) == ("failed", "invalid-workload")
        assert text in result["error"]
        assert "use strategy.compile = false" in result["error"]
