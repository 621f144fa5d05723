"""A disk below run directories that fails, and one that is full: training goes on, what waits is written in the end.

The daemon of these tests has a layer between it and its disk. It also watches the event loop's thread, which must not
open, make or rename anything below a run directory.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weft.client.client import RequestRefused

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until, SECONDS, LINE = (_REAL[name] for name in ("RealDaemon", "until", "SECONDS", "LINE"))
metrics_rows = _REAL["metrics_rows"]

# Every fifth call of the writer's or a follower's fails while the file `faults` is there. Seeded, so that each run is
# the same up to the order of threads.
LAYER = """
import errno, os, random, runpy, sys, threading
from pathlib import Path
home, faulty = Path(sys.argv[1]), sys.argv[2]
FaultyOs = runpy.run_path(faulty)["FaultyOs"]
chance = random.Random(11)
numbers = (errno.ENOSPC, errno.EIO, errno.EMFILE)
from weft.machine import run_file
run_file.os = FaultyOs(lambda call: numbers[call % 3] if (home / "faults").exists() and chance.random() < 0.2 else 0)
FILES = {"job.log", "metrics.jsonl", "plan.json", "spec.json", "recording.msgpack", "model.safetensors"}
FILES |= {f".{name}.partial" for name in FILES}
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.listdir", "os.scandir"}
def look(event, arguments):
    if event not in EVENTS:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    touched = [str(each) for each in arguments[:2]]
    if any(each in FILES or (each.startswith(f"{home}/") and "/runs/" in each) for each in touched):
        os.write(told, f"{event} {touched};".encode())
told = os.open(home / "violations", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.addaudithook(look)
sys.argv = ["weft", *sys.argv[3:]]
from weft.cli.main import main
main()
"""


class FaultyDaemon(RealDaemon):  # type: ignore[misc, valid-type]  # a module that runpy has run
    """Its disk fails while `home/faults` exists. `home/violations` has what its event loop's thread did to files."""

    def command(self, **changes: object) -> list[str]:
        script = self.home / "layer.py"
        script.write_text(LAYER)
        faulty = str(Path(__file__).parents[1] / "faulty_os.py")
        command: list[str] = super().command(**changes)
        assert command[:3] == [sys.executable, "-m", "weft"]
        return [sys.executable, str(script), str(self.home), faulty, *command[3:]]


@pytest.fixture
def faulty_daemon() -> Iterator[Any]:
    running = FaultyDaemon(workers=2)
    try:
        yield running.start()
        assert running.stop() == 0
        running.until_nothing_lives()
    finally:
        running.close()


def counters(daemon: Any, name: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{daemon.client.status()['metrics']}/metrics", timeout=SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {next(iter(s.labels.values())): s.value for f in families for s in f.samples if s.name == name}


@pytest.mark.slow(seconds=4)
def test_a_disk_that_fails_now_and_then_costs_no_job_and_no_line(faulty_daemon: Any) -> None:
    daemon = faulty_daemon
    faults = daemon.home / "faults"
    gate = daemon.gate()
    source = LINE.replace("        calls += 1\n", "        calls += 1\n        print('call', calls, flush=True)\n")
    spec = daemon.spec(source, args={"gate": str(gate), "gate_at": 120}, epochs=40, strategy={"stages": 2})
    faults.touch()
    job = submitted(daemon, spec)
    daemon.until_logged(job, "at the gate of training")
    for _ in range(20):  # each follows, records and asks for the page's timeline
        ask_everything(daemon, job)
    wanted = {"no-space", "io", "descriptors"}
    until(lambda: wanted <= counters(daemon, "weft_run_directory_errors_total").keys(), "each kind of error")
    faults.unlink()
    gate.open()
    result = daemon.client.wait(job, SECONDS)
    assert result["state"] == "completed"
    rows = metrics_rows(result["run_dir"])
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, result["steps"] + 1))
    log = Path(result["run_dir"], "job.log").read_text()
    calls = [int(line.split()[1]) for line in log.splitlines() if line.startswith("call ")]
    assert max(calls) > 120
    assert all(call in (1, before + 1) for before, call in pairwise([0, *calls]))  # each worker counts from 1
    assert log.splitlines()[-1].endswith("completed")
    assert {"spec.json", "plan.json", "recording.msgpack"} <= {path.name for path in Path(result["run_dir"]).iterdir()}
    assert (daemon.home / "violations").read_text() == ""


def submitted(daemon: Any, spec: Any) -> str:
    """Refused by name while the disk cannot be written to, never taken and then failed."""
    while True:
        with suppress(RequestRefused):
            return str(daemon.submit(spec))


def ask_everything(daemon: Any, job: str) -> None:
    with suppress(RequestRefused):
        daemon.client.record(job)
    with suppress(RequestRefused):
        daemon.log_of(job)
    daemon.client.show(job, path=True)
    url = f"{daemon.client.status()['metrics']}/api/jobs/{job}/timeline?iterations=2"
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        json.load(answer)


# --- a disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of half a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)]
    if os.geteuid() or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk, where it can")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """The file that fills it to the last page."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.slow(seconds=4)
def test_on_a_full_disk_training_goes_on_and_submits_are_refused_by_name(
    own_daemon: Callable[..., Any], small_disk: Path
) -> None:
    daemon = own_daemon(runs_dir=small_disk)
    gate, second = daemon.gate(), daemon.gate()
    # A lane tells of itself twice a second, fifty calls apart, and not from inside the user's code.
    slow = "print('call', calls, flush=True); import time; time.sleep(0.01)"
    source = LINE.replace("        calls += 1\n", f"        calls += 1\n        {slow}\n")
    source = source.replace(
        "calls == gate_at:",
        "calls == gate_at + 160:\n            pass_gate(second, 'of the end')\n        if calls == gate_at:",
    ).replace("gate_at=0,", "gate_at=0, second='',")
    arguments = {"gate": str(gate), "gate_at": 20, "second": str(second)}
    job = daemon.submit(daemon.spec(source, args=arguments, epochs=40))
    daemon.until_logged(job, "at the gate of training")
    ballast = fill(small_disk)
    refused = daemon.weft("submit", daemon.spec_file(daemon.spec()))
    assert refused.returncode == 74
    assert "No space left on device; the job was not taken" in refused.stderr
    gate.open()
    until(lambda: (daemon.client.show(job)["step"] or 0) >= 30, "steps on a full disk")
    until(lambda: counters(daemon, "weft_run_directory_errors_total").get("no-space"), "the count of what failed")
    ballast.unlink()
    second.open()
    result = daemon.client.wait(job, SECONDS)
    assert (result["state"], result["reason"]) == ("completed", None), result["error"]
    rows = metrics_rows(result["run_dir"])
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, result["steps"] + 1))
    assert daemon.run(daemon.spec())["state"] == "completed"


@pytest.mark.slow(seconds=3)
@pytest.mark.days(3)
def test_a_model_that_has_no_room_fails_its_job_with_a_sentence(
    own_daemon: Callable[..., Any], small_disk: Path
) -> None:
    """It was the user's error, with a traceback of ours."""
    daemon = own_daemon(runs_dir=small_disk)
    result = daemon.run(daemon.spec(args={"width": 400}, epochs=1))  # 660 kB
    assert (result["state"], result["reason"], result["exit_code"]) == ("failed", "run-directory", 74)
    assert "model.safetensors" in result["error"]
    assert "No space left on device" in result["error"]
    assert "Traceback" not in result["error"]
    assert not list(Path(result["run_dir"]).glob("*.partial"))
    assert daemon.run(daemon.spec())["state"] == "completed"
