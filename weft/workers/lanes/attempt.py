"""One worker's part in one attempt of a job: what its lanes' tasks do, from slots to slots and from buckets to buckets.

Built by Prepare, dropped by Release. `operations` are a lane's tasks of one iteration as callables; the lane decides
when each runs, they only do the work. Where each kind is:

    LOAD, FETCH                this module, weft.workload.data
    FORWARD, BACKWARD, GRAD    weft.workers.compute.stage_tasks, weft.workers.compute.gradients
    DOWN, UP, RELOAD           weft.workers.memory.replica_memory
    SYNC, UPDATE, VALIDATE     weft.workers.updates
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from weft.plan.course import Course
from weft.plan.itinerary import Iteration
from weft.plan.kinds import KINDS
from weft.spec.job_spec import JobSpec
from weft.spec.strategy import Prefetch
from weft.transport.memory.board import INITIAL_BYTE, Board, num_words
from weft.transport.memory.directory import Directory
from weft.workers.compute.measured import Measured
from weft.workers.compute.weights import Weights
from weft.workers.devices.device import Device
from weft.workers.lanes.model_parts import ModelParts
from weft.workers.lanes.operation import Operation, Run
from weft.workers.memory.bucket_memory import Holder
from weft.workers.memory.replica_memory import ReplicaMemory
from weft.workers.memory.slots import SlotRing
from weft.workers.updates.bucket_updates import BucketUpdates
from weft.workload.data import Batches
from weft.workload.workload import Workload

COMPUTE = "compute"  # of all lanes of a worker the one that may spin: the others would take the core from it


class Attempt:
    """The shared parts: board, slots, course; and the operations of the lanes that this worker holds."""

    def __init__(
        self,
        spec: JobSpec,
        plan: Mapping[str, Any],
        workload: Workload,
        directory: Directory,
        spin_seconds: float,
        device: Device,
    ) -> None:
        self.device = device
        self.course = Course(plan)
        self.num_tasks: int = plan["num_tasks"]
        self.measured = {lane: Measured() for lane in plan["lanes"]}
        words = directory.block("board", 4 * num_words(self.num_tasks), INITIAL_BYTE)
        shares_core = len(plan["lanes"]) > 1
        self.boards = {
            lane: Board(words.view(torch.int32), spin_seconds if lane == COMPUTE else 0.0, shares_core=shares_core)
            for lane in plan["lanes"]
        }
        self.board = next(iter(self.boards.values()))
        self._rings = {
            ring["name"]: SlotRing(
                directory, ring, self.course.microbatches[ring["replica"]], self.device, position=plan["position"]
            )
            for ring in plan["rings"]
        }
        for name in [name for name, ring in self._rings.items() if ring.by_number]:
            for replica in range(len(plan["replicas"])):
                self._rings[f"{name.partition('-')[0]}-{replica}"] = self._rings[name]
        self._weights = Weights(
            workload.weight,
            directory,
            num_microbatches=sum(self.course.microbatches),
            depth=_batches_under_way(spec.strategy.prefetch),
        )
        loads = any(task["kind"] == "load" for program in plan["lanes"].values() for task in program)
        self._batches = Batches(workload, seed=spec.job.seed) if loads else None
        self._post: dict[tuple[int, int, int], int] = {
            (task["replica"], task["stage"], task["bucket"]): task["id"]
            for program in plan["lanes"].values()
            for task in program
            if KINDS[task["kind"]].is_milestone
        }
        # By milestone: who posts it from inside another task.
        self.milestones: dict[int, Callable[[int, int], None]] = dict.fromkeys(self._post.values(), self.board.post)
        self._bounded = bool((plan["synchronisation"] or {}).get("bounded"))
        self._now: dict[Holder, int] = {}  # the iteration that a stage's backward is of
        self._boards_to_abort = [self.board]
        self._parts = ModelParts(
            spec, plan, workload, directory, self.device, self.course, self._weights, self._rings, self._post_gradient
        )

    def iteration(self, index: int) -> Iteration:
        return self.course.iteration(index)

    def abort(self) -> None:
        """Ends every wait of its lanes, and of the other workers' too."""
        for board in self._boards_to_abort:
            board.abort()

    def abort_with(self, board: Board) -> None:
        """Another board on which lanes wait."""
        self._boards_to_abort.append(board)

    def _post_gradient(self, replica: int, stage: int, bucket: int) -> None:
        """From inside a backward."""
        task = self._post[replica, stage, bucket]
        self.milestones[task](task, self._now[replica, stage])

    def operations(self, lane: str, program: list[dict[str, Any]]) -> dict[int, Operation]:
        """The operations of a lane's tasks as the plan's worker view describes them, by task id."""
        measured, updates = self.measured[lane], self._parts.updates
        return {
            task["id"]: Operation(
                task=task["id"],
                mode=KINDS[task["kind"]].mode,
                waits=tuple((source, distance, cause) for source, distance, cause in task["waits"]),
                wakes=task["wakes"],
                passes=KINDS[task["kind"]].learns,
                run=self._bind(task, measured),
                update_needed=self._parts.update_needed(task),
                takes=updates.takes(task) if updates is not None else None,
                skips=self._skips(task),
                place=_place_of(task, num_replicas=len(self.course.microbatches)),
                is_milestone=KINDS[task["kind"]].is_milestone,
                reads_on_host=updates is not None and (updates.reads_norm(task) or updates.sums_on_host(task)),
                is_read_on_host=self._bounded and task["kind"] == "sync",
            )
            for task in program
        }

    def _skips(self, task: Mapping[str, Any]) -> Callable[[Iteration], Collection[int]] | None:
        if not any(task["ways"]):
            return None
        bucket, course = task["bucket"], self.course
        numbers = {way: [n for n, each in enumerate(task["ways"]) if each == way] for way in ("host", "device")}
        return lambda iteration: numbers["host" if course.is_local(bucket, iteration) else "device"]

    def _bind(self, task: Mapping[str, Any], measured: Measured) -> Run:
        r, s, m, b = task["replica"], task["stage"], task["microbatch"], task["bucket"]
        parts, updates = self._parts, self._parts.updates
        match task["kind"]:
            case "load":
                return lambda iteration: self._load(iteration, r, m)
            case "fetch":
                return lambda iteration: self._fetch(iteration, r, s, m)
            case "forward":
                return lambda iteration: parts.stages[r, s].forward(iteration, m, measured)
            case "backward":
                return lambda iteration: self._backward(iteration, r, s, m)
            case "grad":
                return lambda iteration: parts.stages[r, s].finish_gradient(iteration, b)
            case "update" if updates is None:
                return lambda iteration: parts.own_updates[s].run(iteration, measured)
        assert updates is not None
        return _bind_to_bucket(task, updates, parts.memories, measured)

    # --- tasks that belong to no other module

    def _load(self, iteration: Iteration, replica: int, microbatch: int) -> None:
        part = self.course.loaded_part(iteration, replica, microbatch)
        if part.size == 0:
            self._weights.weigh(iteration, part, None)
            return
        slots = [self._rings[f"{name}-{replica}"].slot(iteration.index, microbatch, part.size) for name in _DATA]
        assert self._batches is not None
        self._batches.load(iteration, part, (slots[0], slots[1]))
        self._weights.weigh(iteration, part, slots[1])

    def _fetch(self, iteration: Iteration, replica: int, stage: int, microbatch: int) -> None:
        part = self.course.part(iteration, replica, microbatch)
        last = self._parts.num_stages[replica] - 1
        for name, at in (("input", 0), ("target", last)):
            if part.size and stage == at:
                device, shared = (self._rings[f"{place}{name}-{replica}"] for place in ("device-", ""))
                source = shared.slot(iteration.index, part.number if shared.by_number else microbatch, part.size)
                self.device.copy(device.slot(iteration.index, microbatch, part.size), source)

    def _backward(self, iteration: Iteration, replica: int, stage: int, microbatch: int) -> None:
        self._now[replica, stage] = iteration.index  # what the hooks post
        self._parts.stages[replica, stage].backward(iteration, microbatch)


def _bind_to_bucket(
    task: Mapping[str, Any], updates: BucketUpdates, memories: Mapping[Holder, ReplicaMemory], measured: Measured
) -> Run:
    r, s, b, owner = task["replica"], task["stage"], task["bucket"], task["owner"]
    match task["kind"]:
        case "down":
            return lambda iteration: updates.down((r, s), b, iteration)
        case "up":
            return lambda iteration: updates.up((r, s), b, iteration)
        case "reload":
            return lambda iteration: memories[r, s].load(b)
        case "sync":
            return lambda iteration: updates.owners[owner].sync(b, iteration)
        case "update" if owner is not None:
            return lambda iteration: updates.owners[owner].update(b, iteration, measured)
        case "update":
            return lambda iteration: updates.update_device(r, s, b, iteration, measured)
        case "validate":
            return lambda iteration: updates.owners[owner].validate(iteration, measured)
    raise AssertionError(task["kind"])


def _place_of(task: Mapping[str, Any], *, num_replicas: int) -> str:
    parts = [str(task["kind"])]
    if task["owner"] is None and task["kind"] != "load":
        parts[0] += f" of stage {task['stage']}"
    if num_replicas > 1 and task["owner"] is None:
        parts.append(f"replica {task['replica']}")
    parts += [f"{name} {task[name]}" for name in ("microbatch", "bucket") if task[name] is not None]
    return ", ".join(parts)


_DATA = ("input", "target")


def _batches_under_way(prefetch: Prefetch) -> int:
    """Loaded, at most, and not yet through the last backward of every replica; the one being loaded counts too.

    A device hands the loader's slots back when it has fetched them, which is up to `transfer` microbatches and those in
    flight (at most a batch) before it computes with what is in them.
    """
    return prefetch.load + 1 + prefetch.transfer + 1
