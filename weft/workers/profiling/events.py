"""Profiled events: from what torch.profiler has recorded to the tracks of a worker's profile. Pure.

The profiler stamps by a clock of its own. The thread that runs it lays marks into the recording, at the beginning and
at the end, and reads CLOCK_MONOTONIC before and after each; no mark can have begun before the one reading or ended
after the other:

    ours       before │          │ after            before - start <= offset <= after - end, for every mark,
    theirs            ├── mark ──┤                  so it lies in an interval of some microseconds

On a GPU it also launches something into the stream of each lane: of a stream the profiler tells a number only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType

from weft.plan.worker_profile import KINDS, MAX_EVENTS, MAX_NAME, ProfileRow, Track, apart_or_within, packed_track

MARK = "weft clock mark "  # and its number
LANE_MARK = "weft lane mark "  # and the lane's name
_KIND_OF_ACTIVITY = {"cpu_op": "operator", "kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
_NO_OPERATOR = re.compile(  # the names of calls to CUDA, and of what Kineto itself takes
    "cu(da)?[A-Z]|INVALID|Activity Buffer|Buffer Flush|Instrumentation|Resource$|Runtime Trig|Lazy Func|Command Buf"
)
_NO_KERNELS = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})  # activities


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An event as the profiler has it."""

    activity: str  # Kineto's name of its kind
    name: str
    start_ns: int
    end_ns: int
    place: int  # a thread's id, or a stream's number
    correlation: int = 0  # the number of an operator
    linked: int = 0  # of what runs on a device: the number of the operator that it came from


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    number: int
    before_ns: int  # CLOCK_MONOTONIC
    after_ns: int
    at_end: bool  # laid when the profiler was about to end, not when it had begun


class MarksMissing(Exception):
    """What was recorded is not ours: another profiler has begun meanwhile, and ended ours."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The profiler's time on CLOCK_MONOTONIC: an offset at either end of the recording, and a line through both."""

    first: tuple[int, int]
    last: tuple[int, int]
    error_ns: int

    def at(self, theirs_ns: int) -> int:
        (begin, offset), (end, later) = self.first, self.last
        drift = (later - offset) * (theirs_ns - begin) // (end - begin) if end > begin else 0
        return theirs_ns + offset + drift


def seen_in(events: Iterable[Any]) -> list[Seen]:
    """Of `_KinetoEvent`s: marks, operators, and what ran on the device."""
    return [
        Seen(
            activity=activity,
            name=event.name(),
            start_ns=event.start_ns(),
            end_ns=event.end_ns(),
            place=event.device_resource_id(),
            correlation=event.correlation_id(),
            linked=event.linked_correlation_id(),
        )
        for event in events
        if (activity := _activity_of(event)) in _KIND_OF_ACTIVITY or activity == "user_annotation"
    ]


def _activity_of(event: Any) -> str | None:
    """Kineto's name of an event's kind, which events of torch before 2.12 do not tell; None of what is not wanted."""
    if hasattr(event, "activity_type"):
        told: str = event.activity_type()
        return told
    name: str = event.name()
    if event.device_type() == DeviceType.CPU:
        if event.is_user_annotation():
            return "user_annotation"
        return None if _NO_OPERATOR.match(name) else "cpu_op"
    if event.is_user_annotation():
        return None
    return next((kind for start, kind in _NO_KERNELS.items() if name.startswith(start)), "kernel")


def clock_of(seen: Iterable[Seen], marks: Iterable[Mark]) -> Clock:
    """Errors: MarksMissing."""
    found = {event.name: event for event in seen if event.name.startswith(MARK)}
    bounds: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
    for mark in marks:
        event = found.get(f"{MARK}{mark.number}")
        if event is None:
            raise MarksMissing
        bounds[mark.at_end].append((mark.before_ns - event.start_ns, mark.after_ns - event.end_ns, event.start_ns))
    (first, first_error), (last, last_error) = (_offset(bounds[at_end]) for at_end in (False, True))
    return Clock(first, last, max(first_error, last_error))


def _offset(bounds: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int], int]:
    """When, the offset then, and how far it may be off."""
    if not bounds:
        raise MarksMissing
    low, high = max(low for low, _, _ in bounds), min(high for _, high, _ in bounds)
    return (bounds[0][2], (low + high) // 2), abs(
        high - low + 1
    ) // 2  # the clocks' own noise may have turned them round


def lanes_of_streams(seen: Sequence[Seen]) -> dict[int, str]:
    """Which lane a stream's number belongs to, by what was launched within the lanes' marks."""
    spans = [event for event in seen if event.name.startswith(LANE_MARK)]
    lane_of = {
        event.correlation: span.name.removeprefix(LANE_MARK)
        for span in spans
        for event in seen
        if event.activity == "cpu_op" and event.place == span.place and _within(event, span)
    }
    return {
        event.place: lane_of[event.linked] for event in seen if event.activity in ON_DEVICE and event.linked in lane_of
    }


def _within(event: Seen, span: Seen) -> bool:
    return span.start_ns <= event.start_ns and event.end_ns <= span.end_ns


def tracks_of(
    seen: Sequence[Seen], clock: Callable[[int], int], lane_of_thread: Mapping[int, str], own_thread: int
) -> tuple[tuple[str, ...], tuple[Track, ...], int]:
    """Names, tracks (those of lanes first), and how many events were too many: the last ones. own_thread: of the
    profiler, whose marks and whatever came from them stay out."""
    streams = lanes_of_streams(seen)
    own = {event.correlation for event in seen if event.place == own_thread and event.activity not in ON_DEVICE}
    events = sorted(
        (event for event in seen if event.activity in _KIND_OF_ACTIVITY and not _is_own(event, own, own_thread)),
        key=lambda event: event.start_ns,
    )
    names: dict[str, int] = {}
    rows: dict[tuple[bool, int], list[ProfileRow]] = {}
    for event in events[:MAX_EVENTS]:
        name = names.setdefault(event.name[:MAX_NAME], len(names))
        kind = KINDS.index(_KIND_OF_ACTIVITY[event.activity])
        row = (name, kind, clock(event.start_ns), clock(event.end_ns))
        rows.setdefault((event.activity in ON_DEVICE, event.place), []).append(row)
    tracks = tuple(
        Track(
            lane=(streams if on_device else lane_of_thread).get(place, ""),
            source=f"{'stream' if on_device else 'thread'} {place}",
            packed=packed_track(apart_or_within(own_rows)),
        )
        for (on_device, place), own_rows in sorted(rows.items())
    )
    tracks = tuple(sorted(tracks, key=lambda track: not track.lane))
    return tuple(names), tracks, len(events) - len(events[:MAX_EVENTS])


def _is_own(event: Seen, own: set[int], own_thread: int) -> bool:
    if event.activity in ON_DEVICE:
        return event.linked in own and event.linked > 0
    return event.place == own_thread
