"""Copies that go on beside a lane: the same bits, whole once they were waited for, left once nobody wants them."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from weft.workers.snapshots import beside
from weft.workers.snapshots.beside import CopyBeside, Pairs, run_anywhere, step_aside


def pairs_of(count: int, elements: int = 1 << 14) -> Pairs:
    return [(torch.zeros(elements), torch.full((elements,), float(number))) for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("group_bytes", [1, 100_000, 1 << 30])
def test_all_is_there_once_it_was_waited_for(monkeypatch: pytest.MonkeyPatch, count: int, group_bytes: int) -> None:
    monkeypatch.setattr(beside, "_GROUP_BYTES", group_bytes)
    pairs = pairs_of(count)
    CopyBeside(pairs).wait()
    assert all(torch.equal(target, source) for target, source in pairs)


def test_bits_and_order_in_memory_are_those_of_the_source() -> None:
    generator = torch.Generator().manual_seed(1)
    sources = [
        torch.randn(3, 8, 5, 5, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(6, 4, generator=generator).t(),
        torch.tensor([0.0, -0.0, float("nan"), float("inf"), 5e-324], dtype=torch.float64),
        torch.randn(9, dtype=torch.complex64, generator=generator),
        torch.randn(9, generator=generator).bfloat16(),
        torch.tensor(True),
    ]
    pairs = [(torch.empty_like(source), source) for source in sources]
    CopyBeside(pairs).wait()
    for target, source in pairs:
        assert target.stride() == source.stride()
        if source.dim():
            assert torch.equal(target.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8))
        assert torch.equal(target.nan_to_num(), source.nan_to_num())


def test_one_that_is_left_ends_with_the_group_that_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_GROUP_BYTES", 1)
    reached, go_on = threading.Event(), threading.Event()
    copy = torch._foreach_copy_

    def slow(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copy(targets, sources)
        reached.set()
        assert go_on.wait(60)

    monkeypatch.setattr(torch, "_foreach_copy_", slow)
    pairs = pairs_of(1000)
    copying = CopyBeside(pairs)
    assert reached.wait(60)
    threading.Timer(0.05, go_on.set).start()
    copying.leave()
    assert not any(thread.name == "snapshot" for thread in threading.enumerate())
    assert not all(torch.equal(target, source) for target, source in pairs)


def test_it_tells_the_time_of_a_core_and_not_how_long_it_waited_for_one() -> None:
    copying = CopyBeside(pairs_of(3, 1 << 20))
    copying.wait()
    assert 0.0 < copying.seconds < 60.0


def test_its_thread_steps_aside_and_back_and_the_one_that_asks_stays_as_it_was() -> None:
    """Where all cores are its process's own there is nowhere to step to."""
    before, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    parents = os.sched_getaffinity(os.getppid())
    own = {min(before)}
    found: list[set[int]] = []
    nices: list[int] = []

    def look() -> None:
        os.sched_setaffinity(0, own)
        step_aside()
        nices.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        found.append(os.sched_getaffinity(0))
        run_anywhere(threading.get_native_id())
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [parents - own or own, parents]
    assert nices == [19]
    assert os.sched_getaffinity(0) == before
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == nice


def test_a_thread_that_is_over_is_nobody_to_be_moved() -> None:
    run_anywhere((1 << 22) - 1)
