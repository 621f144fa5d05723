"""Bucket updates: which buckets the lanes of one worker sum and update, and by which optimizer.

    owner           a lane of the plan's `owners`: its range of every bucket that it owns, shared or a device's own
    device's own    UPDATE(r,s,b), VALIDATE(r,s) of a device's parameters with the sum that has come up

A device that updates a bucket alone owns it; then the bucket's parameters and gradient are the device's own as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from weft.plan.buckets import Bucket, Holder, Route
from weft.plan.course import Course
from weft.plan.graph import Task
from weft.plan.itinerary import Iteration
from weft.plan.kinds import Kind, Way
from weft.plan.worker_view import WorkerView
from weft.spec.job_spec import JobSpec
from weft.workers.compute.measured import Measured
from weft.workers.devices.device import Accelerator, Device
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workers.memory.replica_memory import ReplicaMemory
from weft.workers.snapshots.held import Held
from weft.workers.snapshots.saved import Saved
from weft.workers.updates.digests import Digests
from weft.workers.updates.draws import drawing_of
from weft.workers.updates.moving_state import Moves
from weft.workers.updates.norm import DeviceNorm, Norm
from weft.workers.updates.optimizer_state import is_elementwise
from weft.workers.updates.owner import Owner, missing_parameters
from weft.workers.updates.updates import Updates, group_of, make_shard
from weft.workload.optimizer import can_skip_on_device, make_optimizer, tensors_by_place
from weft.workload.workload import Workload, WorkloadError


class BucketUpdates:
    """parameters: the model's, with their names. memories: of the stages that the worker holds."""

    def __init__(
        self,
        spec: JobSpec,
        view: WorkerView,
        workload: Workload,
        parameters: Sequence[nn.Parameter],
        memory: BucketMemory,
        moves: Moves,
        course: Course,
        device: Device,
        memories: Mapping[Holder, ReplicaMemory],
        names: Sequence[str],
    ) -> None:
        assert view.synchronisation is not None
        self._strategy, self._view, self._sync = spec.strategy, view, view.synchronisation
        self._drawing = drawing_of(view, device, spec.job.seed)
        self._memory, self._moves, self._course, self._device = memory, moves, course, device
        self._memories, self._names = memories, names
        self._launches = isinstance(device, Accelerator)
        self.owners: dict[int, Owner] = {}  # by number
        self._of_devices: dict[Holder, Updates] = {}
        self._of_owners: dict[int, Updates | None] = {}
        self._of_buckets: dict[tuple[Holder, int], Updates] = {}  # of a device's own parameters
        self._publishing: set[Holder] = set()  # whose own parameters nobody else has to show
        # By owner, or by replica and stage: the bucket that its lane updates last.
        self._last = {
            (task.owner, task.replica, task.stage): task.bucket
            for program in view.programs.values()
            for task in program
            if task.kind is Kind.UPDATE
        }
        for number, lane in enumerate(self._sync.owners):
            if lane.worker == view.position:
                self._add_owner(number, workload, parameters)
        for holder in memories:
            if not self._is_cpu(holder[0]):
                self._add_device(holder, workload, parameters)

    # --- set-up

    def _add_device(self, holder: Holder, workload: Workload, parameters: Sequence[nn.Parameter]) -> None:
        """The updates that one stage's device makes with sums; of parameters that no CPU replica has, the first holder
        publishes its own."""
        summed = [bucket for bucket in self._memory.held(holder) if bucket.comes_up_summed]
        if not summed:
            return
        bounds = {bucket.index: (0, bucket.num_elements) for bucket in summed}
        alone = not any(self._is_cpu(r) for bucket in summed for r, _ in bucket.holders)
        own = {bucket.index: self._memories[holder] for bucket in summed}
        publishes = alone and holder == summed[0].holders[0]
        self._publishing |= {holder} if publishes else set()
        self._of_devices[holder] = self._updates(
            workload,
            parameters,
            summed,
            bounds,
            own,
            speculative=self._sync.devices_speculate,
            publishes=publishes,
            last=self._last.get((None, *holder)),
        )
        self._of_buckets |= {(holder, bucket.index): self._of_devices[holder] for bucket in summed}

    def _add_owner(self, number: int, workload: Workload, parameters: Sequence[nn.Parameter]) -> None:
        owned = [bucket for bucket in self._memory.buckets if number in bucket.owners()]
        alone = [b for b in owned if b.route is Route.DEVICE or number in [each.owner for each in b.device_ranges]]
        own = {bucket.index: self._memories[bucket.holders[0]] for bucket in alone}
        updated = [
            bucket
            for bucket in owned
            if bucket.route is not Route.SUM or any(self._is_cpu(r) for r, _ in bucket.holders)
        ]
        updates = None
        if updated:
            bounds = {bucket.index: bucket.range_of(number) for bucket in updated}
            updates = self._updates(
                workload,
                parameters,
                updated,
                bounds,
                own,
                speculative=self._sync.speculative,
                publishes=bool(alone),
                last=self._last.get((number, None, None)),
            )
            self._of_buckets |= {(bucket.holders[0], bucket.index): updates for bucket in alone}
        gradients = {index: (memory.gradients or {})[index] for index, memory in own.items()}
        self._of_owners[number] = updates
        self.owners[number] = Owner(
            number, self._memory, self._course, gradients, updates, squares=self._sync.bounded, device=self._device
        )

    def _updates(
        self,
        workload: Workload,
        parameters: Sequence[nn.Parameter],
        buckets: list[Bucket],
        bounds: Mapping[int, tuple[int, int]],
        own: Mapping[int, ReplicaMemory],
        *,
        speculative: bool,
        publishes: bool,
        last: int | None,
    ) -> Updates:
        """own: whose memory is updated, by bucket; nothing for the shared one."""
        moves, course = self._moves, self._course
        knows_norm = not self._launches or self._sync.devices_speculate
        template = make_optimizer(workload.optimizer, parameters)
        assert template is not None
        self._check_values(template, buckets)
        groups = group_of(template, parameters)
        shards = {
            b.index: make_shard(b, bounds[b.index], *self._elements(b, own.get(b.index)), groups) for b in buckets
        }

        def begin(bucket: Bucket, iteration: Iteration) -> None:
            if not own:
                moves.begin(updates, bucket, iteration)

        def done(bucket: Bucket, iteration: Iteration) -> None:
            if not own:
                moves.done(updates, bucket, iteration)
            self._keep_version(bucket, bounds[bucket.index], iteration)
            if publishes and course.may_be_last_step(iteration):
                own[bucket.index].publish(bucket, bounds[bucket.index])

        updates = Updates(
            workload,
            template,
            parameters,
            buckets,
            shards,
            norm=self._norm(template, knows_norm=knows_norm) if self._sync.bounded else None,
            speculative=speculative,
            chooses=speculative and knows_norm,
            missing=missing_parameters(self._memory, course),
            begin=begin,
            done=done,
            takes=moves.device_takes if own else moves.host_takes,
            value=course.measured,
            drawing=self._drawing,
            device=self._device,
            reports=self._view.position == self._view.reporter,
            digests=Digests(self._names) if self._strategy.verify == "digest" else None,
            last=last,
            outside=set(range(len(parameters))) - {place.parameter for b in self._memory.buckets for place in b.places},
        )
        return updates

    def _check_values(self, template: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """An optimizer that is built here has to find values where it keeps some by place. Errors: WorkloadError."""
        there = {number for memory in self._memories.values() for number in memory.held_parameters()}
        lacking = [place.parameter for bucket in buckets for place in bucket.places if place.parameter not in there]
        if lacking and not is_elementwise(template) and (attribute := tensors_by_place(template)) is not None:
            raise WorkloadError(
                f"Workload.optimizer: {type(template).__name__} keeps tensors in {attribute!r}, and the worker that "
                f"updates {self._names[lacking[0]]!r} has no values of it when it builds those; make them in its first "
                "step, in optimizer.state[parameter], or take a strategy that updates parameters where they are "
                "computed with (stages, ddp)"
            )

    def _elements(self, bucket: Bucket, own: ReplicaMemory | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and gradient: a device's own, or the shared ones."""
        if own is None:
            return self._memory.parameters(bucket), self._memory.sum(bucket)
        return own.values[bucket.index], (own.gradients or {})[bucket.index]

    def _keep_version(self, bucket: Bucket, bounds: tuple[int, int], iteration: Iteration) -> None:
        """What stale replicas will read of the update."""
        if self._memory.num_versions:
            updated = slice(*bounds)
            version = self._memory.version(bucket, iteration.step + 1)
            version[updated].copy_(self._memory.parameters(bucket)[updated])

    def _is_cpu(self, replica: int) -> bool:
        return self._view.replicas[replica].device == "cpu"

    def _norm(self, template: torch.optim.Optimizer, *, knows_norm: bool) -> Norm:
        """A device's host need not know it, unless it has to leave out a step that the device cannot."""
        memory, strategy, device = self._memory, self._strategy, self._device
        clip_norm, skips = strategy.clip_norm, strategy.skip_nonfinite
        if not knows_norm and (not skips or can_skip_on_device(template)):
            return DeviceNorm(memory, self._course, clip_norm, skips_nonfinite=skips, device=device)
        return Norm(memory, self._course, clip_norm, skips_nonfinite=skips)

    # --- what training has come to

    def hold_owned(self, owner: int, held: Held, names: Sequence[str], iteration: Iteration) -> None:
        """What an owner updates. names: of the parameters."""
        if (updates := self._of_owners[owner]) is not None:
            updates.hold(held, names, iteration)

    def check_owned(self, owner: int, iteration: Iteration) -> None:
        """Errors: StateCorrupted, where what the owner has updated is no longer so."""
        if (updates := self._of_owners[owner]) is not None:
            updates.check(iteration)

    def hold_own(self, holder: Holder, held: Held, names: Sequence[str], iteration: Iteration) -> None:
        """What a device updates with sums, unless others have the same to show."""
        if holder in self._publishing:
            self._of_devices[holder].hold(held, names, iteration)

    def restore(self, saved: Saved, names: Sequence[str], first: Iteration) -> None:
        """first: the iteration that training goes on with."""
        for updates in [*self._of_owners.values(), *self._of_devices.values()]:
            if updates is not None:
                updates.restore(saved, names, first)

    def rewind(self) -> None:
        """To before `restore`."""
        for updates in [*self._of_owners.values(), *self._of_devices.values()]:
            if updates is not None:
                updates.rewind()

    @property
    def has_optimizer(self) -> bool:
        return any(updates is not None for updates in [*self._of_owners.values(), *self._of_devices.values()])

    def read_options(self) -> None:
        """Takes over what somebody has changed in the groups of the user's optimizer."""
        for updates in [*self._of_owners.values(), *self._of_devices.values()]:
            if updates is not None:
                updates.read_options()

    # --- tasks

    def takes(self, task: Task) -> Callable[[Iteration], bool] | None:
        """Whether a task is of the way that its bucket goes; None where it runs in any case."""
        if task.way is None:
            return None
        bucket = self._sync.bucket_of(task)
        if task.kind is Kind.UPDATE:
            updates = self._updates_of(task)
            if updates is not None and updates.ends_with(bucket):
                return None
        b, course, is_device = bucket.index, self._course, task.way is Way.DEVICE
        return lambda iteration: iteration.learns and course.is_local(b, iteration) is is_device

    def reads_norm(self, task: Task) -> bool:
        """Whether the task reads on the host what the norm of the gradient is."""
        if task.kind not in (Kind.UPDATE, Kind.VALIDATE):
            return False
        updates = self._updates_of(task)
        return updates is not None and updates.reads_norm(task.kind)

    def _updates_of(self, task: Task) -> Updates | None:
        """Of an UPDATE or VALIDATE."""
        if task.owner is not None:
            return self._of_owners[task.owner]
        return self._of_devices[task.holder]

    def sums_on_host(self, task: Task) -> bool:
        """Whether a SYNC in a device's lane adds up what has come down, since no other worker does: of a parameter that
        stages share."""
        if task.kind is not Kind.SYNC or not self._launches:
            return False
        assert task.owner is not None
        return not self.owners[task.owner].is_own(self._sync.bucket_of(task).index)

    def gradients(self, task: Task, iteration: Iteration) -> list[tuple[int, torch.Tensor]]:
        """That a SYNC is about to add up, of the host's: (replica, its part)."""
        assert task.owner is not None
        return self.owners[task.owner].gradients(self._sync.bucket_of(task).index, iteration)

    def bind(self, task: Task, measured: Measured) -> Callable[[Iteration], None]:
        """What a task of a bucket does in an iteration."""
        if task.owner is not None:
            return self.owners[task.owner].bind(task, measured)
        match task.kind, task.bucket:
            case Kind.DOWN, int(b):
                return partial(self._down, task.holder, b)
            case Kind.UP, int(b):
                return partial(self._up, task.holder, b)
            case Kind.RELOAD, int(b):
                return lambda _: self._memories[task.holder].load(b)
            case Kind.REFRESH, None:
                return lambda _: self._memories[task.holder].refresh()
            case Kind.UPDATE, int(b):
                return partial(self._update_device, task.holder, b, measured=measured)
            case Kind.VALIDATE, None:
                return partial(self._of_devices[task.holder].validate, measured=measured)
            case _:
                raise AssertionError(f"{task} is nothing that is done with a bucket")

    def _update_device(self, holder: Holder, bucket: int, iteration: Iteration, measured: Measured) -> None:
        """UPDATE(r,s,b) of a device's own parameters with the sum that has come up."""
        self._of_devices[holder].update(self._memory.buckets[bucket], iteration, measured)

    def _down(self, holder: Holder, bucket: int, iteration: Iteration) -> None:
        """DOWN(r,s,b): the gradient, and what else the host needs if the bucket comes down anew."""
        memory, view = self._memories[holder], self._memory.buckets[bucket]
        memory.down(bucket, iteration)
        if view.route is Route.EITHER and view.holders[0] == holder:
            self._moves.down(self._of_buckets[holder, bucket], view, memory.values[bucket], iteration)

    def _up(self, holder: Holder, bucket: int, iteration: Iteration) -> None:
        """UP(r,s,b): the parameters or the sum, and what else the device needs if the bucket stays up from now on."""
        view = self._memory.buckets[bucket]
        self._memories[holder].up(bucket, iteration)
        if view.route is Route.EITHER and iteration.learns:
            self._moves.up(self._of_buckets[holder, bucket], view, iteration)
