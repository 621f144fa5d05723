"""Peer of benchmarks/recovery.py: the plain loop of a job, which torch.distributed.checkpoint.async_save writes.

Config: spec, cores (of this process), threads. Reads "run K KIND" lines and takes K steps, the first of which begins
with an async_save of model and optimizer; prints {"seconds": [...], "held": ...} as JSON. What a step waits for is in
its seconds, and held is how long the loop stood still for the save, its call and its copy; what is still to be written
after the last step is in that one's. Kinds:

    thread     the copy in the loop, a thread writes it: the default
    staged     a thread copies, too, and the loop waits for it before the optimizer's step
    process    the copy in the loop, to shared memory, and a process writes it

Best settings that we know of: memory that is copied to stays from one checkpoint to the next, no collectives where they
can be left out, one file, one step's checkpoint before the next begins.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported, if not in __all__
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from training_loop import Samples

from weft.spec.job_spec import JobSpec
from weft.workload.entry import load_workload
from weft.workload.optimizer import make_optimizer

Futures = tuple[Future[Any] | None, Future[Any]]  # until all is copied, until all is written


class Loop:
    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        spec = JobSpec.parse(config["spec"])
        self._workload = load_workload(spec)
        self._samples = Samples(self._workload.train, spec, 0, 1)
        optimizer = make_optimizer(self._workload.optimizer, self._workload.model.parameters())
        assert optimizer is not None
        assert self._workload.loss is not None
        self._loss = self._workload.loss
        self._optimizer = optimizer
        self._folder = folder
        self._step = 0
        self._held = 0.0  # seconds, of the newest save
        self._stagers = {
            "thread": DefaultStager(StagingOptions(False, False, False, False)),
            "staged": DefaultStager(StagingOptions(False, False, True, False)),
            "process": DefaultStager(StagingOptions(False, True, False, False)),
        }

    def run(self, steps: int, kind: str) -> dict[str, Any]:
        seconds = []
        writing: Future[Any] | None = None
        for number in range(steps):
            started = time.perf_counter()
            copied, saved = self._save(kind) if number == 0 else (None, None)
            self._held = time.perf_counter() - started if number == 0 else self._held
            writing = saved or writing
            self._iterate(copied)
            if writing is not None and number == steps - 1:
                writing.result()
            seconds.append(time.perf_counter() - started)
        for old in self._folder.iterdir():
            shutil.rmtree(old)
        return {"seconds": seconds, "held": self._held}

    def _iterate(self, copied: Future[Any] | None) -> None:
        model = self._workload.model
        inputs, targets = self._samples.of(self._step)
        loss = self._loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if copied is not None:
            started = time.perf_counter()
            copied.result()
            self._held += time.perf_counter() - started
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        loss.item()
        self._step += 1

    def _save(self, kind: str) -> Futures:
        in_process = kind == "process"
        response = async_save(
            {"model": self._workload.model.state_dict(), "optimizer": self._optimizer.state_dict()},
            storage_writer=FileSystemWriter(self._folder / f"step-{self._step}"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD,
            async_stager=self._stagers[kind],
            no_dist=not in_process,
        )
        if isinstance(response, Future):
            return None, response
        return response.staging_completion, response.upload_completion

    def close(self) -> None:
        for stager in self._stagers.values():
            stager.close()


def main() -> None:
    config = json.loads(sys.argv[1])
    os.sched_setaffinity(0, config["cores"])
    torch.set_num_threads(config["threads"])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        store = FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        written = Path(folder, "checkpoints")
        written.mkdir()
        loop = Loop(config, written)
        for line in sys.stdin:
            _, steps, kind = line.split()
            print(json.dumps(loop.run(int(steps), kind)), flush=True)
        loop.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
