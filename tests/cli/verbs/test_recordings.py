"""`weft trace` and `weft plot` on the files of a run directory, without a daemon."""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgpack
import pytest
from click.testing import Result
from typer.testing import CliRunner

from weft.cli.recordings.edited_file import reads_recording
from weft.cli.verbs.app import app
from weft.metrics.recording.recording import Recording
from weft.plan.rows import packed_rows
from weft.plan.worker_profile import Track, WorkerProfile, packed_track

_MADE = runpy.run_path(str(Path(__file__).parents[2] / "metrics" / "conftest.py"))
make_pipeline, record = _MADE["make_pipeline"], _MADE["record"]


def weft(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def metrics_line(step: int) -> str:
    values = {"loss": 1 / step, "lr": 0.1, "grad_norm": None, "skipped": False, "samples": 16, "seconds": 0.03}
    return json.dumps({"step": step, "epoch": 0, **values}) + "\n"


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a made-up job of 12 iterations; the working directory is another."""
    plan = make_pipeline(stages=2, microbatches=4)
    made: Recording = record(plan)
    directory = tmp_path / "runs" / "made-up-1"
    directory.mkdir(parents=True)
    facts = {**made.facts, "itinerary": asdict(plan.itinerary)}
    replace(made, facts=facts).save(directory / "recording.msgpack")
    (directory / "metrics.jsonl").write_text("".join(map(metrics_line, range(1, 13))))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return directory


def trace_in(text: str | bytes) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(text)
    return trace


def iterations_in(trace: dict[str, Any]) -> list[int]:
    return [event["args"]["iteration"] for event in trace["traceEvents"] if event.get("cat") == "iteration"]


def test_a_trace_of_a_file_needs_no_daemon_and_has_all_iterations_with_their_losses(run_directory: Path) -> None:
    done = weft("trace", run_directory / "recording.msgpack", "-o", "trace.json")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "trace: steps 1 to 12 of made-up-1 in trace.json\n"
    trace = trace_in(Path("trace.json").read_text())
    assert iterations_in(trace) == list(range(12))
    losses = [event["args"]["loss"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert losses == [1 / step for step in range(1, 13)]


def test_the_last_iterations_and_a_picture_of_them_in_one_call(run_directory: Path) -> None:
    done = weft("trace", run_directory, "-o", "trace.json", "--svg", "picture.svg", "--iterations", "3", "--json")
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert (said["job"], said["attempt"]) == ("made-up-1", 1)
    assert iterations_in(trace_in(Path("trace.json").read_text())) == [9, 10, 11]
    for name, path in (("trace", "trace.json"), ("svg", "picture.svg")):
        assert said[name]["path"] == path
        assert said[name]["bytes"] == Path(path).stat().st_size
        assert said[name]["iterations"] == [9, 11]
        assert said[name]["seconds"] > 0
    assert ElementTree.parse("picture.svg").getroot().tag.endswith("svg")


def test_a_minus_is_stdout(run_directory: Path) -> None:
    trace = weft("trace", run_directory, "-o", "-")
    assert iterations_in(trace_in(trace.stdout)) == list(range(12))
    assert trace.stderr == "trace: steps 1 to 12 of made-up-1 in stdout\n"
    assert ElementTree.fromstring(weft("trace", run_directory, "--svg", "-").stdout).tag.endswith("svg")


def test_a_name_that_ends_in_gz_is_compressed(run_directory: Path) -> None:
    assert weft("trace", run_directory, "-o", "trace.json.gz").exit_code == 0
    assert iterations_in(trace_in(gzip.decompress(Path("trace.json.gz").read_bytes()))) == list(range(12))


def test_a_recording_in_this_directory_needs_no_slash(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_directory)
    assert weft("trace", "recording.msgpack", "-o", "trace.json").exit_code == 0
    assert Path("trace.json").exists()


def test_without_its_metrics_a_trace_has_no_losses(run_directory: Path) -> None:
    (run_directory / "metrics.jsonl").unlink()
    assert weft("trace", run_directory, "-o", "trace.json").exit_code == 0
    assert [e for e in trace_in(Path("trace.json").read_text())["traceEvents"] if e["ph"] == "i"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "nothing to write: give -o trace.json"),
        (["-o", "-", "--json"], 2, "only one of -o -, --svg - and --json can have stdout"),
        (["-o", "-", "--svg", "-"], 2, "only one of -o -, --svg - and --json can have stdout"),
        (["-o", "gone/trace.json"], 74, "gone/trace.json cannot be written: No such file or directory; give a path"),
        (["-o", "."], 74, ". cannot be written: it is a directory; give a path"),
        (["--svg", "gone/picture.svg"], 74, "gone/picture.svg cannot be written"),
    ],
)
def test_what_cannot_be_written_is_told_with_the_remedy(
    run_directory: Path, arguments: list[str], code: int, message: str
) -> None:
    done = weft("trace", run_directory, *arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith(f"weft: {message}")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("verb", ["trace", "plot"])
def test_what_is_no_recording_is_told_by_its_path(run_directory: Path, verb: str) -> None:
    file = run_directory / "other.msgpack"
    file.write_bytes(b"something else")
    for path, message in (
        (file, f"{file} is no recording"),
        (run_directory / "gone", f"{run_directory / 'gone'} is not there; give a job's id, or the path of a recording"),
        (run_directory.parent, f"{run_directory.parent / 'recording.msgpack'} is not there; give a job's id"),
        (file / "in", f"{file / 'in'} is not there; give a job's id"),
        ("/dev/null", "/dev/null is no file; give a job's id"),
    ):
        done = weft(verb, path, "-o", "file.svg")
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"weft: {message}")
    assert list(Path().iterdir()) == []


def test_a_recording_without_a_whole_iteration_says_when_to_come_back(run_directory: Path) -> None:
    path = run_directory / "recording.msgpack"
    replace(Recording.load(path), packed={}).save(path)
    done = weft("trace", path, "-o", "trace.json")
    assert done.exit_code == 4
    assert done.stderr.startswith("weft: made-up-1 has no complete iteration recorded; try again once it has run a few")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("verb", ["trace", "plot"])
def test_metrics_that_are_none_are_told_by_their_line(run_directory: Path, verb: str) -> None:
    pytest.importorskip("matplotlib")
    (run_directory / "metrics.jsonl").write_text(metrics_line(1) + "nonsense\n")
    done = weft(verb, run_directory, "-o", "file.png")
    assert done.exit_code == 2
    assert "metrics.jsonl, line 2, is no line of a step log" in done.stderr


def test_a_plot_of_a_file_is_named_for_its_job(run_directory: Path) -> None:
    pytest.importorskip("matplotlib")
    done = weft("plot", run_directory)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "picture: made-up-1.png\n")
    assert Path("made-up-1.png").read_bytes()[:4] == b"\x89PNG"
    done = weft("plot", run_directory, "-o", "picture.svg", "--json")
    assert json.loads(done.stdout) == {"job": "made-up-1", "picture": "picture.svg", "events": None}
    assert b"gradient" in Path("picture.svg").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-o", "picture.bmp"], 2, "-o picture.bmp: the name must end in one of .png, .svg, .pdf"),
        (["--follow"], 2, "--follow goes with --tensorboard DIR"),
        (["--follow", "--tensorboard", "board"], 2, "--follow needs a job's id"),
        (["-o", "gone/picture.png"], 74, "gone/picture.png cannot be written"),
    ],
)
def test_a_plot_that_cannot_be_drawn_says_why(
    run_directory: Path, arguments: list[str], code: int, message: str
) -> None:
    pytest.importorskip("matplotlib")
    done = weft("plot", run_directory, *arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith(f"weft: {message}")
    assert list(Path().iterdir()) == []


def test_a_job_without_a_step_has_nothing_to_plot(run_directory: Path) -> None:
    pytest.importorskip("matplotlib")
    (run_directory / "metrics.jsonl").unlink()
    done = weft("plot", run_directory)
    assert done.exit_code == 4
    assert "made-up-1 has no training step in" in done.stderr


def test_without_matplotlib_the_extra_is_named(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.") or name == "weft.metrics.views.plot"]:
        monkeypatch.delitem(sys.modules, name)
    done = weft("plot", run_directory)
    assert done.exit_code == 2
    assert done.stderr == (
        "weft: weft plot needs matplotlib, which is not installed; it comes with: pip install 'weft[plots]'\n"
    )


# --- what was profiled


def add_profile(directory: Path, first: int, last: int, **changes: Any) -> WorkerProfile:
    """One kernel in the middle of the profiled iterations of the compute lane."""
    recording = Recording.load(directory / "recording.msgpack")
    ends = recording.iteration_ends
    lane = next(lane for lane in recording.programs if lane.endswith("/compute"))
    middle = ends.get(last, max(ends.values())) - 1_000
    made = {
        "job": recording.job,
        "attempt": recording.attempt,
        "worker": lane.partition("/")[0],
        "first": first,
        "last": last,
        "start_ns": middle - 1_000,
        "end_ns": middle + 1_000,
        "clock_error_ns": 1,
        "dropped": 0,
        "names": ("gemm",),
        "tracks": (Track(lane="compute", source="stream 7", packed=packed_track([(0, 1, middle - 500, middle)])),),
    }
    profile = WorkerProfile(**made | changes)
    profile.save(directory)
    return profile


def kernels_in(trace: dict[str, Any]) -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if event.get("cat") == "kernel"]


def test_a_trace_has_the_kernels_of_a_profile_beside_it(run_directory: Path) -> None:
    profile = add_profile(run_directory, 4, 6)
    done = weft("trace", run_directory, "-o", "trace.json")
    assert (done.exit_code, done.stderr.count("\n")) == (0, 1)
    trace = trace_in(Path("trace.json").read_text())
    assert kernels_in(trace) == ["gemm"]
    assert trace["otherData"]["profiled"] == {profile.worker: [4, 6]}


def test_profiled_takes_the_iterations_that_were_profiled_for_the_trace_and_the_picture(run_directory: Path) -> None:
    add_profile(run_directory, 4, 6)
    done = weft("trace", run_directory, "--profiled", "-o", "trace.json", "--svg", "trace.svg", "--json")
    assert done.exit_code == 0, done.output
    trace = trace_in(Path("trace.json").read_text())
    assert (iterations_in(trace), kernels_in(trace)) == ([4, 5, 6], ["gemm"])
    written = json.loads(done.stdout)
    assert written["trace"]["iterations"] == written["svg"]["iterations"] == [4, 6]


def test_profiled_iterations_that_the_recording_has_lost_are_in_the_one_of_then(run_directory: Path) -> None:
    whole = Recording.load(run_directory / "recording.msgpack")
    add_profile(run_directory, 1, 2)
    whole.save(run_directory / "profiled.msgpack")
    late = {lane: packed_rows(rows[len(rows) // 2 :]) for lane, rows in whole.rows.items()}
    replace(whole, packed=late).save(run_directory / "recording.msgpack")
    plain = weft("trace", run_directory, "-o", "plain.json")
    assert plain.exit_code == 0
    assert "iterations up to step 3 were profiled, before these begin; --profiled shows them" in plain.stderr
    assert kernels_in(trace_in(Path("plain.json").read_text())) == []
    done = weft("trace", run_directory, "--profiled", "-o", "-")
    assert done.exit_code == 0, done.output
    assert (iterations_in(trace_in(done.stdout)), kernels_in(trace_in(done.stdout))) == ([1, 2], ["gemm"])


def test_profiled_without_a_profile_says_how_to_ask_for_one(run_directory: Path) -> None:
    add_profile(run_directory, 4, 6, attempt=7)
    done = weft("trace", run_directory, "--profiled", "-o", "trace.json")
    assert (done.exit_code, done.stdout) == (4, "")
    assert "made-up-1 has no profile; ask for one with weft run --profile N, and see its log" in done.stderr


def test_profiled_iterations_of_which_nothing_is_recorded_any_more_are_named(run_directory: Path) -> None:
    add_profile(run_directory, 40, 42)
    done = weft("trace", run_directory, "--profiled", "-o", "trace.json")
    assert done.exit_code == 4
    assert "iterations 40 to 42 of made-up-1 were profiled, and nothing of them is recorded" in done.stderr


def test_profiled_and_a_number_of_iterations_contradict_each_other(run_directory: Path) -> None:
    done = weft("trace", run_directory, "--profiled", "--iterations", "3", "-o", "trace.json")
    assert done.exit_code == 2
    assert "leave --iterations out" in done.stderr


def test_a_file_that_is_no_profile_is_named(run_directory: Path) -> None:
    (run_directory / "profile-cpu-0.msgpack").write_bytes(b"nothing")
    done = weft("trace", run_directory, "-o", "trace.json")
    assert done.exit_code == 2
    assert "profile-cpu-0.msgpack is no profile" in done.stderr


EDITED: list[tuple[list[Any], Any]] = [
    (["facts"], 3),
    (["facts", "itinerary"], []),
    (["facts", "itinerary", "steps"], None),
    (["finished"], "x"),
    (["packed"], []),
    (["packed", "cpu-0/compute"], b"\1\2\3"),
    (["tasks", 0, "lane"], None),
    (["clock_ns"], "x"),
]


@pytest.mark.parametrize(("place", "value"), EDITED)
def test_a_recording_that_somebody_has_edited_is_named_whatever_stumbles_over_it(
    run_directory: Path, place: list[Any], value: Any
) -> None:
    """It ended the verb with the traceback of a TypeError."""
    path = edited(run_directory, {tuple(place): value})
    done = [weft(*each) for each in (["trace", path, "-o", "t.json", "--svg", "t.svg"], ["plot", path])]
    assert any(each.exit_code for each in done)
    for each in done:
        assert each.exit_code in (0, 2), each.exception
        assert each.exit_code == 0 or each.stderr.startswith(f"weft: {path} is no recording"), each.stderr


@pytest.mark.parametrize("inspection", [None, {}, {"units": 3}])
def test_what_if_names_it_as_well(run_directory: Path, inspection: Any) -> None:
    spec = {"job": {"entry": "a.py:workload", "batch_size": 16, "steps": 12}, "directory": "/"}
    path = edited(run_directory, {("spec",): spec, ("inspection",): inspection})
    done = weft("whatif", path)
    assert done.exit_code == 2, done.exception
    assert done.stderr.startswith(f"weft: {path} is no recording as Weft writes them ("), done.stderr


def edited(run_directory: Path, values: dict[tuple[Any, ...], Any]) -> Path:
    """By where each stands."""
    path = run_directory / "recording.msgpack"
    wire = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
    for (*place, last), value in values.items():
        part = wire
        for key in place:
            part = part[key]
        part[last] = value
    path.write_bytes(msgpack.packb(wire))
    return path


def test_a_fault_in_a_recording_that_the_daemon_has_written_stays_one() -> None:
    @reads_recording
    def verb(*, job: str) -> None:
        raise KeyError(job)

    with pytest.raises(KeyError):
        verb(job="digits-1")
