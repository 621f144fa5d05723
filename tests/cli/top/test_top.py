"""`weft top` on a pseudo-terminal and in a pipe, against a daemon that says what the tests want."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.weighs(tests=7)

_FOLDER = Path(__file__).parents[2]
_SCRIPTED = runpy.run_path(str(_FOLDER / "scripted_daemon.py"))
ScriptedDaemon, HANG_UP, HOLD = _SCRIPTED["ScriptedDaemon"], _SCRIPTED["HANG_UP"], _SCRIPTED["HOLD"]
TerminalCommand = runpy.run_path(str(_FOLDER / "terminal.py"))["TerminalCommand"]

SECONDS = 180.0
JOB = {
    "job": "digits-1",
    "state": "running",
    "reason": None,
    "priority": 0,
    "step": 120,
    "steps": 480,
    "loss": 0.4312,
    "submitted_at": time.time() - 90.0,
    "started_at": time.time() - 80.0,
    "ended_at": None,
    "why": None,
}
QUEUED = JOB | {
    "job": "digits-2",
    "state": "queued",
    "step": 0,
    "steps": None,
    "loss": None,
    "started_at": None,
    "why": "it needs 2 cpu workers (0 free)",
}
STATUS = {
    "pid": 6,
    "version": "0.1.0",
    "workers": [{"worker": "cpu-0", "kind": "cpu", "device": "CPU", "state": "busy", "pid": 7, "job": "digits-1"}],
    "jobs": {"running": 1, "queued": 1},
    "metrics": None,
}
UNKNOWN = dict.fromkeys(("plan", "time", "overlap", "validation", "iteration_seconds", "limit_seconds", "error"))


def shown(seconds: float, step: int = 120) -> dict[str, Any]:
    """A job that has run so long, of one lane that computes three quarters of its time."""
    modes = {"forward": 0.5 * seconds, "backward": 0.25 * seconds, "stall_data": 0.25 * seconds}
    lane = {"wall_seconds": seconds, "residual_seconds": 0.0, "modes": modes}
    stall = {"lane": "cpu-0/compute", "cause": "data", "task": "LOAD(0,0)", "on": "loader-0/load"}
    stalls = [stall | {"seconds": 0.25 * seconds}]
    report = {"lanes": {"cpu-0/compute": lane}, "stalls": stalls, "bubble_ratio": 0.0, "imbalance": 0.0}
    plan = {"samples_per_step": 100.0}
    return JOB | UNKNOWN | {"time": report, "step": step, "plan": plan, "iteration_seconds": 0.025}


ANSWERS = {
    "ps": [[{"ok": {"jobs": [QUEUED, JOB]}}]],
    "status": [[{"ok": STATUS}]],
    "show": [[{"ok": shown(10.0)}], [{"ok": shown(11.0, step=130)}], [{"ok": shown(12.0, step=140)}]],
}


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    directory = tmp_path / "runtime"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def daemon(runtime: Path) -> Iterator[Any]:
    """(changes of ANSWERS) -> a started daemon that gives them, stopped after the test."""
    started: list[Any] = []

    def make(**changes: Any) -> Any:
        started.append(ScriptedDaemon(runtime / "weft.sock", ANSWERS | changes).__enter__())
        return started[-1]

    yield make
    for one in started:
        one.__exit__(None, None, None)


def environment(runtime: Path, **variables: str) -> dict[str, str]:
    return os.environ | {"WEFT_RUNTIME_DIR": str(runtime), "PYTHONWARNINGS": "error"} | variables


def on_terminal(runtime: Path, *arguments: str, size: tuple[int, int] = (120, 40), **variables: str) -> Any:
    command = ["-m", "weft", "top", *arguments]
    return TerminalCommand(command, environment(runtime, **{"NO_COLOR": "1"} | variables), *size)


def in_pipe(runtime: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "top", *arguments]
    return subprocess.run(
        command,
        env=environment(runtime),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def frame_with(text: str) -> Callable[[list[str]], bool]:
    """A whole frame, down to its last line."""
    return lambda lines: text in "\n".join(lines) and lines[-1].startswith("q quit")


def test_it_shows_daemon_jobs_and_lanes_and_q_leaves_the_terminal_as_it_was(runtime: Path, daemon: Any) -> None:
    daemon()
    with on_terminal(runtime, "--interval", "0.2") as terminal:
        lines = terminal.until("q quit")
        assert lines[0].startswith("weft 0.1.0  pid 6  workers busy: 1 of 1 cpu  jobs: 1 running, 1 queued")
        lines = terminal.until(frame_with("the last"))
        assert lines[3].split()[:4] == [">", "digits-1", "running", "120/480"]
        assert lines[4].split()[:2] == ["digits-2", "queued"]
        (bar,) = [line for line in lines if line.startswith("cpu-0/compute  │")]
        assert bar.index("│forward") < bar.index("│backward") < bar.index("│data")
        assert bar.rstrip().endswith("75.0 %")
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.is_restored()


def test_keys_select_another_job_pause_and_help(runtime: Path, daemon: Any) -> None:
    scripted = daemon()
    with on_terminal(runtime, "--interval", "0.2") as terminal:
        terminal.until(">  digits-1")
        terminal.press("j")
        terminal.until(">  digits-2")
        terminal.until(lambda _: "digits-2" in [request.get("job") for request in scripted.requests])
        terminal.press("\x1b[A")
        terminal.until(">  digits-1")
        terminal.press("?")
        terminal.until("any key closes this help")
        terminal.press("x")
        terminal.until("q quit")
        terminal.press("p")
        terminal.until(" paused ")
        terminal.press("p")
        terminal.until(lambda lines: "paused" not in lines[0])
        terminal.press("q")
        assert terminal.wait() == 0


@pytest.mark.parametrize("size", [(40, 10), (1, 1), (200, 60)])
def test_a_resize_draws_the_screen_anew_in_the_new_size(runtime: Path, daemon: Any, size: tuple[int, int]) -> None:
    daemon()
    with on_terminal(runtime, "--interval", "60") as terminal:  # only the resize can make it draw
        terminal.until("q quit")
        terminal.resize(*size)
        columns, num_lines = size
        terminal.until(lambda lines: len(lines) == num_lines and max(map(len, lines)) <= columns)
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.is_restored()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGQUIT, -signal.SIGQUIT), (None, 130)],
)
def test_however_it_is_ended_the_terminal_is_as_it_was(
    runtime: Path, daemon: Any, number: signal.Signals | None, code: int
) -> None:
    daemon()
    with on_terminal(runtime, "--interval", "0.2") as terminal:
        terminal.until("q quit")
        terminal.press("\x03") if number is None else terminal.process.send_signal(number)
        assert terminal.wait() == code
        assert terminal.is_restored()
        assert "Traceback" not in terminal.written


@pytest.mark.usefixtures("hangup")
def test_a_terminal_that_closes_ends_it_with_143(runtime: Path, daemon: Any) -> None:
    """It was 74, since the cursor could not be shown again."""
    daemon()
    with on_terminal(runtime, "--interval", "0.2") as terminal:
        terminal.until("q quit")
        assert terminal.hang_up() == 143


def test_what_it_cannot_draw_ends_it_with_the_terminal_as_it_was(runtime: Path, daemon: Any) -> None:
    daemon(show=[[{"ok": shown(10.0)}], [{"ok": shown(11.0) | {"time": {"lanes": {"cpu-0/compute": {}}}}}]])
    with on_terminal(runtime, "--interval", "0.2") as terminal:
        assert terminal.wait() == 1
        assert terminal.is_restored()
        assert "KeyError" in terminal.written


def test_a_daemon_that_goes_is_awaited_and_its_successor_shown(runtime: Path) -> None:
    first = ScriptedDaemon(runtime / "weft.sock", ANSWERS).__enter__()
    with on_terminal(runtime, "--interval", "0.2") as terminal:
        terminal.until("q quit")
        first.__exit__(None, None, None)
        terminal.until(lambda lines: lines[0].startswith(" daemon unreachable, retrying  weft 0.1.0  pid 6"))
        with ScriptedDaemon(runtime / "weft.sock", ANSWERS | {"status": [[{"ok": STATUS | {"pid": 8}}]]}):
            terminal.until(lambda lines: lines[0].startswith("weft 0.1.0  pid 8"))
            terminal.press("q")
            assert terminal.wait() == 0
            assert terminal.is_restored()


def test_a_daemon_that_hangs_does_not_keep_a_key_from_being_heard(runtime: Path, daemon: Any) -> None:
    scripted = daemon(status=[[{"ok": STATUS}], [HOLD]])
    with on_terminal(runtime, "--interval", "0.2") as terminal:
        terminal.until("q quit")
        assert scripted.held.wait(SECONDS)
        terminal.press("q")
        assert terminal.wait(SECONDS / 2) == 0
        assert terminal.is_restored()


def test_colour_is_for_terminals_without_no_color(runtime: Path, daemon: Any) -> None:
    daemon()
    with on_terminal(runtime, "--interval", "0.2", NO_COLOR="") as terminal:
        terminal.until(frame_with("the last"))
        terminal.press("q")
        assert terminal.wait() == 0
        assert "\x1b[30;42m forward" in terminal.written
    with on_terminal(runtime, "--interval", "0.2") as terminal:
        terminal.until(frame_with("the last"))
        terminal.press("q")
        assert terminal.wait() == 0
        assert "42m" not in terminal.written


def test_without_a_terminal_one_interval_is_printed_as_plain_text(runtime: Path, daemon: Any) -> None:
    daemon()
    done = in_pipe(runtime, "--interval", "0.2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "cpu-0/compute  │forward" in done.stdout
    assert "cpu-0 waits 25 % of its time for data, longest for LOAD(0,0) on loader-0/load" in done.stdout


def test_json_is_one_object_with_the_differences_of_the_interval(runtime: Path, daemon: Any) -> None:
    daemon()
    done = in_pipe(runtime, "--json", "--interval", "0.2")
    told = json.loads(done.stdout)
    assert (done.returncode, told["version"], told["daemon"]) == (0, 1, STATUS)
    assert [job["job"] for job in told["jobs"]] == ["digits-1", "digits-2"]
    job = told["job"]
    (lane,) = job["lanes"]
    assert (lane["wall_seconds"], lane["percent"]["forward"]) == (1.0, 50.0)
    assert job["stalls"][0]["seconds"] == 0.25
    assert job["diagnosis"]["kind"] == "data"
    assert job["samples_per_second"] == pytest.approx(10 * 100 / job["window_seconds"])
    assert job["eta_seconds"] == pytest.approx((480 - 130) / job["steps_per_second"])


def test_without_a_job_it_says_how_to_submit_one(runtime: Path, daemon: Any) -> None:
    daemon(ps=[[{"ok": {"jobs": []}}]])
    done = in_pipe(runtime)
    assert done.returncode == 0
    assert "No job yet: `weft submit SPEC.toml`" in done.stdout


def test_without_a_daemon_it_says_how_to_start_one(runtime: Path) -> None:
    for done in (in_pipe(runtime), in_pipe(runtime, "--json")):
        assert (done.returncode, done.stdout) == (69, "")
        assert "`weft daemon`" in done.stderr
    with on_terminal(runtime) as terminal:
        assert terminal.wait() == 69
        assert "\x1b[?1049h" not in terminal.written


def test_an_unknown_job_is_refused_before_the_screen_is_taken(runtime: Path, daemon: Any) -> None:
    daemon(show=[[{"error": {"code": "no-such-job", "message": "no job 'x'"}}]])
    with on_terminal(runtime, "x") as terminal:
        assert terminal.wait() == 4
        assert "\x1b[?1049h" not in terminal.written


@pytest.mark.parametrize("seconds", ["0.1", "61", "nan", "x"])
def test_an_interval_out_of_bounds_is_refused(runtime: Path, seconds: str) -> None:
    done = in_pipe(runtime, "--interval", seconds)
    assert done.returncode == 2
    assert "--interval" in done.stderr
    assert "Traceback" not in done.stderr
