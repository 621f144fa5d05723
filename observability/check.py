"""Proves the boards, rules and alerts on a real run, without Grafana: `make check-observability`.

promtool reads the configuration, the rules and their tests. Then a daemon of its own runs a pipeline and a pair of
replicas at once, a job that fails and one whose code ends its worker; one worker is killed. A real Prometheus scrapes
every second. Each query of each panel has to have data, and each lane's modes have to add up to its time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from panels import Window, empty_panels
from prometheus_server import SHIPPED, PrometheusError, PrometheusServer, tool, until

from weft.client.client import Client, DaemonUnreachable
from weft.metrics.grafana.boards import BOARDS
from weft.spec.job_spec import JobSpec

ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "examples" / "digits.toml"
TRAIN_SECONDS = 24.0
MAX_SECONDS = 240  # of everything; some 50 on a machine that does nothing else
WAIT_SECONDS = 90.0  # for any one thing, beside whatever else the machine has to do
SUM_TOLERANCE = 0.15  # of some 16 s: the counters grow once a second, and so are they scraped
SETTLE_SECONDS = 3.0  # for the last values to be scraped
WORKERS = 4
HIDDEN = 1024  # wide enough that tasks take some time, on a machine with fewer cores than lanes
BEGAN = time.monotonic()
TRAINED = ("digits-pipeline", "digits-replicas")

# Jobs that end otherwise than well; an inspection calls the loss a few times.
FAULTY = """
import os
import torch, weft

calls = 0

def workload(exits=False):
    def loss(output, target):
        global calls
        calls += 1
        if calls > 20:
            os._exit(17) if exits else 1 / 0
        return torch.nn.functional.mse_loss(output, target)

    inputs = torch.linspace(-1, 1, 64).reshape(64, 1)
    return weft.Workload(model=torch.nn.Sequential(torch.nn.Linear(1, 1)), loss=loss, train=(inputs, inputs),
                         optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
"""


class CheckError(RuntimeError):
    """Something that the boards, the rules or the metrics promise does not hold."""


@contextlib.contextmanager
def daemon(home: Path) -> Iterator[Client]:
    """A daemon with all its workers up. Errors: CheckError, PrometheusError."""
    runtime = home / "r"
    command = [sys.executable, "-m", "weft", "daemon", "--runtime-dir", str(runtime), "--state-dir", str(home / "s")]
    command += ["--workers", str(WORKERS), "--stand-ins", "1", "--metrics", "127.0.0.1:0", "--drain-seconds", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    client = Client(runtime / "weft.sock")
    log = home / "daemon.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def is_up() -> bool:
        if process.poll() is not None:
            raise CheckError(f"the daemon ended with exit code {process.returncode}:\n{log.read_text()}")
        with contextlib.suppress(DaemonUnreachable):
            return all(worker["state"] == "free" for worker in client.status()["workers"])
        return False

    try:
        until(is_up, "every worker up", WAIT_SECONDS)
        yield client
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def specs(home: Path) -> dict[str, JobSpec]:
    """By job id. The first two train until they are cancelled."""
    (home / "faulty.py").write_text(FAULTY, encoding="utf-8")
    digits = JobSpec.load(DIGITS).to_wire()
    digits["job"] |= {"epochs": 2_000, "args": {"hidden": HIDDEN}}
    replicas: dict[str, Any] = {"replicas": [{"device": "gpu"}, {"device": "cpu"}], "update": "cpu", "sync": "fine"}
    faulty = {"entry": "faulty.py:workload", "epochs": 100, "batch_size": 16}
    return {
        "digits-pipeline": JobSpec.parse(digits),
        "digits-replicas": JobSpec.parse({**digits, "strategy": {**replicas, "bucket_mib": 1.0}}),
        "raises": JobSpec.parse({"job": faulty, "directory": str(home)}),
        "exits": JobSpec.parse({"job": faulty | {"args": {"exits": True}}, "directory": str(home)}),
    }


def run_jobs(client: Client, server: PrometheusServer, home: Path, seconds: float) -> float:
    """When the first job was submitted: from then on there is something of everything that a panel shows."""
    started = time.time()
    for job, spec in specs(home).items():
        client.submit(spec, job=job)
    until(lambda: all(client.show(job)["step"] for job in TRAINED), "the first steps of both jobs", WAIT_SECONDS)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(home / "r" / "weft.sock"))
        stranger.sendall(b"\0\0\0\0")  # an empty frame
    say(f"two jobs train, for {seconds:.0f} s in all")
    time.sleep(seconds / 3)
    victim = next(worker for worker in client.status()["workers"] if worker["job"] == TRAINED[0])
    os.kill(victim["pid"], signal.SIGKILL)
    recovered = f'weft_job_attempt{{job="{TRAINED[0]}"}} == 2 and weft_job_step > 0'
    until(lambda: server.query(recovered, time.time()), "steps after a worker was killed", WAIT_SECONDS)
    check_sums(client, server, 2 * seconds / 3)
    for job in TRAINED:
        client.cancel(job)
    time.sleep(SETTLE_SECONDS)
    ended = {job: client.show(job)["state"] for job in specs(home)}
    if ended != dict.fromkeys(TRAINED, "cancelled") | {"raises": "failed", "exits": "failed"}:
        raise CheckError(f"jobs have ended otherwise than they should: {ended}")
    return started


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:5.1f} s  {text}", file=sys.stderr, flush=True)


def promtool(*arguments: str | Path, text: bytes | None = None) -> None:
    """Errors: CheckError with what promtool says, a mere warning of it too."""
    command = [tool("promtool"), *map(str, arguments)]
    checked = subprocess.run(command, input=text, capture_output=True, check=False)
    if checked.returncode != 0:
        said = (checked.stdout + checked.stderr).decode(errors="replace")
        raise CheckError(f"promtool {' '.join(map(str, arguments[:2]))}:\n{said}")


def check_files() -> None:
    promtool("check", "config", SHIPPED / "prometheus.yml")
    promtool("check", "rules", SHIPPED / "rules.yml", SHIPPED / "alerts.yml")
    promtool("test", "rules", *sorted(SHIPPED.glob("*_test.yml")))


def check_sums(client: Client, server: PrometheusServer, seconds: float) -> None:
    """Lets the jobs train so long; then each lane's modes have grown by that, of the workers that the jobs have now: a
    job that has lost one may have got another, which has had less time. Errors: PrometheusError."""
    began, before = lane_seconds(server)

    def add_up() -> bool:
        nonlocal began, before
        held = {(worker["job"], worker["worker"]) for worker in client.status()["workers"]}
        scraped_at, now = lane_seconds(server)
        lanes = {lane for lane in now if lane[:2] in held}
        if not lanes <= before.keys():
            began, before = scraped_at, now
        elapsed = scraped_at - began
        grown = [now[lane] - before[lane] for lane in lanes]
        return bool(grown) and elapsed >= seconds and all(abs(each / elapsed - 1) <= SUM_TOLERANCE for each in grown)

    until(add_up, "the modes of each lane adding up to its time", seconds + WAIT_SECONDS)


def lane_seconds(server: PrometheusServer) -> tuple[float, dict[tuple[str, ...], float]]:
    """When they were scraped, which a busy machine does late, and the seconds by then of each lane."""
    at, trained = time.time(), f'weft_lane_seconds_total{{job=~"{"|".join(TRAINED)}"}}'
    scraped = server.query(f"max(timestamp({trained}))", at)
    lanes = server.query(f"sum by (job, worker, lane) ({trained})", at)
    return (
        float(scraped[0]["value"][1]) if scraped else at,
        {tuple(each["metric"][name] for name in ("job", "worker", "lane")): float(each["value"][1]) for each in lanes},
    )


def check_run(home: Path, seconds: float, pictures: Path | None) -> str:
    with daemon(home) as client:
        metrics = client.status()["metrics"]
        say("a daemon is up")
        with PrometheusServer(home, urlsplit(metrics).netloc, interval="1s") as server:
            until(lambda: server.query("up == 1", time.time()), "the first scrape", WAIT_SECONDS)
            started = run_jobs(client, server, home, seconds)
            say("the jobs have ended; every panel is asked for")
            window = Window(start=started, end=time.time(), step=0.5, rate=5)
            with urllib.request.urlopen(f"{metrics}/metrics", timeout=WAIT_SECONDS) as answer:
                promtool("check", "metrics", text=answer.read())
            empty = [problem for board in BOARDS for problem in empty_panels(server, board, window)]
            if pictures is not None:
                say("the boards are drawn")
                from pictures import draw_board  # here: matplotlib is an extra

                for board in BOARDS:
                    draw_board(server, board, window, pictures / f"{board.uid}.png")
    if empty:
        raise CheckError("\n".join([f"{len(empty)} without data:", *empty]))
    panels = [panel for board in BOARDS for panel in board.panels()]
    num_queries = sum(len(panel.queries) for panel in panels)
    return f"{len(BOARDS)} boards, {len(panels)} panels, {num_queries} queries, all with data"


def too_long(_number: int, _frame: object) -> None:
    raise CheckError(f"not over within {MAX_SECONDS} s; is the machine busy with something else?")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw each board there; needs weft[plots]")
    parser.add_argument("--seconds", type=float, default=TRAIN_SECONDS, help="to train; default %(default)s")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whatever was started is ended
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(MAX_SECONDS)
    try:
        tool("prometheus")
        say("promtool reads the configuration, the rules and their tests")
        check_files()
        with tempfile.TemporaryDirectory(prefix="wo-", dir="/tmp") as home:  # short: a Unix socket's path has 107 bytes
            print(check_run(Path(home), arguments.seconds, arguments.pictures))
    except (CheckError, PrometheusError) as error:
        print(f"check-observability: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
