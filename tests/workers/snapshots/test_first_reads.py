"""Watched attributes are what they are unwatched, in every class that has them, and behind the end of each watcher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from torch import nn

from weft.workers.snapshots.first_reads import CountedElsewhere, FirstReads, asking
from weft.workload.cutting.names import Attribute
from weft.workload.cutting.tape import of_no_run, playing
from weft.workload.workload import WorkloadError


class Counting(nn.Module):
    steps = 0  # a module may have none of its own

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


class Child(Counting):
    @property
    def half(self) -> float:
        return self.calls / 2


@contextlib.contextmanager
def running() -> Iterator[None]:
    playing.run = object()
    try:
        yield
    finally:
        playing.run = None


def test_what_a_run_reads_before_it_writes_is_noted_by_module_of_a_class_and_of_one_below_it() -> None:
    base, child = Counting(), Child()
    reads = FirstReads(
        {Attribute(*each) for each in [(base, "calls"), (child, "calls"), (child, "steps"), (child, "half")]}
    )
    with reads.watching(), reads.watching():
        reads.begin()
        base.calls = 1
        assert (base.calls, child.calls, Counting().calls, child.half) == (1, 0, 0, 0.0)
    assert reads.read == {Attribute(child, "calls")}
    assert (base.steps, Counting.steps, [key for key in vars(Child) if key in ("calls", "steps")]) == (0, 0, [])
    base.calls = 2  # watched no longer


def test_watchers_of_one_class_may_end_in_any_order() -> None:
    first, second = Counting(), Counting()
    guards = CountedElsewhere(first, ["calls"], []), CountedElsewhere(second, ["calls"], [])
    guards[0].close()
    with running():
        assert first.calls == 0
        with pytest.raises(WorkloadError, match=r"^the attribute 'calls' is used in the process of a stage that does"):
            second.calls += 1
    guards[1].close()
    assert "calls" not in vars(Counting)


def test_what_other_stages_count_is_neither_read_nor_written_by_a_step_and_not_read_where_somebody_asks() -> None:
    model = nn.Sequential(Child())
    guard = CountedElsewhere(model, ["0.calls", "0.steps", "1.calls"], ["0.calls"])  # it has no 1 yet
    inner = model[0]
    assert isinstance(inner, Child)
    inner.calls = 3  # by train(), say
    for allowed in (running, asking):
        with allowed(), pytest.raises(WorkloadError, match=r"^the attribute '0\.(calls|steps)' is used"):
            inner.calls + inner.steps
    with running(), pytest.raises(WorkloadError):
        inner.steps = 1
    with running(), of_no_run():  # a skipped call is tried
        inner.calls += 1
        inner.steps = inner.calls
        del inner.calls
    assert (inner.calls, inner.steps) == (3, 0)
    guard.close()
    inner.steps = 1
    assert vars(inner)["steps"] == 1


def test_what_stages_before_count_too_is_counted_where_they_are_in_the_step() -> None:
    model = Counting()
    guard = CountedElsewhere(model, [], ["calls"])
    with running():
        playing.lines = object()  # the stage's own call has not begun
        model.calls += 1
        playing.lines = None
        assert model.calls == 1
        with pytest.raises(
            WorkloadError, match=r"^the attribute 'calls' is changed where stages have left the step that"
        ):
            model.calls = 0
        with of_no_run():
            model.calls = 0
    model.calls += 1
    assert model.calls == 1
    with running():  # it begins anew with each run, as a factor of pooling does
        playing.lines = object()
        model.calls = 1
        playing.lines = None
        model.calls *= 2
    assert model.calls == 2
    guard.close()
