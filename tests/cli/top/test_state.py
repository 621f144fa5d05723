"""What `weft top` knows: samples and their differences, the jobs' order, and what each key changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cli.top.state import (
    MAX_STALLS,
    PACE_SECONDS,
    PATH_SECONDS,
    WINDOW_SECONDS,
    Keys,
    NewestPath,
    RecentSamples,
    Sample,
    View,
    ordered,
    report,
)

JOBS = [{"job": name} for name in ("a", "b", "c")]


def job(name: str, state: str, **changes: Any) -> dict[str, Any]:
    return {"job": name, "state": state, "submitted_at": 1.0, "started_at": None, "ended_at": None} | changes


def shown(seconds: float, name: str = "a", **changes: Any) -> dict[str, Any]:
    lane = {"wall_seconds": seconds, "residual_seconds": 0.0, "modes": {"forward": 0.5 * seconds, "idle": seconds / 2}}
    time = {"lanes": {"cpu-0/compute": lane}, "stalls": [], "bubble_ratio": 0.0, "imbalance": 0.0}
    told = {"job": name, "state": "running", "step": 10 * seconds, "steps": 1000, "time": time}
    return told | {"overlap": {}, "plan": {"samples_per_step": 32.0}} | changes


def sample(at: float, told: dict[str, Any] | None, pid: int = 1) -> Sample:
    return Sample(at=at, status={"pid": pid, "workers": [], "jobs": {}}, jobs=[], shown=told)


def history_of(*samples: Sample) -> RecentSamples:
    history = RecentSamples()
    for each in samples:
        history.add(each)
    return history


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        ([b"q"], ["q"]),
        ([b"jk"], ["j", "k"]),
        ([b"\x1b[A\x1b[B"], ["up", "down"]),
        ([b"\x1bOA"], ["up"]),
        ([b"\x1b", b"[", b"B"], ["down"]),
        ([b"\x1b[1;5C", b"q"], ["\x1b[1;5C", "q"]),
        ([b"\x1b\x1bq"], ["\x1b", "\x1b", "q"]),
        ([b"\xff\xc3\xa4q"], ["q"]),
    ],
)
def test_keys_are_read_from_the_bytes_of_a_terminal(data: list[bytes], keys: list[str]) -> None:
    reader = Keys()
    assert [key for part in data for key in reader.feed(part)] == keys


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_whatever_comes_a_q_after_it_is_heard_soon(data: list[bytes]) -> None:
    reader = Keys()
    for part in data:
        reader.feed(part)
    assert "q" in reader.feed(b"qqqq" * 8)


def test_the_selection_moves_among_the_jobs_and_stops_at_the_ends() -> None:
    view = View()
    for key, expected in [("j", "b"), ("down", "c"), ("j", "c"), ("k", "b"), ("up", "a"), ("k", "a")]:
        view = view.pressed(key, JOBS)
        assert view.selected == expected
    assert View(selected="gone").pressed("j", JOBS).selected == "a"
    assert View().pressed("j", []).selected is None


def test_p_pauses_and_any_key_closes_the_help() -> None:
    view = View().pressed("p", JOBS)
    assert view.paused
    view = view.pressed("?", JOBS)
    assert view.help
    view = view.pressed("j", JOBS)
    assert (view.help, view.selected, view.paused) == (False, None, True)
    assert not view.pressed(" ", JOBS).paused
    assert view.pressed("q", JOBS).left
    assert view.pressed("?", JOBS).pressed("q", JOBS).left
    assert view.pressed("\x1b[1;5C", JOBS) == view


def test_jobs_that_run_come_first_then_those_that_wait_then_the_ended_ones() -> None:
    jobs = [
        job("old", "completed", ended_at=5.0),
        job("waits", "queued", submitted_at=2.0),
        job("new", "failed", ended_at=9.0),
        job("runs", "running", submitted_at=3.0, started_at=4.0),
        job("paused", "paused", submitted_at=1.5, started_at=1.6),
        job("stopped for another", "queued", submitted_at=1.7, started_at=1.8),
    ]
    told = [each["job"] for each in ordered(jobs)]
    assert told == ["runs", "paused", "stopped for another", "waits", "new", "old"]


def test_a_job_is_told_by_what_changed_between_two_samples() -> None:
    told = report(history_of(sample(0.0, shown(10.0)), sample(2.0, shown(12.0))))["job"]
    (lane,) = told["lanes"]
    assert (lane["wall_seconds"], lane["seconds"]) == (2.0, {"forward": 1.0, "idle": 1.0})
    assert (told["window_seconds"], told["steps_per_second"], told["samples_per_second"]) == (2.0, 10.0, 320.0)
    assert told["eta_seconds"] == pytest.approx((1000 - 120) / 10)


def test_the_window_is_short_and_the_pace_is_taken_from_longer() -> None:
    seconds = [float(at) for at in range(100)]
    history = history_of(*(sample(at, shown(at)) for at in seconds))
    window, pace = history.before(WINDOW_SECONDS), history.before(PACE_SECONDS)
    assert window is not None
    assert pace is not None
    assert (window.at, pace.at) == (99 - WINDOW_SECONDS, 99 - PACE_SECONDS)


def test_looks_that_are_far_apart_are_compared_all_the_same() -> None:
    told = report(history_of(sample(0.0, shown(0.0)), sample(60.0, shown(60.0))))["job"]
    assert told["window_seconds"] == 60.0


@pytest.mark.parametrize(
    "after",
    [
        sample(1.0, shown(11.0, name="b")),
        sample(1.0, shown(11.0), pid=2),
        sample(1.0, shown(9.0)),
        sample(1.0, shown(11.0) | {"time": {"lanes": {}}}),
    ],
    ids=["another job", "another daemon", "another attempt", "other lanes"],
)
def test_what_does_not_continue_is_not_compared(after: Sample) -> None:
    history = history_of(sample(0.0, shown(10.0)), after)
    assert history.before(WINDOW_SECONDS) is None
    assert report(history)["job"]["window_seconds"] is None


@pytest.mark.parametrize("state", ["completed", "paused", "queued"])
def test_a_job_that_has_no_workers_is_told_since_it_began_and_has_no_pace(state: str) -> None:
    ended = shown(12.0, state=state)
    told = report(history_of(sample(0.0, shown(10.0)), sample(2.0, ended)))["job"]
    assert told["window_seconds"] is None
    assert told["lanes"][0]["wall_seconds"] == 12.0
    assert told["samples_per_second"] is None


def stalls_of(told: dict[str, Any]) -> dict[str, float]:
    return {stall["task"]: stall["seconds"] for stall in told["stalls"]}


def with_stalls(seconds: float, stalls: dict[str, float]) -> dict[str, Any]:
    told = shown(seconds)
    stall = {"lane": "cpu-0/compute", "cause": "gradient", "on": "cpu-1/compute"}
    told["time"]["stalls"] = [stall | {"task": task, "seconds": waited} for task, waited in stalls.items()]
    return told


def test_stalls_are_those_of_the_window() -> None:
    before, after = with_stalls(10.0, {"x": 3.0, "y": 2.0}), with_stalls(12.0, {"x": 4.0, "y": 2.0, "z": 0.5})
    told = report(history_of(sample(0.0, before), sample(2.0, after)))["job"]
    assert stalls_of(told) == {"x": 1.0, "z": 0.5}


def test_a_stall_that_was_not_among_the_longest_is_not_told_longer_than_it_can_have_been() -> None:
    many = {f"t{i}": 3.0 for i in range(MAX_STALLS)}
    before, after = with_stalls(10.0, many), with_stalls(12.0, many | {"new": 3.5})
    told = report(history_of(sample(0.0, before), sample(2.0, after)))["job"]
    assert stalls_of(told) == {"new": 0.5}


def with_path(path: Any) -> dict[str, Any]:
    told = shown(1.0)
    told["time"]["critical_path"] = path
    return told


def test_the_critical_path_is_looked_for_now_and_then_and_kept_meanwhile() -> None:
    newest = NewestPath()
    assert newest.is_due("a", 100.0)
    assert newest.added(with_path("first"))["time"]["critical_path"] == "first"
    assert not newest.is_due("a", 100.0 + 0.9 * PATH_SECONDS)
    assert newest.added(with_path(None))["time"]["critical_path"] == "first"
    assert newest.is_due("a", 100.0 + PATH_SECONDS)
    assert newest.added(with_path("second"))["time"]["critical_path"] == "second"
    assert newest.is_due("b", 100.0 + PATH_SECONDS)
    assert newest.added(with_path(None))["time"]["critical_path"] is None
    assert newest.added({"time": None}) == {"time": None}


def test_without_a_job_there_is_none_to_tell() -> None:
    assert report(history_of(sample(0.0, None)))["job"] is None
