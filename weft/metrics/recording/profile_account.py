"""Profile account: a job's busy and hidden time once from its lanes' rows and once from what torch.profiler saw. Pure.

    our rows        ├──── FORWARD ────┤├─ stall ─┤├── BACKWARD ──┤
    the profiler's    ▕k▏▕k▏ ▕kernel▏               ▕k▏ ▕kernel▏
    as tasks          ├─────────────┤               ├──────────┤     from the first to the last of what ran in a task

Both become the same value, a lane's tasks as spans, and the same sums are made of both. A gap between two kernels of
one task is busy time in either, since our rows end with tasks; how much of it there is, is told beside. What ran in no
busy row of ours stands for itself. So they differ by what our stamps are off at a task's edges, by time that we count
as a task's before its first kernel and after its last one, and by what ran in our stalls.

torch.profiler sees what torch runs. A lane of the host that works otherwise (SYNC in shared memory) has no track.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.metrics.accounts.overlap import KINDS
from weft.metrics.recording.recording import Recording
from weft.plan.kinds import COMPUTE_MODES, FIRST_STALL, MODES
from weft.plan.rows import Row
from weft.plan.worker_profile import Track, WorkerProfile, outermost

Span = tuple[int, int, int]  # start_ns, end_ns, a mode's index in MODES, or NO_MODE
Spans = Mapping[str, Sequence[Span]]  # by lane, in order and apart

NO_MODE = -1  # of what ran in no busy row
_COMPUTE = frozenset(map(MODES.index, COMPUTE_MODES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same time by our rows and by the profiler, in nanoseconds."""

    ours: int
    theirs: int

    def apart(self, at_least: float = 0.0) -> float:
        """The difference as a part of the greater one, or of `at_least` nanoseconds where both are less; 0 for
        nothing at all."""
        greatest = max(self.ours, self.theirs, at_least)
        return abs(self.ours - self.theirs) / greatest if greatest else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    wall_ns: int  # of each lane, the time that every profile covers
    busy: Mapping[str, Pair]  # by lane, `<worker>/<lane>`
    hidden: Mapping[tuple[str, str], Pair]  # by worker and kind, what ran beside compute
    all_of: Mapping[tuple[str, str], Pair]  # the same of all that ran
    gaps_ns: Mapping[str, int]  # by lane, between what ran within one task

    def stall(self, lanes: Iterable[str]) -> Pair:
        busy = [self.busy[lane] for lane in lanes]
        walls = len(busy) * self.wall_ns
        return Pair(ours=walls - sum(pair.ours for pair in busy), theirs=walls - sum(pair.theirs for pair in busy))

    def overlap(self, kinds: Collection[str] = KINDS) -> Pair:
        pairs = [pair for (_, kind), pair in self.hidden.items() if kind in kinds]
        return Pair(ours=sum(pair.ours for pair in pairs), theirs=sum(pair.theirs for pair in pairs))


def compare(recording: Recording, profiles: Sequence[WorkerProfile]) -> Comparison:
    """Of the profiled workers' lanes, in the time that all of the profiles cover. Errors: ValueError where none is."""
    begin = max((profile.start_ns for profile in profiles), default=0)
    end = min((profile.end_ns for profile in profiles), default=0)
    if begin >= end:
        raise ValueError("the profiles have no time in common")
    tracks = {f"{profile.worker}/{track.lane}": track for profile in profiles for track in profile.tracks}
    workers = {profile.worker for profile in profiles}
    rows = {lane: own for lane, own in recording.rows.items() if _worker_of(lane) in workers}
    ours = {lane: _cut(spans_of_rows(own), begin, end) for lane, own in rows.items()}
    theirs = {lane: _cut(spans_of_track(tracks.get(lane), own), begin, end) for lane, own in rows.items()}
    hidden = [hidden_by_kind(spans) for spans in (ours, theirs)]
    both = sorted(hidden[0].keys() | hidden[1].keys())
    found = [[of.get(key, (0, 0)) for of in hidden] for key in both]
    return Comparison(
        wall_ns=end - begin,
        busy={lane: Pair(ours=_total(ours[lane]), theirs=_total(theirs[lane])) for lane in rows},
        hidden={key: Pair(ours=mine[0], theirs=other[0]) for key, (mine, other) in zip(both, found, strict=True)},
        all_of={key: Pair(ours=mine[1], theirs=other[1]) for key, (mine, other) in zip(both, found, strict=True)},
        gaps_ns={lane: _total(theirs[lane]) - _ran(tracks.get(lane), begin, end) for lane in rows},
    )


def spans_of_rows(rows: Iterable[Row]) -> list[Span]:
    return [(start, end, mode) for mode, _, _, _, start, end in rows if mode < FIRST_STALL]


def spans_of_track(track: Track | None, rows: Sequence[Row]) -> list[Span]:
    """What ran in one task as one span. It is of the task in whose row its middle lies."""
    spans: list[Span] = []
    starts = [row[4] for row in rows]
    last_task = None
    for start, end in outermost(track.rows()) if track is not None else ():
        place = bisect_right(starts, (start + end) // 2) - 1
        row = rows[place] if place >= 0 and (start + end) // 2 < rows[place][5] else None
        task = place if row is not None and row[0] < FIRST_STALL else None
        if spans and task is not None and task == last_task:
            spans[-1] = (spans[-1][0], end, spans[-1][2])
        else:
            spans.append((start, end, row[0] if row is not None and task is not None else NO_MODE))
        last_task = task
    return spans


def hidden_by_kind(lanes: Spans) -> dict[tuple[str, str], tuple[int, int]]:
    """By worker and kind: nanoseconds that ran while compute ran, and all of them. As weft.metrics.accounts.overlap has
    it: of a worker that computes nothing, beside any compute lane of the job."""
    compute = {lane: [span for span in spans if span[2] in _COMPUTE] for lane, spans in lanes.items()}
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for lane, spans in lanes.items():
        worker = _worker_of(lane)
        own = [each for other, each in compute.items() if each and _worker_of(other) == worker]
        computed = _union(own or list(compute.values())) if not compute[lane] else []
        for mode, kind in ((MODES.index(kind), kind) for kind in KINDS):
            of_kind = [span for span in spans if span[2] == mode]
            if of_kind:
                hidden, whole = sums.get((worker, kind), (0, 0))
                sums[worker, kind] = hidden + _common(of_kind, computed), whole + _total(of_kind)
    return sums


def _cut(spans: Iterable[Span], begin: int, end: int) -> list[Span]:
    return [(max(start, begin), min(stop, end), mode) for start, stop, mode in spans if stop > begin and start < end]


def _ran(track: Track | None, begin: int, end: int) -> int:
    """Nanoseconds in which anything ran."""
    spans = [(start, stop, NO_MODE) for start, stop in outermost(track.rows())] if track is not None else []
    return _total(_cut(spans, begin, end))


def _total(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end, _ in spans)


def _union(lanes: Iterable[Sequence[Span]]) -> list[Span]:
    """When any of the lanes ran."""
    return [
        (start, end, NO_MODE)
        for start, end in outermost(sorted((0, 0, start, end) for spans in lanes for start, end, _ in spans))
    ]


def _common(spans: Sequence[Span], others: Sequence[Span]) -> int:
    """Nanoseconds that both have; each is in order and apart."""
    common, place = 0, 0
    for start, end, _ in spans:
        while place < len(others) and others[place][1] <= start:
            place += 1
        for other_start, other_end, _ in others[place:]:
            if other_start >= end:
                break
            common += min(end, other_end) - max(start, other_start)
    return common


def _worker_of(lane: str) -> str:
    return lane.partition("/")[0]
