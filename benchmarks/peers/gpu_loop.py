"""Peers of the GPU benchmarks: the loop that a user would write without Weft, as fast as we know how.

    plain       all on the GPU: autocast to bf16, AdamW's fused kernel, clip_grad_norm_
    fsdp2       torch.distributed.fsdp.fully_shard of one process with CPUOffloadPolicy; each unit of the model is a
                group, which stays on the GPU from forward to backward; fused AdamW on the host's cores
    deepspeed   ZeRO-Offload of stage 2, with DeepSpeed's own Adam on the host's cores

Config: loop, spec, device, threads, warm, measured. Takes that many iterations of the job, with its batches in Weft's
order, microbatches and norm to clip to. Prints {"seconds", "losses", "gpu_bytes"} as JSON; or {"reason", "error"} where
it could not. The device is waited for before the first and after the last iteration that is measured, never in between.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported, if not in __all__
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from training_loop import Samples

from weft.spec.job_spec import JobSpec
from weft.workload.entry import load_workload
from weft.workload.faults import fault_of
from weft.workload.optimizer import make_optimizer
from weft.workload.units import units
from weft.workload.workload import Workload

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Missing(Exception):
    """The loop cannot be had here."""


class Loop(Protocol):
    """train: the job's samples, in memory of the host."""

    train: tuple[torch.Tensor, torch.Tensor]

    def step(self, microbatches: Pairs) -> torch.Tensor:
        """One iteration; the mean loss, on the device."""


class Plain:
    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        with device:  # a model that is made where it stays
            self._workload = load_workload(spec)
        optimizer = make_optimizer(self._workload.optimizer, self._workload.model.parameters())
        assert optimizer is not None
        self._optimizer = optimizer
        self._device, self._strategy = device, spec.strategy
        self.train = self._workload.train
        self._parameters = list(self._workload.model.parameters())

    def step(self, microbatches: Pairs) -> torch.Tensor:
        total = torch.zeros((), device=self._device)
        for inputs, targets in microbatches:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._strategy.precision == "bf16"):
                loss = self._workload.loss(self._workload.model(inputs), targets) / len(microbatches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self._strategy.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._strategy.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total


class Fsdp2:
    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        workload = load_workload(spec)
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
            "reshard_after_forward": False,
        }
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # returns a view, to which nobody writes here
        for _, unit in units(workload.model):
            fully_shard(unit, **settings)
        fully_shard(workload.model, **settings)
        self._model: Any = workload.model  # a module, and what FSDP2 has made of it
        self._loss, self._device, self._clip_norm = workload.loss, device, spec.strategy.clip_norm
        self.train = workload.train
        self._optimizer = workload.optimizer(self._model.parameters())
        for group in self._optimizer.param_groups:
            group["fused"] = True  # make_optimizer leaves sharded parameters as they are

    def step(self, microbatches: Pairs) -> torch.Tensor:
        total = torch.zeros((), device=self._device)
        for number, (inputs, targets) in enumerate(microbatches):
            is_last = number == len(microbatches) - 1
            self._model.set_requires_gradient_sync(is_last)
            self._model.set_reshard_after_backward(is_last)
            loss = self._loss(self._model(inputs).float(), targets) / len(microbatches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total


class DeepSpeed:
    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise Missing("deepspeed is not installed")
        deepspeed = importlib.import_module("deepspeed")
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", "29500")
        workload: Workload = load_workload(spec)
        optimizer = workload.optimizer(workload.model.parameters())
        group = optimizer.param_groups[0]
        microbatches = spec.strategy.microbatches
        self._loss, self.train = workload.loss, workload.train
        self._engine, *_ = deepspeed.initialize(
            model=workload.model,
            model_parameters=list(workload.model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": spec.job.batch_size // microbatches,
                "gradient_accumulation_steps": microbatches,
                "gradient_clipping": spec.strategy.clip_norm or 0.0,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": group["lr"], "weight_decay": group["weight_decay"]}},
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "pin_memory": True},
                    "overlap_comm": True,
                    "contiguous_gradients": True,
                },
            },
        )

    def step(self, microbatches: Pairs) -> torch.Tensor:
        losses = []
        for inputs, targets in microbatches:
            loss = self._loss(self._engine(inputs).float(), targets)
            self._engine.backward(loss)  # divides by the number of microbatches
            self._engine.step()  # updates after the last of them
            losses.append(loss.detach())
        return torch.stack(losses).mean()


LOOPS: dict[str, Callable[[JobSpec, torch.device], Loop]] = {"plain": Plain, "fsdp2": Fsdp2, "deepspeed": DeepSpeed}


def batches(spec: JobSpec, train: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> Iterator[Pairs]:
    """On the device before they are asked for: a user's loader would bring them beside the computation."""
    samples = Samples(train, spec, rank=0, num_ranks=1)
    step = 0
    while True:
        parts = (part.to(device).tensor_split(spec.strategy.microbatches) for part in samples.of(step))
        yield list(zip(*parts, strict=True))
        step += 1


def measure(config: dict[str, Any]) -> dict[str, Any]:
    spec, device = JobSpec.parse(config["spec"]), torch.device(config["device"])
    torch.set_num_threads(config["threads"])
    loop = LOOPS[config["loop"]](spec, device)
    source = batches(spec, loop.train, device)
    losses = [loop.step(next(source)) for _ in range(config["warm"])]
    ready = [next(source) for _ in range(config["measured"])]
    synchronize(device)
    started = time.perf_counter()
    losses += [loop.step(microbatches) for microbatches in ready]
    synchronize(device)
    seconds = (time.perf_counter() - started) / config["measured"]
    return {
        "seconds": seconds,
        "losses": [float(loss) for loss in losses],
        "gpu_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    try:
        told = measure(json.loads(sys.argv[1]))
    except Missing as error:
        told = {"reason": "missing", "error": str(error)}
    except Exception as error:  # whatever the peer raises is for the benchmark to tell
        fault = fault_of(error)
        told = {"reason": fault.reason, "error": fault.message.strip().splitlines()[-1]}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
