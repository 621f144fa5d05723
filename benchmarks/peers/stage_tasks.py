"""Peer of benchmarks/pipeline.py: the task times of one stage, alone. No other process is ever waited for.

Runs the very operations that a worker runs, in the lane's order, over private blocks in place of the shared ones. The
other stages' processes do the same at the same time on their cores, so shared cache and memory count. Reads "run K"
lines and prints {task: [seconds of each of K iterations]} as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import pin

from weft.plan.plan import Ring, Role
from weft.plan.worker_view import WorkerView
from weft.spec.job_spec import JobSpec
from weft.transport.memory.arena import Arena, Layout
from weft.workers.devices.host import HostDevice
from weft.workers.lanes.attempt import Attempt
from weft.workers.memory.parcels import ParcelRing
from weft.workload.entry import load_workload


class PrivateDirectory:
    """A directory whose blocks nobody else sees."""

    def __init__(self) -> None:
        self.blocks: dict[str, torch.Tensor] = {}

    def block(self, name: str, num_bytes: int, fill: int = 0) -> torch.Tensor:
        if name not in self.blocks:
            self.blocks[name] = torch.full((num_bytes,), fill, dtype=torch.uint8)
        return self.blocks[name]

    def ask_for(self, wanted: Collection[Any]) -> None:
        """They are here already."""

    def create(self, name: str, layout: Layout) -> Arena:
        return Arena(self.block(name, layout.num_bytes), layout)


def fill(directory: Any, ring: Ring, microbatches: int) -> None:
    """What another stage would have sent, in every slot."""
    made = ParcelRing(directory, ring, microbatches, HostDevice())
    scale = 1.0 if ring.role is Role.ACTIVATION else 1e-4
    for number in range(ring.depth):
        made.write(0, number, [scale * torch.randn(max(value.shapes.values())) for value in ring.values])


def main() -> None:
    config = json.loads(sys.argv[1])
    pin(config["core"])
    torch.set_num_threads(1)
    spec = JobSpec.parse(config["spec"])
    directory: Any = PrivateDirectory()  # all that an attempt asks of one
    view, loader_view = (WorkerView.from_wire(config[name]) for name in ("view", "loader_view"))
    stage = Attempt(spec, view, load_workload(spec), directory, 0.0, HostDevice())
    loader = Attempt(spec, loader_view, load_workload(spec), directory, 0.0, HostDevice())
    loads = loader.operations("load", loader_view.programs["load"])
    program = view.programs["compute"]
    operations = stage.operations("compute", program)
    for ring in view.rings:
        if ring.crosses and ring.writer != view.stages[0].stage:
            fill(directory, ring, stage.course.microbatches[0])
    iteration_number = 0
    for line in sys.stdin:
        seconds: defaultdict[int, list[float]] = defaultdict(list)
        for _ in range(int(line.split()[1])):
            iteration = stage.iteration(iteration_number % stage.course.itinerary.num_iterations)
            iteration_number += 1
            for load in loads.values():
                started = time.perf_counter()
                load.run(iteration)
                seconds[load.task].append(time.perf_counter() - started)
            for task in program:
                started = time.perf_counter()
                operations[task.id].run(iteration)
                seconds[task.id].append(time.perf_counter() - started)
            stage.measured["compute"].take()
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
