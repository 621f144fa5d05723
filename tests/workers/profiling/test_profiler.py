"""torch.profiler over some iterations of real lanes: what it saw lies in their rows, and what may go wrong is told."""

from __future__ import annotations

import queue
import runpy
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.plan.itinerary import Iteration
from weft.plan.kinds import FIRST_STALL, MODES
from weft.plan.rows import unpack
from weft.plan.worker_profile import KINDS, Track, WorkerProfile, outermost
from weft.spec.job_spec import ProfileSection
from weft.workers.devices.device import Device
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.lanes.lanes import run_lanes
from weft.workers.profiling import profiler as profiler_module
from weft.workers.profiling.profiler import profiling

_LANES = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "test_lanes.py"))
Attempt, LANES, SOON = _LANES["Attempt"], _LANES["LANES"], _LANES["SOON"]

FIRST, NUM, AFTER = 2, 3, 3
LAST = FIRST + NUM - 1
SIDE = 192  # of a matrix: some 100 µs to multiply, far above what is between two stamps


class Profiled:
    """The lanes of one worker in this thread, with a profile of the iterations FIRST to LAST. told: in words."""

    def __init__(self, directory: Path, device: Device) -> None:
        self.directory = directory
        self.device = device
        self.told: list[str] = []
        self.rows: dict[str, list[Any]] = {lane: [] for lane in LANES}

    def run(self, compute: Callable[[Iteration], None], sync: Callable[[Iteration], None], iterations: int) -> None:
        """All of their work, then the end of the attempt. Raises what a lane raises."""
        attempt = Attempt({0: compute, 1: sync}, self.device)
        inboxes: dict[str, Any] = {lane: queue.SimpleQueue() for lane in LANES}
        left = threading.Semaphore(0)
        for lane, (task,) in LANES.items():
            inboxes[lane].put([(index, [task["id"]]) for index in range(iterations)])

        def report(message: dict[str, Any]) -> None:
            self.rows[message["lane"]] += unpack(message["records"])
            for _ in range(message["count"]):
                left.release()

        def end() -> None:
            for _ in range(iterations * len(LANES)):
                left.acquire(timeout=SOON)
            for inbox in inboxes.values():
                inbox.put(None)

        ending = threading.Thread(target=end)
        ending.start()
        asked = ProfileSection(first=FIRST, iterations=NUM)
        about = {"job": "made-up-1", "attempt": 1, "worker": "gpu-0"}
        try:
            with profiling(asked, self.device, list(LANES), about, self.directory, self.told.append) as observer:
                self.observer = observer
                run_lanes("compute", LANES, inboxes, attempt, report, lambda run: run(), threads=1, observer=observer)
        finally:
            left.release(iterations * len(LANES))  # where a lane has failed they are not all told of
            ending.join(SOON)

    def profile(self) -> WorkerProfile:
        return WorkerProfile.load(self.directory / "profile-gpu-0.msgpack")


def multiply(iteration: Iteration) -> None:
    torch.ones(SIDE, SIDE) @ torch.ones(SIDE, SIDE)


def add(iteration: Iteration) -> None:
    torch.ones(SIDE, SIDE).add_(1)


@pytest.fixture(params=[HostDevice, StandIn], ids=["host", "stand-in"])
def profiled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Profiled]:
    yield Profiled(tmp_path, request.param())
    assert not any(thread.name == "profiler" for thread in threading.enumerate())


def names_within(profile: WorkerProfile, track: Track, start: int, end: int) -> list[str]:
    return [profile.names[name] for name, _, begin, until in track.rows() if start <= begin and until <= end]


def test_operators_of_each_lane_lie_in_the_rows_of_its_tasks(profiled: Profiled) -> None:
    """The first task of the iteration after the last one waits for the other lane, as a forward does for updates."""
    synchronised = threading.Event()

    def compute(iteration: Iteration) -> None:
        if iteration.index == LAST + 1:
            assert synchronised.wait(SOON)
        multiply(iteration)

    def sync(iteration: Iteration) -> None:
        add(iteration)
        if iteration.index == LAST:
            synchronised.set()

    profiled.run(compute, sync, LAST + 1 + AFTER)
    profile = profiled.profile()
    tracks = {track.lane: track for track in profile.tracks}
    assert profiled.told == [f"profiled iterations 2 to 4: {profile.num_events} events in profile-gpu-0.msgpack"]
    for lane, operator in (("compute", "aten::matmul"), ("sync", "aten::add_")):
        for mode, _, iteration, _, start, end in profiled.rows[lane]:
            if mode < FIRST_STALL and FIRST <= iteration <= LAST:
                assert operator in names_within(profile, tracks[lane], start, end), (lane, iteration)
                assert profile.start_ns <= start
                assert end <= profile.end_ns
    assert {KINDS[kind] for track in profile.tracks for _, kind, _, _ in track.rows()} == {"operator"}


def test_most_of_what_the_operators_ran_is_within_rows_of_their_lane(profiled: Profiled) -> None:
    """The profiler's clock and ours, brought together by marks: a wrong offset would shift one against the other."""
    profiled.run(multiply, add, LAST + 1 + AFTER)
    profile = profiled.profile()
    (track,) = (track for track in profile.tracks if track.lane == "compute")
    busy = [(row[4], row[5]) for row in profiled.rows["compute"] if row[0] < FIRST_STALL]
    ran = within = 0
    for start, end in outermost(track.rows()):
        ran += end - start
        within += sum(max(0, min(end, until) - max(start, begin)) for begin, until in busy)
    assert ran > 0
    assert within > 0.5 * ran
    assert profile.clock_error_ns < 1_000_000


def test_the_wait_for_the_profiler_is_a_stall_and_of_no_task(
    profiled: Profiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = profiler_module._begin
    late_ns = 200_000_000

    def late(device: Device) -> Any:
        threading.Event().wait(late_ns / 1e9)
        return begin(device)

    monkeypatch.setattr(profiler_module, "_begin", late)
    profiled.run(multiply, add, LAST + 1 + AFTER)
    waits = [
        row for row in profiled.rows["compute"] if MODES[row[0]] == "stall_dispatch" and row[5] - row[4] >= late_ns
    ]
    assert len(waits) == 1
    (first,) = (row for row in profiled.rows["compute"] if row[0] < FIRST_STALL and row[2] == FIRST)
    assert waits[0][5] <= first[4]


def test_a_job_that_ends_within_the_profiled_iterations_has_a_profile_up_to_there(profiled: Profiled) -> None:
    profiled.run(multiply, add, FIRST + 1)
    assert [text.partition(":")[0] for text in profiled.told] == ["profiled iterations 2 to 4"]
    assert "aten::matmul" in profiled.profile().names


def test_a_job_that_ends_before_them_says_that_there_is_no_profile(profiled: Profiled) -> None:
    profiled.run(multiply, add, FIRST)
    assert profiled.told == ["not profiled: the job ended before iteration 2"]
    assert list(profiled.directory.iterdir()) == []


def test_where_another_profiler_runs_there_is_no_profile_and_the_lanes_go_on(profiled: Profiled) -> None:
    with torch.autograd.profiler.profile(use_kineto=True):
        profiled.run(multiply, add, LAST + 1 + AFTER)
    assert profiled.told == ["not profiled: another profiler runs in this process, of the job's own code perhaps"]
    assert sum(row[0] < FIRST_STALL for row in profiled.rows["compute"]) == LAST + 1 + AFTER


def test_a_profiler_that_the_jobs_code_begins_meanwhile_takes_the_place_of_ours_and_it_is_told(
    profiled: Profiled,
) -> None:
    def with_own_profiler(iteration: Iteration) -> None:
        if iteration.index == FIRST + 1:
            with torch.autograd.profiler.profile(use_kineto=True):
                multiply(iteration)

    profiled.run(with_own_profiler, add, LAST + 1 + AFTER)
    assert profiled.told == ["not profiled: another profiler, of the job's own code perhaps, has begun meanwhile"]
    assert list(profiled.directory.iterdir()) == []


def test_a_profiler_that_cannot_be_started_costs_a_warning(profiled: Profiled, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Device) -> Any:
        raise RuntimeError("no CUPTI here")

    monkeypatch.setattr(profiler_module, "_begin", refuse)
    profiled.run(multiply, add, LAST + 1 + AFTER)
    assert profiled.told == ["not profiled: torch.profiler cannot be started: no CUPTI here"]


def test_a_directory_that_takes_no_file_costs_a_warning(profiled: Profiled) -> None:
    profiled.directory /= "file"
    profiled.directory.write_text("where the directory should be")
    profiled.run(multiply, add, LAST + 1 + AFTER)
    assert profiled.told == [f"not profiled: {profiled.directory} is a file, which Weft has not put there; remove it"]


def test_it_is_cut_after_some_seconds_however_long_the_iterations_take(
    profiled: Profiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_module, "MAX_SECONDS", 0.05)

    def until_cut(iteration: Iteration) -> None:
        multiply(iteration)
        while iteration.index == LAST and profiled.observer.gate.is_open:
            time.sleep(0.001)  # until it wants to end

    profiled.run(until_cut, add, LAST + 1 + AFTER)
    (told,) = profiled.told
    assert told.endswith("; cut after 0.05 s")
    assert profiled.profile().num_events > 0


def test_what_a_lane_raises_is_raised_and_the_profile_ends_with_it(profiled: Profiled) -> None:
    def fail(iteration: Iteration) -> None:
        if iteration.index > FIRST:
            raise ZeroDivisionError("theirs")
        multiply(iteration)

    with pytest.raises(ZeroDivisionError):
        profiled.run(fail, add, LAST + 1)
    assert [text.partition(":")[0] for text in profiled.told] == ["profiled iterations 2 to 4"]


def test_nothing_is_begun_for_a_job_that_does_not_ask(tmp_path: Path) -> None:
    before = threading.active_count()
    told: list[str] = []
    with profiling(None, HostDevice(), ["compute"], {}, tmp_path, told.append) as reach:
        assert reach is None
        assert threading.active_count() == before
    assert (told, list(tmp_path.iterdir())) == ([], [])
