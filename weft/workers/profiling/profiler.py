"""The profiler: torch.profiler over some iterations of a worker's lanes, on request; what it saw becomes a file.

    main lane    ... │ first │ ... │ last │ last + 1 ...     as this lane passes the iterations
                     ▲ waits until it runs     ▲ after the first task of the next one: what that waited for is over
    profiler         ├─ marks ── recording ── marks ─┤ file ─▶ the daemon is told

It runs in a thread of its own, and its marks are laid there (weft.workers.profiling.events). On the cores operators of
all threads are recorded, so no lane computes as it begins and as it ends. On a GPU CUPTI records kernels and copies of
the whole process, and no operator but those of the marks: nothing is added to what the host does for a launch but
CUPTI's own work.

A profile that cannot be made costs a warning in the job's log and never the job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as autograd_profiler

from weft.plan.worker_profile import WorkerProfile
from weft.spec.job_spec import ProfileSection
from weft.workers.devices.device import Accelerator, Device
from weft.workers.profiling.events import (
    LANE_MARK,
    MARK,
    ON_DEVICE,
    Clock,
    Mark,
    MarksMissing,
    Seen,
    clock_of,
    seen_in,
    tracks_of,
)
from weft.workers.profiling.gate import Gate

MARKS = 16  # at each end: the closest of them count
MAX_SECONDS = 10.0  # that are recorded: operators of small tensors are some 100,000 a second, each 1 KB in memory
START_SECONDS = 30.0  # the main lane waits no longer than this for the profiler to run

Tell = Callable[[str], None]


class _Unavailable(Exception):
    """There is no profile. The text says why."""


@contextlib.contextmanager
def profiling(
    asked: ProfileSection | None,
    device: Device,
    lanes: list[str],
    about: dict[str, Any],
    directory: Path,
    tell: Tell,
) -> Iterator[Profiler | None]:
    """Within it the lanes run. Yields who observes them; None where no profile is asked for, or none can be made.

    In the thread of the main lane, before other lanes run. lanes: the main one first. about: job, attempt, worker.
    tell: of what has become of it, in words.
    """
    if asked is None:
        yield None
        return
    try:
        _try_out(device)
    except _Unavailable as reason:
        tell(f"not profiled: {reason}")
        yield None
        return
    profiler = Profiler(asked, device, lanes, about, directory, tell)
    try:
        yield profiler
    finally:
        profiler.close()


class Profiler:
    """See `profiling`."""

    def __init__(
        self,
        asked: ProfileSection,
        device: Device,
        lanes: list[str],
        about: dict[str, Any],
        directory: Path,
        tell: Tell,
    ) -> None:
        self._first, self._last = asked.first, asked.first + asked.iterations - 1
        self._device = device
        self._lanes = lanes
        self._about = about
        self._directory = directory
        self._tell = tell
        self._main_thread = threading.get_native_id()
        self._thread: threading.Thread | None = None
        self._runs = threading.Event()
        self._enough = threading.Event()
        self._tasks_beyond = 0
        # torch takes its records from every thread, and a thread that writes one meanwhile writes to freed memory.
        self.gate = Gate(lanes if device.torch.type != "cuda" else ())
        self.through, self.within = self.gate.through, self.gate.within

    def reach(self, iteration: int) -> bool:
        """See weft.workers.lanes.lane.Observer."""
        if iteration < self._first or self._enough.is_set():
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="profiler", daemon=True)
            self._thread.start()
            self._runs.wait(START_SECONDS)
            return True
        if iteration > self._last:
            self._tasks_beyond += 1
            if self._tasks_beyond > 1:
                self._enough.set()
        return False

    def close(self) -> None:
        """Ends it where it runs; the file is there on return."""
        self._enough.set()
        if self._thread is None:
            self._tell(f"not profiled: the job ended before iteration {self._first}")
        else:
            self._thread.join()

    # --- the profiler's thread

    def _run(self) -> None:
        try:
            self._tell(self._record())
        except (_Unavailable, RuntimeError, OSError) as error:  # RuntimeError: torch's own
            self._tell(f"not profiled: {error}")
        except MarksMissing:
            self._tell("not profiled: another profiler, of the job's own code perhaps, has begun meanwhile")
        finally:
            self._runs.set()

    def _record(self) -> str:
        marks: list[Mark] = []
        lane_of = self._lanes_of_threads()
        with self.gate.quiet():
            profile = _begin(self._device)
        try:
            _lay_marks(marks, at_end=False)
            self._mark_lanes()
            start_ns = time.monotonic_ns()
            self._runs.set()
            in_time = self._enough.wait(MAX_SECONDS)
            if self._device.torch.type == "cuda":
                torch.cuda.synchronize()  # what has been launched by now belongs to it
            end_ns = time.monotonic_ns()
            _lay_marks(marks, at_end=True)
        finally:
            with self.gate.quiet():
                events = _end(profile)
        seen = seen_in(events)
        clock = clock_of(seen, marks)
        _check_device_was_seen(self._device, seen)
        made = self._profile(seen, clock, lane_of, start_ns, end_ns)
        path = made.save(self._directory)
        return _story(made, path, in_time=in_time)

    def _lanes_of_threads(self) -> dict[int, str]:
        """By the system's number of a thread. Every lane has its own by the time that the main one runs tasks."""
        threads = [(thread.native_id, thread.name) for thread in threading.enumerate()]
        found = {number: name for number, name in threads if number is not None and name in self._lanes}
        return {**found, self._main_thread: self._lanes[0]}

    def _profile(
        self, seen: list[Seen], clock: Clock, lane_of: Mapping[int, str], start_ns: int, end_ns: int
    ) -> WorkerProfile:
        names, tracks, dropped = tracks_of(seen, clock.at, lane_of, threading.get_native_id())
        return WorkerProfile(
            **self._about,
            first=self._first,
            last=self._last,
            start_ns=start_ns,
            end_ns=end_ns,
            clock_error_ns=clock.error_ns,
            dropped=dropped,
            names=names,
            tracks=tracks,
        )

    def _mark_lanes(self) -> None:
        """On a GPU: something in each lane's stream, so that the stream's number is known."""
        if self._device.torch.type != "cuda":
            return
        assert isinstance(self._device, Accelerator)
        for lane in self._lanes:
            with autograd_profiler.record_function(f"{LANE_MARK}{lane}"):
                self._device.stream(lane).launch(self._touch_device)

    def _touch_device(self) -> None:
        torch.zeros(1, device=self._device.torch)


def _begin(device: Device) -> autograd_profiler.profile:
    if autograd_profiler._is_profiler_enabled:
        raise _Unavailable("another profiler runs in this process, of the job's own code perhaps")
    on_gpu = device.torch.type == "cuda"
    config = _ExperimentalConfig(profile_all_threads=not on_gpu)
    profile = autograd_profiler.profile(
        use_device="cuda" if on_gpu else None, use_kineto=True, experimental_config=config
    )
    profile.__enter__()  # type: ignore[no-untyped-call]
    return profile


def _end(profile: autograd_profiler.profile) -> list[Any]:
    """What it has recorded. In the thread that has begun it. Errors: MarksMissing."""
    try:
        profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # torch before 2.12 says so itself where another profiler has ended this one
        raise MarksMissing from error
    return [] if profile.kineto_results is None else list(profile.kineto_results.events())


def _try_out(device: Device) -> None:
    """Records next to nothing: Kineto wants to be begun first where torch was imported, and CUPTI takes a while to be
    set up. Errors: _Unavailable."""
    try:
        profile = _begin(device)
        try:
            torch.zeros(1, device=device.torch)
        finally:
            events = _end(profile)
        seen_in(events)
    except (RuntimeError, AttributeError) as error:  # AttributeError: a torch whose events tell less
        raise _Unavailable(f"torch.profiler cannot be started: {error}") from error


def _check_device_was_seen(device: Device, seen: Sequence[Seen]) -> None:
    """Errors: _Unavailable. Where CUPTI may not record, Kineto only warns, and records the rest."""
    if device.torch.type == "cuda" and not any(event.activity in ON_DEVICE for event in seen):
        raise _Unavailable(
            "CUPTI recorded nothing of this GPU; the driver may allow it to root alone "
            "(NVreg_RestrictProfilingToAdminUsers), another tool may use it, or this build of torch may have none"
        )


def _lay_marks(marks: list[Mark], *, at_end: bool) -> None:
    for number in range(len(marks), len(marks) + MARKS):
        before = time.monotonic_ns()
        with autograd_profiler.record_function(f"{MARK}{number}"):
            pass
        marks.append(Mark(number=number, before_ns=before, after_ns=time.monotonic_ns(), at_end=at_end))


def _story(made: WorkerProfile, path: Path, *, in_time: bool) -> str:
    story = f"profiled iterations {made.first} to {made.last}: {made.num_events:,} events in {path.name}"
    if not in_time:
        story += f"; cut after {MAX_SECONDS:g} s"
    if made.dropped:
        story += f"; {made.dropped:,} more were left out"
    return story
