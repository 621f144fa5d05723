"""Lanes on the streams of a real GPU, without a daemon: the harness of tests/workers/lanes/test_stream_lanes.py."""

from __future__ import annotations

import runpy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.reference import loop as reference
from weft.workers.devices import cuda
from weft.workers.devices.cuda import CudaDevice
from weft.workers.devices.tiles import TILE_BYTES

_WORKERS = Path(__file__).parents[1] / "workers"
_LANES = runpy.run_path(str(_WORKERS / "lanes" / "test_stream_lanes.py"))
Workers, STRATEGIES, source_of = _LANES["Workers"], _LANES["STRATEGIES"], _LANES["source_of"]
planned_workload = _LANES["planned_workload"]
ASKS_THE_DEVICE = "x[0, 0] < 0"  # what the model of test_attempt.py does in its forward: it makes the host wait
planned = runpy.run_path(str(_WORKERS / "conftest.py"))["planned"]

GPU = {"device": "gpu"}
# All GPU workers have one device here, and tiles are for one thread that launches into a stream.
ONE_WORKER = {
    name: strategy
    for name, strategy in STRATEGIES.items()
    if [r for r in strategy["replicas"] if r["device"] == "gpu"] == [GPU]
}
TOLERANCE = 1e-9  # float64, sums in another order than the plain loop's on the same GPU


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.end_job()


class Refusing:
    """cudart, where nothing can be page-locked any more: the call is made, of memory that is nobody's."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
        return self._runtime.cudaHostRegister(0, num_bytes, flags)


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on no memory can be page-locked."""
    runtime = torch.cuda.cudart() if torch.cuda.is_available() else None
    return lambda: monkeypatch.setattr(cuda, "_runtime", lambda: Refusing(runtime))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    ("strategy", "is_locked"),
    [
        *(pytest.param(each, True, id=name) for name, each in STRATEGIES.items()),
        *(pytest.param(each, False, id=f"{name}, through tiles") for name, each in ONE_WORKER.items()),
    ],
)
def test_streams_of_a_gpu_train_what_the_plain_loop_trains(
    planned: Any,
    device: CudaDevice,
    tmp_path: Path,
    refuses: Callable[[], None],
    strategy: dict[str, Any],
    is_locked: bool,
) -> None:
    """And nothing but events makes the host wait for the GPU once the job is set up."""
    if not is_locked:
        refuses()
    source = source_of()
    assert source.count(ASKS_THE_DEVICE) == 1
    (tmp_path / "job.py").write_text(source.replace(ASKS_THE_DEVICE, "len(x) % 2"))
    plan = planned(planned_workload(tmp_path), steps=8, directory=str(tmp_path), batch_size=9, **strategy)
    expected = reference.train(plan.spec, device="cuda:0")
    workers = Workers(plan, lambda: device)
    with device.computing():
        workers.prepare()
    try:
        torch.cuda.set_sync_debug_mode("error")
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


@pytest.mark.parametrize("num_bytes", [8, TILE_BYTES - 8, 3 * TILE_BYTES + 24])
def test_memory_that_cannot_be_page_locked_is_copied_through_tiles(
    device: CudaDevice, refuses: Callable[[], None], num_bytes: int
) -> None:
    """Behind what the stream does before, in both directions; and the job's user hears of it."""
    refuses()
    block = torch.zeros(num_bytes, dtype=torch.uint8).share_memory_()
    device.pin(block)
    assert not block.is_pinned()
    assert "page-locked" in (device.notice() or "")
    shared = block.view(torch.float64)
    own = torch.zeros(len(shared), dtype=torch.float64, device=device.torch)
    numbers = torch.randn(len(shared), dtype=torch.float64)
    stream = device.stream("h2d")
    torch.cuda.synchronize()  # the zeros are another stream's

    def there_and_back() -> None:
        torch.cuda._sleep(50_000_000)  # cycles
        device.copy(own, shared)
        shared.fill_(torch.nan)
        own.mul_(2.0)
        device.copy(shared, own)
        assert torch.equal(shared, numbers * 2), "over, when the call returns"
        shared.copy_(numbers)
        own.copy_(device.put(shared))
        shared.fill_(torch.nan)

    for _ in range(3):  # the tiles are kept
        shared.copy_(numbers)
        stream.launch(there_and_back)
        stream.record().wait()
        assert torch.equal(own.cpu(), numbers)
    device.end_job()
    assert device.notice() is None


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
