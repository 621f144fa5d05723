"""Memory that one process lends and another one reads: of the same GPU, and of one that it does not see."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weft.reference import loop as reference

_REAL = runpy.run_path(str(Path(__file__).parents[1] / "integration" / "real_daemon.py"))
metrics_rows = _REAL["metrics_rows"]
_JOBS = runpy.run_path(str(Path(__file__).with_name("test_gpu_jobs.py")))
SOURCE, STEPS, GPU = _JOBS["SOURCE"], _JOBS["STEPS"], _JOBS["GPU"]

TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1),
    reason="there are no two GPUs here that reach each other",
)
KEY = b"k" * 32
SERVER = f"""
import sys
from pathlib import Path
from weft.transport.memory.directory import DirectoryServer
DirectoryServer(Path(sys.argv[1]), {KEY!r}).serve(lambda: print("ready", flush=True))
"""
WORKER = f"""
import sys
from pathlib import Path
import torch
from weft.transport.memory.directory import Directory
from weft.workers.devices.cuda import CudaDevice
device, directory = CudaDevice(), Directory(Path(sys.argv[1]), {KEY!r}, "job")
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    sys.stdout.flush()
"""
LENT = "block = device.lend(directory, 'activation-0-0', 1 << 20); block.fill_(7); torch.cuda.synchronize(); print('')"
WRITTEN_AGAIN = "block.fill_(8); torch.cuda.synchronize(); print('')"
BORROWED = "block = device.borrow(directory, 'activation-0-0'); kept = block.clone(); print(kept.unique().tolist())"
READ_AGAIN = "print(block.clone().unique().tolist(), kept.unique().tolist(), block.numel(), torch.cuda.device_count())"
LET_GO = "del block, kept; device.end_job(); print(device.is_clean())"
ENDED = "del block; device.end_job(); print(device.is_clean())"


class Process:
    """Runs a line at a time, which prints one."""

    def __init__(self, source: str, address: Path, gpu: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", source, str(address)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self.reply() == "ready"

    def begin(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def reply(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.begin(line)
        return self.reply()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A worker on a GPU, all in one job."""
    address = tmp_path / "directory.sock"
    processes = [Process(SERVER, address, "")]

    def worker(gpu: str) -> Process:
        processes.append(Process(WORKER, address, gpu))
        return processes[-1]

    yield worker
    for process in processes:
        process.end()


def counters_of(process: Process) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{process.pid}_")]


@pytest.mark.parametrize("gpu", ["0", pytest.param("1", marks=TWO_GPUS)])
def test_what_is_lent_is_read_where_it_stands_and_given_back(start: Start, gpu: str) -> None:
    lender, borrower = start(gpu), start("0")
    lender.ask(LENT)
    assert borrower.ask(BORROWED) == "[7]"
    lender.ask(WRITTEN_AGAIN)
    assert borrower.ask(READ_AGAIN) == f"[8] [7] {1 << 20} 1"
    lender.begin(ENDED)  # it waits for the borrower, who hears of the job's end no earlier
    assert borrower.ask(LET_GO) == "True"
    assert lender.reply() == "True"
    assert counters_of(lender) == []


def test_a_worker_whose_loan_nobody_gives_back_is_not_clean(start: Start) -> None:
    lender, borrower = start("0"), start("0")
    lender.ask(LENT)
    borrower.ask(BORROWED)
    borrower.end()
    assert lender.ask(ENDED) == "False"
    for name in counters_of(lender):
        os.unlink(f"/dev/shm/{name}")  # as the fork server does


@TWO_GPUS
def test_stages_on_two_gpus_train_what_the_plain_loop_trains_and_leave_their_workers_clean() -> None:
    daemon = _REAL["RealDaemon"](workers=2, gpus=2)
    try:
        daemon.start(seconds=120.0)
        strategy = {"replicas": [GPU | {"stages": 2}], "microbatches": 4, "clip_norm": 0.5}
        spec: Any = daemon.spec(SOURCE, strategy=strategy, steps=STEPS, batch_size=16, args={"dtype": "float64"})
        expected = reference.train(spec, device="cuda:0")
        pids = None
        for _ in range(2):
            result = daemon.run(spec)
            assert result["state"] == "completed", daemon.log_of(result["job"])
            plan = json.loads((Path(result["run_dir"]) / "plan.json").read_text())
            lent = {ring["name"] for ring in plan["rings"] if ring["memory"] == "peer"}
            assert lent == {"activation-0-0", "gradient-0-0"}
            losses = [row["loss"] for row in metrics_rows(result["run_dir"]) if "loss" in row]
            assert losses == pytest.approx(expected.losses, rel=1e-6)
            state = load_file(result["model"])
            assert max(float((state[key] - tensor).abs().max()) for key, tensor in expected.state.items()) < 1e-6
            pids = pids or daemon.worker_pids()
        assert daemon.worker_pids() == pids, "they were clean, so nobody replaced them"
    finally:
        daemon.close()
