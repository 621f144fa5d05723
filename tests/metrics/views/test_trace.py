"""The trace: Chrome trace events that a reader of the format can take, and that say what the recording says."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.metrics.recording.critical_path import critical_path
from weft.metrics.recording.recording import RecordedTask, Recording
from weft.metrics.recording.window import Window, last_iterations, planned_runs
from weft.metrics.views.trace import JOB_PROCESS, trace_json
from weft.plan.graph import Edge
from weft.plan.kinds import FIRST_STALL, MODES, Cause
from weft.plan.plan import Plan
from weft.plan.rows import Row, packed_rows
from weft.plan.worker_profile import KINDS, ProfileRow, Track, WorkerProfile, apart_or_within, packed_track

_FORMAT = runpy.run_path(str(Path(__file__).with_name("trace_format.py")))
check_format, nanoseconds = _FORMAT["check_format"], _FORMAT["nanoseconds"]

PipelineOf, RecordingOf = Callable[..., Plan], Callable[..., Recording]
Event = dict[str, Any]

GPU, CPU = {"device": "gpu"}, {"device": "cpu"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one-worker": {},
    "1f1b": {"stages": 2, "microbatches": 4},
    "gpipe": {"schedule": "gpipe", "stages": 4, "microbatches": 4},
    "ddp": {"replicas": 2, "stages": 1, "microbatches": 2, "sync": "fine"},
    "zero-offload": {"replicas": [GPU], "update": "cpu", "sync": "fine", "clip_norm": 1.0},
    "hybrid": {"replicas": [GPU, CPU], "update": "cpu", "shares": [3.0, 1.0], "staleness": 1},
}
ALL = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())


def window_of(recording: Recording, iterations: int | None = 4) -> Window:
    window = last_iterations(recording, iterations)
    assert window is not None
    return window


def traced(recording: Recording, window: Window, **facts: Any) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads("".join(trace_json(recording, window, **facts)))
    return trace


def slices(trace: dict[str, Any], *, category: str | None = None, not_in: str | None = None) -> list[Event]:
    found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [event for event in found if category in (None, event["cat"]) and event["cat"] != not_in]


def process_names(trace: dict[str, Any]) -> dict[int, str]:
    events = trace["traceEvents"]
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def thread_names(trace: dict[str, Any]) -> dict[int, str]:
    """`<process>/<thread>` by the thread's number."""
    processes = process_names(trace)
    return {
        event["tid"]: f"{processes[event['pid']]}/{event['args']['name']}"
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }


# --- the rules of the format


@ALL
@pytest.mark.parametrize("iterations", [None, 1, 3])
def test_a_trace_keeps_the_rules_of_the_format(
    recorded: Callable[..., tuple[Plan, Recording]], strategy: dict[str, Any], iterations: int | None
) -> None:
    _, recording = recorded(**strategy)
    check_format(traced(recording, window_of(recording, iterations)))


@pytest.mark.parametrize(
    ("event", "changes"),
    [
        ("X", {"dur": -1.0}),
        ("X", {"dur": 1e6}),
        ("s", {"id": -1}),
        ("f", {"ts": 0.0}),
        ("X", {"tid": 7}),
        ("C", {"ts": -1.0}),
    ],
)
def test_the_check_itself_sees_what_breaks_a_rule(
    recorded: Callable[..., tuple[Plan, Recording]], event: str, changes: Event
) -> None:
    _, recording = recorded(stages=2, microbatches=4)
    trace = traced(recording, window_of(recording))
    found = [each for each in trace["traceEvents"] if each["ph"] == event]
    found[len(found) // 2].update(changes)
    with pytest.raises(AssertionError):
        check_format(trace)


# --- what it says


def runs_in(recording: Recording, window: Window) -> Iterator[tuple[str, Row]]:
    for lane, rows in recording.rows_within(window.start_ns, window.end_ns).items():
        yield from ((lane, row) for row in rows)


@ALL
def test_every_row_of_the_window_is_a_slice_of_its_lanes_thread(
    recorded: Callable[..., tuple[Plan, Recording]], strategy: dict[str, Any]
) -> None:
    _, recording = recorded(**strategy)
    window = window_of(recording)
    trace = traced(recording, window)
    names = thread_names(trace)
    there = [
        (names[each["tid"]], nanoseconds(each["ts"]), nanoseconds(each["dur"]))
        for each in slices(trace)
        if not names[each["tid"]].startswith(("job ", "planned "))
    ]
    expected = [
        (lane, max(row[4] - window.start_ns, 0), min(row[5], window.end_ns) - max(row[4], window.start_ns))
        for lane, row in runs_in(recording, window)
    ]
    assert sorted(there) == sorted(expected)


def test_a_task_says_what_it_is_about_and_a_stall_what_it_waited_for(
    recorded: Callable[..., tuple[Plan, Recording]],
) -> None:
    _, recording = recorded(stages=2, microbatches=4)
    window = window_of(recording, 1)
    trace = traced(recording, window)
    backward = next(each for each in slices(trace, category="backward") if each["name"] == "BACKWARD(1,2)")
    assert backward["args"] == {"iteration": window.last, "replica": 0, "stage": 1, "microbatch": 2}
    stalls = [each["args"] for each in slices(trace, category="stall") if each["name"] == "stall gradient"]
    assert {
        "cause": "gradient",
        "before": "BACKWARD(0,0)",
        "iteration": window.last,
        "waited_for": "BACKWARD(1,0)",
        "on": "cpu-1/compute",
    } in stalls


def test_workers_are_processes_and_lanes_threads_with_the_planned_ones_beside_them(
    recorded: Callable[..., tuple[Plan, Recording]],
) -> None:
    _, recording = recorded(**STRATEGIES["zero-offload"])
    trace = traced(recording, window_of(recording))
    order = {e["pid"]: e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "process_sort_index"}
    names = process_names(trace)
    workers = [names[pid] for pid in sorted(names, key=order.__getitem__)]
    actual = list(dict.fromkeys(lane.partition("/")[0] for lane in recording.programs))
    assert workers[0] == "job made-up-1"
    assert workers[1::2] == sorted(actual, key=lambda name: (name.startswith("loader"), name))
    assert workers[2::2] == [f"planned {name}" for name in workers[1::2]]
    threads = set(thread_names(trace).values())
    assert threads == {
        "job made-up-1/iterations",
        "job made-up-1/critical path",
        *recording.programs,
        *(f"planned {lane}" for lane in recording.programs),
    }


@ALL
def test_where_all_went_as_planned_the_planned_slices_stand_beside_the_actual_ones(
    recorded: Callable[..., tuple[Plan, Recording]], strategy: dict[str, Any]
) -> None:
    _, recording = recorded(**strategy)
    window = window_of(recording)
    trace = traced(recording, window)
    names = thread_names(trace)
    found: dict[bool, dict[tuple[str, str, int], tuple[float, float]]] = {True: {}, False: {}}
    for each in slices(trace, not_in="stall"):
        thread = names[each["tid"]]
        loaded_ahead = each["args"]["iteration"] > window.last  # the run ends here, the plan goes on
        if not thread.startswith("job ") and each["dur"] and not loaded_ahead:
            planned = thread.startswith("planned ")
            key = thread.removeprefix("planned "), each["name"], each["args"]["iteration"]
            found[planned][key] = each["ts"], each["dur"]
    assert found[True].keys() == found[False].keys()
    for key, (start, duration) in found[False].items():
        assert found[True][key] == (pytest.approx(start, abs=0.01), pytest.approx(duration, abs=0.01)), key


def test_where_it_went_slower_than_planned_the_planned_iterations_end_earlier(
    recorded: Callable[..., tuple[Plan, Recording]],
) -> None:
    plan, quick = recorded(stages=2, microbatches=4)
    slow = {task.id: 2 * plan.task_seconds[task.id] for task in plan.graph.tasks}
    _, recording = recorded(seconds=slow, stages=2, microbatches=4)
    window = window_of(recording)
    ends = [run.end_ns for runs in planned_runs(recording, window).values() for run in runs]
    assert max(ends) == pytest.approx(sum(1e9 * plan.predicted_iteration_seconds for _ in range(4)), rel=1e-6)
    assert window.end_ns - window.start_ns == pytest.approx(2 * max(ends), rel=1e-6)
    assert quick.planned == recording.planned


@ALL
def test_every_wait_for_a_task_has_an_arrow_from_that_task_to_the_one_that_waited(
    recorded: Callable[..., tuple[Plan, Recording]], strategy: dict[str, Any]
) -> None:
    _, recording = recorded(**strategy)
    window = window_of(recording)
    trace = traced(recording, window)
    waits = {
        (lane, row[5] - window.start_ns, MODES[row[0]].removeprefix("stall_"))
        for lane, row in runs_in(recording, window)
        if row[0] >= FIRST_STALL and row[3] >= 0 and row[4] > window.start_ns and row[5] < window.end_ns
    }
    names = thread_names(trace)
    arrows = {
        (names[each["tid"]], nanoseconds(each["ts"]), each["name"])
        for each in trace["traceEvents"]
        if each["ph"] == "f" and each["cat"] == "waited"
    }
    assert waits <= arrows


def test_an_edge_that_hands_back_a_slot_has_an_arrow_only_where_it_was_waited_for(
    recorded: Callable[..., tuple[Plan, Recording]],
) -> None:
    _, recording = recorded(stages=2, microbatches=4)
    events = traced(recording, window_of(recording))["traceEvents"]
    slots = [event for event in events if event["ph"] in "sf" and event["name"] == "slot"]
    assert slots
    assert {event["cat"] for event in slots} == {"waited"}
    assert {event["cat"] for event in events if event["ph"] == "s" and event["name"] == "data"} == {"edge"}


def test_the_critical_path_has_a_thread_of_its_own(recorded: Callable[..., tuple[Plan, Recording]]) -> None:
    _, recording = recorded(stages=2, microbatches=4)
    window = window_of(recording)
    drawn = slices(traced(recording, window), category="critical path")
    steps = critical_path(recording, window.start_ns, window.end_ns)
    assert [(each["name"], each["args"]["lane"]) for each in drawn] == [
        (recording.tasks[step.task].name, step.lane) for step in steps
    ]
    length = sum(each["dur"] + each["args"]["gap_us"] for each in drawn)
    assert length == pytest.approx((window.end_ns - window.start_ns) / 1000, abs=0.01)


def test_iterations_follow_one_another_and_say_what_is_known_of_their_steps(
    recorded: Callable[..., tuple[Plan, Recording]],
) -> None:
    _, recording = recorded(stages=2, microbatches=4)
    window = window_of(recording, 2)
    known = {window.last: {"step": window.last + 1, "loss": 0.25, "lr": 0.1}}
    trace = traced(recording, window, facts=known)
    first, second = slices(trace, category="iteration")
    assert first["ts"] + first["dur"] == pytest.approx(second["ts"])
    assert first["args"] == {"iteration": window.first, "trains": True}
    assert second["args"] == {
        "iteration": window.last,
        "trains": True,
        "step": window.last + 1,
        "loss": 0.25,
        "lr": 0.1,
    }
    (mark,) = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert mark["name"] == f"step {window.last + 1}"
    assert mark["args"]["loss"] == 0.25
    assert mark["ts"] == pytest.approx(second["ts"] + second["dur"])


def test_the_start_is_told_in_unix_time(recorded: Callable[..., tuple[Plan, Recording]]) -> None:
    _, recording = recorded()
    window = window_of(recording)
    other = traced(recording, window)["otherData"]
    assert int(other["start_unix_ns"]) == window.start_ns + recording.clock_ns
    assert other["start"].startswith("2023-11-14T22:13:25")
    assert (other["job"], other["attempt"], other["iterations"]) == ("made-up-1", 1, [window.first, window.last])


def test_a_recording_without_a_planned_span_has_no_planned_process(
    recorded: Callable[..., tuple[Plan, Recording]],
) -> None:
    _, recording = recorded(stages=2, microbatches=4)
    recording = replace(recording, planned=())
    trace = traced(recording, window_of(recording))
    check_format(trace)
    assert not [name for name in process_names(trace).values() if name.startswith("planned")]


# --- rows as real lanes stamp them


def hand_made(rows: dict[str, list[Row]]) -> Recording:
    """FORWARD(0,0) on cpu-0 before FORWARD(1,0) on cpu-1."""
    tasks = tuple(
        RecordedTask(
            id=number,
            name=f"FORWARD({number},0)",
            kind="forward",
            replica=0,
            stage=number,
            microbatch=0,
            bucket=None,
            owner=None,
            lane=f"cpu-{number}/compute",
        )
        for number in (0, 1)
    )
    return Recording(
        job="made-1",
        attempt=1,
        clock_ns=0,
        tasks=tasks,
        edges=(Edge(0, 1, 0, Cause.ACTIVATION),),
        programs={"cpu-0/compute": (0,), "cpu-1/compute": (1,)},
        packed={lane: packed_rows(each) for lane, each in rows.items()},
        finished=1 + max(row[2] for each in rows.values() for row in each),
        planned=(),
        task_seconds=(1e-6, 1e-6),
        spec={},
        inspection={},
        facts={"ended": True},
    )


FORWARD, IDLE, STALL = (MODES.index(name) for name in ("forward", "idle", "stall_activation"))


def test_an_arrow_leaves_from_inside_a_task_whose_end_was_stamped_after_its_reader_had_begun() -> None:
    """A lane posts a task, then stamps it; on a busy machine the reader may run in between."""
    source = [(FORWARD, 0, 0, -1, 1000, 5000)]
    target = [(STALL, 1, 0, 0, 1000, 4000), (FORWARD, 1, 0, -1, 4000, 9000)]
    recording = hand_made({"cpu-0/compute": source, "cpu-1/compute": target})
    trace = traced(recording, window_of(recording, None))
    check_format(trace)
    assert [event["ts"] for event in trace["traceEvents"] if event["ph"] in "sf"] == [3.0, 3.0]


def test_a_task_that_a_stop_of_its_worker_cut_in_two_has_its_arrow_once() -> None:
    source = [(FORWARD, 0, 0, -1, 1000, 2000)]
    target = [(FORWARD, 1, 0, -1, 2000, 3000), (IDLE, 1, 0, -1, 3000, 8000), (FORWARD, 1, 0, -1, 8000, 9000)]
    recording = hand_made({"cpu-0/compute": source, "cpu-1/compute": target})
    trace = traced(recording, window_of(recording, None))
    check_format(trace)
    assert sum(event["ph"] == "f" for event in trace["traceEvents"]) == 1
    assert [each["args"]["cause"] for each in slices(trace, category="stall")] == ["idle"]


def test_what_belongs_to_the_job_is_in_its_own_process(recorded: Callable[..., tuple[Plan, Recording]]) -> None:
    _, recording = recorded(stages=2, microbatches=4)
    events = traced(recording, window_of(recording))["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "C"} == {JOB_PROCESS}
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {
        *("slots of input-0 (of 8)", "slots of target-0 (of 8)", "slots of activation-0-0 (of 2)"),
        *("slots of gradient-0-0 (of 2)", "memory of occupied slots", "batches loaded ahead, replica 0"),
    }


# --- what torch.profiler saw


def profile_of(recording: Recording, worker: str, rows: dict[str, list[ProfileRow]], **changes: Any) -> WorkerProfile:
    """Of iterations 8 and 9; the names "gemm" and "relu"; rows by lane, "" for a stream of no lane."""
    made = {
        "job": recording.job,
        "attempt": recording.attempt,
        "worker": worker,
        "first": 8,
        "last": 9,
        "start_ns": recording.iteration_ends[7],
        "end_ns": recording.iteration_ends[9],
        "clock_error_ns": 1,
        "dropped": 0,
        "names": ("gemm", "relu"),
        "tracks": tuple(
            Track(lane=lane, source="stream 7", packed=packed_track(apart_or_within(own))) for lane, own in rows.items()
        ),
    }
    return WorkerProfile(**made | changes)


@pytest.fixture
def device_job(recorded: Callable[..., tuple[Plan, Recording]]) -> Recording:
    return recorded(**STRATEGIES["zero-offload"])[1]


def kernels_within(recording: Recording, lane: str) -> list[ProfileRow]:
    """Two in each task of the lane, one of them within the other where that is long enough."""
    rows = [row for row in recording.rows[lane] if row[0] < FIRST_STALL]
    return [
        (name, KINDS.index("kernel"), start + name * (end - start) // 4, end)
        for _, _, _, _, start, end in rows
        for name in (0, 1)
    ]


def test_what_the_profiler_saw_is_a_thread_beside_its_lane_with_names_and_times(device_job: Recording) -> None:
    window = window_of(device_job)
    (lane,) = (lane for lane in device_job.programs if lane.startswith("gpu") and lane.endswith("/compute"))
    worker = lane.partition("/")[0]
    rows = kernels_within(device_job, lane)
    trace = traced(device_job, window, profiles=[profile_of(device_job, worker, {"compute": rows})])
    check_format(trace)
    names = thread_names(trace)
    shown = [
        (event["name"], nanoseconds(event["ts"]) + window.start_ns, nanoseconds(event["dur"]))
        for event in slices(trace, category="kernel")
        if names[event["tid"]] == f"{worker}/compute kernels"
    ]
    there = [row for row in rows if row[3] > window.start_ns and row[2] < window.end_ns]
    assert there
    assert sorted(shown) == sorted(
        (("gemm", "relu")[name], max(start, window.start_ns), min(end, window.end_ns) - max(start, window.start_ns))
        for name, _, start, end in there
    )
    assert trace["otherData"]["profiled"] == {worker: [8, 9]}


def test_a_profilers_thread_stands_right_behind_its_lane(device_job: Recording) -> None:
    window = window_of(device_job)
    lanes = [lane for lane in device_job.programs if lane.startswith("gpu")]
    worker = lanes[0].partition("/")[0]
    rows = {lane.partition("/")[2]: kernels_within(device_job, lane) for lane in lanes}
    trace = traced(device_job, window, profiles=[profile_of(device_job, worker, rows | {"": rows["compute"]})])
    names = thread_names(trace)
    order = {
        names[event["tid"]]: event["args"]["sort_index"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_sort_index" and names[event["tid"]].startswith(f"{worker}/")
    }
    assert len(set(order.values())) == len(order)
    shown = [name.removeprefix(f"{worker}/") for name in sorted(order, key=lambda name: order[name])]
    for lane in rows:
        assert shown[shown.index(lane) + 1] == f"{lane} kernels"
    assert shown[-1] == "kernels of stream 7"


@ALL
def test_with_a_profile_everything_else_in_the_trace_is_as_without(
    recorded: Callable[..., tuple[Plan, Recording]], strategy: dict[str, Any]
) -> None:
    _, recording = recorded(**strategy)
    window = window_of(recording)
    lane = next(lane for lane in recording.programs if lane.endswith("/compute"))
    profiles = [profile_of(recording, lane.partition("/")[0], {"compute": kernels_within(recording, lane)})]
    with_it, without = (traced(recording, window, profiles=given) for given in (profiles, []))
    check_format(with_it)
    added = [event for event in with_it["traceEvents"] if event not in without["traceEvents"]]
    assert [event for event in with_it["traceEvents"] if event not in added] == without["traceEvents"]
    assert {event["ph"] for event in added} == {"M", "X"}
    assert "profiled" not in without["otherData"]


def test_a_profile_of_other_iterations_adds_no_thread(device_job: Recording) -> None:
    window = window_of(device_job, 1)
    worker = next(lane for lane in device_job.programs if lane.startswith("gpu")).partition("/")[0]
    early = [(0, KINDS.index("kernel"), window.start_ns - 2_000, window.start_ns - 1_000)]
    trace = traced(device_job, window, profiles=[profile_of(device_job, worker, {"compute": early})])
    assert [name for name in thread_names(trace).values() if "kernels" in name] == []
