"""Recording: the stamped rows of a job's last iterations, beside the graph and the plan that they belong to. Pure.

One file of it, `recording.msgpack` in the run directory, is what every view of the past is made from: the trace, the
timeline page, the critical path, what-if. A `Recorder` keeps the rows while the job runs, the newest some 10,000
iterations of a small job or a few hundred of one with many tasks.

    rows of a lane      mode | task | iteration | waited_for | start_ns | end_ns      six int64, as lanes report them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgpack

from weft.machine.run_file import load, replace
from weft.plan.graph import Edge
from weft.plan.itinerary import Itinerary
from weft.plan.kinds import FIRST_STALL, MODE_INDEX, Cause
from weft.plan.rows import Row, unpack

FILE: Final = "recording.msgpack"
PROFILED_FILE: Final = "profiled.msgpack"  # as it was when the iterations that were to be profiled were over
VERSION: Final = 3
RECORDED_BYTES: Final = 8 << 20  # of a running job's rows: 175,000 of them; a daemon runs few jobs at a time
MAX_BYTES: Final = 256 << 20  # of a file: the rows, and some 100 MB of a graph of 256 stages and 1,024 microbatches
BACKWARD: Final = MODE_INDEX["backward"]


class RecordingError(ValueError):
    """A file that is no recording, or of another version. The text names it and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTask:
    """A task of the graph."""

    id: int
    name: str  # as people see it
    lane: str  # `<worker>/<lane>`
    kind: str
    replica: int | None
    stage: int | None
    microbatch: int | None
    bucket: int | None
    owner: int | None


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """One task of one iteration as the simulator ran the plan, in seconds of virtual time."""

    task: int
    iteration: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Recording:
    job: str
    attempt: int
    clock_ns: int  # unix time less CLOCK_MONOTONIC, of the machine then
    tasks: tuple[RecordedTask, ...]
    edges: tuple[Edge, ...]
    programs: Mapping[str, tuple[int, ...]]
    packed: Mapping[str, bytes]  # each lane's rows as bytes, in order
    finished: int  # how many iterations every lane has finished
    planned: tuple[PlannedSpan, ...]  # some iterations of the steady state
    task_seconds: tuple[float, ...]
    spec: Mapping[str, Any]  # that the plan was made from, as plain data, as the next
    inspection: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def label(self, iteration: int) -> str:
        """Of an iteration of the job, as people count: see `Itinerary.label`."""
        itinerary = self.itinerary
        return f"iteration {iteration}" if itinerary is None else itinerary.label(iteration)

    def span_label(self, first: int, last: int) -> str:
        """`steps 87 to 90`, or `step 90 to validation after step 90`."""
        (one, begin), (other, end) = (self.label(each).split(" ", 1) for each in (first, last))
        if first == last:
            return self.label(first)
        same = one == other and one in ("step", "iteration")
        return f"{one}s {begin} to {end}" if same else f"{one} {begin} to {other} {end}"

    @cached_property
    def itinerary(self) -> Itinerary | None:
        """None in a recording of a Weft that did not keep all of it."""
        facts = self.facts.get("itinerary", {})
        kept = {each.name: facts[each.name] for each in fields(Itinerary) if each.name in facts}
        needed = {each.name for each in fields(Itinerary) if each.default is MISSING}
        return Itinerary(**kept) if kept.keys() >= needed else None

    @cached_property
    def rows(self) -> dict[str, list[Row]]:
        """By lane, in the order of the programs."""
        return {lane: list(unpack(self.packed.get(lane, b""))) for lane in self.programs}

    @cached_property
    def iteration_ends(self) -> dict[int, int]:
        """When the last task of each iteration ended, for the iterations of which every lane has all its rows."""
        first, last = self._complete()
        ends: dict[int, int] = {}
        for rows in self.rows.values():
            for mode, task, iteration, _, _, end in rows:
                if mode < FIRST_STALL and task >= 0 and first <= iteration <= last and end > ends.get(iteration, 0):
                    ends[iteration] = end
        return dict(sorted(ends.items()))

    def _complete(self) -> tuple[int, int]:
        """The first and the last iteration that no lane lacks rows of. The oldest ones may have been dropped; of the
        newest the rows do not tell, since in validation some lanes stamp none."""
        dropped = self.facts.get("dropped", self.programs)  # a lane may as well begin later: loaders take turns
        oldest = (next((row[2] for row in self.rows.get(lane, ()) if row[2] >= 0), 0) for lane in dropped)
        return max((begin + 1 for begin in oldest if begin), default=0), self.finished - 1

    @cached_property
    def training(self) -> frozenset[int]:
        """The complete iterations that train; all of them in a job that only runs forward."""
        backward = {row[2] for rows in self.rows.values() for row in rows if row[0] == BACKWARD}
        return frozenset(self.iteration_ends).intersection(backward or self.iteration_ends)

    def window(self, iterations: int) -> tuple[int, int] | None:
        """The last complete training iterations that follow one another, at most so many: from the end of the one
        before them to their own end. None where there is none."""
        ends = self.iteration_ends
        last = max((i for i in self.training if i - 1 in ends), default=None)
        if last is None:
            return None
        first = last
        while last - first + 1 < iterations and first - 1 in self.training and first - 2 in ends:
            first -= 1
        return ends[first - 1], ends[last]

    def rows_within(self, start_ns: int, end_ns: int) -> dict[str, list[Row]]:
        """Rows that have a part in the window, whole."""
        return {
            lane: [row for row in rows if row[5] > start_ns and row[4] < end_ns] for lane, rows in self.rows.items()
        }

    # --- as a file

    def encode(self) -> bytes:
        return bytes(msgpack.packb({"weft_recording": VERSION, **_plain(self)}))

    def save(self, path: Path) -> None:
        """Whole or not at all. Errors: OSError."""
        replace(path, self.encode())

    @classmethod
    def decode(cls, data: bytes, name: str = "the data") -> Recording:
        """Errors: RecordingError."""
        try:
            wire = msgpack.unpackb(data, strict_map_key=False)
            version = wire.pop("weft_recording")
            if version != VERSION:
                raise RecordingError(f"{name} is of version {version} and this Weft reads {VERSION}; run the job again")
            return cls(
                **{
                    **wire,
                    "tasks": tuple(RecordedTask(**task) for task in wire["tasks"]),
                    "edges": tuple(
                        Edge(source, target, distance, Cause(cause))
                        for source, target, distance, cause in wire["edges"]
                    ),
                    "programs": {lane: tuple(program) for lane, program in wire["programs"].items()},
                    "planned": tuple(PlannedSpan(*span) for span in wire["planned"]),
                    "task_seconds": tuple(wire["task_seconds"]),
                }
            )
        except RecordingError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
            raise RecordingError(f"{name} is no recording ({type(error).__name__}: {str(error)[:200]})") from error

    @classmethod
    def load(cls, path: Path, *, owner: int | None = None) -> Recording:
        """owner: the uid that the file must be of, None for anybody's. Errors: RecordingError, and OSError where it
        cannot be read."""
        return cls.decode(load(path, MAX_BYTES, owner=owner), str(path))


class Recorder:
    """A running job's newest rows, as bytes in the order in which lanes reported them."""

    def __init__(self, max_bytes: int = RECORDED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._reports: deque[tuple[str, bytes]] = deque()
        self._num_bytes = 0
        self._dropped: set[str] = set()

    def add(self, lane: str, packed: bytes) -> None:
        self._reports.append((lane, packed))
        self._num_bytes += len(packed)
        while self._num_bytes > self._max_bytes and len(self._reports) > 1:
            lane, oldest = self._reports.popleft()
            self._num_bytes -= len(oldest)
            self._dropped.add(lane)

    def dropped(self) -> list[str]:
        """The lanes whose oldest rows are no longer here."""
        return sorted(self._dropped)

    def packed(self) -> dict[str, bytes]:
        return packed_by_lane(self._reports)

    def reports(self) -> Sequence[tuple[str, bytes]]:
        """As they are now, for `packed_by_lane` in another thread; nothing of them is copied."""
        return tuple(self._reports)


def packed_by_lane(reports: Iterable[tuple[str, bytes]]) -> dict[str, bytes]:
    """What each lane reported, in order, laid end to end."""
    parts: dict[str, list[bytes]] = {}
    for lane, packed in reports:
        parts.setdefault(lane, []).append(packed)
    return {lane: b"".join(chunks) for lane, chunks in parts.items()}


def _plain(recording: Recording) -> dict[str, Any]:
    return {
        "job": recording.job,
        "attempt": recording.attempt,
        "clock_ns": recording.clock_ns,
        "tasks": [asdict(task) for task in recording.tasks],
        "edges": [[edge.source, edge.target, edge.distance, edge.cause] for edge in recording.edges],
        "programs": {lane: list(program) for lane, program in recording.programs.items()},
        "packed": dict(recording.packed),
        "finished": recording.finished,
        "planned": [[span.task, span.iteration, span.start, span.end] for span in recording.planned],
        "task_seconds": list(recording.task_seconds),
        "spec": dict(recording.spec),
        "inspection": dict(recording.inspection),
        "facts": dict(recording.facts),
    }
