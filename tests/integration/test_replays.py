"""An iteration that others run again has the same bits, whatever the strategy; and a worker that is wrong is named.

What is wrong is really computed: in one worker a loss is multiplied by 1 + 2⁻²³, in the iteration that is compared.
"""

from __future__ import annotations

import re
import runpy
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.scheduler.runs.snapshot_pace import LEAST_SECONDS

_RECOVERY = runpy.run_path(str(Path(__file__).with_name("test_recovery.py")))
SOURCE, STRATEGIES, FIRST_CALL, STEPS, SECONDS = (
    _RECOVERY[name] for name in ("SOURCE", "STRATEGIES", "FIRST_CALL", "STEPS", "SECONDS")
)
check_is_undisturbed, until = _RECOVERY["check_is_undisturbed"], _RECOVERY["until"]

# What each lane asks of the course before it computes says which iteration it is in.
COMPUTES_WRONG = """
import dataclasses
from weft.plan.course import Course

def wrong(worker, times, **arguments):
    made = workload(**arguments)

    def loss(output, target):
        value = made.loss(output, target)
        if os.environ.get("WEFT_WORKER") == worker and Course.now and Course.times_wrong < times:
            Course.times_wrong += 1
            value = value * (1 + 2**-23)
        return value

    return dataclasses.replace(made, loss=loss)

if not hasattr(Course, "now"):
    Course.now, Course.times_wrong, part = False, 0, Course.part

    def part_now(self, iteration, replica, position):
        Course.now = self.is_compared(iteration)
        return part(self, iteration, replica, position)

    Course.part = part_now
"""
WRONG = SOURCE + COMPUTES_WRONG


@contextmanager
def replayed(
    daemon: Any, strategy: dict[str, Any], source: str = SOURCE, **arguments: Any
) -> Iterator[tuple[str, Any]]:
    """(job, its spec), of a job that has come so far that an iteration of it is run again from now on."""
    gate = daemon.gate()
    arguments |= {"gates": [str(gate), ""], "calls_at": [FIRST_CALL, 0]}
    entry = "line.py:wrong" if source is WRONG else "line.py:workload"
    strategy = {"window": 16, "verify": "replay"} | strategy
    spec = daemon.spec(source, entry=entry, strategy=strategy, steps=STEPS, args=arguments)
    job = daemon.submit(spec)
    daemon.until_logged(job, f"at the gate of call {FIRST_CALL}")
    due = time.monotonic() + LEAST_SECONDS
    until(lambda: time.monotonic() > due, "the time of a replay")
    gate.open()
    yield job, spec


@pytest.mark.days(2)
@pytest.mark.slow(seconds=5)
@pytest.mark.pairs(strategy=tuple(STRATEGIES))
def test_an_iteration_that_others_run_again_has_the_same_bits_and_so_has_the_result(daemon: Any, strategy: str) -> None:
    with replayed(daemon, STRATEGIES[strategy]) as (job, spec):
        check_is_undisturbed(daemon, job, spec)
    log = daemon.log_of(job)
    assert re.search(r"step \d+ is run again by other workers", log)
    assert re.search(r"step \d+ run again: the same bits", log)
    assert "other bits" not in log


@pytest.mark.days(3)
@pytest.mark.slow(seconds=14)
@pytest.mark.pairs(strategy=("pipeline", "replicas"))  # one a day
def test_a_worker_that_has_computed_wrong_once_is_named_and_the_result_is_that_of_a_sound_one(
    own_daemon: Any, strategy: str
) -> None:
    daemon = own_daemon(workers=2)
    with replayed(daemon, STRATEGIES[strategy], WRONG, worker="cpu-1", times=1) as (job, spec):
        check_is_undisturbed(daemon, job, spec)
    place = {"pipeline": "backward, stage 1, microbatch 0", "replicas": "the gradient, stage 0, replica 1, bucket 0"}
    log = daemon.log_of(job)
    assert re.search(rf"step \d+, run 2 times, has other bits: {place[strategy]} on cpu-1 and then on cpu-0;", log)
    assert re.search(rf"step \d+: cpu-1 has computed other bits in {place[strategy]}, than two runs that agree", log)
    with urllib.request.urlopen(f"{daemon.client.status()['metrics']}/metrics", timeout=SECONDS) as answer:
        assert 'weft_replays_total{result="different"} 1.0' in answer.read().decode()


@pytest.mark.slow(seconds=4)
@pytest.mark.days(3)
def test_where_one_of_two_is_wrong_each_time_the_job_fails_rather_than_guess(own_daemon: Any) -> None:
    daemon = own_daemon(workers=2)
    with replayed(daemon, STRATEGIES["pipeline"], WRONG, worker="cpu-1", times=1000) as (job, _):
        failed = daemon.client.wait(job, SECONDS)
    assert (failed["state"], failed["reason"]) == ("failed", "corrupted"), daemon.log_of(job)
    assert re.search(r"step \d+, run 4 times, has other bits: backward, stage 1, microbatch 0", failed["error"])
    assert "nobody can say which of cpu-0, cpu-1 is wrong" in failed["error"]
