"""A user's mistakes: the right exit code, a sentence that names the field and the remedy, and a daemon that goes on."""

from __future__ import annotations

import contextlib
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.client.client import RequestRefused

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, LINE, SECONDS = _REAL["RealDaemon"], _REAL["LINE"], _REAL["SECONDS"]

OURS = "Traceback (most recent call last)"


@pytest.fixture
def serving(daemon: RealDaemon) -> Iterator[RealDaemon]:
    """The shared daemon; after the test it has run an honest job."""
    yield daemon
    daemon.until_idle()
    assert daemon.run(daemon.spec(epochs=1))["state"] == "completed"


def is_one_paragraph(text: str) -> bool:
    return 0 < len(text.splitlines()) <= 3 and OURS not in text


# --- what the client can see by itself

SPECS: dict[str, tuple[str, str]] = {
    "an unknown key": ("steps = 3\nbatchsize = 4", r"job.batchsize: unknown key; did you mean batch_size?"),
    "a key of a table that is unknown": ("[strategy]\nstage = 2", "strategy.stage: unknown key; did you mean stages?"),
    "a wrong type": ('steps = "3"', "job.steps: '3' is no whole number; write one without quotes"),
    "a value out of range": ("steps = 0", "job.steps: 0 is too small; write 1 or more"),
    "neither steps nor epochs": ("", "neither epochs nor steps is given; write one of them"),
    "a schedule that is not known": ('steps = 3\n[strategy]\nschedule = "zigzag"', "strategy.schedule: "),
    "what is no TOML": ("steps = = 3", "not valid TOML"),
}


@pytest.mark.days(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_a_spec_with_a_mistake_is_refused_with_2_before_it_is_sent(daemon: RealDaemon, name: str) -> None:
    text, told = SPECS[name]
    path = daemon.spec_file(daemon.spec())
    path.write_text(f'[job]\nentry = "line.py:workload"\nbatch_size = 4\n{text}\n')
    done = daemon.weft("submit", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert is_one_paragraph(done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spec", "entry"])
def test_a_file_that_is_missing_is_told_with_2(daemon: RealDaemon, kind: str) -> None:
    spec = daemon.spec()
    path = daemon.spec_file(spec)
    (path if kind == "spec" else spec.entry_file).unlink()
    done = daemon.weft("submit", path)
    assert done.returncode == 2
    assert str(path if kind == "spec" else spec.entry_file) in done.stderr
    assert is_one_paragraph(done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["show", "logs", "wait", "cancel"])
def test_an_unknown_job_is_told_with_4(daemon: RealDaemon, verb: str) -> None:
    done = daemon.weft(verb, "nobody-1")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "weft: no job 'nobody-1'; `weft ps --all` lists them\n"


@pytest.mark.slow
def test_a_daemon_that_is_not_there_is_told_with_69_and_how_to_start_one(daemon: RealDaemon) -> None:
    nowhere = daemon.environment | {"WEFT_RUNTIME_DIR": str(daemon.home / "nowhere")}
    done = subprocess.run(
        [sys.executable, "-m", "weft", "ps"], env=nowhere, capture_output=True, text=True, check=False
    )
    assert done.returncode == 69
    assert "no such socket; start the daemon with `weft daemon`" in done.stderr
    assert is_one_paragraph(done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["runtime directory", "state directory"])
def test_a_second_daemon_is_refused_and_the_first_keeps_serving(serving: RealDaemon, shares: str) -> None:
    command = serving.command()
    option = "--state-dir" if shares == "runtime directory" else "--runtime-dir"
    command[command.index(option) + 1] = str(serving.home / "o")
    done = subprocess.run(
        command, env=serving.environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 1
    assert f"(pid {serving.process.pid})" in done.stderr
    assert is_one_paragraph(done.stderr)


# --- what the daemon or a worker finds out: (source, strategy and job, exit code, reason, part of the message)

LAYERS = "model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))"


def workload_with(**parts: str) -> str:
    values = {
        "before": "",
        "model": LAYERS,
        "loss": "torch.nn.functional.mse_loss",
        "train": "(inputs, inputs)",
        "optimizer": "lambda params: torch.optim.SGD(params, lr=0.1)",
    } | parts
    return f"""
import ctypes, os, sys
import torch, weft

calls = 0

def loss(output, target):
    global calls
    calls += 1
    {values["before"] or "pass"}
    return {values["loss"]}(output, target)

def workload():
    inputs = torch.linspace(0, 1, 8).reshape(8, 1)
    {values["model"]}
    return weft.Workload(model=model, loss=loss, train={values["train"]}, optimizer={values["optimizer"]})
"""


def in_training(statement: str) -> str:
    """The loss does it in its third call in training; the inspection makes four."""
    return workload_with(before=f"if calls == 7: {statement}")


# A limit of the process is the one that a test can set, and the next job's worker must not have it.
ALLOCATE = """
import resource

def allocate():
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))
    try:
        torch.empty(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
"""

JOBS: dict[str, tuple[str, dict[str, Any], int, str, str]] = {
    "an entry that is no function": ("workload = 5", {}, 2, "invalid-workload", "'workload' in "),
    "an entry that is not there": ("def workloads(): pass", {}, 2, "invalid-workload", "did you mean workloads?"),
    "an entry that returns no workload": (
        "def workload(): return 5",
        {},
        2,
        "invalid-workload",
        "workload returned int; it must return a weft.Workload",
    ),
    "arguments that the entry does not take": (
        "def workload(size): pass",
        {"args": {"width": 1}},
        2,
        "invalid-workload",
        "job.args: ",
    ),
    "a model that cannot be cut": (
        workload_with(model="model = torch.nn.Linear(1, 1)"),
        {"strategy": {"stages": 2}},
        2,
        "invalid-plan",
        "strategy.stages = 2, but the model can be cut into at most 1 stage",
    ),
    "a dataset of length 0": (
        workload_with(train="(inputs[:0], inputs[:0])"),
        {},
        2,
        "invalid-workload",
        "Workload.train has length 0; give at least one sample",
    ),
    "a dataset without length and without state that goes on where it was": (
        workload_with(
            train="type('Lines', (torch.utils.data.IterableDataset,), "
            "{'__iter__': lambda self, opened=iter([(row, row) for row in inputs]): opened})()"
        ),
        {"steps": 1, "epochs": None},
        2,
        "invalid-workload",
        "Workload.train: the Lines has neither a length nor a state, and gave other items when it was begun again",
    ),
    "several loaders for what one draws": (
        workload_with(
            train="type('Lines', (torch.utils.data.IterableDataset,), "
            "{'__iter__': lambda self: zip(inputs, inputs), '__len__': lambda self: 8})()"
        ),
        {"strategy": {"loaders": 2}},
        2,
        "invalid-plan",
        "strategy.loaders = 2: Workload.train is an IterableDataset, and one process draws",
    ),
    "a loader of other batches": (
        workload_with(train="torch.utils.data.DataLoader(list(zip(inputs, inputs)), batch_size=3)"),
        {},
        2,
        "invalid-workload",
        "Workload.train: its DataLoader has batch_size = 3, and job.batch_size is ",
    ),
    "a loss that is no number": (
        in_training("output = output * float('nan')"),
        {},
        1,
        "non-finite-loss",
        "loss is nan at step 6 (microbatch 0: samples ",
    ),
    "a loss that is no scalar": (
        workload_with(loss="(lambda output, target: output)"),
        {},
        2,
        "invalid-workload",
        "Workload.loss returned a tensor of shape",
    ),
    "an optimizer that is none": (
        workload_with(optimizer="lambda params: 5"),
        {},
        2,
        "invalid-workload",
        "Workload.optimizer returned int",
    ),
    "a syntax error": ("def workload(:", {}, 1, "user-error", "SyntaxError"),
    "an import that is not there": ("from nowhere import workload", {}, 1, "user-error", "ModuleNotFoundError"),
    "an exception": (in_training("raise KeyError('lost')"), {}, 1, "user-error", "KeyError: 'lost'"),
    "an exception of the entry": ("def workload(): raise KeyError('lost')", {}, 1, "user-error", "KeyError: 'lost'"),
    "memory that there is not": (in_training("allocate()") + ALLOCATE, {}, 1, "out-of-memory", "can't allocate memory"),
    "memory that the entry does not get": (
        "import torch" + ALLOCATE + "def workload(): allocate()",
        {},
        1,
        "out-of-memory",
        "can't allocate memory",
    ),
    "sys.exit": (in_training("sys.exit(5)"), {}, 5, "user-error", "the job's code called exit(5)"),
    "os._exit": (in_training("os._exit(17)"), {}, 17, "worker-lost", "ended cpu-0 with exit code 17"),
    "an abort": (in_training("os.abort()"), {}, 128 + signal.SIGABRT, "worker-lost", "cpu-0 died of signal 6"),
    "a segfault": (in_training("ctypes.string_at(0)"), {}, 128 + signal.SIGSEGV, "worker-lost", "died of signal 11"),
}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # strategy and job, part of the message
    "more stages than workers": (
        {"strategy": {"stages": 4}},
        "strategy.stages = 4 needs 4 CPU workers and this daemon has 3; use fewer stages, or start",
    ),
    "more loaders than there are": (
        {"strategy": {"loaders": 9}},
        "strategy.loaders = 9 needs 9 loader workers and this daemon has ",
    ),
    "more replicas than workers": ({"strategy": {"replicas": 9}}, "needs 9 CPU workers and this daemon has"),
    "more devices than there are": (
        {"strategy": {"replicas": [{"device": "gpu", "stages": 9}]}},
        "use fewer replicas, or start the daemon with --stand-ins 9",
    ),
    "fewer samples in a batch than microbatches": (
        {"batch_size": 2, "strategy": {"microbatches": 3}},
        "job.batch_size = 2 is smaller than strategy.microbatches = 3; a microbatch needs at least one sample",
    ),
    "replicas that steal and lag differently": (
        {"strategy": {"replicas": 2, "share": "stealing", "staleness": [0, 1]}},
        "strategy.staleness = [0, 1] differs between replicas",
    ),
    "a grid that is a deadlock": (
        {"strategy": {"stages": 2, "microbatches": 2, "schedule": "F0 B0 F1 B1\nF0 F1 B0 B1\n"}},
        "strategy.schedule: line 1 stands at B0 and waits for B0 of line 2",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_job_that_can_never_run_here_is_refused_before_it_is_acknowledged(daemon: RealDaemon, name: str) -> None:
    """It was accepted, imported and then failed."""
    options, told = REFUSED[name]
    spec = daemon.spec("raise SystemExit('nobody imports this')", **options)
    done = daemon.weft("submit", daemon.spec_file(spec))
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert is_one_paragraph(done.stderr)
    with pytest.raises(RequestRefused) as refused:  # whoever asks the daemon itself
        daemon.client.submit(spec, job=f"refused-{len(name)}")
    assert refused.value.code == "invalid-spec"
    assert told in refused.value.message
    with pytest.raises(RequestRefused, match="no job"):
        daemon.client.show(f"refused-{len(name)}")


@pytest.mark.days(3)
@pytest.mark.slow(seconds=5)
def test_a_job_that_the_daemon_knows_is_submitted_again_although_it_has_fewer_workers_now(own_daemon: Any) -> None:
    daemon = own_daemon(workers=2)
    spec = daemon.spec(strategy={"stages": 2})
    assert daemon.client.wait(daemon.submit(spec, job="wide"), SECONDS)["state"] == "completed"
    daemon.stop()
    daemon.options["workers"] = 1
    daemon.start()
    assert daemon.client.submit(spec, job="wide") == {"job": "wide", "created": False}


@pytest.mark.slow
def test_a_batch_above_the_data_set_is_one_line_of_warning(serving: RealDaemon) -> None:
    job = serving.submit(serving.spec(batch_size=1000))
    result = serving.client.wait(job, SECONDS)
    assert result["state"] == "completed"
    warnings = [line for line in serving.log_of(job).splitlines() if "warning" in line]
    [line] = warnings
    assert "job.batch_size = 1000 is more than the 48 samples of Workload.train; every batch has 48" in line


@pytest.mark.days(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_cannot_run_fails_alone_with_its_reason_and_code(serving: RealDaemon, name: str) -> None:
    source, options, code, reason, told = JOBS[name]
    spec = serving.spec(source, **{"batch_size": 8, "epochs": 20} | options)
    done = serving.weft("submit", "-f", "--json", serving.spec_file(spec))
    assert done.returncode == code, done.stderr
    job = serving.client.jobs()[0]["job"]
    result = serving.client.wait(job)
    assert (result["state"], result["reason"], result["exit_code"]) == ("failed", reason, code)
    assert told in result["error"]
    assert told in done.stderr  # of the follower, who sees the log
    assert "/weft/" not in result["error"]  # no frame of ours
    if reason not in ("user-error", "out-of-memory"):  # which have a traceback
        assert is_one_paragraph(result["error"])
    elif "def workload(:" not in source:
        assert f'{spec.entry_file}", line' in serving.log_of(job)


@pytest.mark.slow
def test_a_worker_that_the_jobs_code_ends_does_not_touch_the_job_beside_it(serving: RealDaemon) -> None:
    gate = serving.gate()
    with contextlib.ExitStack() as stack:
        stack.callback(gate.open)
        beside = serving.submit(serving.spec(args={"gate": str(gate), "gate_at": 6}))
        serving.until_logged(beside, "at the gate")
        failed = serving.run(serving.spec(in_training("os._exit(17)"), batch_size=8, epochs=20))
        assert failed["exit_code"] == 17
        assert serving.client.show(beside)["state"] == "running"
    assert serving.client.wait(beside, SECONDS)["state"] == "completed"


@pytest.mark.slow
def test_what_the_jobs_code_leaves_behind_does_not_reach_the_next_job(serving: RealDaemon) -> None:
    leaving = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); os.chdir('/tmp')"
    source = workload_with(before=f"if calls == 7: {leaving}; torch.set_default_dtype(torch.float64)")
    before = serving.worker_pids()
    assert serving.run(serving.spec(batch_size=8, epochs=20))["state"] == "completed"
    serving.until_idle()
    assert serving.worker_pids() == before  # nothing was left, so they stay
    assert serving.run(serving.spec(source, batch_size=8, epochs=20))["state"] == "completed"
    serving.until_idle()
    assert serving.worker_pids()["cpu-0"] != before["cpu-0"]  # unclean, so another is in its place


@pytest.mark.slow
def test_output_of_any_kind_reaches_the_log_whole(serving: RealDaemon) -> None:
    source = (
        "import sys\nprint('to stdout'); print('to stderr', file=sys.stderr); print('ünï'); print('half', end='')\n"
    )
    job = serving.submit(serving.spec(source + LINE))
    assert serving.client.wait(job, SECONDS)["state"] == "completed", serving.log_of(job)
    for text in ("to stdout\n", "to stderr\n", "ünï\n", "half"):
        assert text in serving.log_of(job)


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["print(name)", "raise ValueError(name)"])
def test_text_that_is_no_unicode_reaches_the_log_with_replacements(serving: RealDaemon, statement: str) -> None:
    """A file name that is not UTF-8, as `os.listdir` gives it, could not be sent to the daemon."""
    job = serving.submit(
        serving.spec(in_training(f"name = os.fsdecode(b'odd-\\xff'); {statement}"), batch_size=8, epochs=20)
    )
    result = serving.client.wait(job, SECONDS)
    assert result["reason"] == (None if statement.startswith("print") else "user-error"), result["error"]
    assert "odd-" in serving.log_of(job)


@pytest.mark.days(2)
@pytest.mark.slow(seconds=3)
def test_a_run_directory_that_cannot_be_made_fails_the_job_and_not_the_daemon(own_daemon: Any) -> None:
    daemon = own_daemon(workers=1)
    (daemon.state / "runs").rmdir()
    (daemon.state / "runs").write_text("a file stands where the runs should be")
    result = daemon.run(daemon.spec())
    assert (result["state"], result["reason"]) == ("failed", "run-directory")
    told = "/runs is no directory; remove it, or give another --runs-dir"
    assert "cannot be made: what stands at" in result["error"]
    assert told in result["error"]
    (daemon.state / "runs").unlink()
    assert daemon.run(daemon.spec())["state"] == "completed"
