"""Slices: parties to a benchmark that take turns of well below a second, each at its full pace within its own.

    weft     ████          ████          ████          a job that does not end; between its slices all its processes
    torch        ████          ████          ████      are stopped, so that nobody is there but who has the turn
    alone            ████          ████          ██    peers that run some iterations when they are asked
    probe    |   |   |   | ...

The speed of a shared machine drifts by 5 to 10 % within seconds, so only neighbours are compared: a value is the median
over many rounds of the ratio within one. A probe, the same arithmetic each time, says before each slice how fast the
machine is; how far its times lie apart stands with the row, for who wonders about low and high.

What a slice begins with is not counted: caches are another's, and who was stopped has to find out.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
from party import Party, ask

import weft.client.embedded
from weft.client.client import Client
from weft.spec.job_spec import JobSpec

UNCOUNTED_SECONDS = 0.06  # at a slice's begin, an iteration at least: lanes that were stopped do not spin for a while
LEAST = 2  # iterations that count, of each slice
ITERATIONS = 5  # in a slice, at least: one is cut at each end, and some take longer than others
ENDLESS = 100_000_000  # steps
WARM_ITERATIONS = 3  # of peers
PROBE_STEPS = 20_000  # about a millisecond


class Sliced(Protocol):
    """Who takes turns."""

    iteration_seconds: float  # before the first

    def slice(self, seconds: float) -> None:
        """About so long."""

    def slices(self) -> list[list[Any]]:
        """What was measured in each slice, without its begin; asked once, at the end."""


class SlicedJob:
    """A job on a daemon of its own; entered with its processes stopped, and warm."""

    def __init__(self, client: Client, daemon: psutil.Process, job: str) -> None:
        self._client, self._job = client, job
        self.iteration_seconds = statistics.median(_iterations(client.show(job)["run_dir"]))
        children = daemon.children(recursive=True)
        servers = [child for child in children if child.children()]
        # A parent that runs is told of each child that stops: last to go on, first to stop.
        self._processes = [*servers, daemon, *(child for child in children if child not in servers)]
        self._pauses: list[float] = []
        self._stopped_at = 0.0

    def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)
        self._stopped_at = time.monotonic()

    def go_on(self) -> None:
        self._pauses.append(time.monotonic() - self._stopped_at)
        for process in reversed(self._processes):
            process.send_signal(signal.SIGCONT)

    def slice(self, seconds: float) -> None:
        self.go_on()
        time.sleep(seconds)
        self.stop()

    def slices(self) -> list[list[float]]:
        """Seconds of iterations: from the end of one to that of the next. One that spans a pause is as long as that."""
        pauses = list(self._pauses)  # each ahead of a slice
        self.go_on()
        self._client.cancel(self._job, discard=True)
        result = self._client.wait(self._job, timeout=600)
        found = _between(_iterations(result["run_dir"]), pauses)
        found += [[] for _ in pauses]  # of the last slices the job may not have told before its end
        return [list(_counted(each)) for each in found[1 : len(pauses) + 1]]


@contextmanager
def sliced_job(spec: JobSpec, *, warm: int, workers: int = 2, stand_ins: int = 0) -> Iterator[SlicedJob]:
    """spec: of a job that does not end by itself. warm: iterations ahead of the first slice. The rest: its daemon's."""
    machine = {"workers": workers, "stand_ins": stand_ins, "threads": 1}
    with (
        tempfile.TemporaryDirectory(prefix="weft-bench-") as runs_dir,
        weft.client.embedded.Daemon(**machine, runs_dir=runs_dir) as client,
    ):
        job = client.submit(spec)["job"]
        while (shown := client.show(job))["step"] < warm:
            assert shown["state"] not in ("failed", "cancelled", "completed"), shown
            time.sleep(0.05)
        while not _iterations(shown["run_dir"]):  # written twice a second, behind what the daemon knows
            time.sleep(0.05)
        made = SlicedJob(client, psutil.Process(client.status()["pid"]), job)
        made.stop()
        try:
            yield made
        finally:
            for process in made._processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)


class SlicedParty:
    """Peers that run iterations when they are asked, and tell of each."""

    def __init__(self, peers: Party) -> None:
        self._peers = peers
        ask(peers, WARM_ITERATIONS)
        started = time.perf_counter()
        ask(peers, WARM_ITERATIONS)
        self.iteration_seconds = (time.perf_counter() - started) / WARM_ITERATIONS
        self.uncounted = math.ceil(UNCOUNTED_SECONDS / self.iteration_seconds)  # iterations of a slice
        self._answers: list[list[Any]] = []
        self.stop()

    def stop(self) -> None:
        """Gloo's threads wake 200 times a second, whoever has the turn."""
        for peer in self._peers:
            os.kill(peer.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for peer in self._peers:
            os.kill(peer.pid, signal.SIGCONT)

    def slice(self, seconds: float) -> None:
        self.go_on()
        iterations = max(self.uncounted + LEAST, round(seconds / self.iteration_seconds))
        self._answers.append(ask(self._peers, iterations))
        self.stop()

    def slices(self) -> list[list[Any]]:
        """By slice, what each peer answers, of all its iterations."""
        self.go_on()
        return self._answers

    def iterations(self) -> list[list[float]]:
        """By slice, where a peer tells the seconds of each: those of the first one."""
        return [first[self.uncounted :] for first, *_ in self.slices()]


def take_turns(parties: Sequence[Sliced], rounds: int, seconds: float) -> str:
    """Each has a slice in each round, of so many seconds or more where the machine is slow. How the probe's times lie
    apart."""
    seconds = max(seconds, ITERATIONS * max(party.iteration_seconds for party in parties))
    probes = []
    for _ in range(rounds):
        for party in parties:
            probes.append(_probe())
            party.slice(seconds)
    middle, spread = statistics.median(probes), statistics.quantiles(probes, n=10)
    return (
        f"{rounds} slices of {seconds:.2g} s each, in turns; beside them a fixed piece of arithmetic took "
        f"{spread[0] / middle:.2f} to {spread[-1] / middle:.2f} of its median, 8 times of 10"
    )


def medians(*parties: Sequence[Sequence[float]]) -> list[list[float]]:
    """By party, of each round in which all came to LEAST iterations; in others somebody else had the cores."""
    rounds = [each for each in zip(*parties, strict=True) if min(map(len, each)) >= LEAST]
    assert 2 * len(rounds) > len(parties[0]), f"only {len(rounds)} of {len(parties[0])} rounds: the machine is too busy"
    return [[statistics.median(each) for each in row] for row in zip(*rounds, strict=True)]


def _iterations(run_dir: str) -> list[float]:
    """Seconds of each that a job has told."""
    lines = Path(run_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["seconds"] for row in map(json.loads, lines) if row["seconds"] is not None]


def _between(seconds: Sequence[float], pauses: Sequence[float]) -> list[list[float]]:
    """Iterations before, between and behind the pauses; one that spans some is none of them."""
    found, number, shortest = [list[float]()], 0, min(pauses)
    for each in seconds:
        if each < shortest:
            found[-1].append(each)
            continue
        spanned = 0.0
        while number < len(pauses) and (spanned := spanned + pauses[number]) <= each:
            found.append([])
            number += 1
    return found


def _counted(seconds: Sequence[float]) -> Iterator[float]:
    """Of a slice's iterations."""
    ends = itertools.accumulate(seconds, initial=0.0)
    return (each for each, begins in zip(seconds, ends, strict=False) if begins >= UNCOUNTED_SECONDS)


def _probe() -> float:
    started, value = time.perf_counter(), 0
    for step in range(PROBE_STEPS):
        value += step * step
    return time.perf_counter() - started
