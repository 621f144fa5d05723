"""What is refused of a spec alone, or for a daemon's workers; and what is only doubted."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from weft.plan.itinerary import Itinerary
from weft.scheduler.planning.plan_notes import doubt_of_batch
from weft.spec.admission import problem_of_crew, problem_of_spec
from weft.spec.job_spec import JobSpec

CREW = ["cpu", "cpu", "gpu", "loader"]


def spec(batch_size: int = 8, mode: str = "train", **axes: Any) -> JobSpec:
    job = {"entry": "a.py:f", "steps": 1, "batch_size": batch_size, "mode": mode}
    return JobSpec.parse({"job": job, "strategy": axes})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (spec(4, microbatches=5), "job.batch_size = 4 is smaller than strategy.microbatches = 5; a microbatch needs"),
        (
            spec(4, microbatches=3, replicas=2),
            "job.batch_size = 4 is smaller than the 6 microbatches that all replicas",
        ),
        (spec(replicas=2, share="stealing", staleness=[0, 1]), "strategy.staleness = [0, 1] differs between replicas"),
        (
            spec(replicas=[{"microbatches": 2}, {}], share="stealing"),
            "the replicas' microbatches = [2, 1] cannot stand beside share = 'stealing'; give strategy.microbatches",
        ),
        (spec(verify="replay", staleness=1), "strategy.verify = 'replay' has other CPU workers run an iteration again"),
        (spec(verify="replay", replicas=[{"device": "gpu"}]), "strategy.verify = 'replay' has other CPU workers run"),
        (spec(verify="replay", replicas=2, share="stealing"), "strategy.verify = 'replay' has other CPU workers run"),
        (spec(verify="replay", recovery="off"), "strategy.verify = 'replay' has other CPU workers run an iteration"),
        (
            spec(stages=3, schedule="interleaved"),
            "strategy.schedule = 'interleaved' has 2 stages in each worker, and 3 are no multiple of that; use stages "
            "= 4, or stages_per_worker = 3",
        ),
        (spec(stages=3, schedule="zero-bubble-v"), "strategy.schedule = 'zero-bubble-v' has 2 stages in each worker"),
        (
            spec(stages=4, stages_per_worker=2),
            "strategy.stages_per_worker = 2 is of schedule = 'interleaved', and '1f1b' has 1; leave it out",
        ),
        (
            spec(stages=2, stages_per_worker=2, schedule="F0 B0\nF0 B0\n"),
            "strategy.stages_per_worker = 2 is of schedule = 'interleaved', and a grid has its own; leave it out",
        ),
        (
            spec(replicas=[{"device": "gpu", "stages": 4, "gpus": 3}], schedule="interleaved"),
            "strategy.replicas: gpus = 3, and strategy.schedule has the 4 stages in 2 workers; use gpus = 2",
        ),
        (
            spec(replicas=2, stages=2, share="stealing", schedule="0F0 1F0 1B0 0B0\n"),
            "strategy.share = 'stealing' cannot stand beside a schedule that has several stages in a worker",
        ),
        (
            spec(replicas=[{"device": "gpu", "stages": 2}], schedule="dynamic"),
            "strategy.schedule = 'dynamic' has a lane begin what is there, and a GPU is given its passes before that",
        ),
        (
            spec(replicas=2, stages=2, share="stealing", schedule="dynamic"),
            "strategy.schedule = 'dynamic' cannot stand beside share = 'stealing', which fills the places of a fixed",
        ),
        (
            spec(replicas=2, share="adaptive", compile=True),
            "strategy.compile = true compiles each size of microbatch, and strategy.share = 'adaptive' has ever other",
        ),
        (
            spec(stages=2, schedule="zero-bubble", compile=True),
            "strategy.compile = true makes one kernel of a unit's backward, and strategy.schedule = 'zero-bubble' has",
        ),
        (spec(mode="forward", preset="stronghold"), "strategy.replicas: working_window streams what updates change"),
    ],
)
def test_what_no_machine_could_plan_is_refused(given: JobSpec, told: str) -> None:
    assert (problem_of_spec(given) or "").startswith(told)


@pytest.mark.parametrize("preset", ["hybrid-fine", "hybrid-coarse"])
def test_a_presets_list_that_cannot_stand_beside_stealing_is_told_as_it_could(preset: str) -> None:
    """To give strategy.microbatches alone was refused again: the preset's own list has microbatches, too."""
    refused = problem_of_spec(spec(preset=preset, share="stealing", microbatches=4)) or ""
    found = re.search(r"replicas = \[.*\]$", refused)
    assert found is not None, refused
    taken = spec(preset=preset, share="stealing", microbatches=4, **tomllib.loads(found[0]))
    assert problem_of_spec(taken) is None
    assert [each.num_stages for each in taken.strategy.replica_list] == [2, 1]


def test_a_presets_working_window_that_nothing_streams_through_is_told_as_a_list_without_it() -> None:
    """To leave it out was no help: it was the preset's own."""
    found = re.search(r"replicas = \[.*\]$", problem_of_spec(spec(mode="forward", preset="stronghold")) or "")
    assert found is not None
    assert problem_of_spec(spec(mode="forward", preset="stronghold", **tomllib.loads(found[0]))) is None


@pytest.mark.parametrize(
    "given",
    [
        spec(),
        spec(4, microbatches=4),
        spec(4, microbatches=4, replicas=2, share="stealing"),
        spec(replicas=[{"stages": 6}, {}], stages_per_worker=3, schedule="interleaved"),
    ],
)
def test_what_could_be_planned_somewhere_is_not(given: JobSpec) -> None:
    assert problem_of_spec(given) is None


def test_what_has_too_few_workers_here_is_refused_with_the_flag_that_gives_more() -> None:
    assert problem_of_crew(spec(stages=2), CREW) is None
    assert problem_of_crew(spec(stages=3), CREW) == (
        "strategy.stages = 3 needs 3 CPU workers and this daemon has 2; use fewer stages, or start the daemon with "
        "--workers 3"
    )
    assert problem_of_crew(spec(loaders=2), CREW) == (
        "strategy.loaders = 2 needs 2 loader workers and this daemon has 1; use fewer loaders, or start the daemon "
        "with --loaders 2"
    )
    assert problem_of_crew(spec(threads=4, stages=2), CREW, threads=4) is None
    assert problem_of_crew(spec(threads=4), CREW) == (
        "strategy.threads = 4 needs 4 CPU workers and this daemon has 2; use fewer threads, or start the daemon with "
        "--workers 4"
    )
    gpu = problem_of_crew(spec(preset="zero-offload"), ["cpu", "loader"]) or ""
    assert "needs 1 GPU worker and this daemon has 0;" in gpu
    assert (problem_of_crew(spec(preset="hybrid-fine").on(0), ["cpu", "loader"]) or "") == (
        "strategy.replicas = gpu × 2, cpu × 1 needs 1 GPU worker and this daemon has 0; use fewer replicas, or start "
        "the daemon with --stand-ins 1"
    )
    assert (problem_of_crew(spec(replicas=[{"device": "gpu", "stages": 2}]), CREW) or "").endswith("--stand-ins 2")


def test_a_batch_above_the_data_set_is_doubted() -> None:
    def doubt(size: int, samples: int = 6) -> str | None:
        return doubt_of_batch(Itinerary.of(num_train=samples, num_validation=0, batch_size=size, epochs=1, steps=None))

    assert doubt(6) is None
    assert doubt(7) == ("warning: job.batch_size = 7 is more than the 6 samples of Workload.train; every batch has 6")
    assert doubt(7, 1) == "warning: job.batch_size = 7 is more than the one sample of Workload.train; every batch has 1"
