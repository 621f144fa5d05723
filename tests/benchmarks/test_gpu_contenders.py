from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from gpu_contenders import Failed, Length, Missing, Run, TooLarge, failure, take_turns
from gpu_session import GIB, Session


def session(seconds: float = 100.0) -> Session:
    return Session(
        quick=False,
        stand_in=True,
        only=(),
        threads=1,
        gpu_bytes=GIB,
        host_bytes=GIB,
        ends=time.monotonic() + seconds,
    )


def contender(calls: list[str], name: str, errors: Sequence[Exception | None] = ()) -> Callable[[], Run]:
    """Fails with the errors in turn, then runs."""
    left = list(errors)

    def run() -> Run:
        calls.append(name)
        if left and (error := left.pop(0)) is not None:
            raise error
        return Run(seconds=1.0, losses=())

    return run


def test_contenders_take_turns_in_an_order_that_turns_round() -> None:
    calls: list[str] = []
    runs = take_turns(session(), "case", {name: contender(calls, name) for name in ("a", "b", "c")}, turns=3)
    assert "".join(calls) == "abccbaabc"
    assert [len(each) for each in runs.values()] == [3, 3, 3]


@pytest.mark.parametrize(("error", "failed"), [(TooLarge("x"), False), (Missing("x"), False), (Failed("x"), True)])
def test_one_that_cannot_run_is_noted_and_left_out_of_every_turn(error: Exception, failed: bool) -> None:
    calls: list[str] = []
    given = session()
    runs = take_turns(given, "case", {"a": contender(calls, "a"), "b": contender(calls, "b", [None, error])}, turns=3)
    assert list(runs) == ["a"]
    assert calls == ["a", "b", "b", "a", "a"]
    assert "case, b" in given.notes[0]
    assert given.has_failed is failed


def test_a_part_leaves_as_much_time_to_those_after_it() -> None:
    """A turn takes ten seconds, and there are twenty-five for two parts: a second one would take from the other's."""
    given = session(seconds=25.0)

    def slow() -> Run:
        given.ends -= 10.0
        return Run(seconds=1.0, losses=())

    assert len(take_turns(given, "case", {"a": slow}, turns=3, parts_left=2)["a"]) == 1
    assert given.notes == ["case: 1 of 3 turns, for want of time"]


def test_without_time_no_turn_begins() -> None:
    given = session(seconds=-1.0)
    assert take_turns(given, "case", {"a": contender([], "a")}, turns=3) == {}
    assert given.notes == ["case: nothing, for want of time"]


def steps(*seconds: float | None) -> list[dict[str, Any]]:
    return [{"seconds": each} for each in seconds]


def test_iterations_count_after_warm_up_by_number_and_by_time() -> None:
    log = steps(None, 1.0, 1.0, 2.0, 3.0)
    assert Length(warm=1, measured=2).counting(log) == steps(1.0, 1.0)
    assert Length(warm=1, measured=2, warm_seconds=2.0).counting(log) == steps(1.0, 2.0)
    assert Length(warm=1, measured=4, warm_seconds=2.0).counting(log) is None


@pytest.mark.parametrize(
    ("reason", "error", "kind"),
    [
        ("out-of-memory", "torch.OutOfMemoryError: CUDA out of memory", TooLarge),
        ("invalid-plan", "the plan needs 90 MiB of shared memory and /dev/shm has 60 MiB free", TooLarge),
        ("invalid-plan", "the model cannot be cut", Failed),
        ("user-error", "ValueError: no", Failed),
    ],
)
def test_only_want_of_memory_makes_a_model_too_large(reason: str, error: str, kind: type[Exception]) -> None:
    assert type(failure({"state": "failed", "reason": reason, "error": error})) is kind
