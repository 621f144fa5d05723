"""Top state: what `weft top` knows and what a key changes in it, apart from any terminal. Pure.

A sample is what the daemon said at one moment. What a lane did of late is the difference of two samples of the same
attempt: the newest one, and the oldest that is not older than WINDOW_SECONDS. The pace is taken from longer apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from weft.cli.screens.time_summary import time_summary
from weft.plan.kinds import is_compute_lane
from weft.spec.job_state import TERMINAL_STATES, WAITING_STATES
from weft.transport.wire.frames import Message

VERSION: Final = 1
WINDOW_SECONDS: Final = 5.0  # that lanes and stalls are shown of: two bars differ by a fifth at most
PACE_SECONDS: Final = 30.0  # that samples/s are taken from, since an iteration may take seconds
PATH_SECONDS: Final = 5.0  # between two looks for the critical path, which cost the daemon up to a tenth of a second
MAX_STALLS: Final = 20  # that the daemon tells of a job

UP, DOWN = "up", "down"
_SEQUENCES: Final = {"\x1b[A": UP, "\x1bOA": UP, "\x1b[B": DOWN, "\x1bOB": DOWN}
_LONGEST_SEQUENCE: Final = 16  # of an escape sequence; arbitrary: terminals send shorter ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at: float  # monotonic seconds
    status: Message
    jobs: Sequence[Message]  # as `ordered` puts them
    shown: Message | None  # the selected job, None where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the user has chosen."""

    selected: str | None = None  # a job's id; None: the first one that runs
    paused: bool = False
    help: bool = False
    left: bool = False

    def pressed(self, key: str, jobs: Sequence[Message]) -> View:
        if self.help:
            return replace(self, help=False, left=key == "q")
        match key:
            case "q":
                return replace(self, left=True)
            case "p" | " ":
                return replace(self, paused=not self.paused)
            case "?" | "h":
                return replace(self, help=True)
            case "k" | "up":
                return self._moved(-1, jobs)
            case "j" | "down":
                return self._moved(1, jobs)
        return self

    def _moved(self, by: int, jobs: Sequence[Message]) -> View:
        names = [job["job"] for job in jobs]
        now = selected(jobs, self.selected)
        if now is None:
            return self
        index = names.index(now) + by if now in names else 0
        return replace(self, selected=names[min(max(index, 0), len(names) - 1)])


class Keys:
    """Names of keys from the bytes of a terminal, of which a sequence may come in parts."""

    def __init__(self) -> None:
        self._pending = ""

    def feed(self, data: bytes) -> list[str]:
        text = self._pending + data.decode("ascii", "ignore")
        self._pending = ""
        keys = []
        while text:
            length = _sequence_length(text)
            if length is None:
                self._pending = text
                break
            key, text = text[:length], text[length:]
            keys.append(_SEQUENCES.get(key, key))
        return keys


def _sequence_length(text: str) -> int | None:
    """Of the key that the text begins with; None where its end is still to come."""
    if text[0] != "\x1b":
        return 1
    if len(text) == 1:
        return None
    if text[1] not in "[O":
        return 1
    end = next((i for i, char in enumerate(text[2:_LONGEST_SEQUENCE], start=3) if "@" <= char <= "~"), None)
    return _LONGEST_SEQUENCE if end is None and len(text) >= _LONGEST_SEQUENCE else end


def ordered(jobs: Sequence[Message]) -> list[Message]:
    """Those that wait or run as they were submitted, running ones first; then those that have ended, newest first.

    A job that is paused, or was stopped for another one, waits, though it has started before.
    """
    alive = [job for job in jobs if job["state"] not in TERMINAL_STATES]
    ended = [job for job in jobs if job["state"] in TERMINAL_STATES]
    alive.sort(key=lambda job: (job["state"] in WAITING_STATES, job["submitted_at"], job["job"]))
    ended.sort(key=lambda job: -(job["ended_at"] or 0.0))
    return alive + ended


def selected(jobs: Sequence[Message], chosen: str | None) -> str | None:
    """The job that is looked at: the chosen one, or the first of the ordered jobs."""
    return chosen if chosen is not None else next((job["job"] for job in jobs), None)


class RecentSamples:
    """The samples of late. It begins anew with another job, another attempt or another daemon."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    @property
    def newest(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    def add(self, sample: Sample) -> None:
        if self._samples and not _continues(self._samples[-1], sample):
            self._samples.clear()
        if self._samples:
            self._samples[-1] = replace(self._samples[-1], jobs=())  # up to a thousand, that nobody asks for again
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.at - self._samples[1].at > PACE_SECONDS:
            self._samples.popleft()

    def before(self, seconds: float) -> Sample | None:
        """The oldest sample within so many seconds of the newest one, at least the one before it."""
        if len(self._samples) < 2:
            return None
        newest = self._samples[-1]
        earlier = list(self._samples)[:-1]
        return next((sample for sample in earlier if newest.at - sample.at <= seconds), earlier[-1])


def _continues(before: Sample, after: Sample) -> bool:
    if before.status["pid"] != after.status["pid"]:
        return False
    if (before.shown or {}).get("job") != (after.shown or {}).get("job"):
        return False
    lanes = _lanes(after.shown)
    return all(
        lane in lanes and told["wall_seconds"] <= lanes[lane]["wall_seconds"]
        for lane, told in _lanes(before.shown).items()
    )


class NewestPath:
    """The critical path of the selected job, which is looked for less often than the rest."""

    def __init__(self) -> None:
        self._asked_at = float("-inf")
        self._job: str | None = None
        self._newest: Message | None = None

    def is_due(self, job: str, now: float) -> bool:
        """Whether to ask for it with this job's next answer. now: monotonic seconds."""
        if job == self._job and now - self._asked_at < PATH_SECONDS:
            return False
        self._newest = self._newest if job == self._job else None
        self._job, self._asked_at = job, now
        return True

    def added(self, shown: Message) -> Message:
        """The answer with the path in it, or the one of before."""
        told = shown.get("time")
        if told is None:
            return shown
        self._newest = told.get("critical_path") or self._newest
        return {**shown, "time": {**told, "critical_path": self._newest}}


def report(history: RecentSamples) -> dict[str, Any]:
    """What `weft top` shows, as data; docs/top.md describes it. history: with one sample at least."""
    newest = history.newest
    assert newest is not None
    return {
        "version": VERSION,
        "daemon": newest.status,
        "jobs": list(newest.jobs),
        "job": None if newest.shown is None else _job(history, newest.shown),
    }


def _job(history: RecentSamples, shown: Message) -> dict[str, Any]:
    """The time summary of the last seconds, and the pace. window_seconds: None where it is told since the job began."""
    newest, before = history.newest, history.before(WINDOW_SECONDS)
    assert newest is not None
    window = None
    if before is not None and before.shown is not None and _holds_workers(shown):
        window = newest.at - before.at
        shown = _within(before.shown, shown)
    summary = time_summary(shown)
    keys = ("why", "loss", "validation", "error", "started_at", "ended_at")
    told = {**summary, **{key: shown.get(key) for key in keys}, "window_seconds": window}
    return {**told, **asdict(_pace(history.before(PACE_SECONDS), newest))}


def _holds_workers(shown: Message) -> bool:
    """Whether there is something to tell of the last seconds, and a pace."""
    return shown["state"] not in TERMINAL_STATES | WAITING_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    eta_seconds: float | None = None


def _pace(before: Sample | None, after: Sample) -> _Pace:
    if before is None or before.shown is None or after.shown is None or not _holds_workers(after.shown):
        return _Pace()
    shown = after.shown
    grown = (shown["step"] or 0) - (before.shown["step"] or 0)
    if grown <= 0 or after.at <= before.at:
        return _Pace()
    rate = grown / (after.at - before.at)
    samples = (shown.get("plan") or {}).get("samples_per_step")
    return _Pace(
        steps_per_second=rate,
        samples_per_second=rate * samples if samples else None,
        eta_seconds=(shown["steps"] - shown["step"]) / rate if shown["steps"] else None,
    )


def _within(before: Message, after: Message) -> Message:
    """What `show` says, of the time between two of its answers."""
    lanes = {
        lane: {
            "wall_seconds": told["wall_seconds"] - earlier["wall_seconds"],
            "residual_seconds": told["residual_seconds"] - earlier["residual_seconds"],
            "modes": _grown(earlier["modes"], told["modes"]),
        }
        for lane, told in _lanes(after).items()
        for earlier in (_lanes(before).get(lane, _NO_LANE),)
    }
    time = after.get("time") or {}
    stalls = _stalls_within((before.get("time") or {}).get("stalls") or (), time.get("stalls") or ())
    kept = ("attempt", "began_after_step", "critical_path")
    told = {"lanes": lanes, "stalls": stalls, **{name: time.get(name) for name in kept}}
    was = before.get("overlap") or {}
    overlap = {
        worker: {kind: _grown(was.get(worker, {}).get(kind, {}), seconds) for kind, seconds in kinds.items()}
        for worker, kinds in (after.get("overlap") or {}).items()
    }
    return {**after, "overlap": overlap, "time": told}


def _stalls_within(before: Sequence[Message], after: Sequence[Message]) -> list[Message]:
    """What each stall has grown by. The daemon tells the longest ones only: one that it had not told may have been as
    long as the shortest that it had, and that is taken off, so none is told longer than it was."""
    stalled = {(stall["lane"], stall["cause"], stall["task"]): float(stall["seconds"]) for stall in before}
    untold = {
        compute: min((stall["seconds"] for stall in before if is_compute_lane(stall["lane"]) is compute), default=0.0)
        for compute in (True, False)
        if len(before) >= MAX_STALLS
    }
    grown = []
    for stall in after:
        earlier = stalled.get(
            (stall["lane"], stall["cause"], stall["task"]), untold.get(is_compute_lane(stall["lane"]), 0.0)
        )
        if stall["seconds"] > earlier:
            grown.append({**stall, "seconds": stall["seconds"] - earlier})
    return grown


_NO_LANE: Final[Mapping[str, Any]] = {"wall_seconds": 0.0, "residual_seconds": 0.0, "modes": {}}


def _lanes(shown: Message | None) -> Mapping[str, Any]:
    return ((shown or {}).get("time") or {}).get("lanes") or {}


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0.0) for name in after}


def num_busy(workers: Sequence[Message]) -> dict[str, tuple[int, int]]:
    """By kind of worker: how many are busy, and how many there are."""
    counts: dict[str, tuple[int, int]] = {}
    for worker in workers:
        busy, every = counts.get(worker["kind"], (0, 0))
        counts[worker["kind"]] = busy + (worker["state"] == "busy"), every + 1
    return counts
