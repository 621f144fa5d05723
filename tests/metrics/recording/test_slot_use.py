"""How many slots are occupied when, and how far loaders are ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from weft.metrics.recording.recording import Recording
from weft.metrics.recording.slot_use import batches_ahead, bytes_used, ring_uses
from weft.metrics.recording.window import Window, last_iterations
from weft.plan.kinds import FIRST_STALL, MODES
from weft.plan.plan import Plan
from weft.plan.rows import Row, packed_rows

GPU, CPU = {"device": "gpu"}, {"device": "cpu"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one-worker": {},
    "1f1b": {"stages": 2, "microbatches": 4},
    "gpipe": {"schedule": "gpipe", "stages": 4, "microbatches": 4},
    "zero-bubble": {"schedule": "zero-bubble", "stages": 3, "microbatches": 4},
    "loaders that take turns": {"stages": 2, "microbatches": 3, "loaders": 2},
    "loaders for a batch each": {"loaders": 3},
    "ddp": {"replicas": 2, "stages": 1, "microbatches": 2, "sync": "fine"},
    "hybrid": {"replicas": [GPU, CPU], "update": "cpu", "shares": [3.0, 1.0]},
}
ALL = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())


def window_of(recording: Recording, iterations: int | None = 4) -> Window:
    window = last_iterations(recording, iterations)
    assert window is not None
    return window


def runs_in(recording: Recording, window: Window) -> Iterator[tuple[str, Row]]:
    for lane, rows in recording.rows_within(window.start_ns, window.end_ns).items():
        yield from ((lane, row) for row in rows)


@ALL
def test_slots_in_use_are_never_more_than_the_ring_has_and_all_of_them_are_used(
    recorded: Callable[..., tuple[Plan, Recording]], strategy: dict[str, Any]
) -> None:
    plan, recording = recorded(**strategy)
    uses = ring_uses(recording, window_of(recording))
    assert [use.name for use in uses] == [ring.name for ring in plan.rings]
    for use in uses:
        levels = [level for _, level in use.levels]
        assert 0 <= min(levels) <= max(levels) <= use.depth, use.name
        assert max(levels) >= 1, use.name


def test_slots_are_occupied_from_the_end_of_the_writer_to_the_end_of_the_reader(
    recorded: Callable[..., tuple[Plan, Recording]],
) -> None:
    _, recording = recorded(stages=2, microbatches=1)
    window = window_of(recording, 1)
    (use,) = [use for use in ring_uses(recording, window) if use.name == "activation-0-0"]
    runs = {
        recording.tasks[row[1]].name: row
        for _, row in runs_in(recording, window)
        if row[0] < FIRST_STALL and row[2] == window.last
    }
    assert use.levels == (
        (window.start_ns, 0),
        (runs["FORWARD(0,0)"][5], 1),
        (runs["BACKWARD(1,0)"][5], 0),
    )


def test_the_memory_of_occupied_slots_is_that_of_all_rings_at_each_instant(
    recorded: Callable[..., tuple[Plan, Recording]],
) -> None:
    _, recording = recorded(stages=2, microbatches=4)
    uses = ring_uses(recording, window_of(recording))
    for when, num_bytes in bytes_used(uses):
        levels = [max((at, level) for at, level in use.levels if at <= when)[1] for use in uses]
        assert num_bytes == sum(level * use.slot_bytes for level, use in zip(levels, uses, strict=True))


def test_batches_ahead_are_those_loaded_and_not_begun(recorded: Callable[..., tuple[Plan, Recording]]) -> None:
    _, recording = recorded(stages=2, microbatches=4, prefetch={"load": 3})
    ends = recording.iteration_ends
    amid = Window(first=5, last=8, start_ns=ends[4], end_ns=ends[8])
    levels = [level for _, level in batches_ahead(recording, amid)[0]]
    assert max(levels) == 2, "the third batch's slots are those being read"
    assert min(levels) == 1, "a quick loader is never behind"


def test_slots_of_validation_iterations_are_freed_by_the_forward(
    recorded: Callable[..., tuple[Plan, Recording]],
) -> None:
    """BACKWARD leaves no row there, and what nobody frees would stay occupied in the picture for ever."""
    _, recording = recorded(stages=2, microbatches=2)
    validation = window_of(recording, 3).first + 1
    quiet = {"backward", "update"}
    kept = {
        lane: packed_rows([row for row in rows if row[2] != validation or MODES[row[0]] not in quiet])
        for lane, rows in recording.rows.items()
    }
    recording = replace(recording, packed=kept)
    window = window_of(recording, None)
    for use in ring_uses(recording, window):
        assert max(level for _, level in use.levels) <= use.depth
