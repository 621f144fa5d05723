"""`--profile`: torch.profiler over some iterations of a real job, on the cores and on a stand-in, in its trace."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from weft.metrics.recording.recording import PROFILED_FILE, Recording
from weft.plan.kinds import MODES
from weft.plan.worker_profile import Track, WorkerProfile, outermost, profiles_in
from weft.spec.job_spec import JobSpec

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until = _REAL["RealDaemon"], _REAL["until"]
_CHECKS = runpy.run_path(str(Path(__file__).parents[1] / "metrics" / "views" / "trace_format.py"))
check_format = _CHECKS["check_format"]

pytestmark = pytest.mark.slow

FIRST, NUM = 5, 3
PIPELINE = {"stages": 2, "microbatches": 4}
OFFLOAD = {"replicas": [{"device": "gpu"}], "update": "cpu", "sync": "fine", "microbatches": 2}


def with_profile(spec: JobSpec) -> JobSpec:
    return JobSpec.parse(spec.to_wire() | {"profile": {"first": FIRST, "iterations": NUM}})


def names_within(profile: WorkerProfile, track: Track, start: int, end: int) -> set[str]:
    return {profile.names[name] for name, _, begin, until_ns in track.rows() if start <= begin and until_ns <= end}


def check_profiles(run_dir: Path, job: str, expected: dict[str, str]) -> None:
    """expected: by mode, an operator that each task of it runs in training, in the time that the profile covers."""
    recording = Recording.load(run_dir / "recording.msgpack")
    checked = set()
    for profile in profiles_in(run_dir, job, 1):
        assert (profile.first, profile.last) == (FIRST, FIRST + NUM - 1)
        for track in (track for track in profile.tracks if track.lane):
            for mode, _, iteration, _, start, end in recording.rows[f"{profile.worker}/{track.lane}"]:
                kind = MODES[mode] if iteration in recording.training else ""  # UP has nothing to bring in validation
                if kind in expected and profile.start_ns <= start and end <= profile.end_ns:
                    found = names_within(profile, track, start, end)
                    assert any(expected[kind] in name for name in found), (profile.worker, track.lane, kind, iteration)
                    checked.add(kind)
    assert checked == expected.keys()


def test_operators_of_a_pipeline_stand_in_its_trace_beside_the_lanes(daemon: RealDaemon, tmp_path: Path) -> None:
    result = daemon.run(with_profile(daemon.spec(strategy=PIPELINE, steps=20)))
    job, run_dir = result["job"], Path(result["run_dir"])
    assert result["state"] == "completed"
    log = daemon.log_of(job)
    workers = {profile.worker for profile in profiles_in(run_dir, job, 1)}
    assert len(workers) == 3, log
    for worker in workers:
        assert f"{worker}: profiled iterations 5 to 7: " in log
    check_profiles(run_dir, job, {"forward": "aten::", "backward": "autograd::engine::evaluate_function"})
    done = daemon.weft("trace", job, "--profiled", "-o", tmp_path / "trace.json")
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_format(trace)
    operators = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "operator"}
    assert {"aten::linear", "aten::tanh", "autograd::engine::evaluate_function: TanhBackward0"} <= operators
    threads = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert threads.count("compute operators") == 2
    assert trace["otherData"]["iterations"] == [FIRST, FIRST + NUM - 1]
    assert trace["otherData"]["profiled"] == {worker: [FIRST, FIRST + NUM - 1] for worker in workers}


def test_a_profiled_job_trains_what_it_trains_without(daemon: RealDaemon) -> None:
    spec = daemon.spec(strategy=PIPELINE, steps=12)
    plain, profiled = (daemon.run(each) for each in (spec, with_profile(spec)))
    assert Path(plain["model"]).read_bytes() == Path(profiled["model"]).read_bytes()
    assert list(Path(plain["run_dir"]).glob("profile*")) == []


def test_copies_and_updates_of_a_device_job_are_in_the_rows_of_their_lanes(machine: RealDaemon) -> None:
    result = machine.run(with_profile(machine.spec(strategy=OFFLOAD, steps=16)))
    assert result["state"] == "completed", machine.log_of(result["job"])
    run_dir, job = Path(result["run_dir"]), result["job"]
    check_profiles(run_dir, job, {"forward": "aten::", "transfer": "aten::copy_", "update": "aten::"})
    (device,) = (profile for profile in profiles_in(run_dir, job, 1) if profile.worker == "gpu-0")
    assert {"compute", "fetch", "d2h", "h2d"} <= {track.lane for track in device.tracks}
    recording = Recording.load(run_dir / "recording.msgpack")
    (track,) = (track for track in device.tracks if track.lane == "compute")
    busy = [(row[4], row[5]) for row in recording.rows["gpu-0/compute"] if MODES[row[0]] in ("forward", "backward")]
    ran = [(start, end) for start, end in outermost(track.rows()) if device.start_ns <= start and end <= device.end_ns]
    within = sum(max(0, min(end, stop) - max(start, begin)) for start, end in ran for begin, stop in busy)
    assert within > 0.5 * sum(end - start for start, end in ran)


def test_what_was_profiled_long_ago_can_be_traced_and_asked_for_at_the_command_line(
    daemon: RealDaemon, tmp_path: Path
) -> None:
    """While the job runs: as the recording was then stands beside the profiles."""
    spec = daemon.spec(strategy=PIPELINE, steps=100_000_000)
    toml = tmp_path / "job.toml"
    tables: dict[str, Any] = {"job": spec.to_wire()["job"], "strategy": PIPELINE}
    lines = [
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in table.items() if v != {})
        for name, table in tables.items()
    ]
    toml.write_text("\n".join(lines))
    submitted = daemon.weft(
        "submit",
        toml,
        "--profile",
        NUM,
        "--set",
        f"profile.first={FIRST}",
        "--set",
        f"directory={spec.directory}",
        "--json",
    )
    assert submitted.returncode == 0, submitted.stderr
    job = json.loads(submitted.stdout)["job"]
    run_dir = Path(daemon.client.show(job)["run_dir"])
    until((run_dir / PROFILED_FILE).exists, "the recording of the profiled iterations")
    done = daemon.weft("trace", job, "--profiled", "-o", "-")
    assert daemon.client.cancel(job) == "cancelled"
    assert done.returncode == 0, done.stderr
    trace = json.loads(done.stdout)
    check_format(trace)
    assert trace["otherData"]["iterations"] == [FIRST, FIRST + NUM - 1]
    assert any(event.get("cat") == "operator" for event in trace["traceEvents"])


def test_a_profiler_of_the_jobs_own_code_costs_ours_and_not_the_job(daemon: RealDaemon) -> None:
    source = _REAL["LINE"].replace(
        "    return weft.Workload(",
        "    torch.autograd.profiler.profile(use_kineto=True).__enter__()\n    return weft.Workload(",
    )
    assert source != _REAL["LINE"]
    result = daemon.run(with_profile(daemon.spec(source, steps=12)))
    assert result["state"] == "completed"
    log = daemon.log_of(result["job"])
    assert "not profiled: another profiler runs in this process" in log
    assert list(Path(result["run_dir"]).glob("profile-cpu-*")) == []
