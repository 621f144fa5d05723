"""Plan: a job resolved onto this machine, as a value that can be printed, stored and sent.

An inspection (what a worker found out about the user's model and data) and a spec go in; the planner makes the plan.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from weft.plan.buckets import Bucket, Holder, Route
from weft.plan.division import Turns
from weft.plan.graph import Graph, Lane, Task
from weft.plan.inspection import ParameterFacts, Shape
from weft.plan.itinerary import Itinerary
from weft.plan.kinds import KINDS, Kind, Way


class Role(enum.StrEnum):
    """What stands in the slots of a ring."""

    INPUT = "input"
    TARGET = "target"
    BATCH = "batch"  # all that was loaded, for every stage of a model that is cut by its own forward
    ACTIVATION = "activation"  # all that a stage makes and later ones read
    GRADIENT = "gradient"  # of values that an earlier stage has made, or reads too, from one that reads them
    TIED = "tied"  # gradients of parameters that an earlier stage uses too


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotValue:
    """One tensor's place in each slot of a ring."""

    name: str  # as in the inspection; of data the role
    dtype: str  # as it was inspected
    shapes: Mapping[int, Shape]  # by microbatch size, as they were inspected
    offset: int  # of its place in the slot, in bytes
    num_bytes: int  # of its place
    stages: tuple[int, ...]  # that read it, ascending
    parameter: int | None = None  # whose gradient it is, by its number in the model; of a TIED ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A ring of `depth` slots: microbatch u of the replica's run stands in slot u % depth.

    What crosses from stage to stage has an ACTIVATION ring for each stage that makes any of it, with all its values for
    whichever stages read them. A value's gradient goes from its last reader to the one before, which adds its own part,
    and so on down to its maker, as autograd sums it in the whole model: a GRADIENT ring for each pair of stages that
    any value's gradient goes between. With the gradients of parameters that several stages use it is the same: a TIED
    ring for each pair, and the first of the stages comes to have the sum.
    """

    role: Role
    replica: int
    writer: int | None = None  # the stage that writes it, of what crosses
    stages: tuple[int, ...]  # that read it, ascending
    # Shared by workers that map it; or a device's own; or on the device of the worker that writes it, where another
    # device reads it (a peer).
    memory: Literal["shared", "device", "peer"] = "shared"
    lender: int | None = None  # that worker, of a peer's
    depth: int
    slot_bytes: int
    values: tuple[SlotValue, ...]  # that stand in a slot, one behind the other
    by_number: bool = False  # all replicas read it, and microbatches stand in it by their number in the batch

    @property
    def name(self) -> str:
        """For people, and for the directory. What it is made of is asked of the fields."""
        match self.role:
            case Role.ACTIVATION:
                return f"{self.role}-{self.replica}-{self.writer}"
            case Role.GRADIENT:
                (reader,) = self.stages
                return f"{self.role}-{self.replica}-{reader}" + (f"-{self.writer}" if self.writer != reader + 1 else "")
            case Role.TIED:
                return f"{self.role}-{self.replica}-{self.stages[0]}-{self.writer}"
            case Role.BATCH if self.memory == "device":
                return f"device-{self.role}-{self.replica}-{self.stages[0]}"
            case Role.INPUT | Role.TARGET | Role.BATCH:
                return f"{'device-' if self.memory == 'device' else ''}{self.role}-{self.replica}"

    @property
    def crosses(self) -> bool:
        """From one stage to others."""
        return self.writer is not None

    @property
    def is_loaded(self) -> bool:
        """By the loaders, in whole batches."""
        return self.memory == "shared" and not self.crosses

    @property
    def written_by(self) -> tuple[frozenset[Kind], int]:
        """Kinds and stage of the tasks that write what is not loaded."""
        if self.writer is None:
            return frozenset({Kind.FETCH}), self.stages[0]
        if self.role is Role.ACTIVATION:
            return frozenset({Kind.FORWARD}), self.writer
        return frozenset(kind for kind, facts in KINDS.items() if facts.hands_back), self.writer

    def readers(self, replicas: Sequence[ReplicaPlan]) -> list[Holder]:
        """Of what is loaded: the first stage of each replica, or the last one, or all."""
        numbers = range(len(replicas)) if self.by_number else [self.replica]
        if self.role is Role.BATCH:
            stages = self.stages if self.memory == "device" else None
            return [Holder(r, s) for r in numbers for s in stages or range(replicas[r].num_stages)]
        return [Holder(r, 0 if self.role is Role.INPUT else replicas[r].num_stages - 1) for r in numbers]


@dataclass(frozen=True, slots=True)
class Border:
    """Where a stage of a model that is cut by its own forward begins, and the one before ends: the first call of one of
    these modules. Which that is may differ from one microbatch to the next, as layers are left out at random."""

    modules: tuple[str, ...]  # with which the stage's units begin, and those of later stages
    given: tuple[tuple[int, str], ...] = ()  # to the first of them: by number among its tensors and Nones, the value
    # Where a step goes through modules again, and the stage before has some to run behind that first call:
    ends: tuple[str, ...] = ()  # calls with which that stage ends, "module" or "module@1" for its second
    late: tuple[str, ...] = ()  # second and further calls of modules, all of which are run where the first is
    # Where modules are left out at random: of a value, the one that stands for it where its call is left out.
    instead: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Units first .. last - 1 on the plan's worker `worker`."""

    first: int
    last: int
    worker: int
    parameter_bytes: int
    memory_bytes: int  # state, gradients and slots
    copies_input: bool = False  # the first unit writes to its input, or keeps it, so it gets a copy of the slot
    replica: int = 0
    stage: int = 0
    # Of a model that is cut by its own forward:
    begins: Border | None = None  # None: with the step
    ends: Border | None = None  # where the next stage begins; None: with the step
    state: tuple[str, ...] = ()  # names of the parameters and buffers that it uses
    counts: tuple[str, ...] = ()  # of numbers in attributes that it changes
    changing: tuple[str, ...] = ()  # of parameters that nobody trains, and that the step itself changes
    rewrites: bool = False  # the step itself changes parameters that are trained

    @property
    def holder(self) -> Holder:
        return Holder(self.replica, self.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    device: Literal["cpu", "gpu"]
    num_stages: int
    microbatches: int
    private: bool = False  # it computes on parameters of its own, which UP tasks bring up to date
    staleness: int = 0  # updates that its parameters may lack
    working_window: int | None = None  # of its stages, layers then, so many are on the device at once; None: all
    resident: bool = False  # the data lie on its devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronisation:
    """How gradients become updates, for a job with buckets."""

    buckets: tuple[Bucket, ...]
    owners: tuple[Lane, ...]  # the lane in which each works
    coarse: bool  # every SYNC waits for every BACKWARD
    bounded: bool  # an update stands only once the norm of the whole gradient is known: clipping, skipping
    speculative: bool  # owners' updates begin before it is
    devices_speculate: bool = False  # so do updates that devices make with a sum that has come up
    warmup: int = 0
    local: tuple[int, ...] = ()  # of the route EITHER, the buckets that devices update themselves at the start

    def bucket_of(self, task: Task) -> Bucket:
        assert task.bucket is not None
        return self.buckets[task.bucket]


LEAST_SECONDS = 10.0  # that a job takes whose workers have spares


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    schedule: str
    microbatches: int
    recompute: bool
    window: int
    itinerary: Itinerary
    replicas: tuple[ReplicaPlan, ...]
    shares: tuple[float, ...]  # of a batch, by replica, at the start
    stages: tuple[StagePlan, ...]
    workers: tuple[str, ...]  # the kind of each that it needs, by position
    graph: Graph
    rings: tuple[Ring, ...]
    task_seconds: tuple[float, ...]  # the cost of each task that the prediction and the limit come from
    shared_bytes: int
    threads: int | None = None  # of each CPU worker, where the strategy says; None: the daemon's
    synchronisation: Synchronisation | None = None  # None where each stage updates its own parameters
    share: Literal["fixed", "adaptive", "stealing"] = "fixed"
    predicted_iteration_seconds: float = 0.0
    limit_seconds: float = 0.0
    limit_cycle: str = ""
    skipped_calls: str = ""  # as in the inspection
    compiled_calls: str = ""  # as in the inspection
    draws: bool = True  # from torch's generator: the model, or the optimizer, or it may; each by its key
    seeds_others: bool = False  # as in the inspection
    optimizer_draws: bool = False  # as in the inspection
    streams: bool = False  # one loader draws items one after another
    endless: bool = False  # the training data are such a stream without a length: one epoch, of what the steps need
    parameters: tuple[ParameterFacts, ...] = ()  # of the model, as they were inspected
    activation_bytes: tuple[int, ...] = ()  # by worker, that its forwards keep for backwards at one time, if known
    optimizer_bytes: tuple[int, ...] = ()  # the same of the optimizer's state that stands in no shared memory
    notes: tuple[str, ...] = ()  # what the job's user should know, a line each
    recovers: bool = True  # where there are SNAPSHOT tasks, they run now and then, for an attempt after a lost worker
    copies_each: bool = False  # they run in each iteration that learns
    spares: bool | None = None  # as in the strategy
    checkpoint_steps: int | None = None  # between two that are written to the disk
    checkpoint_seconds: float | None = None  # the same
    on_epoch: bool = False  # the workload's function is asked, too
    scheduler_metric: str | None = None  # of each validation: what the job's schedulers are stepped with behind it
    keeps_best: bool = False  # the best checkpoint by a validation stays
    judged: bool = False  # after each epoch lanes are sent nothing before it is known whether training goes on

    @property
    def has_spares(self) -> bool:
        """Whether CPU workers that compute have spares: not where a job that loses one begins again or is planned anew,
        and by itself not where to make them takes more than they are likely to save."""
        if not self.recovers or not self.has_snapshots or "gpu" in self.workers:
            return False
        seconds = self.predicted_iteration_seconds * self.itinerary.num_iterations
        return seconds > LEAST_SECONDS if self.spares is None else self.spares

    @property
    def turns(self) -> Turns:
        """Of its loaders."""
        counts = [replica.microbatches for replica in self.replicas]
        return Turns.among(self.workers.count("loader"), counts, steals=self.share == "stealing")

    @property
    def has_ways(self) -> bool:
        """Whether any bucket's way may change as the job runs."""
        sync = self.synchronisation
        return sync is not None and any(bucket.route is Route.EITHER for bucket in sync.buckets)

    @property
    def is_adjusted(self) -> bool:
        """Whether shares, grants or ways may change as the job runs, by what its lanes report."""
        return self.share != "fixed" or self.has_ways

    def arenas_to_save(self) -> list[str]:
        """Those that hold the trained model, by name."""
        states = [f"state-0-{stage.stage}" for stage in self.stages if stage.replica == 0]
        return states if self.synchronisation is None else [*states, "parameters"]

    def worker_bytes(self) -> dict[int, int]:
        """By the position of each worker that has a stage or updates."""
        found: Counter[int] = Counter()
        for stage in self.stages:
            found[stage.worker] += stage.memory_bytes
        for beside in (self.activation_bytes, self.optimizer_bytes):
            found.update({worker: num_bytes for worker, num_bytes in enumerate(beside) if num_bytes})
        return dict(found)

    @property
    def snapshot_places(self) -> int:
        checkpoints = self.checkpoint_steps is not None or self.checkpoint_seconds is not None
        checkpoints = checkpoints or self.keeps_best
        return num_snapshot_places(each=self.copies_each, checkpoints=checkpoints, best=self.keeps_best)

    @property
    def has_snapshots(self) -> bool:
        """Whether what training comes to can be copied as the job runs."""
        return any(task.kind is Kind.SNAPSHOT for task in self.graph.tasks)

    def snapshot_tasks(self) -> tuple[str, ...]:
        """By the names that their snapshots go by; none where the job has no snapshots."""
        return tuple(snapshot_name(task) for task in self.graph.tasks if task.kind is Kind.SNAPSHOT)

    def summary(self, worker_names: Sequence[str]) -> str:
        """Where the model is, in a line."""
        parts = [
            f"{_units(stage.first, stage.last - 1)} on {worker_names[stage.worker]}"
            for stage in self.stages
            if self.replicas[stage.replica].working_window is None
        ]
        return ", ".join([*parts, *self.windows(worker_names)])

    def windows(self, worker_names: Sequence[str]) -> list[str]:
        """In words, those of the replicas that have any."""
        return [
            f"a working window of {self.replicas[stage.replica].working_window} of "
            f"{self.replicas[stage.replica].num_stages} layers on {worker_names[stage.worker]}"
            for stage in self.stages
            if stage.stage == 0 and self.replicas[stage.replica].working_window is not None
        ]

    def updates(self, local: Collection[int], worker_names: Sequence[str]) -> str | None:
        """In words, which buckets the host updates and which of them each device, while devices update these
        themselves; None where that cannot change."""
        if self.synchronisation is None or not self.has_ways:
            return None
        workers = {stage.holder: worker_names[stage.worker] for stage in self.stages}
        by: dict[str, list[int]] = {}
        for bucket in self.synchronisation.buckets:
            devices = [workers[holder] for holder in bucket.holders if self.replicas[holder.replica].device == "gpu"]
            if bucket.route is Route.EITHER:
                who = " and ".join(devices) if bucket.index in local else "the host"
                by.setdefault(who, []).append(bucket.index)
        return "; ".join(
            f"bucket{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} by {who}" for who, numbers in by.items()
        )

    def describe(self, worker_names: tuple[str, ...] | None = None) -> dict[str, Any]:
        """The plan as people and `plan.json` see it."""
        names = worker_names or tuple(f"{kind}-{position}" for position, kind in enumerate(self.workers))
        return {
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "recompute": self.recompute,
            "window": self.window,
            "threads": self.threads,
            "replicas": [asdict(replica) for replica in self.replicas],
            "share": self.share,
            "shares": list(self.shares),
            "stages": self.describe_stages(names),
            "workers": list(names),
            "buckets": self._describe_buckets(names),
            "lanes": {
                f"{names[lane.worker]}/{lane.name}": [str(self.graph.tasks[task]) for task in program]
                for lane, program in self.graph.programs.items()
            },
            "free": {f"{names[lane.worker]}/{lane.name}": limit for lane, limit in self.graph.free.items()},
            "edges": [
                [str(self.graph.tasks[edge.source]), str(self.graph.tasks[edge.target]), edge.distance, str(edge.cause)]
                for edge in self.graph.edges
            ],
            "rings": [
                {"name": ring.name, "depth": ring.depth, "slot_bytes": ring.slot_bytes, "memory": ring.memory}
                for ring in self.rings
            ],
            "task_seconds": {str(task): self.task_seconds[task.id] for task in self.graph.tasks},
            "shared_bytes": self.shared_bytes,
            "steps": self.itinerary.steps,
            "iterations": self.itinerary.num_iterations,
            "predicted_iteration_seconds": self.predicted_iteration_seconds,
            "limit_seconds": self.limit_seconds,
            "limit_cycle": self.limit_cycle,
            "notes": list(self.notes),
        }

    def describe_stages(self, worker_names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {
                "replica": stage.replica,
                "units": [stage.first, stage.last],
                "worker": worker_names[stage.worker],
                "parameter_bytes": stage.parameter_bytes,
                "memory_bytes": stage.memory_bytes,
            }
            for stage in self.stages
        ]

    def _start_of(self, bucket: Bucket) -> Way:
        assert self.synchronisation is not None
        return Way.DEVICE if bucket.index in self.synchronisation.local else Way.HOST

    def _describe_buckets(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        if self.synchronisation is None:
            return []
        return [
            {
                "parameters": [place.parameter for place in bucket.places],
                "bytes": bucket.num_bytes,
                "route": str(bucket.route),
                **({"starts": self._start_of(bucket)} if bucket.route is Route.EITHER else {}),
                "holders": [list(holder) for holder in bucket.holders],
                "owners": {
                    names[self.synchronisation.owners[owned.owner].worker]: [owned.start, owned.stop]
                    for owned in bucket.all_ranges
                },
            }
            for bucket in self.synchronisation.buckets
        ]


def num_snapshot_places(*, each: bool, checkpoints: bool, best: bool) -> int:
    """One whole, one written, one told ahead where each iteration has one; one for the disk, and one for the best."""
    return 2 + each + checkpoints + best


def snapshot_name(task: Task) -> str:
    return f"owner-{task.owner}" if task.owner is not None else f"stage-{task.replica}-{task.stage}"


def _units(first: int, last: int) -> str:
    return f"unit {first}" if first == last else f"units {first}-{last}"
