"""Lanes on the streams of a real GPU, without a daemon: the harness of tests/workers/test_stream_lanes.py."""

from __future__ import annotations

import runpy
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft import reference
from weft.workers.cuda import CudaDevice

_WORKERS = Path(__file__).parents[1] / "workers"
_LANES = runpy.run_path(str(_WORKERS / "test_stream_lanes.py"))
Workers, STRATEGIES, source_of = _LANES["Workers"], _LANES["STRATEGIES"], _LANES["source_of"]
planned_workload = _LANES["planned_workload"]
planned = runpy.run_path(str(_WORKERS / "conftest.py"))["planned"]

TOLERANCE = 1e-9  # float64, sums in another order than the plain loop's on the same GPU


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.end_job()


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_streams_of_a_gpu_train_what_the_plain_loop_trains(
    planned: Any, device: CudaDevice, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    """And nothing but the events that lanes wait for makes the host wait for the GPU once the job is set up."""
    (tmp_path / "job.py").write_text(source_of())
    plan = planned(planned_workload(tmp_path), steps=8, directory=str(tmp_path), batch_size=9, **strategy)
    expected = reference.train(plan.spec, device="cuda:0")
    workers = Workers(plan, lambda: device)
    workers.directory._opened = device.pin
    workers.prepare()
    torch.cuda.set_sync_debug_mode("error")
    try:
        reports = workers.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert workers.errors.empty()
    losses: dict[int, float] = defaultdict(float)
    for _, report in reports:
        for fragment in report["values"]:
            if plan.plan.itinerary.at(fragment["iteration"]).training:
                losses[fragment["iteration"]] += fragment["means"].get("loss", 0.0)
    assert [losses[index] for index in sorted(losses)] == pytest.approx(expected.losses, rel=TOLERANCE)
    state = workers.state()
    for name, tensor in expected.state.items():
        torch.testing.assert_close(state[name], tensor, rtol=TOLERANCE, atol=TOLERANCE)
    device.end_job()


def test_what_is_pinned_is_unpinned_at_the_jobs_end(device: CudaDevice) -> None:
    block = torch.zeros(1 << 20, dtype=torch.uint8).share_memory_()
    device.pin(block)
    device.pin(block)
    assert block.is_pinned()
    device.end_job()
    assert not block.is_pinned()


def test_an_events_time_is_the_hosts(device: CudaDevice) -> None:
    """Ten launches, each waited for: events happen between the times at which the host was before and after."""
    stream = device.stream("compute")
    times = []
    for _ in range(10):
        before = time.monotonic_ns()
        stream.launch(lambda: torch.ones(1 << 20, device=device.torch).sum())
        event = stream.record()
        event.wait()
        times.append((before, event.at_ns(), time.monotonic_ns()))
    slack = 100_000  # ns, of one clock against the other
    assert all(before - slack <= at <= after for before, at, after in times)
    assert [at for _, at, _ in times] == sorted(at for _, at, _ in times)
