"""Units that are compiled: a job's result is that of the plain loop with the same units compiled, bit for bit; what was
compiled is found again; and what cannot be is told with a remedy."""

from __future__ import annotations

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


@pytest.mark.slow(seconds=45)
@pytest.mark.filterwarnings("ignore")  # torch's own, where it compiles
@pytest.mark.pairs(4, name=("rows", "attends"), recompute=(False, True))
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
