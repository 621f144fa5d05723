"""`weft doctor` as its users run it: the page, the JSON, the exit code, and what is measured."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from weft.cli.doctor.facts import Facts
from weft.cli.doctor.machine_findings import findings
from weft.cli.doctor.page import doctor_page
from weft.cli.verbs.app import app
from weft.cli.verbs.doctor import VERSION, measure_speeds, speeds_of
from weft.client.console import make_console
from weft.client.embedded import Daemon
from weft.machine.gpus import GpuProcess
from weft.spec.presets import PRESETS

_HERE = Path(__file__).parents[2]
_SCRIPTED = runpy.run_path(str(_HERE / "scripted_daemon.py"))
_SOUND = runpy.run_path(str(_HERE / "sound_facts.py"))
ScriptedDaemon, with_gpu = _SCRIPTED["ScriptedDaemon"], _SOUND["with_gpu"]

PROCESS_SECONDS = 180.0
SPEEDS = {
    "wake_round_trip_seconds",
    "first_touch_bytes_per_second",
    "one_core_bytes_per_second",
    "all_cores_bytes_per_second",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the verb runs: a working directory without weft.toml, and directories of its own for the daemon."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("WEFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WEFT_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("WEFT_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--no-measure", *arguments])


def report_of(result: Result) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_the_page_has_a_section_for_each_part_and_a_line_for_each_check(home: Path) -> None:
    page = doctor().stdout
    sections = [line for line in page.splitlines() if line and not line.startswith(" ")]
    assert sections[:6] == ["machine", "memory", "software", "daemon", "GPUs", "strategies"]
    assert "findings" in sections
    assert all(preset in page for preset in PRESETS)
    assert "\x1b" not in page


def test_the_page_tells_slower_cores_apart() -> None:
    """By which a job's stages are cut."""
    facts: Facts = _SOUND["SOUND"]
    speeds = {cpu: 1.0 if cpu < 4 else 0.625 for cpu in range(8)}
    facts = replace(facts, machine=replace(facts.machine, core_speeds=speeds))
    stream = StringIO()
    doctor_page(make_console(stream), facts, findings(facts))
    assert [" ".join(line.split()) for line in stream.getvalue().splitlines() if "speed" in line] == [
        "speed 0.62 processors 4 5 6 7, of the fastest ones' 1"
    ]


def test_the_json_has_the_facts_and_findings_and_nothing_else_is_on_stdout(home: Path) -> None:
    result = doctor("--json")
    report = report_of(result)
    assert set(report) == {"version", "findings", *(field.name for field in fields(Facts))}
    assert (report["version"], report["speeds"]) == (VERSION, None)
    assert set(report["machine"]["cpus"]) == os.sched_getaffinity(0)
    assert {finding["level"] for finding in report["findings"]} <= {"ok", "note", "problem"}
    assert [preset["preset"] for preset in report["presets"]] == list(PRESETS)


def test_the_exit_code_says_whether_there_is_a_problem(home: Path) -> None:
    result = doctor("--json")
    levels = [finding["level"] for finding in report_of(result)["findings"]]
    assert result.exit_code == int("problem" in levels)


def test_a_runtime_directory_that_cannot_be_used_is_a_problem_with_a_remedy(home: Path) -> None:
    (home / "run").touch()
    result = doctor()
    assert result.exit_code == 1
    assert f"problem runtime-directory: {home / 'run'} is no directory" in result.stdout
    assert "WEFT_RUNTIME_DIR" in result.stdout


def test_a_weft_toml_that_does_not_parse_ends_it_as_it_ends_the_other_verbs(home: Path) -> None:
    (home / "weft.toml").write_text("[daemon\n")
    result = doctor()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "weft.toml: cannot be read as TOML" in result.stderr


def test_a_setting_that_is_wrong_names_its_source(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_WORKERS", "many")
    result = doctor()
    assert (result.exit_code, "WEFT_WORKERS" in result.stderr) == (2, True)


def test_the_workers_of_a_daemon_that_answers_count(home: Path) -> None:
    (home / "run").mkdir(mode=0o700)
    names = {"cpu-0": "cpu", "cpu-1": "cpu", "gpu-0": "gpu", "loader-0": "loader"}
    workers = [{"worker": name, "kind": kind, "state": "free", "pid": 9, "job": None} for name, kind in names.items()]
    status = {"pid": 7, "version": "0.1.0", "workers": workers, "jobs": {"running": 1}, "metrics": None}
    with ScriptedDaemon(home / "run" / "weft.sock", {"status": [[{"ok": status}]]}):
        report, page = report_of(doctor("--json")), doctor().stdout
    assert report["workers"] == {"cpu": 2, "gpu": 1}
    assert all(preset["runs"] for preset in report["presets"])
    assert report["daemon"]["status"] == status
    assert "0.1.0, pid 7, 1 running" in page
    assert "gpu-0 free" in page


def test_the_settings_workers_count_where_no_daemon_answers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_WORKERS", "1")
    monkeypatch.setenv("WEFT_STAND_INS", "1")
    report = report_of(doctor("--json"))
    assert report["workers"] == {"cpu": 1, "gpu": 1}
    assert {preset["preset"]: preset["runs"] for preset in report["presets"]}["hybrid-fine"]


def test_nothing_is_made_where_it_looks(home: Path) -> None:
    doctor()
    assert list(home.iterdir()) == []


def test_gpus_and_their_links_are_shown() -> None:
    facts = with_gpu(processes=(GpuProcess(pid=77, bytes_used=1 << 30),))
    stream = StringIO()
    doctor_page(make_console(stream), facts, findings(facts))
    page = stream.getvalue()
    assert "580.1, up to CUDA 13.0" in page
    assert "gen 1 of 4, x16 of 16" in page
    assert "GPU-0000" in page


def test_a_run_without_measuring_imports_no_torch(home: Path) -> None:
    code = "import sys\nfrom weft.cli.verbs.app import app\ntry: app()\nexcept SystemExit: pass\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--no-measure"],
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=True,
    )
    modules = done.stdout.splitlines()[-1].split()
    assert "weft.cli.doctor.machine_findings" in modules
    assert "torch" not in modules


@pytest.mark.days(3)
@pytest.mark.slow
def test_the_whole_verb_measures_what_a_machine_without_a_gpu_has(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weft", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )
    report = json.loads(done.stdout)
    speeds = report["speeds"]
    assert done.returncode == int(any(finding["level"] == "problem" for finding in report["findings"])), done.stderr
    assert done.stderr == "weft: measuring memory, wake-ups and links (--no-measure leaves it out)\n"
    assert speeds["error"] is None
    assert set(speeds) == {*SPEEDS, "num_cores", "gpus", "error"}
    assert speeds["num_cores"] == report["machine"]["num_cores"]
    several = speeds["num_cores"] > 1
    assert all(speeds[name] > 0 for name in SPEEDS if several or name != "wake_round_trip_seconds")


def test_a_measurement_that_is_killed_leaves_what_it_had_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal\nprint('{\"num_cores\": 2}', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    speeds = measure_speeds()
    assert speeds == {"num_cores": 2, "gpus": [], "error": "signal 9: "}
    assert capsys.readouterr().err.startswith("weft: measuring")


def test_speeds_are_put_together_from_the_lines_that_were_written_in_full() -> None:
    output = b'{"num_cores": 2}\nchatter\n{"gpu": {"index": 0}}\n{"gpu": {"ind'
    assert speeds_of(output) == {"num_cores": 2, "gpus": [{"index": 0}]}


def test_measured_speeds_are_shown() -> None:
    gpu = {"index": 0, "name": "A GPU"}
    gpu |= {"h2d_bytes_per_second": 25e9, "d2h_bytes_per_second": 24e9, "both_bytes_per_second": 40e9}
    speeds = dict.fromkeys(SPEEDS - {"wake_round_trip_seconds"}, 40e9) | {"num_cores": 8, "gpus": [gpu], "error": None}
    facts = _SOUND["replace"](_SOUND["SOUND"], speeds=speeds | {"wake_round_trip_seconds": 45e-6})
    stream = StringIO()
    doctor_page(make_console(stream), facts, findings(facts))
    page = stream.getvalue()
    assert "to it 25 GB/s, from it 24 GB/s, both at once 40 GB/s" in page
    assert "45 µs" in page


@pytest.mark.slow
def test_a_real_daemon_is_asked_for_its_workers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Daemon(workers=1, stand_ins=1, runs_dir=home / "runs") as client:
        monkeypatch.setenv("WEFT_RUNTIME_DIR", str(client.socket_path.parent))
        report = report_of(doctor("--json"))
    assert report["workers"] == {"cpu": 1, "gpu": 1}
    levels = {finding["check"]: finding["level"] for finding in report["findings"]}
    assert (report["daemon"]["socket"], levels["runtime-directory"], "lock" in levels) == ("answers", "ok", False)
    assert (report["daemon"]["lock_pid"], report["daemon"]["lock_held"]) == (report["daemon"]["status"]["pid"], True)
