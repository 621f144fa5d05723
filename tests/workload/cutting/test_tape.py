"""Tapes: what a stage's run has met before its own call is answered in the next run, without keeping what it met."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from weft.workload.cutting.tape import Tape


class Cache:
    """Which a step makes anew each time, and modules fill."""

    def __init__(self) -> None:
        self.held = torch.zeros(3)


def answers(tape: Tape, *questions: Any) -> list[Any]:
    """Of one run in which each of these is given to the same asker; what is computed is that question."""
    tape.rewind()
    return [tape.answer("asker", ((given,), {}), lambda given=given: given) for given in questions]


def is_answered(first: Any, second: Any) -> bool:
    """Whether the tape of a run that had asked the first question knows the second."""
    tape, computed = Tape(), []
    for given in (first, second):
        tape.rewind()
        tape.answer("asker", ((given,), {}), lambda given=given: computed.append(given))
    return len(computed) == 1


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ((1, "a", None), (1, "a", None), True),
        ((1,), (2,), False),
        ((None,), (1,), False),
        (torch.zeros(2), torch.ones(2), True),
        (torch.zeros(2), torch.zeros(3), False),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(2, dtype=torch.int64)}, False),
        (Cache(), Cache(), True),
        (Cache(), {}, False),
        ((torch.float16,), (torch.float32,), False),
        ((torch.device("cpu"),), (torch.device("meta"),), False),
        ((torch.device("cpu"),), (torch.device("cpu"),), True),
        ((range(2),), (range(3),), False),
        ((int,), (float,), False),
    ],
)
def test_questions_are_alike_by_value_tensors_by_shape_and_objects_by_class(
    first: Any, second: Any, alike: bool
) -> None:
    """Two dtypes were alike, as objects of one class."""
    assert is_answered(first, second) is alike


def test_a_real_tensor_that_is_given_back_is_the_one_of_this_run() -> None:
    """It was the first run's: a mask that blocks hand on was that of another microbatch."""
    tape = Tape()
    answers(tape, {"mask": torch.zeros(3), "length": 3})
    mask = torch.ones(3)
    (answer,) = answers(tape, {"mask": mask, "length": 3})
    assert answer == {"mask": mask, "length": 3}
    assert answer["mask"] is mask


def test_nothing_of_what_was_given_is_kept() -> None:
    """A cache of keys and values was, with what the stage's own modules had put into it later."""
    tape, given = Tape(), [Cache(), torch.zeros(3)]
    gone = [weakref.ref(each) for each in given]
    tape.answer("asker", (tuple(given), {}), lambda: given[1])
    given.clear()
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_a_tensor_that_was_made_for_an_answer_is_made_again() -> None:
    tape, made = Tape(), []
    for _ in range(2):
        tape.rewind()
        tape.answer("asker", ((), {}), lambda: made.append(torch.zeros(1)) or made[-1])
        tape.answer("asker", ((), {}), lambda: None)
    assert len(made) == 2
