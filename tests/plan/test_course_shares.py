"""Whose part of a batch is which, where that changes as a job runs."""

from __future__ import annotations

from typing import Literal

import pytest

from weft.plan.course import Course
from weft.plan.division import Part, divide
from weft.plan.itinerary import Itinerary
from weft.plan.plan import ReplicaPlan
from weft.plan.tables import NO_MORE, Adjustment
from weft.plan.worker_view import WorkerView

ITINERARY = Itinerary(num_train=10, num_validation=0, batch_size=10, steps=50)


def course_of(share: Literal["adaptive", "stealing"]) -> Course:
    return Course(
        WorkerView(
            position=0,
            stages=(),
            replicas=(ReplicaPlan(device="cpu", num_stages=1, microbatches=4),) * 2,
            shares=(1.0, 1.0),
            share=share,
            recompute=False,
            itinerary=ITINERARY,
            rings=(),
            num_tasks=0,
            programs={},
            waits={},
            wakes=frozenset(),
            first_stages=(),
            synchronisation=None,
            reporter=None,
        )
    )


def test_an_iteration_is_divided_by_the_shares_that_hold_in_it() -> None:
    course = course_of("adaptive")
    course.adjust(3, Adjustment(shares=[4, 1]))
    course.adjust(7, Adjustment(shares=[1, 0]))
    for index, shares in ((2, [1, 1]), (3, [4, 1]), (6, [4, 1]), (7, [1, 0])):
        assert course.parts(ITINERARY.at(index)) == divide(10, shares, [4, 4], "adaptive")
    assert course.contributes(ITINERARY.at(6), 1)
    assert not course.contributes(ITINERARY.at(7), 1)


def test_a_position_has_the_microbatch_that_it_was_granted() -> None:
    course = course_of("stealing")
    course.adjust(0, Adjustment(grants=[(1, 0, 0, 2), (1, 0, 1, 3), (1, 0, 2, NO_MORE), (1, 1, 0, 0)]))
    (parts,) = divide(10, [1], [4])
    assert [course.part(ITINERARY.at(0), 1, position) for position in (0, 1)] == parts[2:]
    assert [course.part(ITINERARY.at(0), 1, position).size for position in (2, 3)] == [0, 0]
    assert course.part(ITINERARY.at(1), 1, 0) == parts[0] == Part(0, 0, 3)
    assert [course.loaded_part(ITINERARY.at(1), 0, number) for number in range(4)] == parts


def test_samples_are_those_of_the_microbatches_that_were_granted() -> None:
    """Ten samples in four microbatches: 3, 3, 2, 2."""
    course = course_of("stealing")
    course.adjust(0, Adjustment(grants=[(0, 0, 0, 0), (0, 0, 1, 1)]))
    course.adjust(0, Adjustment(grants=[(1, 0, 0, 2), (1, 0, 1, NO_MORE)]))
    course.adjust(0, Adjustment(grants=[(0, 0, 2, 3), (0, 1, 0, 0)]))
    assert course.samples(ITINERARY.at(0)) == [8, 2]


def test_owners_read_the_gradient_of_every_replica_that_steals() -> None:
    """They are told of no grants; a replica without microbatches leaves zeros."""
    course = course_of("stealing")
    assert all(course.contributes(ITINERARY.at(0), replica) for replica in (0, 1))


def test_what_is_not_decided_cannot_be_asked_for() -> None:
    with pytest.raises(KeyError):
        course_of("stealing").part(ITINERARY.at(0), 0, 0)


def test_grants_of_iterations_that_are_over_are_forgotten() -> None:
    course = course_of("stealing")
    for index in range(40):
        course.adjust(max(0, index - 7), Adjustment(grants=[(0, index, 0, 1), (0, index, 1, NO_MORE)]))
    assert course.part(ITINERARY.at(39), 0, 0).number == course.part(ITINERARY.at(32), 0, 0).number == 1
    with pytest.raises(KeyError):
        course.part(ITINERARY.at(31), 0, 0)
