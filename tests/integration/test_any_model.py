"""Models of any class, cut by their own forward, give the result of the plain loop: bit for bit with one replica."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest

from weft.spec.job_spec import JobSpec
from weft.spec.schedule_text import DYNAMIC, MEASURED, SCHEDULE_NAMES, STAGES_PER_WORKER

_REPLICAS = runpy.run_path(str(Path(__file__).with_name("test_replicas.py")))
agrees, STRATEGIES = _REPLICAS["agrees"], _REPLICAS["STRATEGIES"]
_SAME = runpy.run_path(str(Path(__file__).with_name("test_same_result.py")))
RealDaemon, same_as_the_plain_loop = _SAME["RealDaemon"], _SAME["same_as_the_plain_loop"]
TESTS = Path(__file__).resolve().parents[1]
MODELS = runpy.run_path(str(TESTS / "any_models.py"))
# The experts' kernel of mixtral has no float64; replicas of heads have a running mean each, those of hooked a vector.
IN_FLOAT64 = [name for name in MODELS["NAMES"] if name not in ("mixtral", "heads", "hooked")]
# Stages of mlp multiply with one parameter: rounded in each, and once in the whole model, so the proof refuses the cut.
IN_BFLOAT16 = [name for name in MODELS["NAMES"] if name != "mlp"]

SCHEDULED = [name for name in ("mlp", "gpt2", "resnet18", "unet", "tapped") if name in MODELS["NAMES"]]


def any_spec(name: str, double: bool = False, **strategy: Any) -> JobSpec:
    """Of 20 samples: batches of 8, 8 and 4, in microbatches of other sizes."""
    args = {"name": name, "double": double}
    job = {"entry": "any_models.py:workload", "args": args, "batch_size": 8, "epochs": 2, "seed": 11}
    return JobSpec.parse({"job": job, "strategy": strategy, "directory": str(TESTS)})


@pytest.mark.slow(seconds=1.5)
@pytest.mark.pairs(
    32,
    name=MODELS["NAMES"],
    stages=(1, 2, 3),
    microbatches=(1, 3, 4),
    schedule=("gpipe", "1f1b", "zero-bubble"),
    recompute=(False, True),
)
def test_a_model_of_any_class_gives_the_result_of_the_plain_loop(
    daemon: RealDaemon, name: str, stages: int, microbatches: int, schedule: str, recompute: bool
) -> None:
    spec = any_spec(name, stages=stages, microbatches=microbatches, schedule=schedule, recompute=recompute)
    assert same_as_the_plain_loop(daemon, spec)


@pytest.mark.slow(seconds=1.5)
@pytest.mark.pairs(32, name=SCHEDULED, schedule=SCHEDULE_NAMES, recompute=(False, True))
def test_so_it_does_under_every_schedule(daemon: RealDaemon, name: str, schedule: str, recompute: bool) -> None:
    """Of six microbatches two have no sample in an epoch's last batch, and the others have one. The mlp cannot be cut
    into four stages, two in a worker. An order that came out is a schedule, too."""
    stages = 4 if schedule in STAGES_PER_WORKER and name != "mlp" else 3
    named = "zero-bubble" if schedule in STAGES_PER_WORKER and name == "mlp" else schedule
    how = {"stages": stages, "microbatches": 6, "recompute": recompute}
    result = same_as_the_plain_loop(daemon, any_spec(name, schedule=named, **how))
    if named in (MEASURED, DYNAMIC):
        grid = Path(result["run_dir"], "schedule.grid").read_text()
        assert same_as_the_plain_loop(daemon, any_spec(name, schedule=grid, **how))


@pytest.mark.slow
@pytest.mark.pairs(16, name=IN_BFLOAT16, how=tuple(itertools.product((2, 3), (1, 2))))
def test_so_it_does_in_bfloat16_and_with_several_loaders(daemon: RealDaemon, name: str, how: tuple[int, int]) -> None:
    stages, loaders = how
    spec = any_spec(name, stages=stages, microbatches=3, precision="bf16", loaders=loaders)
    assert same_as_the_plain_loop(daemon, spec)


@pytest.mark.slow(seconds=1.5)
@pytest.mark.pairs(32, name=IN_FLOAT64, how=STRATEGIES)
def test_replicas_of_it_compute_what_the_plain_loop_computes(machine: RealDaemon, name: str, how: str) -> None:
    strategy = {key: value for key, value in STRATEGIES[how].items() if key != "bucket_mib"}
    agrees(machine, any_spec(name, double=True, **strategy), least=1.0)


@pytest.mark.slow
@pytest.mark.pairs(16, name=IN_FLOAT64, how=tuple(itertools.product((1, 2, 3), (False, True))))
def test_two_replicas_of_it_clip_by_one_norm_though_one_is_cut(
    machine: RealDaemon, name: str, how: tuple[int, bool]
) -> None:
    first, recompute = how
    replicas = [{"stages": first, "microbatches": 3}, {"stages": 2 if first == 1 else 1, "microbatches": 2}]
    spec = any_spec(name, double=True, replicas=replicas, clip_norm=0.25, recompute=recompute)
    expected = agrees(machine, spec, least=1.0)
    assert max(expected.grad_norms) > 0.25


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a worker", "a GPU"])
def test_stages_that_share_a_worker_have_a_model_each(machine: RealDaemon, where: str) -> None:
    """A copy's hooks wrote to the first stage's model: a term of the loss was missing, and nobody was told."""
    how: dict[str, Any] = {"stages": 4, "microbatches": 4, "schedule": "interleaved"}
    if where == "a GPU":
        how = {"microbatches": 4, "replicas": [{"device": "gpu", "stages": 2, "gpus": 1}]}
    assert same_as_the_plain_loop(machine, any_spec("tapped", **how))


@pytest.mark.slow
@pytest.mark.parametrize("split", [["gate"], ["inlet", "blocks.1"], ["blocks.0", "outlet"]], ids=" ".join)
def test_what_came_over_may_be_written_to_wherever_in_a_stage(daemon: RealDaemon, split: list[str]) -> None:
    spec = any_spec("gated", stages=len(split) + 1, microbatches=3, split=split)
    assert same_as_the_plain_loop(daemon, spec)


@pytest.mark.slow
def test_a_running_mean_that_forward_reads_is_told_where_there_are_replicas(daemon: RealDaemon) -> None:
    job = daemon.run(any_spec("heads", replicas=2))["job"]
    assert "buffers: forward of trunk.0 (_NormedBlock), trunk.1" in daemon.log_of(job)
