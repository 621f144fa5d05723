"""From what the profiler has recorded to tracks: values as Kineto has them, also those of a GPU that is not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd import profiler as autograd_profiler

from weft.plan.worker_profile import KINDS
from weft.workers.profiling import events as profiled_events
from weft.workers.profiling.events import (
    LANE_MARK,
    MARK,
    Mark,
    MarksMissing,
    Seen,
    clock_of,
    lanes_of_streams,
    seen_in,
    tracks_of,
)

OFFSET = -1_000_000  # theirs to ours
OWN, COMPUTE_THREAD, SYNC_THREAD = 70, 7, 8  # threads
COMPUTE, DOWN, OTHER = 13, 14, 20  # streams


def mark(number: int, start: int, end: int) -> Seen:
    return Seen(activity="user_annotation", name=f"{MARK}{number}", start_ns=start, end_ns=end, place=OWN)


def read(number: int, start: int, end: int, *, offset: int = OFFSET, slack: int = 100, at_end: bool = False) -> Mark:
    """What the host's clock said around a mark."""
    return Mark(number=number, before_ns=start + offset - slack, after_ns=end + offset + slack, at_end=at_end)


def operator(name: str, start: int, end: int, thread: int, number: int = 0) -> Seen:
    return Seen(activity="cpu_op", name=name, start_ns=start, end_ns=end, place=thread, correlation=number)


def kernel(name: str, start: int, end: int, stream: int, *, linked: int = 0, activity: str = "kernel") -> Seen:
    return Seen(activity=activity, name=name, start_ns=start, end_ns=end, place=stream, correlation=900, linked=linked)


# --- the clock


def test_the_closest_of_the_marks_tells_the_offset_and_how_far_it_may_be_off() -> None:
    spans = [(1_000, 1_010), (2_000, 2_010), (9_000, 9_010)]
    seen = [mark(number, *span) for number, span in enumerate(spans)]
    marks = [read(0, *spans[0], slack=5_000), read(1, *spans[1], slack=40), read(2, *spans[2], slack=40, at_end=True)]
    clock = clock_of(seen, marks)
    for time in (1_000, 5_000, 9_000):
        assert clock.at(time) == pytest.approx(time + OFFSET, abs=clock.error_ns)
    assert 40 <= clock.error_ns <= 50, "half of what before and after leave open"


def test_readings_that_lie_on_one_side_of_a_mark_bound_each_other() -> None:
    """One was late before it, another after it; together they are close."""
    seen = [mark(0, 1_000, 1_000), mark(1, 2_000, 2_000), mark(2, 3_000, 3_000)]
    marks = [
        Mark(number=0, before_ns=1_000 + OFFSET - 9_000, after_ns=1_000 + OFFSET + 10, at_end=False),
        Mark(number=1, before_ns=2_000 + OFFSET - 10, after_ns=2_000 + OFFSET + 9_000, at_end=False),
        read(2, 3_000, 3_000, slack=10, at_end=True),
    ]
    clock = clock_of(seen, marks)
    assert clock.error_ns <= 10
    assert clock.at(1_500) == pytest.approx(1_500 + OFFSET, abs=10)


def test_a_clock_that_drifts_is_followed_from_one_end_to_the_other() -> None:
    first, last = (1_000, 1_000), (1_001_000, 1_001_000)
    seen = [mark(0, *first), mark(1, *last)]
    marks = [read(0, *first, slack=0), read(1, *last, offset=OFFSET + 2_000, slack=0, at_end=True)]
    clock = clock_of(seen, marks)
    assert [clock.at(time) - time - OFFSET for time in (1_000, 501_000, 1_001_000)] == [0, 1_000, 2_000]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_recording_without_our_marks_is_not_ours(missing: int) -> None:
    seen = [mark(number, 1_000, 1_001) for number in (0, 1) if number != missing]
    marks = [read(0, 1_000, 1_001), read(1, 1_000, 1_001, at_end=True)]
    with pytest.raises(MarksMissing):
        clock_of(seen, marks)


# --- tracks


def of_a_gpu() -> list[Seen]:
    """What a GPU worker records: no operator but those of the marks, and what runs in streams, whoever launched it."""
    return [
        Seen(activity="user_annotation", name=f"{LANE_MARK}compute", start_ns=10, end_ns=50, place=OWN),
        operator("aten::zeros", 12, 45, OWN, 101),
        operator("aten::fill_", 20, 40, OWN, 102),
        Seen(activity="user_annotation", name=f"{LANE_MARK}d2h", start_ns=60, end_ns=99, place=OWN),
        operator("aten::fill_", 70, 90, OWN, 103),
        kernel("fill", 45, 47, COMPUTE, linked=102),
        kernel("Memset (Device)", 95, 96, DOWN, linked=103, activity="gpu_memset"),
        kernel("gemm", 200, 300, COMPUTE),
        kernel("relu", 310, 330, COMPUTE),
        kernel("Memcpy DtoH (Device -> Pinned)", 305, 400, DOWN, activity="gpu_memcpy"),
        kernel("theirs", 250, 260, OTHER),
    ]


def test_a_streams_number_is_known_by_what_was_launched_within_its_lanes_mark() -> None:
    assert lanes_of_streams(of_a_gpu()) == {COMPUTE: "compute", DOWN: "d2h"}


def test_a_gpus_streams_are_tracks_of_their_lanes_without_what_the_marks_have_launched() -> None:
    names, tracks, dropped = tracks_of(of_a_gpu(), lambda time: time + OFFSET, {}, OWN)
    told = {
        (track.lane, track.source): [
            (names[name], KINDS[kind], start - OFFSET) for name, kind, start, _ in track.rows()
        ]
        for track in tracks
    }
    assert told == {
        ("compute", "stream 13"): [("gemm", "kernel", 200), ("relu", "kernel", 310)],
        ("d2h", "stream 14"): [("Memcpy DtoH (Device -> Pinned)", "copy", 305)],
        ("", "stream 20"): [("theirs", "kernel", 250)],
    }
    assert [track.lane for track in tracks] == ["compute", "d2h", ""], "those of lanes come first"
    assert dropped == 0


def test_a_threads_operators_are_its_lanes_track_and_the_profilers_own_are_not() -> None:
    seen = [
        operator("aten::linear", 100, 200, COMPUTE_THREAD),
        operator("aten::addmm", 110, 190, COMPUTE_THREAD),
        operator("aten::copy_", 100, 150, SYNC_THREAD),
        operator("aten::zeros", 100, 150, OWN),
        mark(0, 1, 2),
    ]
    names, tracks, _ = tracks_of(seen, lambda time: time, {COMPUTE_THREAD: "compute"}, OWN)
    assert [(track.lane, track.source) for track in tracks] == [("compute", "thread 7"), ("", "thread 8")]
    assert [names[row[0]] for row in tracks[0].rows()] == ["aten::linear", "aten::addmm"]


def test_too_many_events_are_counted_and_the_first_ones_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiled_events, "MAX_EVENTS", 3)
    seen = [operator(f"op {number}", number, number + 1, COMPUTE_THREAD) for number in reversed(range(5))]
    names, tracks, dropped = tracks_of(seen, lambda time: time, {COMPUTE_THREAD: "compute"}, OWN)
    assert names == ("op 0", "op 1", "op 2")
    assert sum(1 for track in tracks for _ in track.rows()) == 3
    assert dropped == 2


def test_a_long_name_is_cut() -> None:
    (name,), _, _ = tracks_of([kernel("x" * 5_000, 1, 2, COMPUTE)], lambda time: time, {}, OWN)
    assert name == "x" * profiled_events.MAX_NAME


# --- events of torch before 2.12, which do not tell their kind

TOLD_BY_ALL = ("start_ns", "end_ns", "device_resource_id", "correlation_id", "linked_correlation_id")


def older(event: Any) -> Any:
    names = ("name", "device_type", "is_user_annotation", *TOLD_BY_ALL)
    return SimpleNamespace(**{name: getattr(event, name) for name in names})


def test_events_that_do_not_tell_their_kind_are_seen_as_those_that_do() -> None:
    with autograd_profiler.profile() as profile:
        with autograd_profiler.record_function(f"{MARK}0"):
            pass
        weights = torch.ones(3, 3, requires_grad=True)
        (weights @ weights).cumsum(0).sum().backward()
    assert profile.kineto_results is not None
    events = profile.kineto_results.events()
    seen = seen_in(events)
    assert {each.activity for each in seen} == {"cpu_op", "user_annotation"}
    assert seen_in(map(older, events)) == seen


@pytest.mark.parametrize(
    ("name", "device", "is_marked", "activity"),
    [
        ("Memcpy HtoD (Pinned -> Device)", DeviceType.CUDA, False, "gpu_memcpy"),
        ("Memset (Device)", DeviceType.CUDA, False, "gpu_memset"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", DeviceType.CUDA, False, "kernel"),
        (f"{LANE_MARK}compute", DeviceType.CUDA, True, None),
        (f"{LANE_MARK}compute", DeviceType.CPU, True, "user_annotation"),
        ("cudaLaunchKernel", DeviceType.CPU, False, None),
        ("cuLaunchKernelEx", DeviceType.CPU, False, None),
        ("Activity Buffer Request", DeviceType.CPU, False, None),
        ("INVALID", DeviceType.CPU, False, None),
    ],
)
def test_of_a_gpus_it_is_known_by_name_and_place(
    name: str, device: DeviceType, is_marked: bool, activity: str | None
) -> None:
    told = {"name": name, "device_type": device, "is_user_annotation": is_marked} | dict.fromkeys(TOLD_BY_ALL, 1)
    event = SimpleNamespace(**{key: (lambda value=value: value) for key, value in told.items()})
    assert [each.activity for each in seen_in([event])] == ([] if activity is None else [activity])
