"""The embedded daemon: its life from start to end around stand-ins, and `weft run` around the real one."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.client.client import Client, DaemonUnreachable
from weft.client.embedded import Daemon, DaemonDied
from weft.client.result import RESULT_KEYS
from weft.spec.field_errors import SpecError

PROCESS_SECONDS = 180.0
ANSWERING = """
import runpy, signal, sys
from pathlib import Path

scripted = runpy.run_path(sys.argv[1])
home = Path(sys.argv[2], "run")
home.mkdir()
if sys.argv[3] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with scripted["ScriptedDaemon"](home / "weft.sock", {"status": [[{"ok": {"pid": 1}}]]}):
    signal.pause()
"""
SCRIPTED = Path(__file__).parents[1] / "scripted_daemon.py"


class StandIn(Daemon):
    """A daemon whose process runs other code."""

    def __init__(self, code: str, manner: str = "", **options: float) -> None:
        super().__init__(**options)
        self._code = code
        self._manner = manner
        self.home: Path

    def _command(self, home: Path) -> list[str]:
        self.home = home
        return [sys.executable, "-c", self._code, str(SCRIPTED), str(home), self._manner]


def nothing_is_left_of(daemon: StandIn) -> bool:
    with pytest.raises(ProcessLookupError):
        os.killpg(daemon._process.pid, 0)
    return not daemon.home.exists()


def test_a_daemon_answers_inside_the_block_and_leaves_nothing_behind() -> None:
    daemon = StandIn(ANSWERING)
    with daemon as client:
        assert client.status() == {"pid": 1}
        assert daemon.home.stat().st_mode & 0o777 == 0o700
    assert nothing_is_left_of(daemon)
    assert daemon._process.returncode == -signal.SIGTERM


def test_an_error_inside_the_block_passes_and_leaves_nothing_behind() -> None:
    daemon = StandIn(ANSWERING)
    with pytest.raises(ZeroDivisionError), daemon:
        raise ZeroDivisionError
    assert nothing_is_left_of(daemon)


def test_a_daemon_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.client.embedded.KILL_MARGIN_SECONDS", 0.0)
    daemon = StandIn(ANSWERING, "stubborn", drain_seconds=0.1)
    with daemon:
        pass
    assert nothing_is_left_of(daemon)
    assert daemon._process.returncode == -signal.SIGKILL


def test_a_daemon_that_dies_at_the_start_is_told_with_its_last_words() -> None:
    daemon = StandIn("import sys; sys.exit('the port is taken')")
    with pytest.raises(DaemonDied, match=r"exit code 1\).*\n.*the port is taken"), daemon:
        pass
    assert nothing_is_left_of(daemon)


def test_a_daemon_that_does_not_answer_in_time_is_given_up() -> None:
    daemon = StandIn("import signal; signal.pause()", start_seconds=0.1)
    with pytest.raises(DaemonUnreachable, match="no such socket"), daemon:
        pass
    assert nothing_is_left_of(daemon)


def test_a_daemon_that_dies_inside_the_block_is_told_in_place_of_the_lost_connection() -> None:
    daemon = StandIn(ANSWERING)

    def kill_and_ask(client: Client) -> None:
        daemon._process.kill()
        daemon._process.wait()
        client.status()

    with pytest.raises(DaemonDied, match=r"signal 9\)"), daemon as client:
        kill_and_ask(client)
    assert nothing_is_left_of(daemon)


def test_a_daemon_that_closes_its_connections_before_it_has_ended_is_told_so_too() -> None:
    """The error was that of the connection, with the remedy to try again."""
    daemon = StandIn(ANSWERING)

    def lose(client: Client) -> None:
        daemon._process.terminate()
        raise DaemonUnreachable(client.socket_path, "the daemon closed the connection")

    with pytest.raises(DaemonDied, match=r"signal 15\)"), daemon as client:
        lose(client)
    assert nothing_is_left_of(daemon)


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", "weft.__exit__(None, None, None)"], ids=["killed", "left"])
def test_a_daemon_ends_with_the_process_that_started_it_and_leaves_nothing_behind(tmp_path: Path, ends: str) -> None:
    parent = (
        "import os\n"
        "from weft.client.embedded import Daemon\n"
        f"weft = Daemon(workers=1, threads=1, runs_dir={str(tmp_path / 'runs')!r})\n"
        "print(weft.__enter__().status()['pid'], flush=True)\n"
        "input()\n"
        f"{ends}\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        daemon = os.pidfd_open(int(process.stdout.readline()))
        process.stdin.write(b"\n")
        process.stdin.close()
        ended, _, _ = select.select([daemon], [], [], PROCESS_SECONDS)
        os.close(daemon)
        assert ended
    assert list(tmp_path.glob("weft-*")) == []


def test_the_options_of_the_daemon_are_flags_of_its_command(tmp_path: Path) -> None:
    command = Daemon(workers=2, threads=1, runs_dir=tmp_path, metrics="127.0.0.1:0")._command(Path("/home"))
    options = dict(zip(command[5::2], command[6::2], strict=True))
    assert options == {
        "--parent": str(os.getpid()),
        "--home": "/home",
        "--runtime-dir": "/home/run",
        "--state-dir": "/home/state",
        "--runs-dir": str(tmp_path),
        "--workers": "2",
        "--threads": "1",
        "--metrics": "127.0.0.1:0",
        "--drain-seconds": "20.0",
    }


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, "runs"), ({"WEFT_RUNS_DIR": "elsewhere"}, "elsewhere")], ids=["default", "set"]
)
def test_run_directories_are_made_in_runs_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEFT_RUNS_DIR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Daemon()._runs_path() == tmp_path / expected


def test_run_directories_below_one_that_no_message_can_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there := tmp_path / "d\udcff").mkdir()
    monkeypatch.chdir(there)
    with pytest.raises(SpecError, match=r"--runs-dir: '.+' has bytes that are not UTF-8"):
        Daemon(runs_dir="runs")._runs_path()


# --- with the real daemon

WORKLOAD = """
import torch, weft

def workload():
    inputs = torch.arange(8.0).reshape(8, 1)
    return weft.Workload(model=torch.nn.Linear(1, 1), loss=torch.nn.functional.mse_loss, train=(inputs, 2 * inputs),
                         validation=(inputs, 2 * inputs), optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
"""


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A spec that trains for a moment, beside an empty TMPDIR. Not below tmp_path, which is long for a Unix socket."""
    pytest.importorskip("weft.scheduler.daemon.daemon", reason="needs the real daemon")
    with tempfile.TemporaryDirectory(prefix="weft-test-") as directory:
        Path(directory, "tmp").mkdir()
        monkeypatch.setenv("TMPDIR", str(Path(directory, "tmp")))
        monkeypatch.setattr(tempfile, "tempdir", None)
        Path(directory, "line.py").write_text(WORKLOAD)
        path = Path(directory, "line.toml")
        path.write_text('[job]\nentry = "line.py:workload"\nsteps = 3\nbatch_size = 4\n')
        yield path


def run_command(line: Path, *arguments: str) -> list[str]:
    runs = str(line.parent / "runs")
    return [sys.executable, "-m", "weft", "run", str(line), "--workers", "1", "--runs-dir", runs, *arguments]


def left_in_tmp(line: Path) -> list[str]:
    """What a run has left there, but for the cache that torch keeps for each user."""
    return [path.name for path in (line.parent / "tmp").iterdir() if not path.name.startswith("torchinductor_")]


@pytest.mark.slow
def test_run_ends_with_one_result_line_and_leaves_only_the_run(line: Path) -> None:
    done = subprocess.run(
        run_command(line, "--json"), capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    (text,) = done.stdout.splitlines()
    result = json.loads(text)
    assert tuple(result) == RESULT_KEYS
    assert (result["state"], result["steps"]) == ("completed", 3)
    assert Path(result["model"]).is_file()
    assert left_in_tmp(line) == []


@pytest.mark.days(3)
@pytest.mark.slow
def test_run_works_where_tmpdir_is_too_long_for_the_path_of_a_socket(
    line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that handed shared memory over listened below TMPDIR, and failed with "AF_UNIX path too long"."""
    for length in (45, 90):  # too long for the socket of a worker, and for the daemon's as well
        long = line.parent / "tmp" / ("x" * length)
        long.mkdir()
        monkeypatch.setenv("TMPDIR", str(long))
        done = subprocess.run(run_command(line), capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        assert not [path for path in long.iterdir() if path.name.startswith("weft-")]


@pytest.mark.days(3)
@pytest.mark.slow
def test_run_tells_people_where_the_time_went(line: Path) -> None:
    done = subprocess.run(run_command(line), capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    for part in ("completed", "cpu-0/compute", "forward", "model.safetensors"):
        assert part in done.stdout


@pytest.mark.days(2)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
@pytest.mark.usefixtures("hangup")
def test_an_interrupt_of_run_cancels_the_job_and_leaves_nothing_behind(
    line: Path, number: signal.Signals, code: int
) -> None:
    line.write_text(line.read_text().replace("steps = 3", "steps = 100000000"))
    with subprocess.Popen(run_command(line), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("step " in text for text in iter(process.stderr.readline, ""))
        process.send_signal(number)
        process.communicate(timeout=PROCESS_SECONDS)
    assert process.returncode == code
    assert left_in_tmp(line) == []


@pytest.mark.slow
def test_the_python_api_runs_a_job_in_a_daemon_of_its_own(line: Path) -> None:
    import weft

    with Daemon(workers=1, runs_dir=line.parent / "runs") as client:
        job = client.submit(weft.JobSpec.load(line))["job"]
        assert client.wait(job, timeout=PROCESS_SECONDS)["state"] == "completed"
        assert "cpu-0/compute" in client.show(job)["lanes"]
