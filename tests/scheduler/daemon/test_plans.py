"""Which strategy a job goes on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weft.machine.checkpoint_files import write_checkpoint
from weft.machine.crew import Crew, Member
from weft.scheduler.daemon.hearing import DeviceFacts
from weft.scheduler.daemon.plans import facts_of_machine, with_chosen
from weft.scheduler.runs.run import CHOSEN
from weft.spec.job_spec import JobSpec

SpecOf = Callable[..., JobSpec]


def test_another_daemon_goes_on_with_what_was_chosen(spec_of: SpecOf, tmp_path: Path) -> None:
    auto = spec_of(preset="auto", clip_norm=1.0)
    assert with_chosen(auto, tmp_path) == auto, "nothing was"
    (tmp_path / CHOSEN).write_text('{"stages": 2, "microbatches": 4, "clip_norm": 1.0}')
    assert with_chosen(auto, tmp_path) == spec_of(stages=2, microbatches=4, clip_norm=1.0)
    assert with_chosen(spec_of(replicas=2), tmp_path) == spec_of(replicas=2), "a user's own strategy stays"


def test_another_daemon_goes_on_with_units_compiled_or_not_as_was_chosen(spec_of: SpecOf, tmp_path: Path) -> None:
    left_open = spec_of(stages=2, compile="auto")
    assert with_chosen(left_open, tmp_path) == left_open
    (tmp_path / CHOSEN).write_text('{"stages": 2, "compile": true}')
    assert with_chosen(left_open, tmp_path) == spec_of(stages=2, compile=True)
    assert with_chosen(spec_of(compile=False), tmp_path) == spec_of(compile=False)


@pytest.mark.parametrize(("kept", "goes_on_with"), [(True, True), (False, False), (None, "auto"), ("true", "auto")])
def test_a_job_that_goes_on_from_a_checkpoint_has_its_units_as_they_were(
    spec_of: SpecOf, tmp_path: Path, kept: object, goes_on_with: object
) -> None:
    """From a run directory, whose newest it is, or from a checkpoint; under another plan, too. One that was written
    before it said so leaves it open, and a user's own word counts."""
    training = {} if kept is None else {"compile": kept}
    path = write_checkpoint(tmp_path / "before", 3, training, lambda directory: (), keep=1)
    for where in (path, tmp_path / "before", tmp_path / "before" / "checkpoints" / "latest"):
        for axes in ({"stages": 2}, {"preset": "auto"}):
            spec = with_resume(spec_of(compile="auto", **axes), where)
            assert with_chosen(spec, tmp_path / "own").strategy.compile == goes_on_with
            assert with_chosen(spec, tmp_path / "own").strategy.is_auto is spec.strategy.is_auto
    spec = with_resume(spec_of(compile=False), path)
    assert with_chosen(spec, tmp_path / "own") == spec
    nowhere = with_resume(spec_of(compile="auto"), tmp_path / "nowhere")
    assert with_chosen(nowhere, tmp_path / "own") == nowhere, "what is wrong with it is told later"


def with_resume(spec: JobSpec, path: Path) -> JobSpec:
    tables = spec.to_wire()
    return JobSpec.parse(tables | {"job": tables["job"] | {"resume_from": str(path)}})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"stages": "two"}', '{"no": 1}'])
def test_what_is_no_strategy_is_chosen_anew(spec_of: SpecOf, tmp_path: Path, text: str) -> None:
    (tmp_path / CHOSEN).write_text(text)
    assert with_chosen(spec_of(preset="auto"), tmp_path).strategy.is_auto


def test_a_job_is_planned_with_the_memory_and_the_speed_of_each_of_its_gpus() -> None:
    """And not with those of others; what it goes by in all of them is the least."""
    models = {"gpu-0": "One", "gpu-1": "Other", "gpu-2": "One"}
    members = [Member(name=name, kind="gpu", device=name, model=model, cores=()) for name, model in models.items()]
    crew, told = Crew((Member(name="cpu-0", kind="cpu", device="cpu", model="CPU", cores=()), *members)), DeviceFacts()
    for worker, link, free, probe in ("gpu-0", 9e9, 8, 0.01), ("gpu-1", 5e9, 24, 0.03), ("gpu-2", 7e9, 6, 0.02):
        told.add(worker, {"link_bytes_per_second": link, "device_bytes": free, "probe_seconds": probe})
    told.add("cpu-0", {"link_bytes_per_second": None, "device_bytes": None, "probe_seconds": None})
    facts = facts_of_machine(crew, told, ["cpu-0", "gpu-0", "gpu-1"], 1)
    assert (facts["link_bytes_per_second"], facts["device_bytes"], facts["gpu_bytes"]) == (5e9, 8, [8, 24])
    assert facts["slowness"] == {"cpu": [1.0], "gpu": [1.0, pytest.approx(3.0)]}
    alone = facts_of_machine(crew, told, ["cpu-0"], 0)
    assert (alone["device_bytes"], alone["gpu_bytes"], alone["slowness"]) == (None, [], {})
