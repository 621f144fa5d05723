"""Slot use: how many slots of each ring were occupied, and how many batches were loaded ahead, at every instant. Pure.

A microbatch takes its slot at the end of the task that writes it and leaves it at the end of the last task that reads
it. Batches stand in the rings of the data until the whole batch is read, as in the graph (see
`weft.scheduler.planning.rings`):

    input, target     LOAD(r,m)          ─▶ the batch's last BACKWARD of the stage that reads (last FETCH, on a device)
    device-…          FETCH(r,s,m)       ─▶ BACKWARD(r,s,m)
    activation-r-s    FORWARD(r,s,m)     ─▶ the last BACKWARD(r,·,m) of the stages that read it
    gradient-r-s      BACKWARD(r,s+1,m)  ─▶ BACKWARD(r,s,m)
    tied-r-s-t        BACKWARD(r,t,m)    ─▶ BACKWARD(r,s,m)

Where a backward is in two parts, INPUT writes and WEIGHT is the last to read. In validation a BACKWARD passes at once
and leaves no row; then the slot is free at the end of the last FORWARD. A lane tells others that a task is done a
moment before it stamps its end, so a slot is free at the latest when it is written again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.metrics.recording.recording import Recording
from weft.metrics.recording.window import Window
from weft.plan.kinds import FIRST_STALL
from weft.plan.plan import Ring, Role

Run = tuple[int, int]  # start and end in nanoseconds
Level = tuple[int, int]  # from this instant on, so many
Interval = tuple[int, int | None]  # None: it lasts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """Microbatch number `position` of the whole run in its slot."""

    position: int
    written: Run
    freed_ns: int | None  # None while it stands there


@dataclass(frozen=True, slots=True, kw_only=True)
class RingUse:
    name: str
    depth: int
    slot_bytes: int
    levels: tuple[Level, ...]  # by time, from the window's start on


def ring_uses(recording: Recording, window: Window) -> list[RingUse]:
    """Of the rings that the recording tells of, in its order."""
    history = _History(recording)
    return [
        RingUse(
            name=ring.name,
            depth=ring.depth,
            slot_bytes=ring.slot_bytes,
            levels=_levels(_intervals(list(history.occupied(ring)), ring.depth), window),
        )
        for ring in _rings(recording)
    ]


def ring_facts(ring: Ring) -> dict[str, Any]:
    """What a recording keeps of it."""
    names = ("role", "replica", "writer", "memory", "depth", "slot_bytes")
    return {name: getattr(ring, name) for name in names} | {"stages": list(ring.stages)}


def _rings(recording: Recording) -> list[Ring]:
    return [
        Ring(**{**facts, "role": Role(facts["role"]), "stages": tuple(facts["stages"])}, values=())
        for facts in recording.facts.get("rings", ())
    ]


def bytes_used(uses: list[RingUse]) -> tuple[Level, ...]:
    """In the slots of all rings together."""
    changes: defaultdict[int, int] = defaultdict(int)
    for use in uses:
        before = 0
        for when, level in use.levels:
            changes[when] += (level - before) * use.slot_bytes
            before = level
    total, levels = 0, []
    for when, change in sorted(changes.items()):
        total += change
        levels.append((when, total))
    return tuple(levels)


def batches_ahead(recording: Recording, window: Window) -> dict[int, tuple[Level, ...]]:
    """By replica: whole batches that are loaded and of which no task has begun to compute."""
    history = _History(recording)
    return {replica: _levels(history.waiting_batches(replica), window) for replica in history.loaded_replicas}


def runs_of(recording: Recording) -> dict[tuple[int, int], Run]:
    """From the first start to the last end of each task in each iteration."""
    runs: dict[tuple[int, int], Run] = {}
    for rows in recording.rows.values():
        for mode, task, iteration, _, start, end in rows:
            if mode < FIRST_STALL and task >= 0:
                before = runs.get((task, iteration))
                runs[task, iteration] = (start if before is None else before[0], end)
    return runs


class _History:
    """The runs of a recording's tasks, by what they are about."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._task = {
            (task.kind, task.replica, task.stage, task.microbatch): task.id
            for task in recording.tasks
            if task.replica is not None and task.stage is not None and task.microbatch is not None
        }
        self._loads: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # of a microbatch, one by each loader
        for (kind, r, _, m), task in self._task.items():
            if kind == "load":
                self._loads[r, m].append(task)
        forwards = [key for key in self._task if key[0] == "forward"]
        self._first_forwards = {  # of each replica, where it is in parts its first one
            task.replica: task.id
            for task in reversed(recording.tasks)
            if (task.kind, task.stage, task.microbatch) == ("forward", 0, 0)
        }
        self._replicas = sorted({r for _, r, _, _ in forwards})
        self._last_microbatch = {each: max(m for _, r, _, m in forwards if r == each) for each in self._replicas}
        self._last_stage = {each: max(s for _, r, s, _ in forwards if r == each) for each in self._replicas}
        self._last_complete = max(recording.iteration_ends, default=-1)

    @cached_property
    def _runs(self) -> dict[tuple[int, int], Run]:
        return runs_of(self._recording)

    @cached_property
    def _iterations(self) -> range:
        seen = [iteration for _, iteration in self._runs]
        return range(min(seen), max(seen) + 1) if seen else range(0)

    @cached_property
    def loaded_replicas(self) -> list[int]:
        """Those for which microbatches are loaded; the first one alone where replicas steal from one another."""
        return sorted({r for r, _ in self._loads})

    def occupied(self, ring: Ring) -> Iterator[_Use]:
        if ring.is_loaded:
            return self._batches(ring)
        kinds, writer = ring.written_by
        written = [
            (m, task)
            for (kind, r, s, m), task in self._task.items()
            if (r, s) == (ring.replica, writer) and kind in kinds
        ]
        return self._between(written, ring)

    def waiting_batches(self, replica: int) -> Iterator[Interval]:
        """From a batch's last LOAD to the first task that takes of it."""
        for iteration in self._iterations:
            runs = [self._loaded(replica, m, iteration) for m in range(self._num_loaded(replica))]
            known = [run for run in runs if run is not None]
            loaded = max(known, key=lambda run: run[1]) if len(known) == len(runs) else None
            begun = [self._first_use(reader, iteration) for reader in self._readers(replica)]
            starts = [run[0] for run in begun if run is not None]
            for use in self._use(iteration, loaded, min(starts) if starts else None, iteration):
                yield use.written[1], None if use.freed_ns is None else max(use.freed_ns, use.written[1])

    def _first_use(self, replica: int, iteration: int) -> Run | None:
        task = self._task.get(("fetch", replica, 0, 0), self._first_forwards[replica])
        return self._runs.get((task, iteration))

    def _readers(self, replica: int) -> list[int]:
        return [replica] if len(self.loaded_replicas) > 1 else self._replicas

    def _num_loaded(self, replica: int) -> int:
        return 1 + max(m for r, m in self._loads if r == replica)

    def _loaded(self, replica: int, microbatch: int, iteration: int) -> Run | None:
        """By the loader whose turn it was; the others leave no row."""
        runs = (self._runs.get((task, iteration)) for task in self._loads[replica, microbatch])
        return next((run for run in runs if run is not None), None)

    def _stages_of_data(self, role: Role, r: int) -> Iterable[int]:
        if role is Role.BATCH:
            return range(self._last_stage[r] + 1)
        return [0 if role is Role.INPUT else self._last_stage[r]]

    def _batches(self, ring: Ring) -> Iterator[_Use]:
        count = self._num_loaded(ring.replica)
        readers = [(r, stage) for r in self._readers(ring.replica) for stage in self._stages_of_data(ring.role, r)]
        for iteration in self._iterations:
            ends = [self._last_read(r, stage, iteration) for r, stage in readers]
            freed = max((end for end in ends if end is not None), default=None)
            for microbatch in range(count):
                written = self._loaded(ring.replica, microbatch, iteration)
                yield from self._use(iteration * count + microbatch, written, freed, iteration)

    def _last_read(self, replica: int, stage: int, iteration: int) -> int | None:
        last = self._last_microbatch[replica]
        fetch = self._task.get(("fetch", replica, stage, last))
        if fetch is not None:
            run = self._runs.get((fetch, iteration))
            return None if run is None else run[1]
        return self._read(replica, stage, last, iteration)

    def _read(self, replica: int, stage: int, microbatch: int, iteration: int) -> int | None:
        """The end of the BACKWARD or its last part, or of the FORWARD in an iteration without."""
        for kind in ("weight", "backward", "forward"):
            task = self._task.get((kind, replica, stage, microbatch))
            run = None if task is None else self._runs.get((task, iteration))
            if run is not None and (kind != "forward" or iteration <= self._last_complete):
                return run[1]
        return None

    def _between(self, written: Sequence[tuple[int, int]], ring: Ring) -> Iterator[_Use]:
        """written: microbatches, and the tasks that write them."""
        for iteration in self._iterations:
            for microbatch, task in written:
                read = [self._read(ring.replica, stage, microbatch, iteration) for stage in ring.stages]
                freed = max((end for end in read if end is not None), default=None) if None not in read else None
                position = iteration * len(written) + microbatch
                yield from self._use(position, self._runs.get((task, iteration)), freed, iteration)

    def _use(self, position: int, written: Run | None, freed: int | None, iteration: int) -> Iterator[_Use]:
        """Nothing where the recording does not tell when it began, or lost when it ended."""
        if written is not None and (freed is not None or iteration > self._last_complete):
            yield _Use(position=position, written=written, freed_ns=freed)


def _intervals(uses: list[_Use], depth: int) -> Iterator[Interval]:
    written_at = {use.position: use.written[0] for use in uses}
    for use in uses:
        ends = [end for end in (use.freed_ns, written_at.get(use.position + depth)) if end is not None]
        yield use.written[1], max(min(ends), use.written[1]) if ends else None


def _levels(intervals: Iterator[Interval], window: Window) -> tuple[Level, ...]:
    changes: defaultdict[int, int] = defaultdict(int)
    for taken, left in intervals:
        if taken < window.end_ns and (left is None or left > window.start_ns):
            changes[max(taken, window.start_ns)] += 1
            if left is not None and left < window.end_ns:
                changes[left] -= 1
    changes.setdefault(window.start_ns, 0)
    level = 0
    levels: list[Level] = []
    for when, change in sorted(changes.items()):
        if change or not levels:
            level += change
            levels.append((when, level))
    return tuple(levels)
