"""What a killed worker, directory or daemon costs: time, and no result.

A job is held at a first gate until a snapshot is due, then at a second one behind it; there something is killed. The
undisturbed run of the same spec has to have the same bits.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.scheduler.core.outcomes import MAX_LOSSES
from weft.scheduler.runs.snapshot_pace import LEAST_SECONDS
from weft.workers.snapshots.beside import LEAST_BYTES

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, KnownKeyDaemon, Gate, until, SECONDS, PASS_GATE, LINE = (
    _REAL[name] for name in ("RealDaemon", "KnownKeyDaemon", "Gate", "until", "SECONDS", "PASS_GATE", "LINE")
)
StartDaemon = Callable[..., Any]

# Calls of the loss: the first behind those of an inspection, the second further behind it than a lane is sent ahead,
# which is 0.05 s of work where the job adapts.
FIRST_CALL, SECOND_CALL = 60, 500
STEPS = 300
WIDE = {"width": 640}

# Buffers that training changes, dropout, an optimizer with state, a scheduler with state, a validation.
SOURCE = (
    PASS_GATE
    + """
import torch, weft

calls = 0

def workload(gates=("", ""), calls_at=(0, 0), seconds=0.0, width=8):
    torch.manual_seed(5)

    def loss(output, target):
        global calls
        calls += 1
        time.sleep(seconds)
        for gate, at in zip(gates, calls_at):
            if calls == at:
                pass_gate(gate, f"of call {at}")
        return torch.nn.functional.mse_loss(output, target)

    inputs = torch.linspace(-1, 1, 48).reshape(48, 1)
    model = torch.nn.Sequential(
        torch.nn.Linear(1, width), torch.nn.BatchNorm1d(width), torch.nn.Tanh(), torch.nn.Dropout(0.1),
        torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    return weft.Workload(
        model=model, loss=loss, train=(inputs, inputs.sin()), validation=(inputs, inputs.sin()),
        optimizer=lambda parameters: torch.optim.AdamW(
            [{"params": [each], "weight_decay": 0.01 * number} for number, each in enumerate(parameters)], lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.01 / (number + 1) for number in range(8)], total_steps=100_000))
"""
)

PIPELINE = {"stages": 2, "microbatches": 2, "window": 16}
STRATEGIES = {
    "one stage": {"microbatches": 2},
    "the cores of others": {"threads": "all", "microbatches": 2},  # of whom the last one is killed
    "pipeline": PIPELINE,
    "dynamic": {"stages": 3, "microbatches": 4, "window": 16, "schedule": "dynamic"},
    "recompute": {"stages": 4, "microbatches": 3, "window": 16, "recompute": True, "schedule": "interleaved"},
    "replicas": {"replicas": 2, "microbatches": 2, "bucket_mib": 1e-4},
    "clipped replicas": {"replicas": 2, "microbatches": 2, "clip_norm": 0.1},
    # split: buckets end where stages do, and by buckets the squares are summed that a clipped step goes by
    "clipped pipeline": PIPELINE | {"clip_norm": 0.1, "split": [4]},
}
ON_STAND_INS = {
    "offload": {"preset": "zero-offload", "microbatches": 2},
    "balanced": {"preset": "cotrain", "microbatches": 2},
    "streamed": {"preset": "stronghold", "microbatches": 2},
    "a pipeline of devices": {"replicas": [{"device": "gpu", "stages": 2}], "microbatches": 2},
    "each device updates": {"replicas": [{"device": "gpu"}] * 2, "microbatches": 2, "clip_norm": 0.1},
    "each side updates": {
        "preset": "hybrid-fine",
        "replicas": [{"device": "gpu", "stages": 2, "split": [3], "microbatches": 2}, {"device": "cpu"}],
        "microbatches": 1,
        "share": "fixed",
        "clip_norm": 0.1,
        "bucket_mib": 1e-4,
    },
    "a replica on each side": {
        "replicas": [{"device": "gpu"}, {"device": "cpu"}],
        "microbatches": 2,
        "update": "balanced",
        "share": "fixed",
    },
}


@contextmanager
def held_behind_a_snapshot(
    daemon: Any,
    strategy: dict[str, Any],
    sections: Mapping[str, Any] = MappingProxyType({}),
    source: str = SOURCE,
    call: int = SECOND_CALL,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    others: Mapping[Any, int] = MappingProxyType({}),
    **job_fields: Any,
) -> Iterator[tuple[str, Any, Any]]:
    """(job, its spec, the gate at which it stands). sections: of the spec, beside [job] and [strategy]. call: of the
    loss, in which the gate is. arguments: of the source, beside those of its gates. others: gates of the test's own, by
    their calls."""
    first, second = daemon.gate(), daemon.gate()
    calls = {first: FIRST_CALL, second: call, **others}
    gates = {"gates": [*map(str, calls)], "calls_at": [*calls.values()]}
    given = gates | dict(arguments)
    spec = daemon.spec(source, strategy={"window": 16} | strategy, steps=STEPS, args=given, **job_fields)
    spec = type(spec).parse(spec.to_wire() | sections)
    job = daemon.submit(spec)
    try:
        daemon.until_logged(job, f"at the gate of call {FIRST_CALL}")
        due = time.monotonic() + LEAST_SECONDS
        until(lambda: time.monotonic() > due, "the time of a snapshot")
        first.open()
        daemon.until_logged(job, f"at the gate of call {call}")
        until(lambda: daemon.client.show(job)["snapshot_step"], "a snapshot")
        yield job, spec, second
    finally:
        first.open()
        second.open()


def lines_of(daemon: Any, job: str) -> list[dict[str, Any]]:
    """Of metrics.jsonl, without times."""
    text = Path(daemon.client.show(job)["run_dir"], "metrics.jsonl").read_text()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in text.splitlines()]


def check_is_undisturbed(daemon: Any, job: str, spec: Any) -> None:
    """The gates are open: run again, nothing holds it."""
    result = daemon.client.wait(job, SECONDS)
    assert result["state"] == "completed", daemon.log_of(job)
    again = daemon.submit(spec)
    other = daemon.client.wait(again, SECONDS)
    ours, theirs = load_file(result["model"]), load_file(other["model"])
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert lines_of(daemon, job) == lines_of(daemon, again)


def kill_worker(daemon: Any, job: str, kind: str) -> None:
    workers = [each for each in daemon.client.status()["workers"] if each["job"] == job and each["kind"] == kind]
    os.kill(workers[-1]["pid"], signal.SIGKILL)


@pytest.mark.slow(seconds=5)
@pytest.mark.pairs(10, strategy=tuple(STRATEGIES), victim=("cpu", "loader"), spares=(False, True))
def test_after_a_killed_worker_a_job_goes_on_from_its_snapshot(
    daemon: Any, strategy: str, victim: str, spares: bool
) -> None:
    with held_behind_a_snapshot(daemon, STRATEGIES[strategy] | {"spares": spares}) as (job, spec, gate):
        kill_worker(daemon, job, victim)
        daemon.until_logged(job, "goes on after step")
        gate.open()
        check_is_undisturbed(daemon, job, spec)
    assert "starts again" not in daemon.log_of(job)


@pytest.mark.days(2)
@pytest.mark.slow(seconds=7)
@pytest.mark.pairs(24, strategy=tuple(STRATEGIES), moment=range(4), spares=(False, True))
def test_so_does_one_whose_snapshots_are_copied_beside_its_lanes(
    daemon: Any, strategy: str, moment: int, spares: bool
) -> None:
    """Wide enough for that. Killed at a gate, and again some steps later, wherever copies are by then."""
    strategies = STRATEGIES[strategy] | {"spares": spares}
    with held_behind_a_snapshot(daemon, strategies, arguments=WIDE) as (job, spec, gate):
        assert 3 * 4 * WIDE["width"] ** 2 > LEAST_BYTES, "one layer with its two moments"
        kill_worker(daemon, job, "cpu")
        daemon.until_logged(job, "(attempt 2)")
        until(lambda: daemon.client.show(job)["state"] == "running", "the next attempt")
        gate.open()
        begun = daemon.client.show(job)["step"]
        until(lambda: daemon.client.show(job)["step"] >= min(begun + 20 * moment, STEPS), "more steps")
        if moment and daemon.client.show(job)["state"] == "running":
            kill_worker(daemon, job, "cpu")
        check_is_undisturbed(daemon, job, spec)
    assert "starts again" not in daemon.log_of(job)


@pytest.mark.days(3)
@pytest.mark.slow(seconds=7)
@pytest.mark.pairs(strategy=tuple(ON_STAND_INS))  # one a day; a soak has them all
def test_so_does_a_job_on_devices(own_daemon: StartDaemon, strategy: str) -> None:
    daemon = own_daemon(workers=2, stand_ins=2)
    with held_behind_a_snapshot(daemon, ON_STAND_INS[strategy]) as (job, spec, gate):
        kill_worker(daemon, job, "gpu")
        daemon.until_logged(job, "recovering")
        gate.open()
        check_is_undisturbed(daemon, job, spec)
    assert "starts again" not in daemon.log_of(job)


@pytest.mark.days(2)
@pytest.mark.slow(seconds=3)
def test_one_that_is_killed_again_and_again_goes_on_each_time(daemon: Any) -> None:
    """Each time from where it was: only a job that comes no further is given up."""
    with held_behind_a_snapshot(daemon, PIPELINE) as (job, spec, gate):
        for attempt in range(2, 2 + MAX_LOSSES):
            kill_worker(daemon, job, "cpu")
            daemon.until_logged(job, f"(attempt {attempt})")
            until(lambda: daemon.client.show(job)["state"] == "running", "the next attempt")
        gate.open()
        check_is_undisturbed(daemon, job, spec)


@pytest.mark.slow
def test_one_whose_own_code_kills_its_worker_each_time_is_given_up_with_a_report_of_each(daemon: Any) -> None:
    """It failed with the last report alone."""
    dying = 'print("its last words", flush=True); import signal; os.kill(os.getpid(), signal.SIGKILL)'
    source = LINE.replace("if calls == gate_at:", f"if calls == 9:\n            {dying}\n        if calls == gate_at:")
    failed = daemon.run(daemon.spec(source, epochs=20))
    assert (failed["state"], failed["reason"], failed["exit_code"]) == ("failed", "worker-lost", 137)
    reports = [line for line in failed["error"].splitlines() if ". attempt " in line]
    found = re.match(r"1\. attempt (\d+):", reports[0])
    assert found is not None, failed["error"]
    for number, report in enumerate(reports, 1):  # one before may have been heard of to come less far
        assert report.startswith(f"{number}. attempt {int(found[1]) + number - 1}: cpu-")
        assert "died of signal 9 (SIGKILL)" in report
        assert report in daemon.log_of(failed["job"])
    assert len(reports) == MAX_LOSSES + 1
    assert failed["error"].count("\n     | its last words") == len(reports)


@pytest.mark.slow(seconds=3)
def test_without_recovery_nothing_is_copied_and_a_job_begins_again(daemon: Any) -> None:
    gate = daemon.gate()
    arguments = {"gates": [str(gate), ""], "calls_at": [SECOND_CALL, 0]}
    spec = daemon.spec(SOURCE, strategy=PIPELINE | {"recovery": "off"}, steps=STEPS, args=arguments)
    job = daemon.submit(spec)
    daemon.until_logged(job, "at the gate")
    kill_worker(daemon, job, "cpu")
    daemon.until_logged(job, "starts again")
    gate.open()
    check_is_undisturbed(daemon, job, spec)
    assert daemon.client.show(job)["snapshot_step"] is None


HANDED_ON = "the workers hand the job's memory on"


@pytest.fixture(scope="module")
def known() -> Iterator[Any]:
    """A daemon whose directory is asked here, too. Each test leaves it without a job, and with what it held before."""
    with KnownKeyDaemon(workers=2).serving() as running:
        yield running


@pytest.mark.days(3)
@pytest.mark.slow(seconds=3)
def test_snapshots_leave_no_memory_behind(known: Any) -> None:
    before = held_blocks(known)
    with held_behind_a_snapshot(known, PIPELINE) as (job, _, gate):
        assert held_blocks(known) > before
        gate.open()
        known.client.wait(job, SECONDS)
    known.until_idle()
    assert held_blocks(known) == before


@pytest.mark.days(2)
@pytest.mark.slow(seconds=6)
def test_a_directory_that_is_killed_costs_no_step_and_no_snapshot(known: Any) -> None:
    """One after another; then a worker, which is replaced from what the first one of them held."""
    before = held_blocks(known)
    with held_behind_a_snapshot(known, PIPELINE) as (job, spec, gate):
        blocks = blocks_of(known, job)
        for losses in range(1, 3):
            RealDaemon.directory(known).kill()
            until(lambda times=losses: known.log_of(job).count(HANDED_ON) == times, "the workers are told")
            until(lambda: blocks_of(known, job) == blocks, "the next one has what the first had")
        assert "(attempt " not in known.log_of(job)
        kill_worker(known, job, "cpu")
        known.until_logged(job, "goes on after step")
        until(lambda: known.client.show(job)["state"] == "running", "the next attempt")
        RealDaemon.directory(known).kill()
        gate.open()
        check_is_undisturbed(known, job, spec)
    known.until_idle()
    assert held_blocks(known) == before


def held_blocks(daemon: Any) -> int:
    """Of shared memory, by all of the daemon's processes."""
    return sum(_REAL["num_held_blocks"](process.pid) for process in daemon.processes())


def blocks_of(daemon: Any, job: str) -> dict[str, int]:
    """Bytes that the directory, as soon as there is one, holds of a job."""
    held = daemon.directory().num_bytes()
    return {name: size for name, size in held.items() if name.startswith(f"{job}@")}


@pytest.mark.days(3)
@pytest.mark.slow(seconds=12)
def test_a_bit_that_changes_in_a_parameter_is_found_before_it_is_used_and_the_result_is_the_same(known: Any) -> None:
    """By the worker that is to update it next: of the stage that stands at the gate, or of the replicas' owner."""
    in_memory = {"state-0-1": PIPELINE, "parameters": STRATEGIES["replicas"]}
    for arena, strategy in in_memory.items():
        with held_behind_a_snapshot(known, strategy | {"verify": "digest"}) as (job, spec, gate):
            tensors = known.directory().of(f"{job}@1").find(arena).items().values()
            numbers = next(tensor for tensor in tensors if tensor.dtype == torch.float32)
            numbers.view(torch.int32).view(-1)[3] ^= 1  # the last bit of its mantissa
            gate.open()
            known.until_logged(job, "recovering (corrupted)")
            check_is_undisturbed(known, job, spec)
        log = known.log_of(job)
        assert re.search(r"cpu-\d: bits of the values of .+ have changed since their last update", log)
        assert "the job goes on after step" in log
    with urllib.request.urlopen(f"{known.client.status()['metrics']}/metrics", timeout=SECONDS) as answer:
        assert 'weft_recoveries_total{cause="corrupted"} 2.0' in answer.read().decode()
