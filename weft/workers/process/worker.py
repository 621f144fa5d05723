"""A worker process: two threads, one job at a time, job after job.

    control thread   reads the daemon's messages; hands work to the lane, everything else to the main thread
    main thread      does it: inspect, prepare (which runs the lanes until something else comes), save, release

The compute lane runs in the main thread because glibc serves that one from the heap that grows, others from mappings
that are made and unmapped for each large tensor. Other lanes have threads of their own (weft.workers.lanes.lanes). The
daemon's end of the socket closing is the signal to end, at any moment.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft.machine.descriptors import has_run_out
from weft.machine.free_memory import SharedMemoryFull
from weft.machine.stacks import answer_with_stacks
from weft.plan.tables import Adjustment
from weft.plan.worker_view import WorkerView
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host
from weft.transport.memory.directory import Directory, SharedMemoryGone
from weft.transport.wire.frames import Message
from weft.workers.devices.device import Device
from weft.workers.devices.opening import open_device
from weft.workers.inspection.kept_inspections import KeptInspections
from weft.workers.inspection.known import Known
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.lanes import Progress, run_lanes
from weft.workers.lanes.queue import Inbox
from weft.workers.process.built import Untouched, built, built_again, is_much
from weft.workers.process.connection import Connection, leave_without_link
from weft.workers.process.footprint import Footprint, peak_resident_bytes, reset_peak, trim
from weft.workers.process.job_output import job_output
from weft.workers.process.kept import Kept, begin_of
from weft.workers.process.looks import Looks
from weft.workers.process.saving import save_state
from weft.workers.process.spare import Spares
from weft.workers.process.torch_settings import TorchSettings
from weft.workers.process.warm_up import warm_up
from weft.workers.process.worker_config import WorkerConfig
from weft.workers.profiling.profiler import profiling
from weft.workload.code.version import CodeVersion
from weft.workload.compiling.compiler import forget, keep_in
from weft.workload.entry import unload
from weft.workload.faults import encodable, fault_of


def run_worker(
    connection: socket.socket, config: WorkerConfig, modules: Mapping[str, ModuleType], spares: Spares
) -> None:
    """The body of a worker process: never returns before the daemon closes the connection. modules: as in Footprint."""
    config.take_cores()
    torch.set_num_threads(config.threads)
    os.environ["WEFT_WORKER"] = config.worker  # for the job's code
    answer_with_stacks()
    device = open_device(config.device)
    warm_up(device)
    gc.freeze()  # torch and all that it imported: 90 ms of every later collection that nothing would come of
    worker = _Worker(connection, config, device, Footprint.now(modules), spares)
    os.register_at_fork(after_in_child=worker.strand)
    worker.serve()


class _Worker:
    def __init__(
        self,
        connection: socket.socket,
        config: WorkerConfig,
        device: Device,
        baseline: Footprint,
        spares: Spares,
    ) -> None:
        self._connection = Connection(connection)
        self._device = device
        self._config = config
        self._spares = spares
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._inboxes: dict[str, Inbox] = {}
        self._attempt: Attempt | None = None
        self._untouched = Untouched()
        self._handing: list[threading.Thread] = []  # on to another directory; each has begun
        self._client: Directory | None = None  # the newest one
        self._kept: Kept | None = None  # what another attempt of the job can go on with
        self._progress: Progress = list  # of the attempt's lanes, once they are there
        self._job: Message = {}
        self._spec: JobSpec | None = None  # of the job
        self._stands_in = False  # for one that is gone, and has been told nothing yet
        self._inspections = None if config.inspections is None else Path(config.inspections)
        self._threads = config.threads  # of torch, in each lane
        self._baseline = baseline
        self._settings = TorchSettings.now()

    # --- control thread

    def _route(self, message: Message) -> None:
        if message["type"] == "dispatch":
            self._inboxes[message["lane"]].put(message["work"])
            return
        if message["type"] == "adjust":
            if self._attempt is not None:  # gone where the job's own code has failed meanwhile
                self._attempt.adjust(message["first"], told := Adjustment(*message["adjustment"]))
                if told.changes:
                    self._inboxes[self._main_of(self._inboxes)].put(partial(self._attempt.take, told.changes))
            return
        if message["type"] == "epoch":
            self._inboxes[self._main_of(self._inboxes)].put(partial(self._ask, message))
            return
        if message["type"] == "look":
            about = {"job": message["job"], "attempt": message["attempt"]}
            self._send({"type": "progress", **about, "lanes": self._progress()})
            return
        if message["type"] == "hand-memory-on":
            handing = threading.Thread(target=self._hand_memory_on, args=(self._attempt, message))
            handing.start()  # it may have to wait for who takes it
            self._handing.append(handing)  # last: somebody may wait for those that are in there
            return
        if message["type"] == "prepare":
            view = message["plan"] = WorkerView.from_wire(message["plan"])
            self._inboxes = message["inboxes"] = {lane: queue.SimpleQueue() for lane in view.programs}
        else:
            for inbox in self._inboxes.values():
                inbox.put(None)  # the lanes stop for what comes now
        if message["type"] == "release" and self._attempt is not None:
            self._attempt.abort()
        self._inbox.put(message)

    # --- main thread

    def serve(self) -> None:
        self._join()
        while True:
            message = self._inbox.get()
            if self._stands_in and (self._kept is None or not self._kept.is_of(message)):
                self._let_go()  # the job has ended, or goes on with another worker
            self._stands_in = False
            match message["type"]:
                case "inspect":
                    self._guarded(self._inspect, message)
                case "prepare":
                    self._prepare(message)
                case "save":
                    self._guarded(self._save, message)
                case "release":
                    self._release(message)
                case "forget":
                    pass
                case other:
                    raise AssertionError(f"the daemon sent {other!r}")

    def _join(self) -> None:
        threading.Thread(target=self._connection.listen, args=(self._route,), name="control", daemon=True).start()
        link, capacity = self._device.link_bytes_per_second(), self._device.capacity_bytes()
        about = {"type": "joined", "link_bytes_per_second": link, "device_bytes": capacity}
        self._send({**about, "probe_seconds": self._device.probe_seconds() if self._config.unlike else None})

    def _guarded(self, handle: Any, message: Message) -> bool:
        """As `_guard`, with what user code prints."""
        self._job = {"job": message["job"], "attempt": message["attempt"]}

        def run() -> None:
            with job_output(self._send_output):
                handle(message)

        return self._guard(run)

    def _guard(self, run: Callable[[], None]) -> bool:
        """Runs user code: whatever it raises fails the job and leaves the worker waiting for its release."""
        try:
            run()
            return True
        except BaseException as error:  # user code may raise anything, SystemExit included
            self._kept = None  # nobody knows what it has left half done
            if isinstance(error, SharedMemoryGone) and not has_run_out(error):
                if error.is_own_descriptor:
                    leave_without_link()
                told = encodable(f"{self._config.worker}: {error}")
                self._send({"type": "directory-missed", **self._job, "message": told})
                return False
            if self._inspections is not None and self._spec is not None:
                KeptInspections(self._inspections).forget(self._spec.entry_file)
            self._send({"type": "fault", **self._job, **dataclasses.asdict(fault_of(error))})
        return False

    def _inspect(self, message: Message) -> None:
        spec = self._enter(message)
        before, version = set(sys.modules), CodeVersion(message["job"], message["code"])
        looks = Looks(
            load=partial(version.load, before),
            device=self._device,
            host=Host(**message["host"]),
            known=Known(self._inspections, before, self._told, self._untouched.note),
            use_own=partial(self._compute_on, message["cores"], message["threads"]),
            use_all=message["all_threads"] and partial(self._compute_on, message["all_cores"], message["all_threads"]),
            keep_kernels=partial(keep_in, Path(self._config.compiled)),
        )
        try:
            inspection = looks.of(spec)
            version.note_late(before, spec)
        finally:
            self._untouched.or_unload(spec, before)
            self._compute_on((), None)
        self._send({"type": "inspected", **self._job, "inspection": inspection, "code": version.digests})

    def _prepare(self, message: Message) -> None:
        if not self._guarded(self._get_ready, message):
            return
        if not message["plan"].programs:  # a host, where every device updates its own parameters
            self._send({"type": "prepared", **self._job})
        elif message["spare"] and (ours := self._spares.make(message["arenas"], self._be_a_spare)) is not None:
            self._connection, self._inbox, self._inboxes = Connection(ours), queue.SimpleQueue(), {}
            self._stands_in = True
            self._join()
        else:
            self._guarded(self._run, message)

    def strand(self) -> None:
        """In a child of this process: one that the job's code has forked, and that may return from it."""
        if self._attempt is not None and not self._spares.is_forking:
            self._attempt.strand()

    def _be_a_spare(self) -> None:
        assert self._kept is not None
        self._connection.close()
        self._kept.snapshots.after_fork()

    def _get_ready(self, message: Message) -> None:
        view: WorkerView = message["plan"]
        if self._kept is None and is_much(view.unneeded):
            trim()  # this worker may have inspected the job
        reset_peak()
        self._device.reset_peak()
        spec = self._enter(message)
        self._config.take_turns(is_ahead=view.share != "stealing")  # by which who has what is known late
        if view.programs:
            self._compute_on(message["cores"], message["threads"])
            if self._kept is None or not self._kept.goes_on(message):
                self._build(message, spec)

    def _run(self, message: Message) -> None:
        view: WorkerView = message["plan"]
        assert self._attempt is not None
        assert self._spec is not None
        job, main = self._job, self._main_of(view.programs)
        with profiling(
            self._spec.profile,
            self._device,
            [main, *(lane for lane in view.programs if lane != main)],
            {**job, "worker": self._config.worker},
            Path(message["run_dir"]),
            lambda text: self._send({"type": "profiled", **job, "text": text}),
        ) as observer:
            self._send({"type": "prepared", **job})
            try:
                run_lanes(
                    main,
                    view.programs,
                    message["inboxes"],
                    self._attempt,
                    lambda report: self._send({**report, **job}),
                    self._guard,
                    threads=self._threads,
                    stamps=self._config.stamps,
                    observer=observer,
                    watch=partial(setattr, self, "_progress"),
                    free=view.free,
                )
            finally:
                for told in self._attempt.notices():
                    self._told(told)

    def _build(self, message: Message, spec: JobSpec) -> None:
        """The worker's part of the job, from the user's function on."""
        view: WorkerView = message["plan"]
        if self._attempt is not None:
            self._let_go()
            self._enter(message)
        directory = self._directory(message["arenas"])
        snapshots = directory.of(message["snapshots"])
        begins, saved = begin_of(message["snapshot"], view, snapshots)
        modules, version = self._baseline.modules, CodeVersion(message["job"], message["code"])
        loading = built(spec, view.unneeded, modules, self._untouched, version)
        with loading as workload, self._device.computing():
            self._attempt = Attempt(
                spec,
                view,
                workload,
                directory,
                self._config.spin_seconds,
                self._device,
                begins=begins,
                snapshots=snapshots,
                saved=saved,
                tell=self._tell,
                again=partial(built_again, spec, modules, version),
            )
            del workload, saved  # the other stages' units go with it
        self._kept = Kept(message["arenas"], view, snapshots, self._attempt)
        if notice := self._device.notice():
            self._told(notice)

    def _enter(self, message: Message) -> JobSpec:
        self._spec = spec = self._config.enter(message)
        return spec

    def _compute_on(self, cores: Collection[int], threads: int | None) -> None:
        """From now on, on this thread and those that it starts. None, and no cores: as ever."""
        if cores := cores or self._config.cores:
            os.sched_setaffinity(0, cores)
        self._threads = threads or self._config.threads
        torch.set_num_threads(self._threads)

    def _tell(self, what: str, /, **about: Any) -> None:
        """Ahead of the report of the task that it is of."""
        self._send({"type": what, **self._job, **about})

    def _main_of(self, lanes: Collection[str]) -> str:
        """The one that runs in the main thread."""
        return self._config.lane if self._config.lane in lanes else next(iter(lanes))

    def _ask(self, message: Message) -> None:
        """The user's function, about an epoch; in the main thread, whose lane waits for what comes of it."""
        assert self._attempt is not None
        told = self._attempt.ask(message["values"], message["arenas_to_save"])
        self._send({"type": "epoch", **self._job, **told})

    def _hand_memory_on(self, attempt: Attempt | None, message: Message) -> None:
        """A thread of its own."""
        if attempt is None:  # gone where the job's own code has failed meanwhile
            return
        try:
            attempt.hand_memory_on()
        except (SharedMemoryGone, SharedMemoryFull) as error:
            about = {"job": message["job"], "attempt": message["attempt"]}
            self._send({"type": "directory-missed", **about, "message": encodable(f"{self._config.worker}: {error}")})

    def _until_handed_on(self) -> None:
        while self._handing:
            self._handing.pop().join()

    def _save(self, message: Message) -> None:
        self._until_handed_on()
        save_state(self._directory(message["arenas"]), message["arenas_to_save"], Path(message["path"]))
        self._send({"type": "saved", **self._job})

    def _release(self, message: Message) -> None:
        has_attempt, clean = self._attempt is not None, True
        peak, device_peak = (peak_resident_bytes(), self._device.peak_bytes()) if has_attempt else (None, None)
        self._until_handed_on()
        if message["keeps"] and self._kept is not None:
            self._kept.attempt.close()
            self._progress = list
        else:
            self._let_go()
            clean = self._baseline.is_clean() and self._device.is_clean() and not self._spares.are_prevented()
        released = {"type": "released", "job": message["job"], "attempt": message["attempt"]}
        self._send({**released, "clean": clean, "peak_bytes": peak, "device_peak_bytes": device_peak})

    def _let_go(self) -> None:
        """Of all that it has of the job."""
        self._spares.end()
        if self._attempt is not None:
            self._attempt.close(for_good=True)
        self._attempt, self._kept, self._progress, self._untouched = None, None, list, Untouched()
        if self._spec is not None:
            unload(self._spec, self._baseline.modules)
        os.chdir("/")
        forget()
        self._settings.restore()
        self._compute_on((), None)
        gc.collect()
        trim()
        self._device.end_job()

    def _directory(self, job: str) -> Directory:
        config, pin = self._config, self._device.pin
        self._client = Directory(Path(config.directory), config.authkey, job, pin, after=self._client)
        return self._client

    def _send(self, message: Message) -> None:
        self._connection.send(message)

    def _told(self, text: str) -> None:
        self._send_output(f"{self._config.worker}: {text}\n")

    def _send_output(self, text: str) -> None:
        self._send({"type": "output", **self._job, "text": encodable(text)})
