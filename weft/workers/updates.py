"""Updates: one worker's optimizer over the parts of buckets that it updates, and when an update stands.

    nothing bounds it     UPDATE: step
    wait for the norm     UPDATE: step with the clipping factor, or none at all
    speculate             UPDATE: step as if the norm were small   VALIDATE: leave it, or undo it and step again

Where the last step was clipped, or skipped, the next one most likely is: UPDATE then leaves its bucket to VALIDATE.

The norm is known once every owner has done its last SYNC of the iteration; until then the graph lets nobody read it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from weft.itinerary import Iteration
from weft.workers.bucket_memory import BucketMemory, BucketView
from weft.workers.course import Course
from weft.workers.measured import Measured
from weft.workers.optimizer_state import State
from weft.workers.sharded_optimizer import Segment, Shard, ShardedOptimizer
from weft.workload import Workload, make_scheduler

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it

Missing = Callable[[BucketView, Iteration], frozenset[int]]
Done = Callable[[BucketView, Iteration], None]
Takes = Callable[[BucketView, Iteration], bool]


class Norm:
    """What the norm of the whole gradient says about the update."""

    def __init__(self, memory: BucketMemory, course: Course, clip_norm: float | None, *, skips_nonfinite: bool) -> None:
        self._memory = memory
        self._course = course
        self._two_ways = [bucket for bucket in memory.buckets if bucket.device_owner is not None]
        self._clip_norm = clip_norm
        self._skips_nonfinite = skips_nonfinite

    def of(self, iteration: Iteration) -> float:
        """Before clipping."""
        squares = float(self._written(iteration).sum())
        return math.sqrt(squares) if squares >= 0 else math.nan

    def _written(self, iteration: Iteration) -> torch.Tensor:
        """The sums of squares of the step, without those of an earlier one that stand where a bucket no longer goes."""
        norms = self._memory.norms(iteration.step)
        if not self._two_ways:
            return norms
        written = norms.clone()
        for bucket in self._two_ways:
            away = bucket.ranges if self._course.is_local(bucket.index, iteration) else [bucket.device_owner]
            for owner in away:
                written[bucket.index, owner] = 0.0
        return written

    def factor(self, iteration: Iteration) -> float | None:
        """What to multiply the gradient with; None where the update is to be skipped."""
        norm = self.of(iteration)
        if self._skips_nonfinite and not math.isfinite(norm):
            return None
        if self._clip_norm is None:
            return 1.0
        factor = self._clip_norm / (norm + CLIP_EPSILON)
        return factor if not factor > 1 else 1.0  # nan stays, as it does in torch


class Updates:
    """shards: by bucket. norm: None where nothing bounds updates. begin: called before a bucket's update, done once it
    stands. takes: whether a bucket is updated here in an iteration. after: calls what tells of a step once the step is
    made. reports: this one tells the learning rate and the norm of each step."""

    def __init__(
        self,
        workload: Workload,
        template: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[BucketView],
        shards: Mapping[int, Shard],
        *,
        norm: Norm | None,
        speculative: bool,
        missing: Missing,
        done: Done,
        begin: Done = lambda bucket, iteration: None,
        takes: Takes = lambda bucket, iteration: True,
        after: Callable[[Callable[[], None]], None] = lambda act: act(),
        reports: bool,
    ) -> None:
        self._template = template
        self._scheduler = make_scheduler(workload.scheduler, template)
        self._optimizer = ShardedOptimizer(template, shards, parameters=parameters, speculative=speculative)
        self._optimizer.read_hyperparameters()
        self._buckets = buckets
        self._norm = norm
        self._speculative = speculative
        self._speculated: set[int] = set()  # buckets of the iteration that is on its way
        self._stood = True  # the last step, as it was
        self._missing = missing
        self._begin = begin
        self._done = done
        self._takes = takes
        self._after = after
        self._reports = reports

    def update(self, bucket: BucketView, iteration: Iteration, measured: Measured) -> None:
        """The last bucket's also ends the step, even if it is updated elsewhere."""
        takes = self._takes(bucket, iteration)
        if takes:
            self._begin(bucket, iteration)
        if self._speculative:
            if takes and self._stood:
                self._optimizer.speculate(bucket.index, touched=self._touched(bucket, iteration), squares=False)
                self._speculated.add(bucket.index)
            return
        factor = 1.0 if self._norm is None else self._norm.factor(iteration)
        if takes and factor is not None:
            self._optimizer.step(bucket.index, touched=self._touched(bucket, iteration), scale=factor)
        if takes:
            self._done(bucket, iteration)
        if self.ends_with(bucket):
            self._end_step(iteration, measured, skipped=factor is None)

    def ends_with(self, bucket: BucketView) -> bool:
        """Whether the step ends with the bucket's UPDATE, not with a VALIDATE."""
        return not self._speculative and bucket is self._buckets[-1]

    def take_state(self, bucket: BucketView, *, keeps: bool) -> Iterator[tuple[Segment, State]]:
        """What the optimizer knows of each segment of the bucket's shard, and without `keeps` no longer knows."""
        return self._optimizer.take_state(bucket.index, keeps=keeps)

    def give_state(self, bucket: BucketView, state_of: Callable[[Segment], State]) -> None:
        self._optimizer.give_state(bucket.index, state_of)

    def validate(self, iteration: Iteration, measured: Measured) -> None:
        """All updates of the iteration have been made; the norm is known."""
        assert self._norm is not None
        factor = self._norm.factor(iteration)
        self._stood = factor == 1.0
        for bucket in self._buckets:
            if not self._takes(bucket, iteration):
                continue
            stands = False
            if bucket.index in self._speculated:
                stands = self._stood
                (self._optimizer.confirm if stands else self._optimizer.undo)(bucket.index)
            if not stands and factor is not None:
                touched = self._touched(bucket, iteration)
                self._optimizer.step(bucket.index, touched=touched, scale=factor)
            self._done(bucket, iteration)
        self._speculated.clear()
        self._end_step(iteration, measured, skipped=factor is None)

    def _touched(self, bucket: BucketView, iteration: Iteration) -> Callable[[int], bool] | None:
        missing = self._missing(bucket, iteration)
        return (lambda parameter: parameter not in missing) if missing else None

    def _end_step(self, iteration: Iteration, measured: Measured, *, skipped: bool) -> None:
        if self._reports:
            facts = {"lr": float(self._template.param_groups[0].get("lr", 0.0))}
            if self._norm is not None:
                facts["grad_norm"] = self._norm.of(iteration)
            if skipped:
                facts["skipped"] = 1.0
            self._after(lambda: measured.complete(iteration.index, facts))
        if self._scheduler is not None:
            step_scheduler(self._scheduler)
            self._optimizer.read_hyperparameters()


def step_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    with warnings.catch_warnings():  # torch takes it for a mistake if the first step is one that was skipped
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
        scheduler.step()


def group_of(template: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> dict[int, int]:
    """Parameter index -> its group in the optimizer; those that are in none are absent."""
    groups = {id(p): number for number, group in enumerate(template.param_groups) for p in group["params"]}
    return {index: groups[id(p)] for index, p in enumerate(parameters) if id(p) in groups}


def make_shard(
    bucket: BucketView, bounds: tuple[int, int], values: torch.Tensor, gradient: torch.Tensor, groups: Mapping[int, int]
) -> Shard:
    """The elements `bounds` of a bucket whose flat values and gradient are given whole."""
    first, last = bounds
    segments = []
    for parameter, (start, count) in sorted(bucket.places.items(), key=lambda place: place[1]):
        begin, end = max(start, first), min(start + count, last)
        if begin < end:
            segments.append(Segment(parameter, groups[parameter], begin - first, end - first, begin - start))
    return Shard(values[first:last].data, gradient[first:last].data, tuple(segments))
