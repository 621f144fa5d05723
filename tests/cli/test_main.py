"""The `weft` command as its users run it: a process, its two streams and its exit code."""

from __future__ import annotations

import json
import os
import pty
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from weft.cli import main as cli
from weft.cli.exits import INTERRUPTED
from weft.client.result import RESULT_KEYS

pytestmark = pytest.mark.weighs(tests=7)

_SCRIPTED = runpy.run_path(str(Path(__file__).parents[1] / "scripted_daemon.py"))
ScriptedDaemon, HANG_UP, HOLD = _SCRIPTED["ScriptedDaemon"], _SCRIPTED["HANG_UP"], _SCRIPTED["HOLD"]

PROCESS_SECONDS = 180.0
VERBS = ["run", "daemon", "submit", "ps", "show", "logs", "wait", "cancel", "status", "top", "trace", "plot"]
VERBS += ["restart", "rm", "init", "completion"]
JOB = {
    "job": "digits-1",
    "state": "queued",
    "reason": None,
    "priority": 0,
    "step": 0,
    "steps": 480,
    "loss": None,
    "submitted_at": time.time() - 90.0,
    "started_at": None,
    "ended_at": None,
    "why": "It waits for a worker: both are busy with digits-0.",
}
RESULT = {
    "job": "digits-1",
    "state": "completed",
    "reason": None,
    "steps": 480,
    "loss": 0.25,
    "validation": {"accuracy": 0.98},
    "seconds": 12.0,
    "iteration_seconds": 0.025,
    "limit_seconds": 0.020,
    "run_dir": "/runs/digits-1",
    "model": "/runs/digits-1/model.safetensors",
    "exit_code": 0,
    "error": None,
    "exception": None,
    "stopped": None,
    "best": None,
}
SHOWN = JOB | RESULT | {"state": "queued", "plan": None, "lanes": {}, "spec": {}}
PROGRESS = {
    "step": 120,
    "steps": 480,
    "epoch": 2,
    "loss": 0.4312,
    "lr": 0.001,
    "grad_norm": None,
    "samples_per_second": 8123.0,
    "data_percent": 0.3,
    "stall_percent": 4.1,
    "overlap_percent": None,
    "eta_seconds": 12.0,
    "validation": None,
}
SUBMITTED = {"ok": {"job": "digits-1", "created": True}}


def log(text: str) -> dict[str, Any]:
    return {"event": {"log": text, "offset": len(text)}}


def ended(**changes: Any) -> dict[str, Any]:
    return {"ok": {"result": RESULT | changes}}


def refused(code: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": f"the reason of {code}"}}


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    directory = tmp_path / "runtime"
    directory.mkdir(mode=0o700)
    return directory


def environment(runtime: Path) -> dict[str, str]:
    return os.environ | {"WEFT_RUNTIME_DIR": str(runtime), "PYTHONWARNINGS": "error", "COLUMNS": "200"}


def weft(runtime: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", *map(str, arguments)]
    return subprocess.run(
        command, env=environment(runtime), capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False
    )


def start(
    runtime: Path, *arguments: object, variables: Mapping[str, str] = MappingProxyType({}), **streams: Any
) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen(
        [sys.executable, "-m", "weft", *map(str, arguments)],
        env={**environment(runtime), **variables},
        text=True,
        **streams,
    )


@pytest.fixture
def daemon(runtime: Path) -> Iterator[Any]:
    """(answers) -> a started daemon that gives them, stopped after the test."""
    started: list[Any] = []

    def make(answers: dict[str, Any]) -> Any:
        started.append(ScriptedDaemon(runtime / "weft.sock", answers).__enter__())
        return started[-1]

    yield make
    for one in started:
        one.__exit__(None, None, None)


def test_submit_prints_the_id_alone_and_returns(runtime: Path, spec: Path, daemon: Any) -> None:
    scripted = daemon({"submit": [[SUBMITTED]]})
    done = weft(runtime, "submit", spec, "--set", "job.seed=8", "--id", "mine", "--priority", 3)
    assert (done.returncode, done.stdout, done.stderr) == (0, "digits-1\n", "")
    (request,) = scripted.requests
    assert (request["job"], request["priority"], request["spec"]["job"]["seed"]) == ("mine", 3, 8)


def test_submit_json_prints_the_reply(runtime: Path, spec: Path, daemon: Any) -> None:
    daemon({"submit": [[SUBMITTED]]})
    assert json.loads(weft(runtime, "submit", spec, "--json").stdout) == {"job": "digits-1", "created": True}


def test_submit_follow_json_puts_one_result_line_on_stdout_and_the_rest_on_stderr(
    runtime: Path, spec: Path, daemon: Any
) -> None:
    daemon({"submit": [[SUBMITTED]], "follow": [[log("hello\n"), {"event": {"progress": PROGRESS}}, ended()]]})
    done = weft(runtime, "submit", spec, "-f", "--json")
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert json.loads(line) == {key: RESULT[key] for key in RESULT_KEYS}
    assert done.stderr.splitlines() == [
        "digits-1",
        "hello",
        "step 120/480  epoch 3  loss 0.4312  lr 0.001  grad norm -  8123 samples/s  data 0.3 %  stall 4.1 %  "
        "overlap -  ETA 12.0 s",
    ]


def test_submit_follow_keeps_stdout_for_the_id(runtime: Path, spec: Path, daemon: Any) -> None:
    daemon({"submit": [[SUBMITTED]], "follow": [[ended(state="failed", reason="user-error", exit_code=17)]]})
    done = weft(runtime, "submit", spec, "-f")
    assert (done.returncode, done.stdout) == (17, "digits-1\n")
    assert "digits-1 failed (user-error) after 12.0 s" in done.stderr


FAILED: dict[str, Any] = {
    "state": "failed",
    "reason": "user-error",
    "exception": "ValueError",
    "error": "Traceback\nValueError: no such class",
    "exit_code": 17,
}


@pytest.mark.parametrize("verb", ["wait", "submit"])
def test_the_json_of_a_failed_job_says_why_though_its_log_has_said_so(
    runtime: Path, spec: Path, daemon: Any, verb: str
) -> None:
    """A script that waited for it got `user-error`, and nothing to tell people."""
    told = log("".join(f"12:00:00 {line}\n" for line in FAILED["error"].splitlines()))
    daemon({"submit": [[SUBMITTED]], "follow": [[told, ended(**FAILED)]], "wait": [[ended(**FAILED)]]})
    arguments = ["wait", "digits-1"] if verb == "wait" else ["submit", spec, "-f"]
    done = weft(runtime, *arguments, "--json")
    assert done.returncode == 17
    result = json.loads(done.stdout)
    assert {key: result[key] for key in FAILED} == FAILED
    assert done.stderr.count("no such class") == (verb == "submit")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
@pytest.mark.usefixtures("hangup")
def test_an_interrupt_while_following_detaches_and_says_how_to_come_back(
    runtime: Path, spec: Path, daemon: Any, number: signal.Signals, code: int
) -> None:
    scripted = daemon({"submit": [[SUBMITTED]], "follow": [[log("hello\n"), HOLD]]})
    with start(runtime, "submit", spec, "-f") as process:
        assert scripted.held.wait(PROCESS_SECONDS)
        assert process.stderr is not None
        assert process.stderr.readline() == "hello\n"
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=PROCESS_SECONDS)
    assert (process.returncode, stdout) == (code, "digits-1\n")
    assert stderr == "weft: detached; the job goes on. Follow it again with: weft logs -f digits-1\n"
    assert [request["verb"] for request in scripted.requests] == ["submit", "follow"]


def test_logs_prints_the_log_so_far(runtime: Path, daemon: Any) -> None:
    daemon({"follow": [[log("one\ntwo"), {"ok": {"result": None}}]]})
    done = weft(runtime, "logs", "digits-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\ntwo", "")


def test_logs_follow_survives_a_lost_daemon_and_ends_with_the_jobs_code(runtime: Path, daemon: Any) -> None:
    daemon({"follow": [[log("one\n"), HANG_UP], [log("two\n"), ended(state="failed", exit_code=137)]]})
    done = weft(runtime, "logs", "-f", "digits-1")
    assert (done.returncode, done.stdout, done.stderr) == (137, "one\ntwo\n", "")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"exit_code": 3, "state": "failed"}, 3),
        ({"exit_code": None, "state": "failed"}, 1),
        ({"exit_code": None, "state": "cancelled"}, 1),
    ],
)
def test_wait_exits_with_the_jobs_code(runtime: Path, daemon: Any, changes: dict[str, Any], code: int) -> None:
    daemon({"wait": [[ended(**changes)]]})
    done = weft(runtime, "wait", "digits-1", "--json")
    assert done.returncode == code
    assert json.loads(done.stdout)["state"] == changes.get("state", "completed")


def test_a_loss_that_is_not_finite_is_null_in_json(runtime: Path, daemon: Any) -> None:
    daemon({"wait": [[ended(loss=float("nan"))]]})
    assert json.loads(weft(runtime, "wait", "digits-1", "--json").stdout)["loss"] is None


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        ("no-such-job", 4),
        ("wrong-protocol", 69),
        ("queue-full", 75),
        ("draining", 75),
        ("not-yours", 77),
        ("timed-out", 124),
        ("invalid-spec", 2),
        ("bad-field", 2),
        ("id-taken", 2),
        ("unknown-verb", 70),
        ("not-ended", 75),
        ("not-removed", 74),
        ("not-saved", 74),
        ("not-replaced", 1),
        ("internal-error", 70),
    ],
)
def test_each_refusal_has_its_exit_code_and_its_sentence(runtime: Path, daemon: Any, refusal: str, code: int) -> None:
    daemon({"cancel": [[refused(refusal)]]})
    done = weft(runtime, "cancel", "digits-1")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"weft: the reason of {refusal}\n")


def test_wait_that_has_timed_out_exits_with_124(runtime: Path, daemon: Any) -> None:
    daemon({"wait": [[refused("timed-out")]]})
    assert weft(runtime, "wait", "digits-1", "--timeout", 0).returncode == 124


@pytest.mark.parametrize(
    "arguments", [["ps"], ["ps", "--json"], ["show", "x"], ["logs", "-f", "x"], ["status"], ["daemon", "--replace"]]
)
def test_without_a_daemon_every_verb_says_how_to_start_one(runtime: Path, arguments: list[str]) -> None:
    done = weft(runtime, *arguments)
    assert (done.returncode, done.stdout) == (69, "")
    assert str(runtime / "weft.sock") in done.stderr
    assert "`weft daemon`" in done.stderr


def test_ps_lists_unfinished_jobs_and_all_of_them_when_asked(runtime: Path, daemon: Any) -> None:
    daemon({"ps": [[{"ok": {"jobs": [JOB, JOB | {"job": "digits-0", "state": "completed"}]}}]]})
    assert [job["job"] for job in json.loads(weft(runtime, "ps", "--json").stdout)["jobs"]] == ["digits-1"]
    assert len(json.loads(weft(runtime, "ps", "--all", "--json").stdout)["jobs"]) == 2
    table = weft(runtime, "ps").stdout
    assert "digits-1" in table
    assert "completed" not in table


def test_show_says_why_a_job_waits(runtime: Path, daemon: Any) -> None:
    daemon({"show": [[{"ok": SHOWN}]]})
    assert weft(runtime, "show", "digits-1").stdout.startswith(f"digits-1: {JOB['why']}\n")
    assert json.loads(weft(runtime, "show", "digits-1", "--json").stdout) == json.loads(json.dumps(SHOWN))


def test_cancel_and_status_print_what_the_daemon_says(runtime: Path, daemon: Any) -> None:
    worker = {"worker": "cpu-0", "kind": "cpu", "device": "CPU", "state": "idle", "pid": 7, "job": None}
    status = {"pid": 6, "version": "0.1.0", "workers": [worker], "jobs": {"running": 2}, "metrics": None}
    daemon({"cancel": [[{"ok": {"state": "cancelled"}}]], "status": [[{"ok": status}]]})
    assert weft(runtime, "cancel", "digits-1").stdout == "cancelled\n"
    assert json.loads(weft(runtime, "cancel", "digits-1", "--json").stdout)["state"] == "cancelled"
    assert "2 running" in weft(runtime, "status").stdout
    assert json.loads(weft(runtime, "status", "--json").stdout) == status


@pytest.mark.parametrize(
    ("jobs", "problem", "told"),
    [
        (0, "", ""),
        (1, "", "; 1 job went on"),
        (2, "", "; 2 jobs went on"),
        (1, "it is torn", "; 1 job starts from its newest checkpoint"),
        (2, "it is torn", "; 2 jobs start from their newest checkpoints"),
    ],
)
def test_a_daemon_that_was_replaced_says_what_became_of_its_jobs(
    runtime: Path, daemon: Any, jobs: int, problem: str, told: str
) -> None:
    scripted = daemon({"replace": [[{"ok": {"version": "9.9", "jobs": jobs, "problem": problem}}]]})
    done = weft(runtime, "daemon", "--replace")
    assert (done.returncode, done.stdout) == (0, f"weft 9.9 serves{told}\n")
    assert done.stderr == (f"weft: the running jobs could not be handed over: {problem}\n" if problem else "")
    assert scripted.requests[0] == {"id": 1, "verb": "replace", "executable": sys.executable}


def test_a_daemon_that_is_replaced_keeps_its_settings(runtime: Path) -> None:
    done = weft(runtime, "daemon", "--replace", "--workers", "3")
    told = "weft: --replace keeps the settings of the daemon that runs; leave --workers out, or restart it\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_restart_prints_the_new_jobs_id(runtime: Path, daemon: Any) -> None:
    scripted = daemon({"restart": [[{"ok": {"job": "digits-2", "created": True}}]]})
    assert weft(runtime, "restart", "digits-1").stdout == "digits-2\n"
    assert json.loads(weft(runtime, "restart", "digits-1", "--json").stdout) == {"job": "digits-2", "created": True}
    assert scripted.requests[0] == {"id": 1, "verb": "restart", "job": "digits-1"}


def test_rm_removes_what_it_can_and_exits_with_the_code_of_the_first_that_stayed(runtime: Path, daemon: Any) -> None:
    answers = [[{"ok": {"job": "a"}}], [refused("not-removed")], [refused("not-ended")], [{"ok": {"job": "d"}}]]
    daemon({"remove": answers * 2})
    done = weft(runtime, "rm", "a", "b", "c", "d", "a")
    assert (done.returncode, done.stdout) == (74, "a\nd\n")
    assert done.stderr == "weft: the reason of not-removed\nweft: the reason of not-ended\n"
    done = weft(runtime, "rm", "a", "b", "c", "d", "--json")
    kept = [
        {"job": job, "code": code, "message": f"the reason of {code}"}
        for job, code in (("b", "not-removed"), ("c", "not-ended"))
    ]
    assert (done.returncode, json.loads(done.stdout)) == (74, {"removed": ["a", "d"], "kept": kept})


def test_rm_of_a_daemon_that_drains_stops_there(runtime: Path, daemon: Any) -> None:
    scripted = daemon({"remove": [[refused("draining")]]})
    assert weft(runtime, "rm", "a", "b").returncode == 75
    assert len(scripted.requests) == 1


def test_rm_by_age_asks_until_nothing_new_is_old_enough(runtime: Path, daemon: Any) -> None:
    """An older daemon does not know the field and sends every job: those that ended later stay."""
    now = time.time()
    rows = [JOB | {"job": f"digits-{age}", "state": "completed", "ended_at": now - age * 86_400} for age in (40, 35, 2)]
    rows.append(JOB | {"job": "digits-0", "ended_at": None})
    pages = [[{"ok": {"jobs": rows}}], [{"ok": {"jobs": rows[1:]}}]]
    scripted = daemon({"ps": pages, "remove": [[{"ok": {"job": "digits-40"}}], [refused("not-removed")]]})
    done = weft(runtime, "rm", "--older-than", "30d")
    assert (done.returncode, done.stdout) == (74, "digits-40\n")
    assert [request.get("job") for request in scripted.requests] == [None, "digits-40", "digits-35", None]
    assert abs(scripted.requests[0]["ended_before"] - (now - 30 * 86_400)) < PROCESS_SECONDS
    scripted.requests.clear()
    assert weft(runtime, "rm", "--older-than", "30d", "--dry-run").stdout == "digits-35\n"
    dry = weft(runtime, "rm", "--older-than", "1.5w", "--dry-run", "--json")
    assert json.loads(dry.stdout) == {"would_remove": ["digits-35"]}
    assert [request["verb"] for request in scripted.requests] == ["ps", "ps"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["digits-1", "--older-than", "30d"],
        ["digits-1", "--dry-run"],
        ["--older-than", ""],
        ["--older-than", "d"],
        ["--older-than", "30"],
        ["--older-than", "-1d"],
        ["--older-than", "30y"],
        ["--older-than", "nand"],
        ["--older-than", "1e3d"],
        ["--older-than", "³d"],
    ],
    ids=" ".join,
)
def test_rm_says_what_it_needs(runtime: Path, daemon: Any, arguments: list[str]) -> None:
    scripted = daemon({"ps": [[{"ok": {"jobs": []}}]], "remove": [[{"ok": {"job": "digits-1"}}]]})
    done = weft(runtime, "rm", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--older-than" in done.stderr
    assert scripted.requests == []


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_ends_with_an_example(runtime: Path, verb: str) -> None:
    done = weft(runtime, verb, "--help")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].strip().startswith(f"Example: weft {verb}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('[job]\nentry = "digits.py:workload"\nsteps = 3\n', "job.batch_size: missing"),
        ('[job]\nentry = "gone.py:workload"\nsteps = 3\nbatch_size = 4\n', "is not a file"),
        ("[job", "not valid TOML"),
    ],
)
@pytest.mark.parametrize("verb", ["submit", "run"])
def test_a_spec_that_is_not_valid_exits_with_2_and_no_traceback(
    runtime: Path, spec: Path, verb: str, lines: str, message: str
) -> None:
    spec.write_text(lines)
    done = weft(runtime, verb, spec)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["ps", "--nonsense"], ["nonsense"], ["show"], ["daemon", "--workers", "-1"]])
def test_wrong_usage_exits_with_2_and_no_traceback(runtime: Path, arguments: list[str]) -> None:
    done = weft(runtime, *arguments)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_of_stdout_that_has_gone_is_no_traceback(runtime: Path, daemon: Any) -> None:
    daemon({"follow": [[log("x" * 1_000_000), {"ok": {"result": None}}]]})
    reading, writing = os.pipe()
    os.close(reading)
    with start(runtime, "logs", "digits-1", stdout=writing) as process:
        os.close(writing)
        _, stderr = process.communicate(timeout=PROCESS_SECONDS)
    assert (process.returncode, stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_disk_under_stdout_is_a_sentence(runtime: Path, daemon: Any, unbuffered: str) -> None:
    variables = {"PYTHONUNBUFFERED": unbuffered}
    daemon({"ps": [[{"ok": {"jobs": [JOB]}}]]})
    with open("/dev/full", "w") as full, start(runtime, "ps", "--json", variables=variables, stdout=full) as process:
        _, stderr = process.communicate(timeout=PROCESS_SECONDS)
    assert process.returncode == 74
    assert "No space left" in stderr
    assert "Traceback" not in stderr


def on_terminal(runtime: Path, *arguments: object, **variables: str) -> str:
    """What the command writes to a terminal that is both its stdout and its stderr."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "weft", *map(str, arguments)]
    variables = environment(runtime) | {"TERM": "xterm-256color"} | variables
    variables = {name: value for name, value in variables.items() if value}
    with subprocess.Popen(command, env=variables, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        written = b""
        while data := _read(ours):
            written += data
    os.close(ours)
    return written.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux: the other side has closed
        return b""


def test_colour_is_for_terminals_without_no_color(runtime: Path, daemon: Any) -> None:
    daemon({"ps": [[{"ok": {"jobs": [JOB | {"state": "running"}]}}]]})
    assert "\x1b[32m" in on_terminal(runtime, "ps", NO_COLOR="")
    assert "\x1b[32m" not in on_terminal(runtime, "ps", NO_COLOR="1")
    assert "\x1b" not in weft(runtime, "ps").stdout


def test_a_terminal_gets_a_progress_bar_with_the_log_above_it(runtime: Path, daemon: Any) -> None:
    partial = {"event": {"log": "[bold]no newline", "offset": 9}}
    daemon({"follow": [[log("hello\n"), {"event": {"progress": PROGRESS}}, partial, ended()]]})
    written = on_terminal(runtime, "logs", "-f", "digits-1")
    assert "hello" in written
    assert "step 120/480" in written
    assert "━" in written
    assert "[bold]no newline" in written


@pytest.mark.slow(seconds=3)
def test_reference_is_the_plain_loop_with_the_same_kind_of_result(runtime: Path, tmp_path: Path) -> None:
    pytest.importorskip("weft.reference.loop")
    (tmp_path / "line.py").write_text(WORKLOAD)
    path = tmp_path / "line.toml"
    path.write_text('[job]\nentry = "line.py:workload"\nsteps = 3\nbatch_size = 4\n')
    done = weft(runtime, "run", path, "--reference", "--json", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert tuple(result) == RESULT_KEYS
    assert (result["state"], result["steps"]) == ("completed", 3)
    assert Path(result["model"]).is_file()
    records = [json.loads(text) for text in Path(result["run_dir"], "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert steps[-1]["loss"] == result["loss"]


@pytest.mark.days(2)
@pytest.mark.slow(seconds=2)
def test_reference_of_a_workload_that_raises_is_a_failed_result(runtime: Path, spec: Path, tmp_path: Path) -> None:
    pytest.importorskip("weft.reference.loop")
    (tmp_path / "digits.py").write_text("def workload():\n    raise RuntimeError('no data here')\n")
    done = weft(runtime, "run", spec, "--reference", "--json", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert (result["state"], result["reason"], result["model"]) == ("failed", "user-error", None)
    assert (result["exception"], result["exit_code"]) == ("RuntimeError", 1)
    assert "no data here" in result["error"]
    assert done.stderr.count("RuntimeError: no data here") == 1


@pytest.mark.days(2)
@pytest.mark.slow(seconds=2)
def test_reference_of_a_workload_that_exits_is_a_failed_result(runtime: Path, spec: Path, tmp_path: Path) -> None:
    """`sys.exit(3)` in the job's code ended the command without a word."""
    pytest.importorskip("weft.reference.loop")
    (tmp_path / "digits.py").write_text("import sys\n\ndef workload():\n    sys.exit(3)\n")
    done = weft(runtime, "run", spec, "--reference", "--runs-dir", tmp_path / "runs")
    assert done.returncode == 3
    assert "the job's code called exit(3); it must return, or raise an exception" in done.stderr
    assert "failed (user-error SystemExit)" in done.stdout


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == INTERRUPTED


WORKLOAD = """
import torch, weft

def workload():
    inputs = torch.arange(8.0).reshape(8, 1)
    return weft.Workload(model=torch.nn.Linear(1, 1), loss=torch.nn.functional.mse_loss, train=(inputs, 2 * inputs),
                         validation=(inputs, 2 * inputs), optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
"""
