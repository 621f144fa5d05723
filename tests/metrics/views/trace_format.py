"""The rules of Chrome's trace event format, as a reader of a file would trip over them. Taken with `runpy`."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import Any

from weft.plan.worker_profile import KINDS

Event = dict[str, Any]


def check_format(trace: dict[str, Any]) -> None:
    """What the documents of the format ask for: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in "MXsfCi", event
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert math.isfinite(event["ts"])
            assert event["ts"] >= 0, event
        if event["ph"] in "Xsfi":
            assert isinstance(event["tid"], int)
    check_names(trace)
    check_slices(events)
    check_flows(events)
    for event in events:
        if event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values()), event
        if event["ph"] == "i":
            assert event["s"] in "gpt"


def check_names(trace: dict[str, Any]) -> None:
    events = trace["traceEvents"]
    named = [event for event in events if event["ph"] == "M"]
    assert all(event["name"].endswith(("_name", "_sort_index")) for event in named)
    for kind in ("process_name", "process_sort_index"):
        pids = [event["pid"] for event in named if event["name"] == kind]
        assert len(pids) == len(set(pids))
        assert {event["pid"] for event in events} == set(pids)
    for kind in ("thread_name", "thread_sort_index"):
        tids = [event["tid"] for event in named if event["name"] == kind]
        assert len(tids) == len(set(tids)), "two threads of one number, even in two processes, are one for some readers"
        assert {event["tid"] for event in events if "tid" in event} == set(tids)


def check_slices(events: list[Event]) -> None:
    threads, nested = defaultdict(list), set()
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            threads[event["tid"]].append((nanoseconds(event["ts"]), nanoseconds(event["ts"] + event["dur"])))
            if event["cat"] in KINDS:
                nested.add(event["tid"])
    for thread, spans in threads.items():
        if thread in nested:
            check_nesting(spans)
            continue
        ordered = sorted(spans)
        for (_, end), (start, _) in pairwise(ordered):
            assert start >= end, "slices of one thread either follow each other or lie within each other; ours follow"


def check_nesting(spans: list[tuple[int, int]]) -> None:
    """What the profiler saw may also lie within."""
    around: list[tuple[int, int]] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1][1] <= start:
            around.pop()
        assert not around or end <= around[-1][1], "slices of one thread either follow each other or lie within"
        around.append((start, end))


def check_flows(events: list[Event]) -> None:
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["tid"]].append((nanoseconds(event["ts"]), nanoseconds(event["ts"] + event["dur"])))
    begun, ended = ({event["id"]: event for event in events if event["ph"] == phase} for phase in "sf")
    assert len(begun) == sum(event["ph"] == "s" for event in events)
    assert len(ended) == sum(event["ph"] == "f" for event in events)
    assert begun.keys() == ended.keys()
    for number, source in begun.items():
        target = ended[number]
        assert (source["name"], source["cat"]) == (target["name"], target["cat"]), "id, name and cat bind them"
        assert source["ts"] <= target["ts"]
        assert target["bp"] == "e", "it ends in the slice that encloses it"
        for event in (source, target):
            when = nanoseconds(event["ts"])
            assert any(start <= when < end for start, end in spans[event["tid"]]), "bound to no slice"


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)
