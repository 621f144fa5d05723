"""Schedule: the order in which the workers of one replica compute its microbatches, as a value.

A program for each worker: the passes of an iteration, each a (stage, kind, microbatch). A worker may have several
stages. All that a plan has to know of a schedule follows from its programs, so nobody asks for its name:

    in_flight   what a stage keeps at once, from a microbatch's forward to the stage's last pass of it
    …_slots     how many slots a ring needs for no writer to wait longer than the programs make it wait anyway

What can be wrong with one `weft.plan.schedules.checking` finds.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from weft.plan.kinds import KINDS, Kind


class Pass(NamedTuple):
    """A stage's computation of one microbatch in one direction."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{KINDS[self.kind].letter}{self.microbatch}"


class ScheduleError(ValueError):
    """Programs that cannot run, or would train on something else than the plain loop. The text names the line and
    what to write instead."""


@dataclass(frozen=True)
class Schedule:
    programs: tuple[tuple[Pass, ...], ...]  # by worker
    lines: tuple[int, ...] = field(default=(), compare=False)  # of a file, from 1, in which they stand; () of no file

    @cached_property
    def worker_of(self) -> Mapping[int, int]:
        """By stage, in their order; of what stands in two programs the first."""
        found: dict[int, int] = {}
        for worker, program in enumerate(self.programs):
            for each in program:
                found.setdefault(each.stage, worker)
        return dict(sorted(found.items()))

    @property
    def num_stages(self) -> int:
        return len(self.worker_of)

    @cached_property
    def num_microbatches(self) -> int:
        return 1 + max((each.microbatch for program in self.programs for each in program), default=-1)

    def passes(self, stage: int) -> list[Pass]:
        """Of one stage, in its worker's order."""
        return self._by_stage[stage]

    @cached_property
    def _by_stage(self) -> Mapping[int, list[Pass]]:
        found: dict[int, list[Pass]] = {}
        for program in self.programs:
            for each in program:
                found.setdefault(each.stage, []).append(each)
        return found

    @cached_property
    def ends(self) -> Mapping[tuple[int, int], Pass]:
        """By stage and microbatch the last pass: then the stage needs nothing of it any more."""
        return {(each.stage, each.microbatch): each for program in self.programs for each in program}

    @cached_property
    def hands_back(self) -> Mapping[tuple[int, int], Pass]:
        """By stage and microbatch the pass that makes what the stage before begins its backward with."""
        passes = (each for program in self.programs for each in program)
        return {(each.stage, each.microbatch): each for each in passes if KINDS[each.kind].hands_back}

    def in_flight(self, stage: int) -> int:
        """The most microbatches of a stage whose forward has begun and whose last pass has not ended."""
        return self.most_kept(self.passes(stage), [1] * self.num_stages, recomputes=False)

    def most_kept(self, passes: Iterable[Pass], sizes: Sequence[int], *, recomputes: bool) -> int:
        """The most that is there at once of what autograd keeps. passes: of a worker or of one stage, in their order.
        sizes: of one microbatch, by stage. recomputes: forward's own graph is dropped, and a backward makes it again,
        which of one in two parts stays for the second."""
        kept = most = 0
        for each in passes:
            is_forward = each.kind is Kind.FORWARD
            if is_forward or (recomputes and KINDS[each.kind].hands_back):
                kept += sizes[each.stage]
            most = max(most, kept)
            if (is_forward and recomputes) or self.ends[each.stage, each.microbatch] == each:
                kept -= sizes[each.stage]
        return most

    def backlog(self, stage: int) -> int:
        """The most microbatches of a stage that it has handed back and not ended."""
        waiting = most = 0
        for each in self.passes(stage):
            waiting += self.hands_back[stage, each.microbatch] == each
            waiting -= self.ends[stage, each.microbatch] == each
            most = max(most, waiting)
        return most

    def activation_slots(self, writer: int, readers: Sequence[int]) -> int:
        """How deep a ring must be that a stage writes in its forwards."""
        return self._slots([Pass(writer, Kind.FORWARD, m) for m in range(self.num_microbatches)], readers)

    def gradient_slots(self, writer: int, reader: int) -> int:
        """How deep a ring must be that a stage writes as it hands back."""
        return self._slots([self.hands_back[writer, m] for m in range(self.num_microbatches)], [reader])

    def _slots(self, writes: Sequence[Pass], readers: Sequence[int]) -> int:
        """Microbatch u of the run may be written once all readers have ended microbatch u - depth.

        The programs alone make a writer wait for some of these ends, from one iteration to the next, too. So many
        slots that it waits for no other.
        """
        return max(
            self.num_microbatches
            + each.microbatch
            + 1
            - min(self._ended(self._known[each], reader) for reader in readers)
            for each in writes
        )

    def _ended(self, known: Sequence[int], stage: int) -> int:
        """Microbatches, counted through two iterations, that a stage has surely ended. known: as in `_known`."""
        worker = self.worker_of[stage]
        iterations, passes = divmod(known[worker], len(self.programs[worker]))
        return iterations * self.num_microbatches + self._ends_before[stage][passes]

    @cached_property
    def _ends_before(self) -> Mapping[int, Sequence[int]]:
        """By stage: how many of its microbatches have ended after so many passes of its worker."""
        counts = {}
        for stage, worker in self.worker_of.items():
            so_far = [0]
            for each in self.programs[worker]:
                so_far.append(so_far[-1] + (each.stage == stage and self.ends[stage, each.microbatch] == each))
            counts[stage] = so_far
        return counts

    @cached_property
    def _known(self) -> Mapping[Pass, list[int]]:
        """Of each pass of a second iteration: how many passes of each worker, counted from the first one's start, have
        surely ended when it starts."""
        clocks: dict[tuple[int, Pass], list[int]] = {}  # by iteration, after the pass
        lanes = [[0] * len(self.programs) for _ in self.programs]
        found = {}
        for iteration in range(2):
            for worker, each in self.in_order():
                now = lanes[worker]
                for needed in self.needs(each):
                    now = list(map(max, now, clocks[iteration, needed]))
                if iteration:
                    found[each] = now
                lanes[worker] = clocks[iteration, each] = [
                    count + (number == worker) for number, count in enumerate(now)
                ]
        return found

    # --- what waits for what

    def needs(self, each: Pass) -> list[Pass]:
        """The passes whose results it takes, of other stages and of its own."""
        stage, m = each.stage, each.microbatch
        if each.kind is Kind.FORWARD:
            return [Pass(stage - 1, Kind.FORWARD, m)] if stage else []
        if not KINDS[each.kind].hands_back:
            return [self.hands_back[stage, m]]
        later = [self.hands_back[stage + 1, m]] if stage + 1 < self.num_stages else []
        return [Pass(stage, Kind.FORWARD, m), *later]

    def in_order(self) -> Iterator[tuple[int, Pass]]:
        """(worker, pass) in an order in which they can run. Errors: ScheduleError, where they wait in a circle."""
        for _, worker, each in self.timeline():
            yield worker, each

    def timeline(self, seconds: Mapping[Kind, int] | None = None) -> Iterator[tuple[int, int, Pass]]:
        """(start, worker, pass) if every worker runs its program as soon as it can, in the order of the starts.

        seconds: what a pass of a kind takes; one, where it is not given. Errors: ScheduleError, where the workers wait
        in a circle.
        """
        ended: dict[Pass, int] = {}
        places, free = [0] * len(self.programs), [0] * len(self.programs)
        waiting: defaultdict[Pass, list[int]] = defaultdict(list)  # workers, by what they wait for
        ready: list[tuple[int, int]] = []  # a heap: start, worker
        offered = list(range(len(self.programs)))
        while offered or ready:
            for worker in offered:
                if places[worker] == len(self.programs[worker]):
                    continue
                needed = self.needs(self.programs[worker][places[worker]])
                if missing := next((other for other in needed if other not in ended), None):
                    waiting[missing].append(worker)
                else:
                    heapq.heappush(ready, (max([free[worker], *(ended[other] for other in needed)]), worker))
            if not ready:
                break
            start, worker = heapq.heappop(ready)
            each = self.programs[worker][places[worker]]
            places[worker] += 1
            free[worker] = ended[each] = start + (seconds or {}).get(each.kind, 1)
            offered = [worker, *waiting.pop(each, ())]
            yield start, worker, each
        if any(waiting.values()):
            raise ScheduleError(self._circle(places, ended))

    def _circle(self, places: Sequence[int], ended: Mapping[Pass, int]) -> str:
        """From the first worker that waits along what is waited for, until one comes again."""
        worker = next(worker for worker, place in enumerate(places) if place < len(self.programs[worker]))
        seen: list[int] = []
        while worker not in seen:
            seen.append(worker)
            worker = self.worker_of[self._missing(worker, places, ended).stage]
        circle = seen[seen.index(worker) :]
        waits = [(w, self.programs[w][places[w]], self._missing(w, places, ended)) for w in circle]
        told = "; ".join(
            f"{self.line(w)} stands at {self.shown(each)} and waits for {self.shown(other)} of "
            f"{self.line(self.worker_of[other.stage])}"
            for w, each, other in waits
        )
        return f"{told}: that is a deadlock; {self._way_out(waits, places, ended)}"

    def _way_out(
        self, waits: Sequence[tuple[int, Pass, Pass]], places: Sequence[int], ended: Mapping[Pass, int]
    ) -> str:
        """One pass written earlier in one line of a circle. waits: (worker, where it stands, what it waits for).

        Not every place in a circle will do: what a line stands at may itself have to come before what is waited for.
        It cannot be so at all of them, since nothing has to come before itself.
        """
        for number in reversed(range(len(waits))):
            worker, stands, _ = waits[number]
            wanted = waits[number - 1][2]
            before = self._before(wanted, ended)
            if stands in before:
                continue
            left = self.programs[worker][places[worker] :]
            while (first := next(each for each in left if each in before)) != wanted:
                wanted, before = first, self._before(first, ended)
            return f"in {self.line(worker)} write {self.shown(wanted)} before {self.shown(stands)}"
        raise AssertionError(f"{self.programs}: passes that have to come before themselves")

    def _before(self, each: Pass, ended: Mapping[Pass, int]) -> set[Pass]:
        """Itself and all passes left that have to come before it, whatever the lines' order."""
        found, following = {each}, [each]
        while following:
            for other in self._directly_before(following.pop()):
                if other not in ended and other not in found:
                    found.add(other)
                    following.append(other)
        return found

    def _directly_before(self, each: Pass) -> list[Pass]:
        """What it needs, and those of the microbatch before, in whose order each stage has them."""
        stage, kind, m = each.stage, each.kind, each.microbatch - 1
        if m < 0:
            return self.needs(each)
        if kind is Kind.FORWARD:
            return [*self.needs(each), each._replace(microbatch=m)]
        back = [self.hands_back[stage, m]] if KINDS[kind].hands_back else []
        ends = [self.ends[stage, m]] if each == self.ends[stage, each.microbatch] else []
        return [*self.needs(each), *back, *ends]

    def _missing(self, worker: int, places: Sequence[int], ended: Mapping[Pass, int]) -> Pass:
        return next(other for other in self.needs(self.programs[worker][places[worker]]) if other not in ended)

    def line(self, worker: int) -> str:
        """What a program is called in errors."""
        return f"line {self.lines[worker] if self.lines else worker + 1}"

    def shown(self, each: Pass) -> str:
        """As a grid has it: with its stage, where that is not the line's number."""
        alone = self.worker_of.get(each.stage) == each.stage
        return str(each) if alone else f"{each.stage}{each}"
