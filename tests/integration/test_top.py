"""`weft top` and `weft show --time` with a real daemon, on a pseudo-terminal and in a pipe."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.plan.kinds import MODES

_FOLDER = Path(__file__).parent
_REAL = runpy.run_path(str(_FOLDER / "real_daemon.py"))
RealDaemon, until = _REAL["RealDaemon"], _REAL["until"]
TerminalCommand = runpy.run_path(str(_FOLDER.parent / "terminal.py"))["TerminalCommand"]

LANES = ["cpu-0/compute", "cpu-1/compute", "loader-0/load"]


@pytest.fixture
def running(daemon: RealDaemon) -> Iterator[str]:
    """A job of two stages that trains until the test has seen enough."""
    job = daemon.submit(daemon.spec(strategy={"stages": 2, "microbatches": 4}, steps=100_000_000))
    try:
        until(lambda: (daemon.client.show(job, path=True)["time"] or {}).get("critical_path"), "a critical path")
        yield job
    finally:
        daemon.client.cancel(job)


def on_terminal(daemon: RealDaemon, *arguments: str) -> Any:
    return TerminalCommand(["-m", "weft", *arguments], daemon.environment)


def frame_with(text: str) -> Callable[[list[str]], bool]:
    """A whole frame, down to its last line."""
    return lambda lines: text in "\n".join(lines) and lines[-1].startswith("q quit")


@pytest.mark.slow
def test_top_shows_a_running_job_and_its_lanes_live(daemon: RealDaemon, running: str) -> None:
    with on_terminal(daemon, "top", "--interval", "0.2") as terminal:
        terminal.until(frame_with("lanes, the last"))
        lines = terminal.until(lambda lines: lanes_shown(lines) == LANES)  # lanes report twice a second
        assert f"pid {daemon.process.pid}  workers busy: 2 of 3 cpu" in lines[0]
        assert any(line.startswith(f">  {running}") and "running" in line for line in lines)
        terminal.until("samples/s  ETA ")

        terminal.resize(80, 24)
        terminal.until(lambda lines: len(lines) == 24 and max(map(len, lines)) <= 80)
        step = daemon.client.show(running)["step"]
        terminal.until(lambda lines: any(_step_of(line, running) > step for line in lines))
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.is_restored()


def lanes_shown(lines: list[str]) -> list[str]:
    return sorted(line.split()[0] for line in lines if "│" in line)


def _step_of(line: str, job: str) -> int:
    words = line.split()
    return int(words[3].partition("/")[0]) if words[:2] == [">", job] else -1


@pytest.mark.slow
def test_top_follows_its_job_to_the_end(daemon: RealDaemon, running: str) -> None:
    with on_terminal(daemon, "top", running, "--interval", "0.2") as terminal:
        terminal.until("lanes, the last")
        daemon.client.cancel(running)
        terminal.until(f"{running}  cancelled")
        terminal.until("lanes, since the job began")
        terminal.press("\x03")
        assert terminal.wait() == 130
        assert terminal.is_restored()


@pytest.mark.slow
def test_top_in_a_pipe_tells_an_interval_whose_modes_are_the_lanes_time(daemon: RealDaemon, running: str) -> None:
    done = daemon.weft("top", "--json", "--interval", "1.5")  # lanes report twice a second
    told = json.loads(done.stdout)["job"]
    assert (done.returncode, told["job"]) == (0, running)
    assert told["window_seconds"] >= 0.5
    assert sorted(lane["lane"] for lane in told["lanes"]) == LANES
    for lane in told["lanes"]:
        assert lane["wall_seconds"] > 0
        assert sum(lane["seconds"].values()) + lane["residual_seconds"] == pytest.approx(lane["wall_seconds"])
    assert told["samples_per_second"] > 0


@pytest.mark.slow
def test_show_time_of_a_running_job_tells_where_its_time_goes(daemon: RealDaemon, running: str) -> None:
    with on_terminal(daemon, "show", running, "--time") as terminal:
        assert terminal.wait() == 0
        for section in ("Lanes: ", "Bubble: ", "Stalls: ", "Overlap: ", "Critical path of the last ", "step by step"):
            assert section in terminal.written
    piped = daemon.weft("show", running, "--time")
    assert piped.returncode == 0
    assert "\x1b" not in piped.stdout
    table = piped.stdout.partition("Lanes: ")[2].partition("Bubble: ")[0]
    assert sorted(line.split()[0] for line in table.splitlines()[2:] if line.strip()) == LANES


@pytest.mark.slow
def test_show_time_of_a_job_that_has_ended_has_the_documented_parts_and_they_add_up(daemon: RealDaemon) -> None:
    job = daemon.run(daemon.spec(strategy={"stages": 2, "microbatches": 4}, epochs=30))["job"]
    told = json.loads(daemon.weft("show", job, "--time", "--json").stdout)
    assert (told["version"], told["job"], told["state"], told["nothing"]) == (1, job, "completed", None)
    assert sorted(lane["lane"] for lane in told["lanes"]) == LANES
    for lane in told["lanes"]:
        assert set(lane["seconds"]) <= set(MODES)
        assert sum(lane["seconds"].values()) + lane["residual_seconds"] == pytest.approx(lane["wall_seconds"])
    assert told["diagnosis"]["sentence"].endswith(".")
    path = told["critical_path"]
    assert sum(part["percent"] for part in path["parts"]) + path["gap_percent"] == pytest.approx(100)
    assert path["steps"][-1]["iteration"] >= path["steps"][0]["iteration"]


@pytest.mark.slow
def test_show_time_of_a_job_that_never_ran_says_why(daemon: RealDaemon) -> None:
    job = daemon.run(daemon.spec("def workload():\n    raise ValueError('no data here')\n"))["job"]
    done = daemon.weft("show", job, "--time")
    assert done.returncode == 0
    assert done.stdout.startswith(f"{job} failed (user-error) before a training step was reported")
    assert "no data here" in done.stdout
