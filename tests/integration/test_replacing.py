"""A daemon that is replaced while a job trains: nobody loses a line, and the bits are the plain loop's."""

from __future__ import annotations

import runpy
import stat
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from weft.client.client import RequestRefused
from weft.machine.checkpoint_files import newest_whole
from weft.reference import loop as reference
from weft.spec.job_spec import JobSpec
from weft.version import __version__

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, until, SECONDS, PASS_GATE = (_REAL[name] for name in ("RealDaemon", "until", "SECONDS", "PASS_GATE"))

# gates: one for the inspection, the others of the loss's calls in its worker, of which an inspection makes some itself.
CALLS = (100, 1200)
SOURCE = (
    PASS_GATE
    + f"""
import torch, weft

calls = 0

def workload(gates=("", "", ""), num_idle=1):
    pass_gate(gates[0], "of planning")

    def loss(output, target):
        global calls
        calls += 1
        time.sleep(0.001)
        for gate, at in zip(gates[1:], {CALLS}):
            if calls == at:
                pass_gate(gate, f"of call {{at}}")
        return torch.nn.functional.mse_loss(output, target)

    inputs = torch.linspace(-1, 1, 48).reshape(48, 1)
    model = torch.nn.Sequential(
        torch.nn.Linear(1, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    model[0].register_buffer("idle", torch.zeros(num_idle))
    return weft.Workload(model=model, loss=loss, train=(inputs, inputs.sin()), validation=(inputs, inputs.sin()),
                         optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
"""
)
STRATEGY = {"stages": 2, "microbatches": 2}
STEPS = 400  # two calls for each, and as many for the validation of every second


class Follower(threading.Thread):
    """Of a job, to its end."""

    def __init__(self, daemon: Any, job: str) -> None:
        super().__init__(daemon=True)
        self._daemon = daemon
        self._job = job
        self.log = ""
        self.result: dict[str, Any] = {}

    def run(self) -> None:
        for event in self._daemon.client.follow(self._job):
            self.log += event.get("log", "")
            self.result = event.get("result", self.result)


class OldDaemon(RealDaemon):  # type: ignore[misc, valid-type]
    """Of another installation: its processes are to be started anew, when no job needs them."""

    def command(self, **changes: object) -> list[str]:
        patch = "import weft.scheduler.daemon.pool as pool; pool.stamp = lambda: 'of another'; "
        return patched(patch, super().command(**changes))


class GarblingDaemon(RealDaemon):  # type: ignore[misc, valid-type]
    """Which leaves what no daemon can read."""

    def command(self, **changes: object) -> list[str]:
        patch = "import weft.scheduler.daemon.replacing.succession as s; s.packed = lambda *left: b'garbled'; "
        return patched(patch, super().command(**changes))


def patched(patch: str, command: list[str]) -> list[str]:
    """The daemon that is started, and not the one that it becomes."""
    return [sys.executable, "-c", patch + "from weft.cli.main import main; main()", *command[3:]]


def has_the_plain_loops_bits(result: dict[str, Any], spec: Any) -> bool:
    assert result["state"] == "completed", result
    expected = reference.train(spec)
    state = load_file(result["model"])
    assert result["loss"] == expected.losses[-1]
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state.items())
    return state.keys() == expected.state.keys()


def metrics_of(daemon: Any) -> tuple[str, str]:
    """(their address, what stands there)."""
    url = daemon.client.status()["metrics"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as answer:
        return url, answer.read().decode()


def python_that(daemon: Any, *, first: str = "true", later: str = "true") -> str:
    """A Python that does something before it says what it is, or before it is the next daemon. Shell."""
    path: Path = daemon.home / "python"
    path.write_text(f'#!/bin/sh\ncase "$*" in *--tell-shape) {first};; *) {later};; esac\nexec {sys.executable} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.days(3)
@pytest.mark.slow(seconds=13)
def test_a_daemon_is_replaced_again_and_again_while_a_job_trains() -> None:
    """While it is planned, in the midst of a step, and as it runs; and where it cannot be, it goes on as it is."""
    with OldDaemon(workers=2).serving() as daemon:
        gates = [daemon.gate() for _ in range(3)]
        spec = daemon.spec(SOURCE, strategy=STRATEGY, steps=STEPS, args={"gates": [str(gate) for gate in gates]})
        job = daemon.submit(spec)
        follower = Follower(daemon, job)
        follower.start()
        pids, (url, _) = daemon.worker_pids(), metrics_of(daemon)
        went_on = {"version": __version__, "jobs": 1, "problem": ""}

        daemon.until_logged(job, "at the gate of planning")
        assert daemon.client.replace() == went_on
        gates[0].open()
        daemon.until_logged(job, f"at the gate of call {CALLS[0]}")
        for python, problem in (
            ("/nobody/python", "/nobody/python: cannot be started (No such file or directory)"),
            ("/bin/true", "/bin/true: has no Weft that could take over (it says nothing)"),
            (python_that(daemon, first='rm "$0"'), "python: cannot be started (No such file or directory)"),
        ):
            with pytest.raises(RequestRefused) as refused:
                daemon.client.replace(python)
            assert refused.value.code == "not-replaced"
            assert refused.value.message.startswith("the daemon goes on as it is: ")
            assert refused.value.message.endswith(problem)
        done = daemon.weft("daemon", "--replace")
        assert (done.stdout, done.returncode) == (f"weft {__version__} serves; 1 job went on\n", 0), done.stderr
        gates[1].open()
        assert daemon.client.replace() == went_on
        assert daemon.worker_pids() == pids
        daemon.until_logged(job, f"at the gate of call {CALLS[1]}")
        daemon_url, metrics = metrics_of(daemon)
        assert daemon_url == url
        assert f'weft_job_attempt{{job="{job}"}} 1.0' in metrics
        assert 'weft_worker_up{worker="cpu-0"} 1.0' in metrics
        assert daemon.process.poll() is None
        gates[2].open()

        follower.join(SECONDS)
        assert has_the_plain_loops_bits(follower.result, spec)
        assert follower.log == Path(follower.result["run_dir"], "job.log").read_text()
        assert follower.log.count(" validation ") == STEPS // 2
        assert "recovering" not in follower.log
        nobody = daemon.weft("daemon", "--replace", "--runtime-dir", daemon.home)
        assert nobody.returncode == 69

        until(lambda: not set(pids.values()) & set(daemon.worker_pids().values()), "workers of the new Weft")
        daemon.until_idle()
        short = daemon.spec(SOURCE, strategy=STRATEGY, steps=4)
        assert has_the_plain_loops_bits(daemon.run(short), short)


@pytest.mark.days(3)
@pytest.mark.slow(seconds=16)
def test_what_the_next_daemon_cannot_read_costs_what_a_restart_costs() -> None:
    with GarblingDaemon(workers=2).serving() as daemon:
        gate = daemon.gate()
        spec = daemon.spec(SOURCE, strategy=STRATEGY, steps=100, args={"gates": ["", str(gate), ""]})
        job = daemon.submit(spec)
        daemon.until_logged(job, f"at the gate of call {CALLS[0]}")
        pids = daemon.worker_pids()
        done = daemon.weft("daemon", "--replace")
        assert done.stdout == f"weft {__version__} serves; 1 job starts from its newest checkpoint\n", done.stderr
        assert "could not be handed over: it cannot be unpickled" in done.stderr
        gate.open()
        result = daemon.client.wait(job, SECONDS)
        assert has_the_plain_loops_bits(result, spec)
        assert "the daemon has restarted; the job runs again (attempt 2)" in daemon.log_of(job)
        assert not set(pids.values()) & set(daemon.worker_pids().values())

        check_a_directory_that_dies_between_two_daemons(daemon)
        check_a_checkpoint_that_is_being_written(daemon)


def check_a_directory_that_dies_between_two_daemons(daemon: Any) -> None:
    """There were two then: one for which it was missing, and one for which its end was told."""
    gate = daemon.gate()
    spec = daemon.spec(SOURCE, strategy=STRATEGY, steps=100, args={"gates": ["", str(gate), ""]})
    job = daemon.submit(spec)
    daemon.until_logged(job, f"at the gate of call {CALLS[0]}")
    python = python_that(daemon, later=f"kill -9 {daemon.directory().pid}")
    assert daemon.client.replace(python)["problem"] == ""
    gate.open()
    assert has_the_plain_loops_bits(daemon.client.wait(job, SECONDS), spec)
    log = daemon.log_of(job)
    assert log.count("the workers hand the job's memory on") == 1
    assert "(attempt " not in log
    assert daemon.directory().is_running()


def check_a_checkpoint_that_is_being_written(daemon: Any) -> None:
    """The same process finishes it. It is stopped while the daemon is replaced, so that it does not end before; after
    ten seconds it would be told to go on, and then the next one is looked at. On a machine with much else to do eight
    savers of a small model had come and gone between two looks, so that here are thirty, of 8 MB each."""
    gate = daemon.gate()
    arguments = {"gates": ["", "", str(gate)], "num_idle": 2_000_000}
    spec = daemon.spec(SOURCE, strategy=STRATEGY, steps=STEPS, args=arguments)
    spec = JobSpec.parse(spec.to_wire() | {"checkpoint": {"every": "10 steps", "keep": STEPS}})
    ours = {daemon.directory().pid, *daemon.worker_pids().values()}
    job = daemon.submit(spec)
    folder = Path(daemon.client.show(job)["run_dir"], "checkpoints")
    is_over = False
    while not is_over:
        saver, partial = until(lambda: saver_in_the_midst(daemon, ours, folder), "a saver")
        assert daemon.client.replace()["problem"] == ""
        with suppress(psutil.NoSuchProcess):
            is_over = partial.exists() and saver.status() == psutil.STATUS_STOPPED
            saver.resume()
    gate.open()
    assert has_the_plain_loops_bits(daemon.client.wait(job, SECONDS), spec)
    log = daemon.log_of(job)
    assert "(attempt " not in log
    assert "recovering" not in log
    until(lambda: not list(folder.glob(".*")), "the last checkpoint")
    whole = partial.name.removeprefix(".").rpartition(".")[0]  # behind it the number of the process that writes it
    assert (folder / whole / "manifest.json").exists()
    assert newest_whole(folder.parent)[1] == []


def saver_in_the_midst(daemon: Any, others: set[int], folder: Path) -> tuple[psutil.Process, Path] | None:
    """(stopped there, what it writes). others: the fork server's children that are none."""
    with suppress(psutil.NoSuchProcess):
        for process in daemon.fork_server().children():
            while process.pid not in others:  # until it has ended
                process.suspend()
                if begun := list(folder.glob(".*")):
                    return process, begun[0]
                process.resume()
    return None
