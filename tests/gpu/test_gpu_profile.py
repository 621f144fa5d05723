"""A profile of a job on a real GPU: kernels and copies by CUPTI, in the streams of their lanes and at the time of their
rows."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from weft.metrics.recording.profile_account import compare
from weft.metrics.recording.recording import Recording
from weft.plan.kinds import FIRST_STALL
from weft.plan.worker_profile import KINDS, WorkerProfile, outermost, profiles_in
from weft.spec.job_spec import JobSpec

_SOURCE = runpy.run_path(str(Path(__file__).with_name("test_gpu_jobs.py")))["SOURCE"]
SOURCE = _SOURCE.replace("width = 64", "width = 1024")  # its kernels take longer than launching them
FIRST, NUM = 10, 5
SMALLEST = 0.05  # as in benchmarks/gpu_accounting.py


@pytest.fixture(scope="module")
def profiled(daemon: Any) -> tuple[Recording, WorkerProfile]:
    spec = daemon.spec(SOURCE, strategy={"preset": "zero-offload"}, steps=30, batch_size=64, args={"dtype": "float32"})
    result = daemon.run(JobSpec.parse(spec.to_wire() | {"profile": {"first": FIRST, "iterations": NUM}}))
    log = daemon.log_of(result["job"])
    assert SOURCE != _SOURCE
    assert result["state"] == "completed", log
    run_dir = Path(result["run_dir"])
    found = [profile for profile in profiles_in(run_dir, result["job"], 1) if profile.worker == "gpu-0"]
    assert len(found) == 1, log
    return Recording.load(run_dir / "recording.msgpack"), found[0]


def test_streams_are_known_by_their_lanes_and_run_what_their_lanes_are_for(
    profiled: tuple[Recording, WorkerProfile],
) -> None:
    _, profile = profiled
    kinds = {track.lane: {KINDS[kind] for _, kind, _, _ in track.rows()} for track in profile.tracks}
    assert "kernel" in kinds["compute"]
    for lane in ("fetch", "d2h", "h2d"):
        assert "copy" in kinds[lane], "on its stream"
    assert "" not in kinds, "no other stream is used"


def test_kernels_and_copies_ran_in_the_rows_of_their_lanes(profiled: tuple[Recording, WorkerProfile]) -> None:
    """Events are told on the host's clock by us, kernels by CUPTI and the profiler's marks."""
    recording, profile = profiled
    for track in profile.tracks:
        busy = [(row[4], row[5]) for row in recording.rows[f"gpu-0/{track.lane}"] if row[0] < FIRST_STALL]
        ran = [span for span in outermost(track.rows()) if profile.start_ns <= span[0] and span[1] <= profile.end_ns]
        within = sum(max(0, min(end, stop) - max(start, begin)) for start, end in ran for begin, stop in busy)
        assert within > 0.5 * sum(end - start for start, end in ran), track.lane


def test_stall_and_overlap_are_those_of_the_profilers_view(profiled: tuple[Recording, WorkerProfile]) -> None:
    recording, profile = profiled
    compared = compare(recording, [profile])
    for pair in (compared.stall(["gpu-0/compute"]), compared.overlap()):
        assert pair.apart(SMALLEST * compared.wall_ns) <= 0.1  # benchmarks/gpu_accounting.py has the figure
