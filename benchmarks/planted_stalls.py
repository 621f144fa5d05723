"""Faults of a known size in known places: each must appear under its own cause, with its size, in every view.

    data    a loader that takes longer than the stage: the stage waits for data, as long as the one is slower
    slot    slots for one batch only: the loader cannot load ahead, and waits for a slot as long as the stage computes
    stage   a second stage of four times the work: the first one waits for its gradients
    stop    a worker that is stopped (SIGSTOP) for 300 ms, three times: its lane is idle

The job spins for times that it is told (planted_job.py), so what is planted follows from them. The views: the counters
of /metrics; the panel of the Pipeline board, its query put to a real Prometheus (where one is installed); the JSON of
the timeline page; `weft show --time`; and the slices of `weft trace`. A row's value is the worst view's error.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import Result, main, value_result

import weft.client.embedded
from weft.client.client import Client
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "observability"))
from panels import Window, filled_in  # noqa: E402
from prometheus_server import PrometheusError, PrometheusServer, tool  # noqa: E402

from weft.metrics.grafana.boards import BOARDS  # noqa: E402

GOAL = "<= 0.10"
STOP_SECONDS, NUM_STOPS = 0.3, 3
SCRAPE_SECONDS = 1.0
MS = 1e-3
_COUNTER = re.compile(r"^weft_lane_seconds_total\{(.*)\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """args: of planted_job.py. lane and cause: where the fault must appear. planted: seconds in one iteration, or in
    the whole job where it stops a worker."""

    lane: str
    cause: str
    planted: float
    args: Mapping[str, Any]
    strategy: Mapping[str, Any]
    steps: int
    stops: bool = False
    how: str = field(default="")


def faults() -> dict[str, Fault]:
    stage, slow, load = 1 * MS, 10 * MS, 25 * MS
    return {
        "data": Fault(
            lane="cpu-0/compute",
            cause="data",
            planted=load - 2 * 2.5 * MS,
            args={"stages": 1, "stage_seconds": 2.5 * MS, "load_seconds": load},
            strategy={"stages": 1, "microbatches": 1},
            steps=400,
            how="a loader of 25 ms a batch before a stage of 5 ms",
        ),
        "slot": Fault(
            lane="loader-0/load",
            cause="slot",
            planted=2 * 10 * MS,
            args={"stages": 1, "stage_seconds": 10 * MS, "load_seconds": 10 * MS},
            strategy={"stages": 1, "microbatches": 1, "prefetch": {"load": 1}},
            steps=330,
            how="slots for one batch between a loader of 10 ms and a stage of 20 ms",
        ),
        "stage": Fault(
            lane="cpu-0/compute",
            cause="gradient",
            planted=4 * slow + 2 * stage,  # the second stage's own work, and the bubble that any two stages have
            args={"stages": 2, "stage_seconds": stage, "slow_worker": "cpu-1", "slow_seconds": slow},
            strategy={"stages": 2, "microbatches": 4},
            steps=200,
            how="10 ms more in each of the second stage's four forwards",
        ),
        "stop": Fault(
            lane="cpu-1/compute",
            cause="idle",
            planted=NUM_STOPS * STOP_SECONDS,
            args={"stages": 2, "stage_seconds": 1 * MS},
            strategy={"stages": 2, "microbatches": 4},
            steps=800,
            stops=True,
            how=f"a worker stopped for {STOP_SECONDS} s, {NUM_STOPS} times",
        ),
    }


def collect(quick: bool) -> list[Result]:
    errors: dict[str, dict[str, list[float]]] = {}
    with _observed() as (client, url, server):
        for _ in range(1 if quick else 3):
            for name, fault in faults().items():
                for view, error in _plant(client, url, server, fault).items():
                    errors.setdefault(name, {}).setdefault(view, []).append(error)
    results = []
    for name, fault in faults().items():
        views = errors[name]
        worst = [max(each) for each in zip(*views.values(), strict=True)]
        how = f"{fault.how}: |seen ÷ planted - 1| of {fault.lane}'s {fault.cause} time"
        results.append(
            value_result(
                f"{name}_error", worst, "of planted", goal=GOAL, how=f"{how}, of the worst of {len(views)} views"
            )
        )
    for name in faults():
        for view, seen in errors[name].items():
            results.append(
                value_result(f"{name}_error_{view}", seen, "of planted", how=f"{name}_error as {view} has it")
            )
    return results


@contextmanager
def _observed() -> Iterator[tuple[Client, str, PrometheusServer | None]]:
    """A daemon, the address of its metrics, and a Prometheus that scrapes it where one is installed."""
    runs = tempfile.mkdtemp(prefix="weft-bench-")
    with weft.client.embedded.Daemon(workers=2, threads=1, runs_dir=runs, metrics="127.0.0.1:0") as client:
        _until(lambda: all(worker["state"] == "free" for worker in client.status()["workers"]), "every worker")
        url = client.status()["metrics"]
        try:
            tool("prometheus")
        except PrometheusError as missing:
            print(missing, file=sys.stderr)
            yield client, url, None
            return
        with tempfile.TemporaryDirectory(prefix="weft-prometheus-") as home:
            target = url.removeprefix("http://")
            with PrometheusServer(Path(home), target, interval=f"{SCRAPE_SECONDS:g}s") as server:
                yield client, url, server


def _plant(client: Client, url: str, server: PrometheusServer | None, fault: Fault) -> dict[str, float]:
    """The error of each view."""
    job = {"entry": "planted_job.py:workload", "args": dict(fault.args), "batch_size": 8, "steps": fault.steps}
    spec = JobSpec.parse({"job": job, "strategy": dict(fault.strategy), "directory": str(HERE)})
    name = client.submit(spec)["job"]
    _until(lambda: (client.show(name)["step"] or 0) > 0, "the first step")
    if fault.stops:
        _stop(client, fault.lane.partition("/")[0])
    result = client.wait(name, timeout=300)
    assert result["state"] == "completed", result
    planted = fault.planted if fault.stops else fault.planted * fault.steps
    wall = client.show(name)["time"]["lanes"][fault.lane]["wall_seconds"]
    views: dict[str, Callable[[], float]] = {
        "metrics": lambda: _of_metrics(url, name, fault),
        "page": lambda: _of_page(url, name, fault),
        "show": lambda: _of_show(client, name, fault),
        "trace": lambda: _of_trace(client, name, fault),
    }
    if server is not None:
        views["board"] = lambda: _of_board(server, name, fault, wall)
    return {view: abs(seen() / planted - 1) for view, seen in views.items()}


def _stop(client: Client, worker: str) -> None:
    (pid,) = [each["pid"] for each in client.status()["workers"] if each["worker"] == worker]
    for _ in range(NUM_STOPS):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STOP_SECONDS)
        finally:
            os.kill(pid, signal.SIGCONT)
        time.sleep(STOP_SECONDS)


# --- the views: seconds that the fault's lane was in its cause


def _mode(fault: Fault) -> str:
    return fault.cause if fault.cause == "idle" else f"stall_{fault.cause}"


def _of_metrics(url: str, job: str, fault: Fault) -> float:
    worker, _, lane = fault.lane.partition("/")
    wanted = {f'job="{job}"', f'worker="{worker}"', f'lane="{lane}"', f'mode="{_mode(fault)}"'}
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    (value,) = [float(value) for labels, value in _COUNTER.findall(text) if wanted == set(labels.split(","))]
    return value


def _of_page(url: str, job: str, fault: Fault) -> float:
    with urllib.request.urlopen(f"{url}/api/jobs/{job}", timeout=30) as answer:
        told = json.load(answer)
    return float(told["time"]["lanes"][fault.lane]["modes"].get(_mode(fault), 0.0))


def _of_show(client: Client, job: str, fault: Fault) -> float:
    command = [sys.executable, "-m", "weft", "show", job, "--time", "--json"]
    environment = {**os.environ, "WEFT_RUNTIME_DIR": str(client.socket_path.parent)}
    shown = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout
    stalls = json.loads(shown)["stalls"]
    return float(sum(s["seconds"] for s in stalls if (s["lane"], s["cause"]) == (fault.lane, fault.cause)))


def _of_trace(client: Client, job: str, fault: Fault) -> float:
    command = [sys.executable, "-m", "weft", "trace", job, "-o", "-"]
    environment = {**os.environ, "WEFT_RUNTIME_DIR": str(client.socket_path.parent)}
    written = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout
    events = json.loads(written)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    return sum(
        event["dur"] / 1e6
        for event in events
        if event["ph"] == "X"
        and event["cat"] == "stall"
        and event["args"]["cause"] == fault.cause
        and f"{processes[event['pid']]}/{threads[event['pid'], event['tid']]}" == fault.lane
    )


def _of_board(server: PrometheusServer, job: str, fault: Fault, wall: float) -> float:
    """The panel's share of the lane's time, over all of it."""
    worker, _, lane = fault.lane.partition("/")
    title = "Stalls of the compute lanes by cause" if lane == "compute" else "Stalls of the other lanes by cause"
    (panel,) = [panel for board in BOARDS for panel in board.panels() if panel.title == title]
    now = time.time()
    window = Window(start=now - wall, end=now, step=SCRAPE_SECONDS, rate=math.ceil(wall) + 3)
    (query,) = panel.queries
    asked = query.expression.replace("$job", job).replace("$worker", worker)
    series = _until(lambda: server.query(filled_in(asked, window), time.time()), "an answer of Prometheus")
    shares = {each["metric"]["mode"]: float(each["value"][1]) for each in series}
    return shares[_mode(fault)] * wall


def _until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(0.05)
    return value


if __name__ == "__main__":
    main("planted_stalls", collect)
