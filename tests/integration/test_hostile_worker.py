"""Job code that finds the worker's descriptors: it writes to them, closes them, puts others in their place.

The code runs in the worker's own process, so it can reach the worker's link to the daemon. It may end its worker and
its own job by that, and nothing else: the daemon lives, and the job beside it has the bits that it has alone.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

_REAL = runpy.run_path(str(Path(__file__).with_name("real_daemon.py")))
RealDaemon, LINE, SECONDS, until = _REAL["RealDaemon"], _REAL["LINE"], _REAL["SECONDS"], _REAL["until"]

NUM_CALLS = 8  # of the loss in two epochs, each of two steps and two batches of validation
MOMENTS = {"inspecting": {"attack_now": True}, "training": {"attack_at": 6}, "ending": {"attack_at": NUM_CALLS}}

HOSTILE = (
    LINE.replace("import os, time", "import contextlib, os, socket, stat, struct, time", 1)
    .replace("marker=", "kind='', attack_now=False, attack_at=0, other='', marker=")
    .replace("    def loss(", "    if attack_now:\n        attack(kind, other)\n\n    def loss(", 1)
    .replace(
        "        if calls == gate_at:",
        "        if calls == attack_at:\n            attack(kind, other)\n        if calls == gate_at:",
    )
    + """

def frame(message):
    import msgpack
    body = msgpack.packb(message)
    return struct.pack(">I", len(body)) + body

JOINED = {"type": "joined", "link_bytes_per_second": None, "device_bytes": None, "probe_seconds": None}

def own(**fields):
    return {"job": os.environ["WEFT_JOB_ID"], "attempt": 1, **fields}

def writings(kind, other):
    return {
        "garbage": bytes(range(256)) * 64,
        "zeros": bytes(1000),
        "half a frame": frame({"type": "output", **own(text="x" * 1000)})[:500],
        "a frame of 60 MiB": struct.pack(">I", 60 << 20) + b"\\x83",
        "a frame of 4 GiB": b"\\xff" * 4,
        "no map": frame([1, 2]),
        "no message": frame({"type": "nonsense"}),
        "no type": frame({"verb": "stop"}),
        "joined again": frame(JOINED),
        "a report of nothing sent": frame({"type": "report", **own(lane="compute", count=999, records=b"", values=[])}),
        "a report of no lane": frame({"type": "report", **own(lane="nowhere", count=1, records=b"", values=[])}),
        "a report of 7 bytes": frame({"type": "report", **own(lane="compute", count=0, records=b"1234567", values=[])}),
        "an inspection of nothing": frame({"type": "inspected", **own(inspection={}, code={})}),
        "of another's fault": frame({"type": "fault", "job": other, "attempt": 1, "reason": "internal",
                                     "message": "not mine", "exit_code": 1, "exception": ""}),
        "of another's end": frame({"type": "saved", "job": other, "attempt": 1}),
        "of another's release": frame({"type": "released", "job": other, "attempt": 1, "clean": False,
                                       "peak_bytes": 1, "device_peak_bytes": None}),
        "of another's output": frame({"type": "output", "job": other, "attempt": 1, "text": "not mine"}),
    }[kind]

def attack(kind, other):
    print("it attacks")
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with contextlib.suppress(OSError):
            if number < 3 or not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                if kind.startswith("of another") and found.getpeername():
                    continue  # the directory's: its next call there would fail, and the job start again
            if kind == "closed":
                os.close(number)
            elif kind == "replaced":
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, number)
                os.close(nowhere)
            else:
                os.write(number, writings(kind, other))
"""
)

UNHEARD = ("of another's fault", "of another's end", "of another's release", "of another's output")
BREAKING = (
    *("garbage", "zeros", "half a frame", "a frame of 60 MiB", "a frame of 4 GiB", "no map", "no message", "no type"),
    *("joined again", "a report of nothing sent", "a report of no lane", "a report of 7 bytes"),
    *("an inspection of nothing", "closed", "replaced"),
)


KINDS = {  # the others are tried by `make soak`
    "inspecting": ("garbage", "half a frame", "joined again", "an inspection of nothing", "closed", UNHEARD[1]),
    "training": (
        "a frame of 4 GiB",
        "no message",
        "a report of nothing sent",
        "a report of 7 bytes",
        "replaced",
        UNHEARD[0],
    ),
    "ending": ("zeros", "a frame of 60 MiB", "closed", UNHEARD[2]),
}


@pytest.fixture(scope="module")
def besieged() -> Iterator[RealDaemon]:
    """One daemon for all of these: it outlives them."""
    running = RealDaemon(workers=3)
    try:
        running.start()
        yield running
        assert running.stop() == 0
        running.until_nothing_lives()
        assert "Traceback" not in (running.home / "daemon.log").read_text()
    finally:
        running.close()


@pytest.mark.days(3)
@pytest.mark.slow(seconds=10)
@pytest.mark.pairs(moment=tuple(MOMENTS))  # one a day
def test_what_a_job_writes_to_its_workers_descriptors_costs_that_job_alone(besieged: RealDaemon, moment: str) -> None:
    """An exception in a link's callback was only logged: the worker looked alive, its job ran for ever."""
    besiege(besieged, moment, KINDS[moment])


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", MOMENTS)
def test_whatever_a_job_writes_there_costs_that_job_alone(besieged: RealDaemon, moment: str) -> None:
    besiege(besieged, moment, (*BREAKING, *UNHEARD))


def besiege(daemon: RealDaemon, moment: str, kinds: tuple[str, ...]) -> None:
    alone = daemon.run(daemon.spec())
    gate = daemon.gate()
    beside = daemon.submit(daemon.spec(args={"gate": str(gate), "gate_at": 6}))
    try:
        daemon.until_logged(beside, "at the gate of training")
        attackers = {kind: attacker(daemon, kind, beside, **MOMENTS[moment]) for kind in kinds}
        ended = {kind: daemon.client.wait(job, SECONDS) for kind, job in attackers.items()}
    finally:
        gate.open()
    for kind, end in ended.items():
        assert "it attacks" in daemon.log_of(end["job"]), kind
        if kind in UNHEARD:
            assert end["state"] == "completed", (kind, end)
        else:
            assert (end["state"], end["reason"]) == ("failed", "worker-lost"), (kind, end)
            assert "must leave Weft's descriptors alone" in end["error"], kind
    result = daemon.client.wait(beside, SECONDS)
    assert same_bits(alone, result)
    assert "attempt 2" not in daemon.log_of(beside)
    assert "not mine" not in daemon.log_of(beside)


def attacker(daemon: RealDaemon, kind: str, other: str, **moment: Any) -> str:
    return daemon.submit(daemon.spec(HOSTILE, args={"kind": kind, "other": other, **moment}))


def same_bits(first: dict[str, Any], second: dict[str, Any]) -> bool:
    ours, theirs = load_file(first["model"]), load_file(second["model"])
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_process_that_a_job_leaves_behind_does_not_speak_for_the_next(besieged: RealDaemon) -> None:
    """A child of the worker has its link, too; nobody looked for one when the job was over."""
    source = LINE.replace(
        "pass_gate(planning_gate",
        "import signal\n"
        "    if (child := os.fork()) == 0:\n"
        "        signal.pause()\n"
        "        os._exit(0)\n"
        '    print("it has forked", child, flush=True)\n'
        "    pass_gate(planning_gate",
    )
    job = besieged.submit(besieged.spec(source))
    assert besieged.client.wait(job, SECONDS)["state"] == "completed"
    forked = [int(line.rpartition(" ")[2]) for line in besieged.log_of(job).splitlines() if "it has forked" in line]
    assert forked
    until(lambda: not any(lives(pid) for pid in forked), "the end of what the job has forked")
    assert besieged.run(besieged.spec())["state"] == "completed"


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("strategy", [{"stages": 2}, {"replicas": 2}, {"microbatches": 2}], ids=str)
def test_a_child_that_a_step_has_forked_ends_where_it_returns(
    besieged: RealDaemon, strategy: dict[str, Any], tmp_path: Path
) -> None:
    """It trained on, in the memory of its parent: the job failed for what both told, or had another result."""
    forks = """if calls == gate_at > 0:
            if not os.fork():
                open(f"FOLDER/{os.getpid()}", "x").close()
        if calls == -1:"""
    source = LINE.replace("if calls == gate_at:", forks.replace("FOLDER", str(tmp_path)))
    ends = [besieged.run(besieged.spec(source, strategy=strategy, epochs=40, args={"gate_at": at})) for at in (0, 60)]
    assert [end["state"] for end in ends] == ["completed", "completed"], ends
    ours, theirs = (load_file(end["model"]) for end in ends)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    children = [int(path.name) for path in tmp_path.iterdir()]
    assert children
    until(lambda: not any(psutil.pid_exists(pid) for pid in children), "their end")
    besieged.until_idle()


@pytest.mark.slow
def test_a_worker_has_no_socket_of_the_daemon_nor_of_another_process(besieged: RealDaemon) -> None:
    """It had the fork server's epoll, with which it could have taken the server's watch on its children away."""
    besieged.until_idle()
    workers = besieged.worker_pids()
    held = {name: descriptors(pid) for name, pid in workers.items()}
    others = [descriptors(process.pid) for process in besieged.processes() if process.pid not in workers.values()]
    for name, mine in held.items():
        assert len(mine) in (2, 3), f"{name} has its link, its spare's, and a connection to the directory: {mine}"
        elsewhere = set().union(*others, *(theirs for each, theirs in held.items() if each != name))
        assert not mine & elsewhere, name


def descriptors(pid: int) -> set[str]:
    """Sockets, and what else two processes may share and talk over."""
    links = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    return {link for link in links if not link.startswith("/")}
