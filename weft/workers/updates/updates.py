"""Updates: one worker's optimizer over the parts of buckets that it updates, and when an update stands.

    nothing bounds it     UPDATE: step
    wait for the norm     UPDATE: step with the clipping factor, or none at all
    speculate             UPDATE: step as if the norm were small   VALIDATE: leave it, or undo it and step again

Where the last step was clipped, or skipped, the next one most likely is: UPDATE then leaves its bucket to VALIDATE. A
device whose host does not know the norm cannot choose and always leaves it: it steps once, with the factor.

The norm is known once every owner has done its last SYNC of the iteration; until then the graph lets nobody read it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from weft.plan.buckets import Bucket
from weft.plan.error_places import step_place, within
from weft.plan.itinerary import Iteration
from weft.plan.kinds import Kind
from weft.workers.compute.measured import Measured
from weft.workers.devices.device import Accelerator, Device
from weft.workers.snapshots.held import Held
from weft.workers.snapshots.saved import Saved
from weft.workers.updates.digests import Digests
from weft.workers.updates.draws import Drawing, draws_nothing
from weft.workers.updates.norm import Bound, DeviceNorm, Norm
from weft.workers.updates.optimizer_state import State, how_it_updates, options, restored_options
from weft.workers.updates.sharded_optimizer import Segment, Shard, ShardedOptimizer
from weft.workload.optimizer import learning_rate_of
from weft.workload.workload import Workload, WorkloadError, make_scheduler, steps_scheduler

Missing = Callable[[Bucket, Iteration], frozenset[int]]
Done = Callable[[Bucket, Iteration], None]
Takes = Callable[[Bucket, Iteration], bool]
MAX_NAMES = 3  # of what an optimizer or a scheduler keeps, in a message; arbitrary
_TWO_WAYS_OUT = "give the one of then, or begin with the weights alone (Workload.start)"

Value = Callable[[Iteration], float | None]


class Updates:
    """shards: by bucket. norm: None where nothing bounds updates. speculative: the step ends with VALIDATE. chooses:
    whether the host knows the norm by then; unset it does where it has the shards. begin: called before a bucket's
    update, done once it stands. takes: whether a bucket is updated here in an iteration. value: what the scheduler is
    to be stepped with before it. drawing: around the step of a bucket. device: what has the shards. reports: this one
    tells the learning rate and the norm of each step. digests: where what an update leaves is compared with what the
    next one finds. last: the bucket that is updated last; unset, that of `buckets`. outside: parameters that no bucket
    has, of whomever."""

    def __init__(
        self,
        workload: Workload,
        template: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Bucket],
        shards: Mapping[int, Shard],
        *,
        norm: Norm | None,
        speculative: bool,
        chooses: bool | None = None,
        missing: Missing,
        done: Done,
        begin: Done = lambda bucket, iteration: None,
        takes: Takes = lambda bucket, iteration: True,
        value: Value = lambda iteration: None,
        drawing: Drawing = draws_nothing,
        device: Device,
        reports: bool,
        digests: Digests | None = None,
        last: int | None = None,
        outside: Collection[int] = (),
    ) -> None:
        self._template = template
        self._parameters = parameters
        self._scheduler = make_scheduler(workload.scheduler, template)
        self._workload = workload
        self._device = device
        self._chooses = speculative and (not isinstance(device, Accelerator) if chooses is None else chooses)
        self._optimizer = ShardedOptimizer(template, shards, parameters=parameters, speculative=self._chooses)
        self._optimizer.read_hyperparameters()
        self._buckets = buckets
        self._last = buckets[-1].index if last is None else last
        self._norm = norm
        self._speculative = speculative
        self._speculated: set[int] = set()  # buckets of the iteration that is on its way
        self._stood = self._chooses  # the last step, as it was
        self._missing = missing
        self._begin = begin
        self._done = done
        self._takes = takes
        self._value = value
        self._drawing = drawing
        self._first = {index: shard.segments[0].parameter for index, shard in shards.items() if shard.segments}
        self._begun = -1  # the iteration of the newest step
        self._reports = reports
        self._digests = digests
        self._outside = frozenset(id(parameters[number]) for number in outside)

    def update(self, bucket: Bucket, iteration: Iteration, measured: Measured) -> None:
        """The last bucket's also ends the step, even if it is updated elsewhere."""
        self._begin_step(iteration)
        takes = self._takes(bucket, iteration)
        if takes:
            self._begin(bucket, iteration)
        if self._speculative:
            if takes and self._stood:
                self._check(bucket)
                with self._drawing(iteration.step, self._first.get(bucket.index, 0)):
                    self._optimizer.speculate(bucket.index, touched=self._touched(bucket, iteration), squares=False)
                self._speculated.add(bucket.index)
            return
        bound = Bound() if self._norm is None else self._norm.bound(iteration)
        if takes:
            self._check(bucket)
            self._step(bucket, iteration, bound)
            self._finish(bucket, iteration)
        if self.ends_with(bucket):
            self._end_step(iteration, measured, bound)

    def ends_with(self, bucket: Bucket) -> bool:
        """Whether the step ends with the bucket's UPDATE, not with a VALIDATE."""
        return not self._speculative and bucket.index == self._last

    def reads_norm(self, kind: Kind) -> bool:
        """Whether a task of the kind reads on the host what the norm is."""
        bounded = self._norm is not None and not isinstance(self._norm, DeviceNorm)
        return bounded and kind is (Kind.VALIDATE if self._speculative else Kind.UPDATE)

    def take_state(self, bucket: Bucket, *, keeps: bool) -> Iterator[tuple[Segment, State]]:
        """What the optimizer knows of each segment of the bucket's shard, and without `keeps` no longer knows."""
        return self._optimizer.take_state(bucket.index, keeps=keeps)

    def give_state(self, bucket: Bucket, state_of: Callable[[Segment], State]) -> None:
        self._optimizer.give_state(bucket.index, state_of)

    def hold(self, held: Held, names: Sequence[str], iteration: Iteration) -> None:
        """What is updated here in the iteration, as it is then. names: of the parameters."""
        for bucket in self._buckets:
            if self._takes(bucket, iteration):
                self._optimizer.hold(bucket.index, held, names)
        self._hold_frozen(held, names)
        hold_scheduler_and_kinds(held, self._template, self._scheduler)

    def _hold_frozen(self, held: Held, names: Sequence[str]) -> None:
        """The options of parameters that no bucket has: a scheduler goes on with the rate of their group, too. They are
        those of the group's others: the template, which never steps, does not know what a step has counted there."""
        by_id = dict(zip(map(id, self._parameters), names, strict=True))
        for group, members in zip(self._template.param_groups, members_of(self._template, by_id), strict=True):
            outside = {by_id[id(each)] for each in group["params"] if id(each) in self._outside}
            if not outside.issuperset(members):
                known = next((held.options[name] for name in members if name in held.options), None)
            else:
                known = options(group)
            if known is not None:
                held.options |= dict.fromkeys(outside, known)

    def rewind(self) -> None:
        """To before `restore`: of the steps that were made, or half made, nothing is known."""
        self._speculated.clear()
        self._stood, self._begun = self._chooses, -1
        for bucket in self._buckets:
            self._optimizer.rewind(bucket.index)
        if self._digests is not None:
            self._digests.forget()

    def restore(self, saved: Saved, names: Sequence[str], first: Iteration) -> None:
        """Goes on from what was saved with what is updated here from the iteration on; the parameters have their values
        already."""
        by_id = dict(zip(map(id, self._parameters), names, strict=True))
        restore_template(self._template, self._scheduler, saved, members_of(self._template, by_id))
        self._optimizer.read_hyperparameters()
        for bucket in self._buckets:
            if self._takes(bucket, first):
                self._optimizer.restore(bucket.index, saved, names, self._parameters)

    def validate(self, iteration: Iteration, measured: Measured) -> None:
        """All updates of the iteration have been made; the norm is known."""
        assert self._norm is not None
        self._begin_step(iteration)
        bound = self._norm.bound(iteration)
        self._stood = self._chooses and bool(bound.scale == 1.0) and not bound.skips
        for bucket in self._buckets:
            if not self._takes(bucket, iteration):
                continue
            stands = False
            if bucket.index in self._speculated:
                stands = self._stood
                (self._optimizer.confirm if stands else self._optimizer.undo)(bucket.index)
            else:
                self._check(bucket)
            if not stands:
                self._step(bucket, iteration, bound)
            self._finish(bucket, iteration)
        self._speculated.clear()
        self._end_step(iteration, measured, bound)

    def check(self, iteration: Iteration) -> None:
        """That the iteration's updates are still as they were made. Errors: StateCorrupted."""
        for bucket in self._buckets:
            if self._takes(bucket, iteration):
                self._check(bucket)

    def _check(self, bucket: Bucket) -> None:
        if self._digests is not None:
            self._digests.check(bucket.index, self._held(bucket, self._digests))

    def _finish(self, bucket: Bucket, iteration: Iteration) -> None:
        """Its update stands."""
        if self._digests is not None:
            self._digests.note(bucket.index, self._held(bucket, self._digests))
        self._done(bucket, iteration)

    def _held(self, bucket: Bucket, digests: Digests) -> Held:
        held = Held()
        self._optimizer.hold(bucket.index, held, digests.names)
        return held

    def read_options(self) -> None:
        """As of BucketUpdates."""
        self._optimizer.read_hyperparameters()

    def _begin_step(self, iteration: Iteration) -> None:
        """With the first of its tasks in an iteration, whichever that is."""
        if iteration.index == self._begun:
            return
        self._begun = iteration.index
        if self._scheduler is not None and (value := self._value(iteration)) is not None:
            step_scheduler(self._scheduler, value)
            self._optimizer.read_hyperparameters()

    def _step(self, bucket: Bucket, iteration: Iteration, bound: Bound) -> None:
        if not bound.skips:
            touched = self._touched(bucket, iteration)
            with self._drawing(iteration.step, self._first.get(bucket.index, 0)):
                self._optimizer.step(bucket.index, touched=touched, scale=bound.scale, found_inf=bound.found_inf)

    def _touched(self, bucket: Bucket, iteration: Iteration) -> Callable[[int], bool] | None:
        missing = self._missing(bucket, iteration)
        return (lambda parameter: parameter not in missing) if missing else None

    def _end_step(self, iteration: Iteration, measured: Measured, bound: Bound) -> None:
        if self._reports:
            self._report(iteration, measured, bound.norm)
        if self._scheduler is not None and steps_scheduler(self._workload, ends_epoch=iteration.ends_epoch):
            step_scheduler(self._scheduler)
            self._optimizer.read_hyperparameters()

    def _report(self, iteration: Iteration, measured: Measured, norm: float | torch.Tensor | None) -> None:
        """Once the step is made."""
        facts = {"lr": learning_rate_of(self._template)}

        def complete(norm: float | None) -> None:
            if norm is not None and self._norm is not None:
                facts["grad_norm"] = norm
                facts.update({"skipped": 1.0} if self._norm.skips(norm) else {})
            measured.complete(iteration.index, facts)

        if isinstance(norm, torch.Tensor):
            self._device.tell(norm, complete)
        else:
            self._device.after(lambda: complete(norm))


def members_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Of each group the names of its parameters. names: by their ids."""
    return [[names[id(each)] for each in group["params"] if id(each) in names] for group in optimizer.param_groups]


def hold_scheduler_and_kinds(held: Held, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
    """Which are the same wherever the job's parameters are updated."""
    held.scheduler = None if scheduler is None else scheduler.state_dict()
    held.kinds = _kinds(optimizer, scheduler)


def _kinds(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> dict[str, str]:
    return {
        "optimizer": type(optimizer).__name__,
        "scheduler": "" if scheduler is None else type(scheduler).__name__,
    }


def restore_template(
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
    saved: Saved,
    members: Sequence[Sequence[str]],
) -> None:
    """The options of the user's optimizer, and its scheduler. members: names of parameters, by group. Errors:
    WorkloadError where one is of another class than the one that was saved."""
    for field, kind in _kinds(optimizer, scheduler).items():  # older releases have saved none
        if (was := saved.kinds.get(field, kind)) != kind:
            told = f"gives {kind or 'none'}, and {was or 'none'} was saved"
            raise WorkloadError(f"Workload.{field} {told}; {_TWO_WAYS_OUT}")
    for group, names in zip(optimizer.param_groups, members, strict=True):
        if restored := restored_options(saved, names):
            check_alike("optimizer", type(optimizer).__name__, how_it_updates(group), restored)
        group.update(restored)
    if scheduler is not None and saved.scheduler is not None:
        check_alike("scheduler", type(scheduler).__name__, scheduler.state_dict(), saved.scheduler)
        with within("in the load_state_dict of Workload.scheduler's"):
            scheduler.load_state_dict(copy.deepcopy(saved.scheduler))  # each has its own: it may be changed in place


def check_alike(field: str, kind: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """By the names of what they keep. More in one of them alone is no difference: another release of torch may have
    more, and a first step may leave some. Errors: WorkloadError."""
    only_own, only_saved = own.keys() - saved.keys(), saved.keys() - own.keys()
    if only_own and only_saved:
        raise WorkloadError(
            f"Workload.{field} gives {kind}, and another kind was saved, which had {_some(only_saved)} and no "
            f"{_some(only_own)}; {_TWO_WAYS_OUT}"
        )


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names, key=lambda name: (name.startswith("_"), name))[:MAX_NAMES])


def step_scheduler(scheduler: LRScheduler, *value: Any) -> None:
    """After a training step; or with what was measured, behind an epoch. Each scheduler goes by one of the two."""
    if isinstance(scheduler, ReduceLROnPlateau) is not bool(value):
        return
    with within(step_place(scheduler)):
        scheduler.step(*value)


def group_of(template: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> dict[int, int]:
    """Parameter index -> its group in the optimizer; those that are in none are absent."""
    groups = {id(p): number for number, group in enumerate(template.param_groups) for p in group["params"]}
    return {index: groups[id(p)] for index, p in enumerate(parameters) if id(p) in groups}


def make_shard(
    bucket: Bucket, bounds: tuple[int, int], values: torch.Tensor, gradient: torch.Tensor, groups: Mapping[int, int]
) -> Shard:
    """The elements `bounds` of a bucket whose flat values and gradient are given whole."""
    first, last = bounds
    segments = []
    for place in bucket.places:
        begin, end = max(place.offset, first), min(place.offset + place.num_elements, last)
        if begin < end:
            group = groups[place.parameter]
            segments.append(Segment(place.parameter, group, begin - first, end - first, begin - place.offset))
    return Shard(values[first:last].data, gradient[first:last].data, tuple(segments))
