"""Course: what each iteration of an attempt is, and who has which part of its batch; from numbers alone.

Also which way each bucket goes that may go either way. What changes as the job runs comes as adjustments: the daemon
takes them as its workers do, so that all read the same.

Also which version of the parameters a stale replica computes with: version v is after v updates. With staleness k,
step i runs on version i - k; during warm-up (and right after, until it has fallen behind) on the newest it may have.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.division import Part, divide
from weft.plan.itinerary import Iteration
from weft.plan.plan import Plan
from weft.plan.tables import NO_MORE, Adjustment, Grant, IterationTable
from weft.plan.worker_view import WorkerView

REFRESH_STEPS = (
    256  # arbitrary: what rounding makes of a copy in so many is far below what a float32 can show of a loss
)
KEPT_SNAPSHOTS = 4  # that have been told, of the latest iterations: no more are under way
_KEPT = 64  # answers of each kind; a lane asks for few different ones in a row
_NOTHING = Part(-1, 0, 0)


class Course:
    """One thread may adjust while lanes ask for the iterations whose tasks they have been sent."""

    def __init__(self, plan: Plan | WorkerView, begins: int = 0) -> None:
        """begins: the first iteration of the attempt."""
        sync = plan.synchronisation
        self.itinerary = plan.itinerary
        self.microbatches = [replica.microbatches for replica in plan.replicas]
        self.steals = plan.share == "stealing"
        self._share = plan.share
        self._staleness = [replica.staleness for replica in plan.replicas]
        self._warmup = sync.warmup if sync else 0
        self._divided = self.microbatches[:1] if self.steals else self.microbatches
        self._judged = plan.judged
        self._iterations: dict[int, Iteration] = {}
        self._parts: dict[tuple[int, tuple[float, ...]], list[list[Part]]] = {}
        self.rewind(plan, begins)

    def rewind(self, plan: Plan | WorkerView, begins: int) -> None:
        """To the first iteration of an attempt: nothing has been adjusted yet. plan: the same, but for what other
        attempts have come to."""
        self.begins = begins
        self.local = IterationTable(frozenset[int](plan.synchronisation.local if plan.synchronisation else ()))
        self.shares = IterationTable((1.0,) if self.steals else plan.shares)
        self._granted: dict[int, dict[tuple[int, int], int]] = {}  # iteration -> (replica, position) -> number
        self._snapshots: dict[int, int] = {}  # iteration -> place
        self._halts = -1  # the iteration behind which the attempt ends, where the job does not
        self._compared = -1  # the newest iteration of which workers are to tell what its tasks make
        self._measured: tuple[int, float] | None = None  # (iteration, what was measured before it), the newest
        self._ends = self.itinerary.num_iterations

    def iteration(self, index: int) -> Iteration:
        iteration = self._iterations.get(index)
        if iteration is None:
            if len(self._iterations) >= _KEPT:
                self._iterations.clear()
            iteration = self._iterations[index] = self.itinerary.at(index)
        return iteration

    def ends_training(self, iteration: Iteration) -> bool:
        """Whether something else than another training iteration follows, or nothing; or may."""
        ends = self.may_be_last(iteration) or not self.iteration(iteration.index + 1).learns
        return iteration.learns and ends

    def ends_attempt(self, iteration: Iteration) -> bool:
        """The same, or the job stops behind it, and goes on in another attempt."""
        return iteration.index == self._halts or self.ends_training(iteration)

    def may_be_last(self, iteration: Iteration) -> bool:
        """Whether the job may end with it: behind an epoch that is judged too, and nobody is told of that before."""
        following = iteration.index + 1
        return following >= self._ends or (self._judged and following == self.itinerary.end_of_epoch(iteration.index))

    def may_be_last_step(self, iteration: Iteration) -> bool:
        """Whether the trained model may be what a training iteration leaves: at most validation follows."""
        if iteration.step == self.itinerary.steps - 1 or iteration.index + 1 >= self._ends:
            return True
        return self._judged and (iteration.step + 1) % self.itinerary.steps_per_epoch == 0

    def adjust(self, first: int, adjustment: Adjustment) -> None:
        """Shares and ways hold from iteration `first` on; of grants, the iterations before it are over; a snapshot,
        whether it halts there, what was measured and what is compared are of that iteration alone, and the snapshot
        before it is whole. What it changes has not been dispatched: of other ways, not even the training iteration
        before."""
        if adjustment.shares:
            self.shares.set(first, tuple(adjustment.shares))
        if adjustment.local is not None:
            self.local.set(first, frozenset(adjustment.local))
        if adjustment.grants:
            self._grant(first, adjustment.grants)
        if adjustment.ends is not None:
            self._ends = adjustment.ends
        if adjustment.halts:
            self._halts = first
        if adjustment.compared:
            self._compared = first
        if adjustment.measured is not None:
            self._measured = (first, adjustment.measured)
        if adjustment.snapshot is not None:
            told = (*self._snapshots.items(), (first, adjustment.snapshot))
            self._snapshots = dict(sorted(told)[-KEPT_SNAPSHOTS:])

    def _grant(self, first: int, grants: Sequence[Grant]) -> None:
        for past in [iteration for iteration in self._granted if iteration < first]:
            del self._granted[past]
        for replica, iteration, position, number in grants:
            granted = self._granted.setdefault(iteration, {})
            if number != NO_MORE:
                granted[replica, position] = number

    def snapshot_place(self, iteration: Iteration) -> int | None:
        """Where the iteration's SNAPSHOTs go; None where it has none."""
        return self._snapshots.get(iteration.index)

    def next_snapshot_place(self, iteration: Iteration) -> int | None:
        """The same of the first iteration behind it that has any and was told of."""
        return next((place for index, place in self._snapshots.items() if index > iteration.index), None)

    @staticmethod
    def refreshes(iteration: Iteration) -> bool:
        """Whether devices that update parameters themselves take over the host's behind it."""
        return iteration.learns and (iteration.step + 1) % REFRESH_STEPS == 0

    def is_compared(self, iteration: Iteration) -> bool:
        """Whether what its tasks make is told, to be compared with another run of it."""
        return iteration.index == self._compared

    def measured(self, iteration: Iteration) -> float | None:
        """What schedulers that take a measured value are stepped with before the iteration's update; None of most."""
        newest = self._measured
        return newest[1] if newest is not None and newest[0] == iteration.index else None

    # --- who has what

    def parts(self, iteration: Iteration) -> list[list[Part]]:
        """The microbatches of each replica; where replicas steal, those of the batch, as if it were one replica's."""
        key = (iteration.size, self.shares.of(iteration.index))
        parts = self._parts.get(key)
        if parts is None:
            if len(self._parts) >= _KEPT:
                self._parts.clear()
            parts = self._parts[key] = divide(iteration.size, key[1], self._divided, self._share)
        return parts

    def part(self, iteration: Iteration, replica: int, position: int) -> Part:
        """What the replica's tasks at a position work on; a part of size 0 where that is nothing."""
        if not self.steals:
            return self.parts(iteration)[replica][position]
        number = self._granted[iteration.index].get((replica, position))
        return _NOTHING if number is None else self.parts(iteration)[0][number]

    def loaded_part(self, iteration: Iteration, replica: int, microbatch: int) -> Part:
        """What the loader loads."""
        return self.parts(iteration)[replica][microbatch]

    def contributes(self, iteration: Iteration, replica: int) -> bool:
        """Whether owners have to read the replica's gradient. Where replicas steal they do: they know of no grants."""
        return self.steals or any(part.size for part in self.parts(iteration)[replica])

    def samples(self, iteration: Iteration) -> list[int]:
        """How many of a batch each replica has; where replicas steal, once all of it is granted."""
        parts = self.parts(iteration)
        if not self.steals:
            return [sum(part.size for part in own) for own in parts]
        samples = [0] * len(self.microbatches)
        for (replica, _), number in self._granted[iteration.index].items():
            samples[replica] += parts[0][number].size
        return samples

    # --- which way buckets go

    def is_local(self, bucket: int, iteration: Iteration) -> bool:
        """Whether devices update the bucket themselves, which may go either way."""
        return bucket in self.local.of(iteration.index)

    def has_turned(self, bucket: int, iteration: Iteration) -> bool:
        """Whether the bucket goes another way than in the training iteration before."""
        if iteration.step == 0:
            return False
        return self.is_local(bucket, self.iteration(self.update_of(iteration.step))) != self.is_local(bucket, iteration)

    def will_turn(self, bucket: int, iteration: Iteration) -> bool:
        """Whether it will go another way in the training iteration after."""
        if iteration.step + 1 >= self.itinerary.steps:
            return False
        following = self.iteration(self.update_of(iteration.step + 2))
        return self.is_local(bucket, following) != self.is_local(bucket, iteration)

    # --- versions

    def version(self, index: int, replica: int) -> int:
        """Updates that the replica's parameters have at iteration `index`; validation has them all."""
        iteration = self.iteration(index)
        step = iteration.step
        if not iteration.learns or step < self._warmup:
            return step
        return max(min(step, self._warmup), step - self._staleness[replica])

    def update_of(self, version: int) -> int:
        """The iteration whose update makes the version; -1 for the first one."""
        return self.itinerary.update_of(version)
