"""The gate: while somebody has asked for quiet no lane computes, and no lane waits for another for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from weft.workers.profiling import gate as gate_module
from weft.workers.profiling.gate import Gate

LANES = ("compute", "sync")
SOON = 60.0


class Lanes:
    """Threads that run tasks without end, each through the gate."""

    def __init__(self, gate: Gate, run: Callable[[str], None]) -> None:
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._go, args=(gate.through(lane, run), lane), daemon=True) for lane in LANES
        ]

    def _go(self, run: Callable[[str], None], lane: str) -> None:
        while not self._is_over:
            run(lane)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(SOON)
            assert not thread.is_alive()


def test_no_lane_computes_within_it_and_all_go_on_behind_it() -> None:
    gate, begun, ended = Gate(LANES), dict.fromkeys(LANES, 0), dict.fromkeys(LANES, 0)

    def run(lane: str) -> None:
        begun[lane] += 1
        sum(range(1000))
        ended[lane] += 1

    with Lanes(gate, run):
        for _ in range(50):
            before = sum(ended.values())
            while sum(ended.values()) == before:
                pass
            with gate.quiet():
                now = begun.copy()
                assert now == ended
                sum(range(10_000))
                assert begun == now
    assert all(ended.values())


def test_a_task_that_needs_another_lane_to_go_on_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(gate_module, "PAUSE_SECONDS", 0.05)
    gate, waits, held, released = Gate(LANES), threading.Event(), threading.Event(), threading.Event()

    def run(lane: str) -> None:
        if lane == "compute":
            waits.set()
            assert released.wait(SOON)
        elif held.is_set():
            released.set()
        else:
            while gate.is_open:
                time.sleep(0.001)
            held.set()  # the next time is behind the gate

    with Lanes(gate, run):
        assert waits.wait(SOON)
        with gate.quiet():
            assert released.is_set()


def test_a_task_that_ends_another_from_inside_and_what_is_not_held_pass() -> None:
    gate, done = Gate(LANES), []
    inner = gate.through("compute", lambda: done.append("inner"))

    def run() -> None:
        with gate.within("compute"):
            inner()

    gate.through("compute", run)()
    with gate.quiet(), gate.within("loader"):
        gate.through("loader", done.append)("loader")
    assert done == ["inner", "loader"]
