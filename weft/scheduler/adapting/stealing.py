"""Stealing: which replica takes which microbatch of each batch, as its lanes come along.

A batch has K microbatches, and each replica's program has K positions. A position is granted a microbatch's number,
in order of number, to whoever has room; what a replica gets none for in an iteration passes like a microbatch without
samples. Replica 1 is three times slower here:

    replica 0   positions  0 1 2 3 4 5 6 7      replica 1   positions  0 1 2 3 4 5 6 7
                numbers    0 1 4 5 6 7 - -                  numbers    2 3 - - - - - -

A replica has the microbatches that it works on and at least one more, so that it never waits for the daemon, and at a
batch's begin more than at its end; once an iteration has nothing more for it, the first ones of the next iteration are
granted, for the same reason.

Iterations that an attempt makes again, after a lost worker, are granted as they were: they have the same bits then.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.plan.graph import Lane, Task
from weft.plan.itinerary import Iteration
from weft.plan.kinds import KINDS, Kind
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.plan.tables import NO_MORE, Grant
from weft.scheduler.adapting.lane_state import LaneState
from weft.scheduler.adapting.policy import Decision, Policy, Verdict
from weft.scheduler.adapting.replica_pace import ReplicaMeasurement, ReplicaPace

QUEUED_SECONDS = 0.02  # of work beyond what a replica works on: a daemon without a core of its own answers late, and
# each answer takes some of a core from somebody
QUEUED_PART = 0.6  # of a replica's part of what nobody has yet: more than that work at a batch's begin
MOST_QUEUED_SECONDS = 0.2  # but no more than this: nobody can take it back from one that grows slow
KEPT = 5  # iterations whose speed counts: the median forgets one that something else slowed down
MIN_KEPT = 2  # before anybody is refused anything
ROUNDING = 1e-9
IDLE_ITERATIONS = 8  # in a row without a microbatch: then it gets none any more
REMEMBERED = 1024  # iterations, since the oldest that may be made again: snapshots are not that far apart
_BEGINS = frozenset({Kind.FORWARD, Kind.FETCH})
_COMES_BACK = frozenset(kind for kind, facts in KINDS.items() if facts.hands_back)


@dataclass(frozen=True, slots=True)
class Stolen:
    """What is known at an attempt's end."""

    numbers: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)  # of microbatches, as in Stealing
    seconds: tuple[tuple[float, ...], ...] = ()  # of one microbatch, by replica, in its last iterations
    off: tuple[bool, ...] = ()  # by replica, whether it gets none any more


@dataclass(slots=True)
class _Taker:
    """One replica."""

    gates: list[tuple[LaneState, tuple[int, ...]]]  # its lanes, with where each position's first task stands there
    last: LaneState  # in which positions end
    ends: tuple[int, ...]  # the index of each position's last task there
    fills: int  # microbatches that keep all its stages at work
    iteration: int = 0  # decided next, with its
    position: int = 0
    held: deque[int] = field(default_factory=deque)  # positions with a microbatch, not ended, through all iterations
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # of one microbatch, by iteration
    usual: float | None = None  # their median, once there are enough
    begun: float = 0.0  # the part of the first of these that is over, by tasks
    idle: int = 0  # iterations in a row without one
    off: bool = False

    def measure(self, *seconds: float) -> None:
        self.seconds.extend(seconds)
        self.usual = statistics.median(self.seconds) if len(self.seconds) >= MIN_KEPT else None

    def forget_ended(self) -> None:
        iteration, within = divmod(self.last.finished, len(self.last.program))
        number = bisect_left(self.ends, within)
        ended = iteration * len(self.ends) + number
        while self.held and self.held[0] < ended:
            self.held.popleft()
        self.begun = 0.0
        if number < len(self.ends) and self.held and self.held[0] == ended:
            first = self.ends[number - 1] + 1 if number else 0
            self.begun = (within - first) / (self.ends[number] + 1 - first)

    def next_iteration(self) -> None:
        self.iteration, self.position = self.iteration + 1, 0

    def open_gates(self) -> None:
        for lane, firsts in self.gates:
            lane.allowed = min(lane.total, self.iteration * len(lane.program) + firsts[self.position])


class Stealing(Policy[ReplicaMeasurement]):
    after_each_iteration = True

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._count = plan.microbatches
        self._pace = ReplicaPace(plan)
        self._takers: list[_Taker] = []
        self._granted: dict[int, list[int]] = {}  # iteration that is not over -> microbatches that each replica has
        self._numbers: dict[int, list[list[int]]] = {}  # by iteration and replica, of the microbatches it was given
        self._before = Stolen()

    @staticmethod
    def applies(plan: Plan) -> bool:
        return plan.share == "stealing"

    @property
    def stolen(self) -> Stolen:
        """What another attempt goes on with."""
        if not self._takers:
            return self._before
        return Stolen(
            {**self._numbers, **self._before.numbers},  # those of before are whole
            tuple(tuple(taker.seconds) for taker in self._takers),
            tuple(taker.off for taker in self._takers),
        )

    def go_on_from(self, before: Stolen, again: range) -> None:
        """Before it begins. before: of the attempt before. again: iterations that it had made."""
        numbers = {
            iteration: numbers
            for iteration, numbers in before.numbers.items()
            if iteration in again and sum(map(len, numbers)) == self._count
        }
        if len(before.off) == len(self._plan.replicas):  # it may have been planned anew
            self._before = Stolen(numbers, before.seconds, before.off)

    # --- grants

    def begin(self, lanes: Mapping[Lane, LaneState]) -> None:
        self._takers = [_taker(self._plan, replica, lanes) for replica in range(len(self._plan.replicas))]
        for taker, seconds, off in zip(self._takers, self._before.seconds, self._before.off, strict=False):
            taker.measure(*seconds)
            taker.off = off
        for taker in self._takers:
            taker.open_gates()

    def come(self, lane: LaneState) -> tuple[Sequence[Grant], Sequence[LaneState]]:
        """The end of a microbatch is in the lane in which a replica's positions end."""
        for replica, taker in enumerate(self._takers):
            if taker.last is lane and (grants := self.grant_more(replica)):
                return grants, self.lanes_of(replica)
        return (), ()

    def lanes_of(self, replica: int) -> list[LaneState]:
        """Those that wait for its grants."""
        return [lane for lane, _ in self._takers[replica].gates]

    def first_open(self) -> int:
        """The earliest iteration that a replica may still get microbatches of."""
        return min(taker.iteration for taker in self._takers)

    def grant_more(self, replica: int) -> list[Grant]:
        """What can be decided for the replica now; its lanes' gates are open as far."""
        taker = self._takers[replica]
        taker.forget_ended()
        made: list[Grant] = []
        num_iterations = self._plan.itinerary.num_iterations
        while taker.iteration < min(num_iterations, 2 + taker.last.done):
            iteration, position = taker.iteration, taker.position
            numbers, is_all = self._numbers_for(replica)
            made += [(replica, iteration, position + n, number) for n, number in enumerate(numbers)]
            self._give(replica, numbers)
            if not is_all:
                break
            if taker.iteration == iteration:  # not all positions have one
                made.append((replica, iteration, taker.position, NO_MORE))
                self._close(taker)
        taker.open_gates()
        return made

    def _numbers_for(self, replica: int) -> tuple[Sequence[int], bool]:
        """Of the microbatches that the replica gets next of its iteration, and whether it gets no others of that."""
        taker = self._takers[replica]
        room = max(0, self._ahead(taker) - len(taker.held))
        again = self._before.numbers.get(taker.iteration)
        if again is not None:
            left = again[replica][taker.position :]
            return left[:room], len(left) <= room
        first = sum(self._granted.get(taker.iteration, ()))
        taken, is_all = self._taken(replica, self._count - first, room)
        return range(first, first + taken), is_all

    def _ahead(self, taker: _Taker) -> int:
        """Microbatches for it to hold at once."""
        seconds = taker.usual
        if not seconds:
            return taker.fills + 1
        rates = [1 / other.usual for other in self._takers if other is not taker and not other.off and other.usual]
        remaining = self._count - sum(self._granted.get(taker.iteration, ()))
        part = QUEUED_PART * remaining / (1 + seconds * sum(rates))
        queued = max(QUEUED_SECONDS / seconds, min(part, MOST_QUEUED_SECONDS / seconds))
        return taker.fills + max(1, math.ceil(queued))

    def _taken(self, replica: int, remaining: int, room: int) -> tuple[int, bool]:
        """How many more microbatches of its iteration the replica should take, up to `room`, and whether it gets none
        beyond them. remaining: those that nobody has."""
        taker = self._takers[replica]
        if taker.off:
            return 0, True
        iteration = taker.iteration  # what is left of those before is done by the time that anybody begins with it
        outstanding = [
            None if other.off or other.iteration > iteration else sum(h // self._count == iteration for h in other.held)
            for other in self._takers
        ]
        seconds = [other.usual for other in self._takers]
        worked = [self._worked(other, iteration, now=taker.last.heard) for other in self._takers]
        held, taken = outstanding[replica], 0
        assert held is not None
        while taken < min(remaining, room):
            if not grant(replica, outstanding, remaining - taken, seconds, worked):
                return taken, True
            taken += 1
            outstanding[replica] = held + taken
        return taken, taken == remaining

    def _worked(self, taker: _Taker, iteration: int, now: float) -> float:
        """Seconds, on what it has of the iteration: by what it has told, and since then."""
        seconds = taker.usual
        if seconds is None or not taker.held or taker.held[0] // self._count != iteration:
            return 0.0
        return taker.begun * seconds + max(0.0, now - taker.last.heard)

    def _give(self, replica: int, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        taker = self._takers[replica]
        self._granted.setdefault(taker.iteration, [0] * len(self._takers))[replica] += len(numbers)
        if taker.iteration not in self._numbers:
            self._numbers[taker.iteration] = [[] for _ in self._takers]
            self._numbers.pop(taker.iteration - REMEMBERED, None)
        self._numbers[taker.iteration][replica] += numbers
        first = taker.iteration * self._count + taker.position
        taker.held.extend(range(first, first + len(numbers)))
        taker.position += len(numbers)
        taker.idle = 0
        if taker.position == self._count:
            taker.next_iteration()

    def _close(self, taker: _Taker) -> None:
        if taker.position == 0:
            taker.idle += 1
        taker.next_iteration()

    # --- speed

    def add(self, rows: Iterable[Row]) -> None:
        self._pace.add(rows, self._granted)

    def finish(self, iteration: Iteration, samples: Sequence[int], seconds: float | None) -> None:
        self._pace.finish(iteration, self._granted.pop(iteration.index), seconds)

    def take(self) -> ReplicaMeasurement | None:
        return self._pace.take(1)

    def decide(self, measured: ReplicaMeasurement, first_unsent: int) -> Decision | None:
        """A replica that gets nothing from now on."""
        verdict = self._judge(measured)
        return None if verdict is None else Decision(self.first_open(), None, verdict)

    def _judge(self, measured: ReplicaMeasurement) -> Verdict | None:
        for taker, seconds in zip(self._takers, measured.unit_seconds, strict=True):
            if seconds is not None:
                taker.measure(seconds)
        for replica, taker in enumerate(self._takers):
            if taker.off or taker.idle < IDLE_ITERATIONS or not (own := taker.usual):
                continue
            rates = [1 / other.usual for other in self._takers if other is not taker and not other.off and other.usual]
            if rates:  # else nobody is known who would do its part
                taker.off, fixed = True, measured.fixed_seconds
                without = self._count / sum(rates) + fixed
                return Verdict(replica=replica, with_seconds=own + fixed, without_seconds=without)
        return None


def _taker(plan: Plan, replica: int, lanes: Mapping[Lane, LaneState]) -> _Taker:
    tasks = plan.graph.tasks
    last_stage = plan.replicas[replica].num_stages - 1
    last, ends, fills, waited_for = _ends(plan, replica, last_stage)
    gates = []
    for lane, program in plan.graph.programs.items():
        own = [(index, tasks[task]) for index, task in enumerate(program) if tasks[task].replica == replica]
        firsts = _by_position(own, _BEGINS, min)
        if firsts:
            gates.append((lanes[lane], tuple(firsts)))
            fills = max(fills, _begun_by_then(firsts, _by_position(own, waited_for, max)))
    begins = lanes[last].done
    return _Taker(gates=gates, last=lanes[last], ends=ends, fills=fills, iteration=begins)


def _ends(plan: Plan, replica: int, last_stage: int) -> tuple[Lane, tuple[int, ...], int, frozenset[Kind]]:
    """(the lane in which a replica is done with its microbatches, where in its program, how many it has begun by then
    and not ended, at most, the kinds of what a microbatch waits for by then): as they come back to the first stage;
    where the last one has all of them before it sends any back, as they come there."""
    tasks = plan.graph.tasks

    def passes(stage: int, *, back: bool) -> tuple[Lane, tuple[int, ...]]:
        def wanted(task: Task) -> bool:
            is_pass = task.kind in _COMES_BACK if back else task.kind is Kind.FORWARD
            return is_pass and (task.replica, task.stage) == (replica, stage)

        lane = next(task.lane for task in tasks if wanted(task))
        return lane, tuple(index for index, task in enumerate(plan.graph.programs[lane]) if wanted(tasks[task]))

    (lane, there), (_, back) = passes(last_stage, back=False), passes(last_stage, back=True)
    if there[-1] < back[0]:
        return lane, there, last_stage + 1, _BEGINS
    (_, begun), (lane, ended) = passes(0, back=False), passes(0, back=True)
    fills = max(bisect_left(begun, end) - place for place, end in enumerate(ended))
    return lane, ended, fills, _BEGINS | _COMES_BACK


def _by_position(
    tasks: Iterable[tuple[int, Task]], kinds: frozenset[Kind], which: Callable[[int, int], int]
) -> list[int]:
    """Where the first or the last task of these kinds stands in a lane's program, by position. A lane may have several
    for each: a worker's stages may fetch in one lane."""
    found: dict[int, int] = {}
    for index, task in tasks:
        if task.kind in kinds and task.microbatch is not None:
            found[task.microbatch] = which(found.get(task.microbatch, index), index)
    return [index for _, index in sorted(found.items())]


def _begun_by_then(firsts: Sequence[int], lasts: Sequence[int]) -> int:
    """Positions, at most, that the lane begins before it is done with the oldest of them: as many have to be granted at
    once, or it would never come there."""
    return max(sum(first <= last for first in firsts) - position for position, last in enumerate(lasts))


def grant(
    replica: int,
    outstanding: Sequence[int | None],
    remaining: int,
    seconds_per_microbatch: Sequence[float | None],
    worked: Sequence[float],
) -> bool:
    """Whether the replica should take one more microbatch of an iteration.

    outstanding: microbatches of it that each replica has and has not told to be finished; None for one that takes no
    more of them. remaining: those that nobody has. worked: seconds that each may have spent on its outstanding ones
    since it told. No: the others would have finished all of them before it has this one.
    Whoever would be the first to finish one more is never refused, so every microbatch finds a taker.
    """
    own, held = seconds_per_microbatch[replica], outstanding[replica]
    assert held is not None
    if own is None:
        return True
    finish = (held + 1) * own - min(worked[replica], held * own)
    done = before = 0
    for other, (theirs, seconds) in enumerate(zip(outstanding, seconds_per_microbatch, strict=True)):
        if other != replica and theirs is not None and seconds:
            spent = min(worked[other], theirs * seconds)
            done += math.ceil((spent + finish) / seconds - ROUNDING) - 1  # strictly before
            before += theirs
    return done < remaining + before
