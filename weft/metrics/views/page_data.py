"""What the timeline page is told of a recording's last iterations, as JSON. Pure.

    jobs' rows ──tail──▶ the newest rows ──window──▶ N whole iterations ──▶ one JSON text, in pieces of a lane each

Times are whole nanoseconds from the window's start; a row that began before it has a negative one. Rows lie end to end
in one flat list, six numbers each: in JSON that is half as long as a list of lists, and quick to read.

    iterations  {"iteration", "start", "end", "trains"}
    itinerary   {"steps", "steps_per_epoch", "validations_per_epoch"}: which step of the job an iteration is; or null
    lanes       {"lane", "rows": mode | task | iteration | waited_for | start | duration, …}
    planned     {"seconds", "spans": lane | task | start | duration, …} of one iteration, from the end of the one before
    path        lane | task | iteration | start | duration, …     the critical path, in order of time
    tasks       [name, lane, mode] by task; a lane is its place in `lanes`, a mode its place in `modes`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from weft.metrics.accounts.accounting import NANOSECONDS
from weft.metrics.recording.critical_path import critical_path
from weft.metrics.recording.recording import BACKWARD, RecordedTask, Recording
from weft.plan.kinds import FIRST_STALL, KINDS, MODE_INDEX, MODES, Kind
from weft.plan.rows import Row

DEFAULT_ITERATIONS: Final = 4
MAX_ITERATIONS: Final = 64
MAX_ROWS: Final = 60_000  # in a window: some 2 MB of JSON, and what a browser still draws at once
_ROW_BYTES: Final = 48
_ROWS_PER_TASK: Final = 2  # a wait and a run
_SPARE_ITERATIONS: Final = 4  # lanes report at different times, and the newest iteration is not whole


@dataclass(frozen=True, slots=True)
class ShownIterations:
    """Iterations that follow one another, from the end of the one before them to their own end. At least one."""

    iterations: Sequence[int]
    start_ns: int
    end_ns: int


def timeline(recording: Recording, iterations: int) -> Iterator[bytes]:
    """JSON of the last whole iterations, at most so many, and fewer where they have more than MAX_ROWS rows.

    Without a whole iteration its lists are empty. In pieces, so that the caller may let others work between two.
    """
    recent = tail(recording, iterations)
    window = _bounded(recent, window_of(recent, iterations))
    rows = recent.rows_within(window.start_ns, window.end_ns) if window else {}
    start = window.start_ns if window else 0
    lanes = {lane: place for place, lane in enumerate(recording.programs)}
    head = {
        "job": recording.job,
        "attempt": recording.attempt,
        "ended": bool(recording.facts.get("ended")),
        "modes": list(MODES),
        "num_busy": FIRST_STALL,
        "ended_at": (window.end_ns + recording.clock_ns) / NANOSECONDS if window else None,
        "duration": window.end_ns - start if window else 0,
        "iterations": _iterations(recent, window),
        "itinerary": _itinerary(recording),
    }
    yield _text(head)[:-1]
    yield b',"planned":' + _text(_planned(recording, lanes))
    yield b',"path":' + _text(_path(recent, window, lanes))
    yield b',"tasks":' + _text([[task.name, lanes.get(task.lane, -1), _mode(task)] for task in recording.tasks])
    yield b',"lanes":['
    for place, lane in enumerate(recording.programs):
        yield (b"," if place else b"") + _text({"lane": lane, "rows": _flat(rows.get(lane, []), start)})
    yield b"]}"


def window_of(recording: Recording, iterations: int) -> ShownIterations | None:
    """The newest whole iterations; of a job that has ended, up to the last one that trained. None without any."""
    ends = recording.iteration_ends
    wanted = _training(recording) if recording.facts.get("ended") else ends.keys()
    last = max((i for i in wanted if i - 1 in ends), default=None)
    if last is None:
        return None
    first = last
    while last - first + 1 < iterations and first - 1 in ends and first - 2 in ends:
        first -= 1
    return ShownIterations(range(first, last + 1), ends[first - 1], ends[last])


def tail(recording: Recording, iterations: int) -> Recording:
    """The same with only the newest rows, enough for the window of so many iterations that the whole one has.

    It takes as many bytes of each lane as its program should have stamped, and twice as many while that is too few.
    """
    times = 1
    while True:
        sizes = {
            lane: times * _ROW_BYTES * _ROWS_PER_TASK * len(program) * (iterations + _SPARE_ITERATIONS)
            for lane, program in recording.programs.items()
        }
        if all(len(packed) <= sizes.get(lane, 0) for lane, packed in recording.packed.items()):
            return recording
        newest = {lane: packed[-size:] for lane, size in sizes.items() if (packed := recording.packed.get(lane, b""))}
        cut = [lane for lane, packed in newest.items() if len(packed) < len(recording.packed[lane])]
        dropped = [*recording.facts.get("dropped", recording.programs), *cut]
        recent = replace(recording, packed=newest, facts={**recording.facts, "dropped": dropped})
        window = window_of(recent, iterations)
        if window is not None and (len(window.iterations) == iterations or window.iterations[0] == 1):
            return recent
        times *= 2


def _bounded(recording: Recording, window: ShownIterations | None) -> ShownIterations | None:
    """The window, or one of the fewer iterations that keep to MAX_ROWS; one iteration always."""
    if window is None:
        return None
    num_rows = sum(map(len, recording.rows_within(window.start_ns, window.end_ns).values()))
    if num_rows <= MAX_ROWS:
        return window
    return window_of(recording, max(1, len(window.iterations) * MAX_ROWS // num_rows))


def _training(recording: Recording) -> frozenset[int]:
    """The whole iterations that train: all of a job that only runs forward, else those with a backward."""
    forward_only = recording.facts.get("itinerary", {}).get("forward_only", False)
    backward = {row[2] for rows in recording.rows.values() for row in rows if row[0] == BACKWARD}
    return frozenset(recording.iteration_ends).intersection(recording.iteration_ends if forward_only else backward)


def _iterations(recording: Recording, window: ShownIterations | None) -> list[dict[str, Any]]:
    if window is None:
        return []
    told, begin, training = [], 0, _training(recording)
    for iteration in window.iterations:
        end = recording.iteration_ends[iteration] - window.start_ns
        told.append({"iteration": iteration, "start": begin, "end": end, "trains": iteration in training})
        begin = end
    return told


def _itinerary(recording: Recording) -> dict[str, int] | None:
    itinerary = recording.itinerary
    if itinerary is None:
        return None
    return {
        "steps": itinerary.steps,
        "steps_per_epoch": itinerary.steps_per_epoch,
        "validations_per_epoch": itinerary.validations_per_epoch,
    }


def _planned(recording: Recording, lanes: Mapping[str, int]) -> dict[str, Any] | None:
    """The second of the planned iterations, from the end of the first: so it can be laid over any that ran."""
    ends: dict[int, float] = {}
    for span in recording.planned:
        ends[span.iteration] = max(span.end, ends.get(span.iteration, 0.0))
    if not {0, 1} <= ends.keys():
        return None
    lane_of = {task.id: lanes.get(task.lane, -1) for task in recording.tasks}
    spans: list[int] = []
    for span in recording.planned:
        if span.iteration == 1:
            start = round((span.start - ends[0]) * NANOSECONDS)
            spans += [lane_of[span.task], span.task, start, round((span.end - span.start) * NANOSECONDS)]
    return {"seconds": ends[1] - ends[0], "spans": spans}


def _mode(task: RecordedTask) -> int:
    return MODE_INDEX[KINDS[Kind(task.kind)].mode]


def _path(recording: Recording, window: ShownIterations | None, lanes: Mapping[str, int]) -> list[int]:
    if window is None:
        return []
    told: list[int] = []
    for step in critical_path(recording, window.start_ns, window.end_ns):
        start = step.start_ns - window.start_ns
        told += [lanes[step.lane], step.task, step.iteration, start, step.end_ns - step.start_ns]
    return told


def _flat(rows: list[Row], start_ns: int) -> list[int]:
    return [
        number
        for mode, task, iteration, waited_for, start, end in rows
        for number in (mode, task, iteration, waited_for, start - start_ns, end - start)
    ]


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
