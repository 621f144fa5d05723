"""Lanes of devices whose streams run on their own and late: what they train is what the plain loop trains.

Every worker of a job with its lanes in threads of this process, and no daemon: each lane is sent all of its work. A
stream runs tasks when it gets to them, so an input that is no edge, or an edge that nobody waits for, shows.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import runpy
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.metrics.accounts.accounting import JobAccount
from weft.plan.kinds import MODE_INDEX
from weft.plan.plan import Role
from weft.plan.rows import unpack
from weft.plan.worker_view import WorkerView
from weft.reference import loop as reference
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Device
from weft.workers.devices.host import HostDevice
from weft.workers.devices.tiles import Tiles
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.lanes import run_lanes
from weft.workers.lanes.operation import Operation
from weft.workers.lanes.queue import Inbox
from weft.workload.entry import load_workload

_ATTEMPT = runpy.run_path(str(Path(__file__).with_name("test_attempt.py")))
planned_workload, two_way_source = _ATTEMPT["planned_workload"], _ATTEMPT["two_way_source"]
validations = _ATTEMPT["validations"]
_THREADS = runpy.run_path(str(Path(__file__).with_name("thread_device.py")))
thread_device, ThreadDevice = _THREADS["thread_device"], _THREADS["ThreadDevice"]

SOON = 60.0
TILE_BYTES = 64  # a few numbers: nearly every copy takes more than two
GPU, CPU = {"device": "gpu"}, {"device": "cpu"}
STREAMED = {"update": "cpu", "recompute": True}
STRATEGIES: dict[str, dict[str, Any]] = {
    "local": {"replicas": [GPU], "microbatches": 2, "update": "local"},
    "local clipped": {"replicas": [GPU], "update": "local", "clip_norm": 0.5},
    "local clipped coarse": {"replicas": [GPU], "update": "local", "clip_norm": 0.5, "sync": "coarse"},
    "local skipping": {"replicas": [GPU], "update": "local", "clip_norm": 0.5, "skip_nonfinite": True},
    "local resident": {"replicas": [GPU], "microbatches": 2, "update": "local", "resident": True},
    "resident beside a CPU": {"replicas": [GPU, CPU], "update": "cpu", "resident": True},
    "stages on one, resident": {"replicas": [{"device": "gpu", "stages": 3, "gpus": 1}], "resident": True},
    "by the host": {"replicas": [GPU], "update": "cpu", "microbatches": 3, "clip_norm": 0.5},
    "by the host, late": {"replicas": [GPU], "update": "cpu", "staleness": 1},
    "beside a CPU": {"replicas": [GPU, CPU], "update": "local", "clip_norm": 0.5},
    "beside a CPU, by the host": {"replicas": [CPU, GPU], "update": "cpu", "microbatches": 2},
    "stages on one beside a CPU, clipped": {
        "replicas": [{"device": "gpu", "stages": 2, "gpus": 1, "microbatches": 2}, CPU],
        "clip_norm": 0.5,
        "bucket_mib": 1e-4,
    },
    "two": {"replicas": [GPU, GPU], "update": "local"},
    "stages": {"replicas": [{"device": "gpu", "stages": 3, "split": [2, 4]}], "microbatches": 3, "clip_norm": 0.5},
    "stages, local": {
        "replicas": [{"device": "gpu", "stages": 2, "split": [3]}],
        "update": "local",
        "microbatches": 3,
        "clip_norm": 0.5,
    },
    "recomputed": {"replicas": [{"device": "gpu", "stages": 2, "split": [3]}], "microbatches": 2, "recompute": True},
    "balanced": {"replicas": [GPU], "update": "balanced", "clip_norm": 0.5},
    "stages on one": {"replicas": [{"device": "gpu", "stages": 3, "gpus": 1}], "microbatches": 3, "clip_norm": 0.5},
    "stages on one, coarse": {"replicas": [{"device": "gpu", "stages": 2, "gpus": 1}], "sync": "coarse"},
    "stages on two": {"replicas": [{"device": "gpu", "stages": 3, "gpus": 2}], "microbatches": 2, "update": "cpu"},
    "stages on one, balanced": {"replicas": [{"device": "gpu", "stages": 2, "gpus": 1}, CPU], "update": "balanced"},
    "window of 1": {"replicas": [GPU | {"working_window": 1}], **STREAMED, "microbatches": 2},
    "window of 2": {"replicas": [GPU | {"working_window": 2}], **STREAMED, "clip_norm": 0.5},
    "window of 2, kept": {"replicas": [GPU | {"working_window": 2}], "update": "cpu", "microbatches": 2},
    "window of all": {"replicas": [GPU | {"working_window": 9}], **STREAMED, "sync": "coarse"},
    "window beside a CPU": {"replicas": [CPU, GPU | {"working_window": 2}], **STREAMED, "microbatches": 2},
}


class Workers:
    """A job's workers, each with a thread for its main lane."""

    def __init__(self, planned: Any, make_device: Callable[[], Device]) -> None:
        self._planned, self.plan = planned, planned.plan
        self._make_device = make_device
        self.devices: list[Device] = []
        self.directory = planned.new_directory()
        self.reports: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._inboxes: list[Inbox] = []

    def prepare(self) -> None:
        """Every lane is sent all iterations."""
        plan = self.plan
        for number, (kind, view) in enumerate(zip(plan.workers, self._planned.views, strict=True)):
            if not view.programs:
                continue
            device = self._make_device() if kind == "gpu" else HostDevice()
            self.devices.append(device)
            spec = self._planned.spec
            attempt = Attempt(spec, view, load_workload(spec), self._client_of(device), 0.0, device)
            own: dict[str, Inbox] = {lane: queue.SimpleQueue() for lane in view.programs}
            for lane, program in view.programs.items():
                tasks = [task.id for task in program]
                own[lane].put([(iteration, tasks) for iteration in range(plan.itinerary.num_iterations)])
            arguments = (number, view, own, attempt)
            self._threads.append(threading.Thread(target=self._run_worker, args=arguments, daemon=True))
            self._inboxes += own.values()

    def _client_of(self, device: Device) -> Directory:
        """As in a process of its own: what another worker has mapped is mapped once more, and the device told of it."""
        client: Directory = self.directory.of("job")
        client._server, client._opened = client._server.anew(), device.pin
        return client

    def run(self) -> list[tuple[int, dict[str, Any]]]:
        """Until all tasks are over; the reports with the number of their worker."""
        plan, reports = self.plan, []
        for thread in self._threads:
            thread.start()
        left = plan.itinerary.num_iterations * len(plan.graph.tasks)
        while left:
            try:
                number, report = self.reports.get(timeout=SOON)
            except queue.Empty:
                raise AssertionError("no report") from self._error()
            reports.append((number, report))
            left -= report["count"]
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(SOON)
            assert not thread.is_alive(), "a worker goes on"
        return reports

    def _error(self) -> BaseException | None:
        """What a lane has raised, if any has."""
        return None if self.errors.empty() else self.errors.get()

    def _run_worker(self, number: int, view: WorkerView, inboxes: dict[str, Inbox], attempt: Attempt) -> None:
        def guard(run: Callable[[], None]) -> None:
            try:
                run()
            except BaseException as error:
                self.errors.put(error)

        guard(
            lambda: run_lanes(
                "compute" if "compute" in view.programs else next(iter(view.programs)),
                view.programs,
                inboxes,
                attempt,
                lambda report: self.reports.put((number, report)),
                guard,
                threads=1,
            )
        )

    def state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for arena in self.plan.arenas_to_save():
            state |= self.directory.find(arena).items()
        return state


def source_of() -> str:
    """Random numbers are a process's own, and these workers share one."""
    source: str = two_way_source("adam")
    return source.replace("nn.Dropout(0.2)", "nn.Identity()")


def source_with_nan() -> str:
    """Some batches' gradients are no numbers."""
    loss = "nn.functional.cross_entropy(y, target, ignore_index=-1)"
    source = source_of()
    assert source.count(loss) == 1
    return source.replace(loss, f"{loss} * torch.where((target == 2).sum() > 1, torch.nan, 1.0)")


@pytest.fixture
def workers_of(planned: Any, tmp_path: Path) -> Iterator[Callable[..., tuple[Workers, Any]]]:
    with thread_device() as make:

        def build(source: str = source_of(), tile_bytes: int = 0, **strategy: Any) -> tuple[Workers, Any]:
            (tmp_path / "job.py").write_text(source)
            plan = planned(planned_workload(tmp_path), steps=8, directory=str(tmp_path), batch_size=9, **strategy)
            return Workers(plan, functools.partial(make, tile_bytes)), plan.spec

        yield build


Values = dict[int, dict[str, float]]


def measured(
    workers: Workers, reports: list[tuple[int, dict[str, Any]]]
) -> tuple[Values, Values, list[dict[str, float]]]:
    """Means and facts of the training iterations, in the order of these, and the means of each validation. And every
    lane's time is accounted for."""
    means: Values = defaultdict(lambda: defaultdict(float))
    facts: Values = defaultdict(dict)
    account = JobAccount()
    for number, report in reports:
        account.add(f"{number}/{report['lane']}", unpack(report["records"]))
        for fragment in report["values"]:
            facts[fragment["iteration"]] |= fragment["facts"]
            for name, value in fragment["means"].items():
                means[fragment["iteration"]][name] += value
    assert all(account.residual_seconds(lane) == 0 for lane in account.lane_seconds())
    steps = [index for index, values in sorted(facts.items()) if "lr" in values]
    of_steps = ({index: values[index] for index in steps} for values in (means, facts))
    return *of_steps, validations(workers.plan, means, facts)


def assert_trained(workers: Workers, expected: reference.ReferenceResult) -> None:
    state = workers.state()
    assert state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-11, atol=1e-13)


@pytest.mark.pairs(name=STRATEGIES, tile_bytes=(0, TILE_BYTES))
def test_streams_that_are_late_train_what_the_plain_loop_trains(
    workers_of: Callable[..., tuple[Workers, Any]], name: str, tile_bytes: int
) -> None:
    """Also where no memory can be page-locked, and each copy's tiles are late besides."""
    workers, spec = workers_of(tile_bytes=tile_bytes, **STRATEGIES[name])
    train_and_compare(workers, spec, STRATEGIES[name])
    staged = [device.num_staged > 0 for device in workers.devices if isinstance(device, ThreadDevice)]
    assert staged == [tile_bytes > 0] * len(staged)


@pytest.mark.parametrize("name", ["stages", "recomputed", "stages on two"])
def test_what_one_device_lends_the_other_one_reads_in_time(
    workers_of: Callable[..., tuple[Workers, Any]], name: str
) -> None:
    workers, spec = workers_of(peer_access=True, **STRATEGIES[name])
    peers = [ring.role for ring in workers.plan.rings if ring.memory == "peer"]
    neighbours = workers.plan.workers.count("gpu") - 1
    assert [peers.count(role) for role in (Role.ACTIVATION, Role.GRADIENT)] == [neighbours, neighbours]
    train_and_compare(workers, spec, STRATEGIES[name])


def train_and_compare(workers: Workers, spec: Any, strategy: dict[str, Any]) -> None:
    expected = reference.train(spec)
    workers.prepare()
    means, facts, validated = measured(workers, workers.run())
    assert workers.errors.empty()
    assert validated == [pytest.approx(values, rel=1e-12) for values in expected.validations]
    assert [values["loss"] for values in means.values()] == pytest.approx(expected.losses, rel=1e-12)
    if "clip_norm" in strategy:
        norms = [values["grad_norm"] for values in facts.values()]
        assert norms == pytest.approx(expected.grad_norms, rel=1e-12)
    assert_trained(workers, expected)


def test_copies_that_do_not_wait_for_their_tiles_train_something_else(
    workers_of: Callable[..., tuple[Workers, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tiles, "_wait", lambda tiles, number: None)
    workers, spec = workers_of(tile_bytes=TILE_BYTES, **STRATEGIES["by the host, late"])
    expected = reference.train(spec)
    workers.prepare()
    means, _, _ = measured(workers, workers.run())
    assert [values["loss"] for values in means.values()] != pytest.approx(expected.losses, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "whole"])
def test_a_step_is_skipped_by_the_device_or_by_its_host_as_by_the_plain_loop(
    workers_of: Callable[..., tuple[Workers, Any]], optimizer: str
) -> None:
    """A host that has to know whether to step waits for the norm, also where that comes from its own lane."""
    source = source_with_nan()
    if optimizer == "whole":
        source = source.replace("torch.optim.Adam(parameters, lr=0.05, eps=1e-3)", "Trusting(parameters)")
    workers, spec = workers_of(source, replicas=[GPU], update="local", skip_nonfinite=True, clip_norm=0.5)
    expected = reference.train(spec)
    workers.prepare()
    _, facts, _ = measured(workers, workers.run())
    assert workers.errors.empty()
    skipped = [step for step, values in enumerate(facts.values()) if "skipped" in values]
    assert skipped == expected.skipped
    assert 0 < len(skipped) < len(facts)
    assert [values["lr"] for values in facts.values()] == expected.learning_rates
    assert_trained(workers, expected)


def test_a_device_that_takes_the_norm_before_the_others_have_told_theirs_trains_something_else(
    workers_of: Callable[..., tuple[Workers, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is the waits of the update, and nothing by the way, that make the norm right: without them the last stage
    is through with its own, long before the first one has a gradient."""
    operations = Attempt.operations

    def without_waits(attempt: Attempt, *given: Any) -> dict[int, Operation]:
        return {
            task: dataclasses.replace(each, waits=() if each.mode == MODE_INDEX["update"] else each.waits)
            for task, each in operations(attempt, *given).items()
        }

    workers, spec = workers_of(**STRATEGIES["stages, local"])
    expected = reference.train(spec)
    monkeypatch.setattr(Attempt, "operations", without_waits)
    workers.prepare()
    _, facts, _ = measured(workers, workers.run())
    assert workers.errors.empty()
    assert [values["grad_norm"] for values in facts.values()] != pytest.approx(expected.grad_norms, rel=1e-6)
