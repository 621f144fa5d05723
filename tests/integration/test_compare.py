"""`weft compare` with real daemons: rows of what ran, of what could not, and the table that an interrupt leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.client.embedded import Daemon
from weft.spec.job_spec import JobSpec

MiB = 1 << 20
SECONDS = 180.0
WORKLOAD = """
import torch, weft

def workload(ballast_mib=0):
    ballast = torch.ones(ballast_mib << 18)
    inputs = torch.arange(8.0).reshape(8, 1)
    model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return weft.Workload(model=model, loss=torch.nn.functional.mse_loss, train=(inputs, 2 * inputs),
                         validation=(inputs, 2 * inputs), optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
"""


@pytest.fixture
def line() -> Iterator[Path]:
    """A spec that trains for a moment."""
    with tempfile.TemporaryDirectory(prefix="weft-test-") as directory:
        Path(directory, "line.py").write_text(WORKLOAD)
        path = Path(directory, "line.toml")
        path.write_text('[job]\nentry = "line.py:workload"\nsteps = 3\nbatch_size = 8\n')
        yield path


def command(line: Path, *arguments: str) -> list[str]:
    runs = str(line.parent / "runs")
    return [sys.executable, "-m", "weft", "compare", str(line), "--runs-dir", runs, *arguments]


@pytest.mark.slow
@pytest.mark.days(3)
def test_each_preset_is_a_row_with_where_its_time_and_memory_went(line: Path) -> None:
    (line.parent / "runs" / "line-1-ddp").mkdir(parents=True)  # of a comparison before, whose log this one continued
    arguments = ["--presets", "ddp,zero-offload", "--steps", "5", "--check", "--json"]
    done = subprocess.run(command(line, *arguments), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    compared = json.loads(done.stdout)
    rows = compared["rows"]
    assert [(row["preset"], row["state"]) for row in rows] == [(name, "completed") for name in compared["presets"]]
    assert [row["job"] for row in rows] == ["line-1-ddp-2", "line-2-zero-offload"]
    assert [row["workers"] for row in rows] == [{"cpu": 2}, {"cpu": 1, "gpu": 1}]
    for row in rows:
        assert (row["steps"], row["agrees"]) == (5, True)
        assert row["iteration_seconds"] > 0
        assert row["shared_bytes"] > 0
        # each worker, the loader too, has torch in its memory
        assert row["peak_bytes"] > (sum(row["workers"].values()) + 1) * 10 * MiB
        assert Path(row["run_dir"], "model.safetensors").is_file()
    assert sum(rows[0]["overlap_seconds"]["sync"].values()) > 0
    assert sum(rows[1]["overlap_seconds"]["transfer"].values()) > 0
    assert "stand-in" in done.stderr


@pytest.mark.days(2)
@pytest.mark.slow
def test_a_preset_that_cannot_run_is_a_row_with_its_reason(line: Path) -> None:
    done = subprocess.run(
        command(line, "--presets", "1f1b", "--workers", "1"),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 1
    _, row, reason = done.stdout.splitlines()
    assert row.split()[:4] == ["1f1b", "2", "cpu", "failed"]
    assert "needs 2 CPU workers and this daemon has 1" in reason
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.days(3)
def test_an_interrupt_cancels_the_running_job_and_prints_the_rows_so_far(line: Path) -> None:
    arguments = ["--presets", "1f1b,as-is", "--workers", "1", "--steps", "100000000", "--json"]
    with subprocess.Popen(
        command(line, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any(text.startswith("step ") for text in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGINT)
        stdout, told = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert f"weft: line-2-as-is cancelled; its files stay in {line.parent}/runs/line-2-as-is\n" in told
    compared = json.loads(stdout)
    assert compared["presets"] == ["1f1b", "as-is"]
    assert [(row["preset"], row["reason"]) for row in compared["rows"]] == [("1f1b", "invalid-plan")]
    log = Path(line.parent, "runs", "line-2-as-is", "job.log").read_text().splitlines()
    # what its last checkpoint has come to may stand behind the end
    assert "cancelled" in [text for text in log if " checkpoint " not in text][-1]


@pytest.mark.days(3)
@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel keeps the high-water mark")
def test_peak_memory_is_the_jobs_own_not_that_of_the_job_before_on_the_same_worker(line: Path) -> None:
    with Daemon(workers=1, runs_dir=line.parent / "runs") as client:
        peaks = []
        for ballast_mib in (400, 0):
            spec = JobSpec.load(line, [f"job.args.ballast_mib={ballast_mib}"])
            result = client.wait(client.submit(spec)["job"], timeout=SECONDS)
            assert client.show(result["job"])["peak_bytes"] == result["peak_bytes"]
            peaks.append(result["peak_bytes"])
    assert [set(peak) for peak in peaks] == [{"cpu-0", "loader-0"}] * 2
    assert peaks[0]["cpu-0"] - peaks[1]["cpu-0"] > 200 * MiB
