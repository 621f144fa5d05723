"""Standard streams that whoever starts the command has closed, or that nobody reads."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.client.client import Client
from weft.client.foreground import run_in_foreground
from weft.spec.job_spec import JobSpec

pytestmark = pytest.mark.weighs(tests=7)

SECONDS = 180.0
TESTS = Path(__file__).parents[1]
_SCRIPTED = runpy.run_path(str(TESTS / "scripted_daemon.py"))
ScriptedDaemon, HOLD = _SCRIPTED["ScriptedDaemon"], _SCRIPTED["HOLD"]
TerminalCommand: Any = runpy.run_path(str(TESTS / "terminal.py"))["TerminalCommand"]
RESULT = runpy.run_path(str(Path(__file__).parent / "screens" / "test_display.py"))["RESULT"]
SHOWN = runpy.run_path(str(Path(__file__).with_name("test_main.py")))["SHOWN"]
STATUS = {"pid": 6, "version": "0.1.0", "workers": [], "jobs": {"running": 2}, "metrics": None}
FACTS = """
import json, os, sys
from weft.cli.streams import prepare_streams

prepare_streams()
print("nobody reads this", "nor this", file=sys.stderr)
print("nor \\ud800 that", flush=True)
nowhere = os.stat(os.devnull).st_rdev
kept = open(sys.argv[1], "w")
facts = [(os.fstat(each).st_rdev == nowhere, os.get_inheritable(each)) for each in range(3)]
json.dump({"facts": facts, "read": sys.stdin.read(), "next": kept.fileno()}, kept)
"""


def closed(redirections: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, **options)


def test_streams_that_are_closed_lead_nowhere_and_programs_inherit_that(tmp_path: Path) -> None:
    assert closed("<&- >&- 2>&-", "-c", FACTS, tmp_path / "facts").returncode == 0
    told = json.loads((tmp_path / "facts").read_text())
    assert told == {"facts": [[True, True]] * 3, "read": "", "next": 3}


def test_one_that_is_open_stays_as_it_is(tmp_path: Path) -> None:
    done = closed("<&- 2>&-", "-c", FACTS, tmp_path / "facts")
    assert (done.returncode, done.stdout, done.stderr) == (0, "nor ? that\n", "")
    assert json.loads((tmp_path / "facts").read_text())["facts"][1] == [False, True]


@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("verb", ["ps", "status", "top"])
def test_a_verb_whose_streams_are_closed_does_what_it_does(tmp_path: Path, verb: str, redirections: str) -> None:
    """It printed the traceback of an AttributeError, and ended with 1."""
    environment = os.environ | {"WEFT_RUNTIME_DIR": str(tmp_path)}
    answers = {"status": [[{"ok": STATUS}]], "ps": [[{"ok": {"jobs": []}}]]}
    with ScriptedDaemon(tmp_path / "weft.sock", answers):
        done = closed(redirections, "-m", "weft", verb, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}])
def test_what_stdout_cannot_encode_is_a_question_mark(tmp_path: Path, variables: dict[str, str]) -> None:
    """It ended `weft run` of a job that had completed with the traceback of a UnicodeEncodeError."""
    environment = os.environ | {"WEFT_RUNTIME_DIR": str(tmp_path), "PYTHONUTF8": "0"} | variables
    shown = SHOWN | {"why": "It waits for 2 × 3 workers."}
    with ScriptedDaemon(tmp_path / "weft.sock", {"show": [[{"ok": shown}]]}):
        done = closed("", "-m", "weft", "show", "digits-1", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "It waits for 2 ? 3 workers." in done.stdout


def test_a_job_in_the_foreground_of_a_process_without_stderr_goes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a service that a library's daemonize has made: the job had been submitted, and was not waited for."""
    shown = {"ok": {"job": "digits-1", "lanes": {}}}
    events = [{"event": {"log": "hello\n", "offset": 6}}, {"ok": {"result": RESULT}}]
    answers = {"submit": [[{"ok": {"job": "digits-1", "created": True}}]], "follow": [events], "show": [[shown]]}
    spec = JobSpec(job={"entry": "digits.py:workload", "steps": 3, "batch_size": 4})
    monkeypatch.setattr(sys, "stderr", None)
    with ScriptedDaemon(tmp_path / "weft.sock", answers):
        result, _ = run_in_foreground(Client(tmp_path / "weft.sock"), spec)
    assert result["state"] == "completed"


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["ps", "--all"],
        ["show", "digits-1"],
        ["wait", "digits-1"],
        ["top", "--once"],
        ["--version"],
        ["--help"],
        ["ps", "--help"],
    ],
    ids=" ".join,
)
def test_a_page_that_nobody_reads_ends_the_verb_with_141(tmp_path: Path, arguments: list[str]) -> None:
    """rich and typer ended the process with 1, which of `weft wait` said that the job had failed."""
    answers = {"status": [[{"ok": STATUS}]], "ps": [[{"ok": {"jobs": []}}]], "show": [[{"ok": SHOWN}]]}
    answers["wait"] = [[{"ok": {"result": RESULT}}]]
    environment = os.environ | {"WEFT_RUNTIME_DIR": str(tmp_path)}
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "weft", *arguments]
    with ScriptedDaemon(tmp_path / "weft.sock", answers), open(writing, "wb") as nobody:
        done = subprocess.run(
            command, env=environment, stdout=nobody, stderr=subprocess.PIPE, timeout=SECONDS, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("elsewhere", [(), ("stdout",), ("stderr",)], ids=str)
@pytest.mark.parametrize("arguments", [["logs", "-f", "digits-1"], ["submit", "-f", "digits.toml"]], ids=" ".join)
@pytest.mark.usefixtures("hangup")
def test_a_terminal_that_closes_ends_who_follows_with_143(
    tmp_path: Path, arguments: list[str], elsewhere: tuple[str, ...]
) -> None:
    """It was 1, as of a job that has failed, where stderr was the terminal: the last sentence could not be written."""
    (tmp_path / "digits.toml").write_text("[job]\nentry = 'digits.py:workload'\nbatch_size = 4\nsteps = 3\n")
    (tmp_path / "digits.py").touch()
    environment = os.environ | {"WEFT_RUNTIME_DIR": str(tmp_path)}
    answers = {
        "submit": [[{"ok": {"job": "digits-1", "created": True}}]],
        "follow": [[{"event": {"log": "hello\n", "offset": 6}}, HOLD]],
    }
    arguments = [str(tmp_path / each) if each.endswith("toml") else each for each in arguments]
    others = dict.fromkeys(elsewhere, subprocess.DEVNULL)
    with (
        ScriptedDaemon(tmp_path / "weft.sock", answers) as daemon,
        TerminalCommand(["-m", "weft", *arguments], environment, elsewhere=others) as terminal,
    ):
        assert daemon.held.wait(SECONDS)
        assert terminal.hang_up() == 143


def test_what_stderr_cannot_take_leaves_the_exit_code_as_it_is(tmp_path: Path) -> None:
    """The sentence of an error, on a disk that was full, ended the verb with 1."""
    environment = os.environ | {"WEFT_RUNTIME_DIR": str(tmp_path)}
    assert closed("2>/dev/full", "-m", "weft", "show", "digits-1", env=environment).returncode == 69
