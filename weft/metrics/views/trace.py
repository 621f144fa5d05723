"""Trace: a window of a recording as Chrome trace events, which Perfetto and chrome://tracing open. Pure.

    process  job digits-1      ▕ step 376 ▏▕ step 377 ▏          threads: iterations, critical path
                               ⌇ slots occupied ⌇ batches ahead ⌇     counters
    process  cpu-0             ▕ FORWARD(0,0) ▏▕ stall gradient ▏     a thread for each lane: tasks and stalls
                               ▕aten::addmm▏▕aten::relu▏              beside a lane what torch.profiler saw of it
    process  planned cpu-0     ▕ FORWARD(0,0) ▏   ▕ BACKWARD… ▏       the same lanes as the plan has them

Arrows (flow events) are the graph's edges between lanes; an edge that only hands back a slot has one where a lane did
wait for it. Times are microseconds from the window's start, cut at both its ends; `otherData` has its start as unix
time. The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final

from weft.metrics.accounts.accounting import NANOSECONDS
from weft.metrics.recording.critical_path import critical_path
from weft.metrics.recording.recording import RecordedTask, Recording
from weft.metrics.recording.slot_use import Level, batches_ahead, bytes_used, ring_uses, runs_of
from weft.metrics.recording.window import Window, planned_runs
from weft.plan.graph import Edge
from weft.plan.kinds import FIRST_STALL, MODES, is_compute_lane
from weft.plan.rows import Row
from weft.plan.worker_profile import KINDS, ProfileRow, WorkerProfile

Event = dict[str, Any]
Facts = Mapping[int, Mapping[str, Any]]  # what is known of an iteration beside its times: step, loss, ...

JOB_PROCESS: Final = 1
ITERATIONS_THREAD, PATH_THREAD = 1, 2
THREADS_OF_PROCESS: Final = 100  # a thread's number is process times this plus its place: no two have the same
FIRST_TRACK: Final = 30  # a track's place in its process, after those of lanes
MAX_TRACKS: Final = 60  # of a process; lanes' come first
LANE_ORDER: Final = ("compute", "fetch", "d2h", "sync", "h2d", "load")


@dataclass(frozen=True, slots=True)
class Thread:
    """Of the trace: where a lane's slices go."""

    process: int
    thread: int


def trace_json(
    recording: Recording, window: Window, facts: Facts | None = None, profiles: Sequence[WorkerProfile] = ()
) -> Iterator[str]:
    """The file in parts, an event in each line. profiles: of the recording's attempt."""
    yield '{"traceEvents":[\n'
    before = ""
    for event in trace_events(recording, window, facts or {}, profiles):
        yield before + json.dumps(event, separators=(",", ":"), ensure_ascii=False)
        before = ",\n"
    other = json.dumps(_other(recording, window, profiles), separators=(",", ":"), ensure_ascii=False)
    yield f'\n],"displayTimeUnit":"ms","otherData":{other}}}\n'


def trace_events(
    recording: Recording, window: Window, facts: Facts, profiles: Sequence[WorkerProfile] = ()
) -> Iterator[Event]:
    return chain(_Trace(recording, window, facts).events(), profile_events(recording, window, profiles))


def _other(recording: Recording, window: Window, profiles: Sequence[WorkerProfile]) -> dict[str, Any]:
    begin_ns = window.start_ns + recording.clock_ns
    known = ("schedule", "microbatches", "predicted_iteration_seconds", "limit_seconds", "iteration_seconds")
    return {
        "job": recording.job,
        "attempt": recording.attempt,
        "iterations": [window.first, window.last],
        "start": datetime.fromtimestamp(begin_ns / NANOSECONDS, UTC).isoformat(),
        "start_unix_ns": str(begin_ns),
        **{name: recording.facts[name] for name in known if name in recording.facts},
        **({"profiled": {each.worker: [each.first, each.last] for each in profiles}} if profiles else {}),
    }


class _Trace:
    def __init__(self, recording: Recording, window: Window, facts: Facts) -> None:
        self._recording, self._window, self._facts = recording, window, facts
        self._tasks = recording.tasks
        self._rows = recording.rows_within(window.start_ns, window.end_ns)
        self._planned = planned_runs(recording, window)
        self._places = _places(list(recording.programs))

    def events(self) -> Iterator[Event]:
        yield from self._names()
        yield from self._iterations()
        yield from self._critical_path()
        for lane, rows in self._rows.items():
            yield from self._slices(lane, rows)
        for lane in self._planned:
            yield from self._planned_slices(lane)
        yield from self._flows()
        yield from self._counters()

    # --- processes and threads

    def _names(self) -> Iterator[Event]:
        yield from _process(JOB_PROCESS, f"job {self._recording.job}", 0)
        yield from _thread(_thread_of_job(ITERATIONS_THREAD), "iterations")
        yield from _thread(_thread_of_job(PATH_THREAD), "critical path")
        for planned, prefix in ((False, ""), (True, "planned ")):
            if planned and not self._planned:
                continue
            named = set()
            for lane, places in self._places.items():
                worker, _, name = lane.partition("/")
                place = places[planned]
                if worker not in named:
                    named.add(worker)
                    yield from _process(place.process, prefix + worker, place.process)
                yield from _thread(place, name)

    # --- slices

    def _iterations(self) -> Iterator[Event]:
        ends = self._recording.iteration_ends
        start, place = self._window.start_ns, _thread_of_job(ITERATIONS_THREAD)
        for iteration in range(self._window.first, self._window.last + 1):
            end = ends[iteration]
            facts = self._facts.get(iteration, {})
            trains = iteration in self._recording.training
            args = {"iteration": iteration, "trains": trains, **facts}
            yield self._slice(place, self._recording.label(iteration), "iteration", (start, end), args)
            if "loss" in facts:
                name = f"step {facts['step']}"
                yield _at(place, "i", name, self._us(end), s="t", cat="step", args=dict(facts))
            start = end

    def _critical_path(self) -> Iterator[Event]:
        place = _thread_of_job(PATH_THREAD)
        for step in critical_path(self._recording, self._window.start_ns, self._window.end_ns):
            task = self._tasks[step.task]
            args = {"iteration": step.iteration, "lane": step.lane, "gap_us": step.gap_ns / 1000}
            span = (step.start_ns, step.end_ns)
            yield self._slice(place, task.name, "critical path", span, args) | {"cname": "bad"}

    def _slices(self, lane: str, rows: Sequence[Row]) -> Iterator[Event]:
        place = self._places[lane][0]
        for mode, number, iteration, waited_for, start, end in rows:
            span = max(start, self._window.start_ns), min(end, self._window.end_ns)
            task = self._tasks[number] if number >= 0 else None
            if mode < FIRST_STALL and task is not None:
                args = _about(task, iteration)
                if span != (start, end):
                    args["cut"] = True
                yield self._slice(place, task.name, MODES[mode], span, args)
                continue
            cause = MODES[mode].removeprefix("stall_")
            args = {"cause": cause}
            if task is not None:
                args |= {"before": task.name, "iteration": iteration}
            if waited_for >= 0:
                args |= {"waited_for": self._tasks[waited_for].name, "on": self._tasks[waited_for].lane}
            yield self._slice(place, f"stall {cause}", "stall", span, args) | {"cname": "grey"}

    def _planned_slices(self, lane: str) -> Iterator[Event]:
        place = self._places[lane][1]
        for run in self._planned[lane]:
            task = self._tasks[run.task]
            span = self._window.start_ns + run.start_ns, self._window.start_ns + run.end_ns
            yield self._slice(place, task.name, "planned", span, _about(task, run.iteration))

    def _slice(self, place: Thread, name: str, category: str, span: tuple[int, int], args: dict[str, Any]) -> Event:
        start, end = span
        return {
            "ph": "X",
            "pid": place.process,
            "tid": place.thread,
            "ts": self._us(start),
            "dur": (end - start) / 1000,
            "name": name,
            "cat": category,
            "args": args,
        }

    def _us(self, when_ns: int) -> float:
        return (when_ns - self._window.start_ns) / 1000

    # --- arrows

    def _flows(self) -> Iterator[Event]:
        lane_of = {task.id: task.lane for task in self._tasks}
        inputs: dict[int, list[Edge]] = {}
        for edge in self._recording.edges:
            if lane_of[edge.source] != lane_of[edge.target]:
                inputs.setdefault(edge.target, []).append(edge)
        runs, number = _Runs(self._recording), 0
        for lane, rows in self._rows.items():
            for task, iteration, start, waited in _begun(rows, self._window):
                for edge in inputs.get(task, ()):
                    if edge.cause == "slot" and edge.source not in waited:
                        continue
                    sent = runs.sent(edge.source, iteration - edge.distance, start, latest=edge.cause == "update")
                    if sent is None or sent < self._window.start_ns:
                        continue
                    number += 1
                    about = {"id": number, "cat": "waited" if edge.source in waited else "edge"}
                    source = self._places[lane_of[edge.source]][0]
                    yield _at(source, "s", edge.cause, self._us(sent), **about)
                    yield _at(self._places[lane][0], "f", edge.cause, self._us(start), bp="e", **about)

    # --- counters

    def _counters(self) -> Iterator[Event]:
        uses = ring_uses(self._recording, self._window)
        for use in uses:
            yield from self._counter(f"slots of {use.name} (of {use.depth})", "occupied", use.levels)
        if uses:
            yield from self._counter("memory of occupied slots", "bytes", bytes_used(uses))
        for replica, levels in batches_ahead(self._recording, self._window).items():
            yield from self._counter(f"batches loaded ahead, replica {replica}", "batches", levels)

    def _counter(self, name: str, series: str, levels: Sequence[Level]) -> Iterator[Event]:
        for when, level in levels:
            yield {"ph": "C", "pid": JOB_PROCESS, "ts": self._us(when), "name": name, "args": {series: level}}


class _Runs:
    """When the output of a task's run was there for others, inside a slice of the lane that ran it."""

    def __init__(self, recording: Recording) -> None:
        self._rows = recording.rows
        self._starts = {lane: [row[4] for row in rows] for lane, rows in recording.rows.items()}
        self._lane_of = {task.id: task.lane for task in recording.tasks}
        self._runs = runs_of(recording)
        self._iterations: dict[int, list[int]] = {}
        for task, iteration in self._runs:
            self._iterations.setdefault(task, []).append(iteration)

    def sent(self, task: int, iteration: int, received_ns: int, *, latest: bool) -> int | None:
        """None where no slice is there to leave from. latest: or of the last iteration before it that ran the task.

        A task is posted a moment before its end is stamped, and a milestone from inside the task before it, so who
        waits may have gone on by then.
        """
        if latest:
            ran = self._iterations.get(task, [])
            iteration = ran[place - 1] if (place := bisect_right(ran, iteration)) else -1
        run = self._runs.get((task, iteration))
        if run is None:
            return None
        when = min(run[1] - 1, received_ns)
        lane = self._lane_of[task]
        place = bisect_right(self._starts[lane], when) - 1
        if place < 0:
            return None
        mode, *_, end = self._rows[lane][place]
        return when if mode < FIRST_STALL and when < end else None


def _begun(rows: Sequence[Row], window: Window) -> Iterator[tuple[int, int, int, set[int]]]:
    """Each run of a task that begins in the window: the task, its iteration, when, and the tasks it had to wait for."""
    waited: set[int] = set()
    last = None
    for mode, task, iteration, waited_for, start, _ in rows:
        if mode >= FIRST_STALL:
            if waited_for >= 0:
                waited.add(waited_for)
            continue
        if (task, iteration) != last and window.start_ns <= start < window.end_ns:  # not the rest of one that was cut
            yield task, iteration, start, waited
        last = task, iteration
        waited = set()


def profile_events(recording: Recording, window: Window, profiles: Sequence[WorkerProfile]) -> Iterator[Event]:
    """A thread for each track, beside its lane; what ran in no lane's stream or thread comes after the lanes."""
    places = _places(list(recording.programs))
    process_of = {lane.partition("/")[0]: here.process for lane, (here, _) in places.items()}
    for profile in profiles:
        process = process_of.get(profile.worker)
        if process is None:
            continue
        for number, track in enumerate(profile.tracks[:MAX_TRACKS], start=FIRST_TRACK):
            rows = [row for row in track.rows() if row[3] > window.start_ns and row[2] < window.end_ns]
            if not rows:
                continue
            place = Thread(process, process * THREADS_OF_PROCESS + number)
            lane = places.get(f"{profile.worker}/{track.lane}")
            what = "operators" if KINDS[rows[0][1]] == "operator" else "kernels"
            name = f"{track.lane} {what}" if lane else f"{what} of {track.source}"
            yield from _thread(place, name, beside=lane[0] if lane else None)
            yield from _track_slices(place, profile, rows, window)


def _track_slices(place: Thread, profile: WorkerProfile, rows: Sequence[ProfileRow], window: Window) -> Iterator[Event]:
    for name, kind, start, end in rows:
        begin, until = max(start, window.start_ns), min(end, window.end_ns)
        yield {
            **_at(place, "X", profile.names[name], (begin - window.start_ns) / 1000),
            "dur": (until - begin) / 1000,
            "cat": KINDS[kind],
            "args": {"cut": True} if (begin, until) != (start, end) else {},
        }


def _places(lanes: Sequence[str]) -> dict[str, tuple[Thread, Thread]]:
    """Of each lane, and of the same lane as planned. A worker's two processes stand beside each other."""
    ordered = in_order(lanes)
    workers = list(dict.fromkeys(lane.partition("/")[0] for lane in ordered))
    places = {}
    for worker_number, worker in enumerate(workers):
        own = [lane for lane in ordered if lane.partition("/")[0] == worker]
        first = JOB_PROCESS + 1 + 2 * worker_number
        for number, lane in enumerate(own, start=1):
            here, planned = (Thread(process, process * THREADS_OF_PROCESS + number) for process in (first, first + 1))
            places[lane] = here, planned
    return places


def in_order(lanes: Sequence[str]) -> list[str]:
    """As people look at them: loaders last, the lanes of a worker from compute outwards."""
    return sorted(lanes, key=_lane_order)


def _lane_order(lane: str) -> tuple[bool, str, int, int]:
    worker, _, name = lane.partition("/")
    kind, _, number = worker.rpartition("-")
    name = "compute" if is_compute_lane(name) else name
    place = LANE_ORDER.index(name) if name in LANE_ORDER else len(LANE_ORDER)
    return kind == "loader", kind, int(number) if number.isdigit() else 0, place


def _thread_of_job(number: int) -> Thread:
    return Thread(JOB_PROCESS, JOB_PROCESS * THREADS_OF_PROCESS + number)


def _process(number: int, name: str, order: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": order}}


def _thread(place: Thread, name: str, beside: Thread | None = None) -> Iterator[Event]:
    """beside: right after that one; by default in the order of their numbers."""
    common = {"ph": "M", "pid": place.process, "tid": place.thread}
    order = 2 * place.thread if beside is None else 2 * beside.thread + 1
    yield {**common, "name": "thread_name", "args": {"name": name}}
    yield {**common, "name": "thread_sort_index", "args": {"sort_index": order}}


def _at(place: Thread, phase: str, name: str, when_us: float, **more: Any) -> Event:
    return {"ph": phase, "pid": place.process, "tid": place.thread, "ts": when_us, "name": name, **more}


def _about(task: RecordedTask, iteration: int) -> dict[str, Any]:
    numbers = {name: getattr(task, name) for name in ("owner", "replica", "stage", "microbatch", "bucket")}
    return {"iteration": iteration, **{name: number for name, number in numbers.items() if number is not None}}
