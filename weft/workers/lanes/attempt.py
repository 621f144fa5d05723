"""One worker's part in one attempt of a job: what its lanes' tasks do, from slots to slots and from buckets to buckets.

Built by Prepare, dropped by Release. `operations` are a lane's tasks of one iteration as callables; the lane decides
when each runs, they only do the work. Where each kind is:

    LOAD, FETCH                weft.workers.lanes.loaded, weft.workload.data
    FORWARD, BACKWARD, GRAD    weft.workers.compute.stage_tasks, weft.workers.compute.gradients
    INPUT, WEIGHT              the same, weft.workers.compute.backward.split
    DOWN, UP, RELOAD, REFRESH  weft.workers.updates.bucket_updates, weft.workers.memory.replica_memory
    SYNC, UPDATE, VALIDATE     weft.workers.updates.owner
    SNAPSHOT                   weft.workers.snapshots
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

from weft.plan.buckets import Holder
from weft.plan.course import Course
from weft.plan.division import Turns
from weft.plan.graph import Task
from weft.plan.itinerary import Iteration
from weft.plan.kinds import KINDS, MODE_INDEX, Kind, Way
from weft.plan.tables import Adjustment
from weft.plan.worker_view import WorkerView
from weft.spec.job_spec import JobSpec
from weft.spec.strategy import Strategy
from weft.transport.memory.board import Board
from weft.transport.memory.directory import Directory
from weft.workers.compute.measured import Measured
from weft.workers.compute.weights import Weights
from weft.workers.devices.device import Device
from weft.workers.lanes.evidence import Evidence, Tell
from weft.workers.lanes.model_parts import ModelParts
from weft.workers.lanes.operation import Operation, Run
from weft.workers.lanes.places import Places
from weft.workers.memory.parcels import ParcelRing
from weft.workers.snapshots.copies import Copies
from weft.workers.snapshots.saved import Saved
from weft.workload.data.batches import Batches
from weft.workload.data.given_batches import is_weighed
from weft.workload.entry import load_workload
from weft.workload.workload import Workload, answer_of


class Attempt:
    """The shared parts: board, slots, course; and the operations of the lanes that this worker holds."""

    def __init__(
        self,
        spec: JobSpec,
        view: WorkerView,
        workload: Workload,
        directory: Directory,
        spin_seconds: float,
        device: Device,
        *,
        begins: int = 0,
        snapshots: Directory | None = None,
        saved: Saved | None = None,
        tell: Tell | None = None,
        again: Callable[[], Workload] | None = None,
    ) -> None:
        """begins: the first iteration. snapshots: where they go. saved: what training goes on from. tell: which of them
        lacks a part, and what tasks make that is compared. again: as of ModelParts; unset, it loads the job again."""
        self.device, self.course = device, Course(view, begins)
        self.num_tasks = view.num_tasks
        self._waits, self._wakes, self.is_adjusted = view.waits, view.wakes, view.is_adjusted
        self.reports_iterations = spec.strategy.recovery == "iteration"
        self._turns, self._directory = Turns.of(spec.strategy), directory
        places = Places(directory, view, self.course, device)
        places.ask_for_all(workload)
        self.boards = places.boards(begins, spin_seconds)
        self.board = next(iter(self.boards.values()))
        self._loaded, growing = places.loaded(workload, spec.job)
        parcels = places.of(ParcelRing, crosses=True)
        self._parcels = [parcel for _, parcel in parcels]
        self._growing = [*growing, *(parcel.growing for parcel in self._parcels)]
        num_microbatches, depth = sum(self.course.microbatches), batches_under_way(spec.strategy)
        weighs = is_weighed(workload)
        self._weights = Weights(directory, weighs=weighs, num_microbatches=num_microbatches, depth=depth)
        tasks = [task for program in view.programs.values() for task in program]
        self._batches = Batches.of_job(workload, spec.job) if any(task.kind is Kind.LOAD for task in tasks) else None
        self._is_verified = spec.strategy.verify == "digest"
        self._bounded = view.synchronisation is not None and view.synchronisation.bounded
        self._now: dict[Holder, int] = {}  # the iteration that a stage's backward is of
        self._find_tasks_run_inside(view)
        self._begin(saved)
        self._parts = ModelParts(
            spec,
            view,
            workload,
            directory,
            self.device,
            self.course,
            self._weights,
            self._loaded,
            parcels,
            self._post_gradient,
            lambda holder: self.goes_on[self._lane_of[holder]](),
            saved,
            again or partial(load_workload, spec),
        )
        self._parts.asked.go_on(saved)
        is_compared, is_alone = spec.strategy.verify == "replay", _is_changed_by_updates_alone(spec, view, workload)
        self._evidence = Evidence(self.course, self._loaded, self._parts, tell) if tell and is_compared else None
        own, where = [task for task in tasks if task.kind is Kind.SNAPSHOT], snapshots or directory
        self._snapshots = Copies(own, where, device, self.course, self._parts, tell, beside=is_alone)

    def _find_tasks_run_inside(self, view: WorkerView) -> None:
        """Milestones, and later parts of a forward: they are run from inside another task."""
        programs = view.programs.items()
        tasks = [task for _, program in programs for task in program]
        self._post = {(task.holder, _given(task.bucket)): task.id for task in tasks if KINDS[task.kind].is_milestone}
        self._lane_of = {task.holder: lane for lane, own in programs for task in own if task.kind is Kind.FORWARD}
        self._later = {after.id for _, own in programs for before, after in pairwise(own) if before.goes_on}

    def _begin(self, saved: Saved | None) -> None:
        """What is of this attempt alone, and not of the job."""
        self.measured = {lane: Measured() for lane in self.boards}
        # By milestone: who posts it from inside another task.
        self.milestones: dict[int, Callable[[int, int], None]] = dict.fromkeys(self._post.values(), self.board.post)
        self.goes_on: dict[str, Callable[[], None]] = {}  # by lane, what ends its task and begins the next from inside
        self._boards_to_abort = [self.board]
        self._begun_from = saved if saved is not None and saved.place is not None else None

    def rewind(self, view: WorkerView, begins: int, saved: Saved) -> bool:
        """To iteration `begins` of another attempt, as if it were made anew and went on from `saved`; whether it could.
        Its lanes have ended, and so have all others of the job. view: as it was, but for shares and ways that the job
        has come to; the model, the data, slots and mappings stay."""
        if not self._parts.can_rewind or not self._parts.fits(saved):
            return False
        self.course.rewind(view, begins)
        for board in self.boards.values():
            board.rewind(begins)
        self._begin(saved)
        for growing in self._growing:
            growing.rewind()
        for parcel in self._parcels:
            parcel.rewind()
        if self._batches is not None:
            self._batches.rewind()
        self._parts.rewind(saved)
        self._parts.asked.go_on(saved)
        self._snapshots.reopen()
        return True

    def notices(self) -> Iterator[str]:
        """What people should know of how it went: which slots have had to grow (told by who writes them), and what was
        not copied."""
        rings = [each for each in self._growing if each.count]
        if rings:
            count = sum(each.count for each in rings)
            yield (
                f"slots have grown {count} time{'s' * (count > 1)}, for batches larger than those inspected: "
                + ", ".join(each.told() for each in rings)
            )
        yield from self._snapshots.notices()

    def adjust(self, first: int, adjustment: Adjustment) -> None:
        """As Course.adjust. What it began with a directory may come to want, until another snapshot goes there: then it
        may have another shape, by the hands of another worker, and this one must not hand on what was there before."""
        if self._begun_from is not None and self._begun_from.place == adjustment.snapshot:
            self._begun_from = None
        self.course.adjust(first, adjustment)

    def iteration(self, index: int) -> Iteration:
        return self.course.iteration(index)

    def abort(self) -> None:
        """Ends every wait of its lanes, and of the other workers' too."""
        for board in self._boards_to_abort:
            board.abort()

    def ask(self, values: Mapping[str, Any], arenas: Iterable[str]) -> dict[str, Any]:
        """What the user's function says of what an epoch has come to, and what it has changed that other processes are
        to be told: of the message "epoch". arenas: that would be saved. Errors: WorkloadError, and those of
        Directory."""
        asked = self._parts.asked
        assert asked.function is not None
        if asked.optimizer is not None:
            asked.optimizer.catch_up(values["step"])
        state = {name: tensor for arena in arenas for name, tensor in self._directory.find(arena).items().items()}
        with ExitStack() as stack:
            for cut in self._parts.cuts:
                stack.enter_context(cut.lifted())
            own = [self._parts.attributes[holder] for holder in asked.holders]
            found = stack.enter_context(asked.whole.shown(state, own, training=not values["validation"]))
            answer = answer_of(asked.function, asked.names, values)
        self._begin_anew()
        return {"stop": answer.stops, "values": dict(answer.values), "changes": found.packed()}

    def take(self, changes: bytes) -> None:
        """As another process has told them. While no lane runs."""
        self._parts.asked.take(changes, self._parts.attributes)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """With what the user's function has left."""
        for shown in self._parts.shown.values():
            shown.begin()
        if self._parts.updates is not None:
            self._parts.updates.read_options()

    def hand_memory_on(self) -> None:
        """To the directory that has taken the place of one that died. Errors: those of Directory."""
        self._directory.hand_on()

    def strand(self) -> None:
        """In a child that the job's code has forked, which has no lanes."""
        for board in self.boards.values():
            board.strand()

    def close(self, *, for_good: bool = False) -> None:
        """Its lanes have ended. for_good: it is not rewound."""
        self._snapshots.close()
        for stage in self._parts.stages.values() if for_good else ():
            stage.close()

    def abort_with(self, board: Board) -> None:
        """Another board on which lanes wait."""
        self._boards_to_abort.append(board)

    def _post_gradient(self, holder: Holder, bucket: int) -> None:
        """From inside a backward."""
        task = self._post[holder, bucket]
        self.milestones[task](task, self._now[holder])

    def operations(self, lane: str, program: Sequence[Task]) -> dict[int, Operation]:
        """The operations of a lane's tasks, by task id."""
        measured, updates = self.measured[lane], self._parts.updates
        copies = [task.id for task in program if task.kind is Kind.SNAPSHOT]
        finish_copies = partial(self._snapshots.finish, copies) if copies else None
        return {
            task.id: Operation(
                task=task.id,
                mode=MODE_INDEX[KINDS[task.kind].mode],
                waits=tuple(
                    (edge.source, edge.distance, MODE_INDEX[f"stall_{edge.cause}"])
                    for edge in self._waits.get(task.id, ())
                ),
                wakes=task.id in self._wakes,
                passes=KINDS[task.kind].learns and not self._verifies(task),
                run=self._run_of(task, measured),
                update_needed=self._parts.update_needed(task),
                takes=self._takes(task),
                skips=self._skips(task),
                place=_place_of(task, num_replicas=len(self.course.microbatches)),
                is_milestone=KINDS[task.kind].is_milestone,
                reads_on_host=updates is not None and (updates.reads_norm(task) or updates.sums_on_host(task)),
                is_read_on_host=self._bounded and task.kind is Kind.SYNC,
                rests=task.kind is Kind.LOAD,
                finish_copies=finish_copies if KINDS[task.kind].mode == "update" else None,
            )
            for task in program
        }

    def _takes(self, task: Task) -> Callable[[Iteration], bool] | None:
        if task.kind is Kind.SNAPSHOT:
            verifies = self._verifies(task)
            return lambda iteration: self._is_copied(task, iteration) if iteration.learns else verifies
        if task.kind is Kind.REFRESH:
            return self.course.refreshes
        if task.kind is Kind.LOAD and self._turns.takers > 1:
            turns, loader = self._turns, task.holder.stage
            position = turns.order().index((task.holder.replica, _given(task.microbatch)))
            return lambda iteration: turns.has(loader, position, iteration.index)
        if self.course.steals and KINDS[task.kind].of_position:
            return self._is_given_a_microbatch(task)
        return self._parts.updates.takes(task) if self._parts.updates is not None else None

    def _is_given_a_microbatch(self, task: Task) -> Callable[[Iteration], bool] | None:
        """At the first position an iteration begins and at the last one it ends, with a microbatch or without."""
        course, replica, position = self.course, task.holder.replica, _given(task.microbatch)
        if not 0 < position < course.microbatches[replica] - 1:
            return None
        return lambda iteration: course.part(iteration, replica, position).size > 0

    def _is_copied(self, task: Task, iteration: Iteration) -> bool:
        """Or is compared."""
        return self._snapshots.takes(task, iteration) or self.course.is_compared(iteration)

    def _verifies(self, task: Task) -> bool:
        """Whether the task looks, behind a validation too, whether what was read there is still as it was left: the
        next update is the first to look otherwise, and the validation would have been told by then."""
        return task.kind is Kind.SNAPSHOT and self._is_verified and self._parts.updates_by(task)

    def _skips(self, task: Task) -> Callable[[Iteration], Collection[int]] | None:
        ways = [edge.way for edge in self._waits.get(task.id, ())]
        if not any(ways):
            return None
        bucket, course = _given(task.bucket), self.course
        of_host, of_device = ([n for n, each in enumerate(ways) if each is way] for way in (Way.HOST, Way.DEVICE))
        return lambda iteration: of_host if course.is_local(bucket, iteration) else of_device

    def _run_of(self, task: Task, measured: Measured) -> Run:
        if task.id in self._later:  # what there is to do the first part of the forward does
            return lambda iteration: None
        run = self._bind(task, measured)
        return run if self._evidence is None else self._evidence.around(task, run)

    def _bind(self, task: Task, measured: Measured) -> Run:
        parts, updates = self._parts, self._parts.updates
        match task.kind:
            case Kind.LOAD:
                r, m, batches = task.holder.replica, _given(task.microbatch), self._batches
                assert batches is not None
                return lambda iteration: self._loaded.load(batches, self._weights, iteration, r, m)
            case Kind.FETCH:
                holder, m = task.holder, _given(task.microbatch)
                return lambda iteration: self._loaded.fetch(holder, iteration, m)
            case Kind.FORWARD:
                stage, m = parts.stages[task.holder], _given(task.microbatch)
                return lambda iteration: stage.forward(iteration, m, measured)
            case Kind.BACKWARD:
                return self._backward(task, parts.stages[task.holder].backward)
            case Kind.INPUT:
                return self._backward(task, parts.stages[task.holder].backward_input)
            case Kind.WEIGHT:
                return self._backward(task, parts.stages[task.holder].backward_weight)
            case Kind.GRAD:
                stage, b = parts.stages[task.holder], _given(task.bucket)
                return lambda iteration: stage.finish_gradient(iteration, b)
            case Kind.SNAPSHOT:
                return partial(self._snapshots.run, task)
            case Kind.UPDATE if updates is None:
                own = parts.own_updates[task.holder.stage]
                return lambda iteration: own.run(iteration, measured)
            case _:
                assert updates is not None
                return updates.bind(task, measured)

    def _backward(self, task: Task, run: Callable[[Iteration, int], None]) -> Run:
        holder, microbatch = task.holder, _given(task.microbatch)

        def backward(iteration: Iteration) -> None:
            self._now[holder] = iteration.index  # what the hooks post
            run(iteration, microbatch)

        return backward


def _is_changed_by_updates_alone(spec: JobSpec, view: WorkerView, workload: Workload) -> bool:
    """Whether nothing else changes parameters and optimizer state: neither the job's own code nor a device, with which
    the host's take turns; and nobody compares them with what updates have left, or asks for a copy with the iteration's
    end."""
    if spec.strategy.recovery == "iteration":
        return False
    of_host = spec.strategy.verify == "off" and all(replica.device == "cpu" for replica in view.replicas)
    return of_host and workload.step is None and not any(stage.rewrites for stage in view.stages)


def _given(number: int | None) -> int:
    """What every task of its kind has."""
    assert number is not None
    return number


_PARTS_OF_BACKWARD = {Kind.INPUT: "the first part of backward", Kind.WEIGHT: "the second part of backward"}


def _place_of(task: Task, *, num_replicas: int) -> str:
    parts = [_PARTS_OF_BACKWARD.get(task.kind, str(task.kind))]
    if task.owner is None and task.kind is not Kind.LOAD:
        parts[0] += f" of stage {task.stage}"
    if num_replicas > 1 and task.owner is None:
        parts.append(f"replica {task.replica}")
    about = (("microbatch", task.microbatch), ("bucket", None if task.goes_on else task.bucket))
    parts += [f"{name} {number}" for name, number in about if number is not None]
    return ", ".join(parts)


def batches_under_way(strategy: Strategy) -> int:
    """Loaded, at most, and not yet through the last backward of every replica; the one being loaded counts too.

    A device hands the loader's slots back when it has fetched them, which is up to `transfer` microbatches and those in
    flight (at most a batch) before it computes with what is in them. A loader of one replica's microbatches alone goes
    so far ahead of that replica, which goes as far ahead of another one, behind that one's loader.
    """
    ahead = Turns.of(strategy).batches_ahead(strategy.prefetch.most_batches) + strategy.prefetch.transfer + 1
    return (ahead if strategy.loaders == 1 else 2 * ahead) + 1
