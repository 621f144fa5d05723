"""Models of any class: what cutting by the model's own forward costs, before a job and in it.

elided_over_sequential     iteration of a GPT that is cut by its own forward ÷ the same network as an nn.Sequential,
                           two stages, the same cut; both, and torch's, take turns in slices (slices.py)
own_forward_vs_torch       torch.distributed.pipelining on the nn.Sequential ÷ ours on the class of its own
own_forward_vs_plain_torch the same, but that torch's processes have the C library's allocator as it is installed
resnet_…, narrow_resnet_…  the same of a ResNet-18, and of one half as wide, with a quarter of the arithmetic
inspection_iterations      seconds of an inspection, with the proof of the cut ÷ those of an iteration
prepare_peak_memory        the most that a worker has beyond an idle one, from the order to prepare on ÷ (the model's
                           bytes ÷ stages + those of its largest unit), of a model that only runs forward, so that
                           there are neither gradients nor an optimizer's state
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measure import Result, main, ratio_result
from pipeline import CASES, ENVIRONMENT, ROUNDS, STARTS, Case, stages_of, torch_peers
from slices import ENDLESS, SlicedParty, medians, sliced_job, take_turns

import weft.client.embedded
from weft.scheduler.daemon.fork_server import ALLOCATOR
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
WARM_ITERATIONS = 10
SCHEDULE = "1f1b"
OVER_SEQUENTIAL = {"": "<= 1.02", "small_": "<= 1.06"}
VS_TORCH = {"": ">= 1.0", "small_": ">= 1.0", "resnet_": ">= 1.0"}
LARGE = dataclasses.replace(CASES[0], args={**CASES[0].args, "layers": 12}, seconds=5.0)
RESNETS = tuple(
    Case(prefix=prefix, entry="resnet_job.py:workload", args={"samples": 64, "width": width}, seconds=seconds)
    for prefix, width, seconds in (("resnet_", 64, 2.5), ("narrow_resnet_", 32, 0.8))
)
OWN_FORWARD = {
    "gpt_job.py:workload": "any_model_job.py:workload",
    "resnet_job.py:workload": "resnet_job.py:own_forward",
}


def collect(quick: bool) -> list[Result]:
    return [result for part in PARTS.values() for result in part(quick)]


def gpts(quick: bool) -> list[Result]:
    return _cases((LARGE, CASES[1]), quick)


def resnets(quick: bool) -> list[Result]:
    return _cases(RESNETS, quick)


def before_a_job(quick: bool) -> list[Result]:
    return [_prepare_peak(1 if quick else 3), _inspection(2 if quick else 5)]


PARTS = {"gpts": gpts, "resnets": resnets, "before-a-job": before_a_job}


def _cases(cases: Sequence[Case], quick: bool) -> list[Result]:
    turns = (1, 4) if quick else (STARTS, ROUNDS)
    return [result for case in cases for result in _iterations(case, *turns)]


def _iterations(case: Case, starts: int, rounds: int) -> list[Result]:
    stages = stages_of(case, SCHEDULE)
    numbers = [first for first, _ in stages[1:]]
    names = [f"blocks.{number - 1}" for number in numbers]  # of the class: what is before the blocks is one child
    specs = [_spec(case, OWN_FORWARD[case.entry], ENDLESS, names), _spec(case, case.entry, ENDLESS, numbers)]
    own, sequential, theirs, plain = list[float](), list[float](), list[float](), list[float]()
    for start in range(starts):
        with ExitStack() as stack:
            order = [0, 1] if start % 2 else [1, 0]
            jobs = {which: stack.enter_context(sliced_job(specs[which], warm=WARM_ITERATIONS)) for which in order}
            peers = [
                SlicedParty(stack.enter_context(torch_peers(case, SCHEDULE, stages, allocator)))
                for allocator in (ALLOCATOR, {})
            ]
            beside = take_turns([*jobs.values(), *peers], rounds, case.seconds)
            found = medians(jobs[0].slices(), jobs[1].slices(), *(each.iterations() for each in peers))
        for values, more in zip((own, sequential, theirs, plain), found, strict=True):
            values += more
    shape = ", ".join(f"{key} {value}" for key, value in case.args.items() if key != "samples")
    what = f"ResNet-18 {shape}, images of 64 × 64" if case in RESNETS else f"GPT {shape}"
    return [
        ratio_result(
            f"{case.prefix}elided_over_sequential",
            own,
            sequential,
            goal=OVER_SEQUENTIAL.get(case.prefix),
            how="iteration cut by the model's own forward ÷ as nn.Sequential, 2 stages, 8 microbatches; "
            f"{what}; {beside}",
        ),
        ratio_result(
            f"{case.prefix}own_forward_vs_torch",
            theirs,
            own,
            goal=VS_TORCH.get(case.prefix),
            how="iteration of torch.distributed.pipelining, over Gloo, on the nn.Sequential ÷ ours on the class",
        ),
        ratio_result(
            f"{case.prefix}own_forward_vs_plain_torch",
            plain,
            own,
            goal=None,
            how="the same; torch's processes have the C library's allocator as it is installed, not as ours set it",
        ),
    ]


def _spec(case: Case, entry: str, steps: int, split: Sequence[int | str]) -> JobSpec:
    job = {"entry": entry, "args": case.args, "steps": steps, "batch_size": 16, "seed": 1}
    strategy = {"schedule": SCHEDULE, "stages": 2, "microbatches": 8, "split": split}
    return JobSpec.parse({"job": job, "strategy": strategy, "directory": str(HERE)})


def _prepare_peak(turns: int) -> Result:
    """Of workers that had no other job: a worker keeps memory that was free."""
    args = {"layers": 12, "dim": 768, "heads": 4, "context": 32, "vocabulary": 512, "samples": 64}
    spec = _spec(dataclasses.replace(LARGE, args=args), OWN_FORWARD[LARGE.entry], 1_000_000, [7])
    spec = spec.model_copy(update={"job": spec.job.model_copy(update={"mode": "forward"})})
    told = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--sizes", json.dumps(spec.to_wire())],
        stdout=subprocess.PIPE,
        check=True,
        timeout=600,
    )
    parameters, largest = json.loads(told.stdout)
    peaks = []
    for _ in range(turns):
        runs_dir = tempfile.mkdtemp(prefix="weft-bench-")
        with weft.client.embedded.Daemon(workers=2, threads=1, runs_dir=runs_dir) as client:
            while not all(pids := [each["pid"] for each in client.status()["workers"] if each["kind"] == "cpu"]):
                time.sleep(0.05)
            time.sleep(1.0)  # until they have imported what they will
            idle = min(_status_bytes(pid, "VmRSS") for pid in pids)
            job = client.submit(spec)["job"]
            while not client.show(job)["step"]:
                time.sleep(0.05)
            peaks.append(max(_status_bytes(pid, "VmHWM") for pid in pids) - idle)
            client.cancel(job)
    return ratio_result(
        "prepare_peak_memory",
        peaks,
        [parameters / 2 + largest] * turns,
        goal="<= 1.3",
        how=f"peak of the larger of 2 stages, of a model of {parameters / 2**20:.0f} MiB of parameters ÷ its share "
        f"and one unit of {largest / 2**20:.0f} MiB",
    )


def _status_bytes(pid: int, key: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(float(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _sizes(wire: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the parameters of all units, and of the largest one."""
    from weft.workload.entry import load_workload

    model: Any = load_workload(JobSpec.parse(wire)).model
    units = [model.embedding, *model.blocks, model.head]
    sizes = [sum(parameter.nbytes for parameter in unit.parameters()) for unit in units]
    return sum(sizes), max(sizes)


def _inspection(turns: int) -> Result:
    """In a process of its own with one thread, as in a worker."""
    spec = _spec(LARGE, OWN_FORWARD[LARGE.entry], 1000, [7])
    command = [sys.executable, str(Path(__file__).resolve()), "--inspect", json.dumps(spec.to_wire()), str(turns)]
    output = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, timeout=600).stdout
    inspections, iterations = json.loads(output)
    return ratio_result(
        "inspection_iterations",
        inspections,
        iterations,
        how="seconds of an inspection, the proof of every cut included ÷ forward and backward of a batch on one core",
    )


def _inspect(wire: dict[str, Any], turns: int) -> tuple[list[float], list[float]]:
    import torch

    from weft.workers.devices.host import HostDevice
    from weft.workers.inspection.inspection import inspect
    from weft.workload.entry import load_workload

    torch.set_num_threads(1)
    spec = JobSpec.parse(wire)
    inspections, iterations = [], []
    for _ in range(turns):
        workload = load_workload(spec)
        started = time.perf_counter()
        told = inspect(workload, spec, HostDevice())
        inspections.append(time.perf_counter() - started)
        seconds = sum(unit["forward_seconds"] + unit["backward_seconds"] for unit in told["units"])
        iterations.append(seconds * spec.strategy.microbatches)
    return inspections, iterations


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sizes"]:
        print(json.dumps(_sizes(json.loads(sys.argv[2]))))
    elif sys.argv[1:2] == ["--inspect"]:
        print(json.dumps(_inspect(json.loads(sys.argv[2]), int(sys.argv[3]))))
    else:
        main("any_model", collect, parts=PARTS)
