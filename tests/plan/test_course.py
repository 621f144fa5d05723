"""The course of a job: whose part of a batch is which, and which parameters a stale replica computes with."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from weft.plan.course import Course
from weft.plan.division import divide
from weft.plan.itinerary import Itinerary
from weft.plan.plan import ReplicaPlan, Synchronisation
from weft.plan.tables import NO_MORE, Adjustment
from weft.plan.worker_view import WorkerView
from weft.reference.replicas import updates_seen

VIEW = WorkerView(
    position=0,
    stages=(),
    replicas=(),
    shares=(),
    share="fixed",
    recompute=False,
    itinerary=Itinerary(num_train=1, num_validation=0, batch_size=1, steps=1),
    rings=(),
    num_tasks=0,
    programs={},
    waits={},
    wakes=frozenset(),
    first_stages=(),
    synchronisation=None,
    reporter=None,
)


def course_of(
    itinerary: Itinerary,
    *,
    staleness: tuple[int, ...] = (0,),
    warmup: int = 0,
    shares: tuple[float, ...] = (1.0,),
) -> Course:
    replicas = [
        ReplicaPlan(device="cpu", num_stages=1, microbatches=1 + r, staleness=k) for r, k in enumerate(staleness)
    ]
    flags = {"coarse": False, "bounded": False, "speculative": False}
    sync = Synchronisation(buckets=(), owners=(), warmup=warmup, **flags)
    return Course(replace(VIEW, itinerary=itinerary, replicas=tuple(replicas), shares=shares, synchronisation=sync))


itineraries = st.builds(
    Itinerary,
    num_train=st.integers(1, 12),
    num_validation=st.integers(0, 12),
    batch_size=st.integers(1, 5),
    steps=st.integers(1, 30),
)


@given(itinerary=itineraries, staleness=st.integers(0, 4), warmup=st.integers(0, 8))
def test_a_stale_replica_computes_with_the_version_that_the_reference_does(
    itinerary: Itinerary, staleness: int, warmup: int
) -> None:
    course = course_of(itinerary, staleness=(0, staleness), warmup=warmup, shares=(1.0, 1.0))
    for index in range(itinerary.num_iterations):
        iteration = itinerary.at(index)
        if iteration.training:
            assert course.version(index, 0) == iteration.step
            assert course.version(index, 1) == updates_seen(iteration.step, staleness, warmup)
        else:
            assert course.version(index, 0) == course.version(index, 1) == iteration.step, "validation has every update"


def test_versions_lag_after_a_warm_up_and_catch_up_for_validation() -> None:
    """Epochs of three steps and one validation (V), staleness 2 after a warm-up of 3."""
    itinerary = Itinerary(num_train=3, num_validation=1, batch_size=1, steps=6)
    course = course_of(itinerary, staleness=(2,), warmup=3)
    #                                                             step 0  1  2  V  3  4  5  V
    assert [course.version(index, 0) for index in range(8)] == [0, 1, 2, 3, 3, 3, 3, 6]
    assert [course.update_of(version) for version in range(7)] == [-1, 0, 1, 2, 4, 5, 6]


@given(itinerary=itineraries)
def test_each_version_is_made_by_the_update_of_one_training_iteration(itinerary: Itinerary) -> None:
    course = course_of(itinerary)
    assert course.update_of(0) == -1
    for version in range(1, itinerary.steps + 1):
        iteration = course.iteration(course.update_of(version))
        assert iteration.training
        assert iteration.step == version - 1


@given(size=st.integers(1, 40), shares=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=4))
def test_every_sample_of_a_batch_is_in_one_part(size: int, shares: list[float]) -> None:
    if not any(shares):
        return
    itinerary = Itinerary(num_train=size, num_validation=0, batch_size=size, steps=1)
    course = course_of(itinerary, staleness=(0,) * len(shares), shares=tuple(shares))
    iteration = course.iteration(0)
    parts = course.parts(iteration)
    assert parts == divide(size, shares, range(1, 1 + len(shares)))
    assert [sample for own in parts for part in own for sample in range(part.start, part.start + part.size)] == list(
        range(size)
    )
    for replica, own in enumerate(parts):
        assert [course.part(iteration, replica, m) for m in range(len(own))] == own
        assert course.contributes(iteration, replica) == any(part.size for part in own)


def test_a_replica_without_a_share_contributes_nothing() -> None:
    itinerary = Itinerary(num_train=8, num_validation=0, batch_size=8, steps=1)
    course = course_of(itinerary, staleness=(0, 0), shares=(1.0, 0.0))
    assert [course.contributes(course.iteration(0), replica) for replica in (0, 1)] == [True, False]


def test_answers_stay_right_over_more_iterations_than_are_kept() -> None:
    itinerary = Itinerary(num_train=100, num_validation=100, batch_size=1, steps=400)
    course = course_of(itinerary)
    for index in [*range(itinerary.num_iterations), 0, 5]:
        assert course.iteration(index) == itinerary.at(index)


def test_shares_change_from_the_iteration_that_is_told() -> None:
    course = course_of(
        Itinerary(num_train=8, num_validation=0, batch_size=8, steps=4), staleness=(0, 0), shares=(1.0, 1.0)
    )
    course.adjust(2, Adjustment(shares=(3.0, 1.0)))
    sizes = [[sum(part.size for part in own) for own in course.parts(course.iteration(index))] for index in range(4)]
    assert sizes == [[4, 4], [4, 4], [6, 2], [6, 2]]
    assert [course.samples(course.iteration(index)) for index in range(4)] == sizes


def test_where_replicas_steal_a_position_has_the_microbatch_that_was_granted_for_it() -> None:
    itinerary = Itinerary(num_train=8, num_validation=0, batch_size=8, steps=2)
    replica = ReplicaPlan(device="cpu", num_stages=1, microbatches=4)
    course = Course(replace(VIEW, itinerary=itinerary, replicas=(replica,) * 2, shares=(1.0, 1.0), share="stealing"))
    first, second = course.iteration(0), course.iteration(1)
    course.adjust(0, Adjustment(grants=[(1, 0, 0, 2), (1, 0, 1, 0), (1, 0, 2, NO_MORE)]))
    course.adjust(0, Adjustment(grants=[(0, 0, 0, 1), (0, 1, 0, 3)]))
    assert [course.part(first, 1, position).number for position in (0, 1)] == [2, 0]
    assert [course.part(first, 1, 0).start, course.part(first, 1, 0).size] == [4, 2]
    assert course.part(first, 1, 2).size == 0, "nothing was left for it"
    assert (course.part(first, 0, 0).number, course.part(second, 0, 0).number) == (1, 3)
    assert [course.loaded_part(first, 0, m).number for m in range(4)] == [0, 1, 2, 3]
    assert course.contributes(first, 0)
    assert course.contributes(first, 1)


def test_each_snapshot_is_of_one_iteration_alone() -> None:
    course = course_of(Itinerary(num_train=1, num_validation=0, batch_size=1, steps=9))

    def places() -> list[int | None]:
        return [course.snapshot_place(course.iteration(index)) for index in range(9)]

    assert places() == [None] * 9
    course.adjust(2, Adjustment(snapshot=0))
    assert places() == [None, None, 0, *[None] * 6]
    course.adjust(5, Adjustment(shares=(2.0,)))
    assert places()[2] == 0, "other adjustments leave it"
    course.adjust(6, Adjustment(snapshot=1))
    assert places() == [None, None, 0, *[None] * 3, 1, None, None]
    for index in (7, 4, 8):  # told ahead or not, the newest few
        course.adjust(index, Adjustment(snapshot=2))
    assert places() == [*[None] * 4, 2, None, 1, 2, 2]


def test_what_was_measured_is_told_of_one_iteration_alone() -> None:
    course = course_of(Itinerary(num_train=1, num_validation=0, batch_size=1, steps=6))

    def measured() -> list[float | None]:
        return [course.measured(course.iteration(index)) for index in range(6)]

    assert measured() == [None] * 6
    course.adjust(2, Adjustment(measured=0.0))
    assert measured() == [None, None, 0.0, None, None, None]
    course.adjust(4, Adjustment(snapshot=1))
    course.adjust(4, Adjustment(measured=1.5))
    assert measured() == [None, None, None, None, 1.5, None]


def test_what_an_early_end_leaves_is_left_where_it_is_told_and_behind_each_epoch_that_is_judged() -> None:
    itinerary = Itinerary(num_train=3, num_validation=1, batch_size=1, steps=6)  # T T T V T T T V

    def found(course: Course) -> tuple[list[int], list[int]]:
        """(iterations that end training, those with what may be the last step)"""
        iterations = [course.iteration(index) for index in range(course.itinerary.num_iterations)]
        ends = [each.index for each in iterations if course.ends_training(each)]
        return ends, [each.index for each in iterations if each.learns and course.may_be_last_step(each)]

    course = course_of(itinerary)
    assert found(course) == ([2, 6], [6])
    course.adjust(4, Adjustment(ends=5))
    assert found(course)[0][:2] == [2, 4]
    assert found(course)[1][0] == 4
    one = (ReplicaPlan(device="cpu", num_stages=1, microbatches=1),)
    judged = Course(replace(VIEW, itinerary=itinerary, replicas=one, judged=True))
    assert found(judged) == ([2, 6], [2, 6])
    assert [judged.may_be_last(judged.iteration(index)) for index in range(8)] == [*[False] * 3, True] * 2
    unvalidated = Itinerary(num_train=3, num_validation=0, batch_size=1, steps=6)
    assert found(Course(replace(VIEW, itinerary=unvalidated, replicas=one, judged=False)))[0] == [5]


def test_an_attempt_may_end_behind_any_iteration_that_is_told() -> None:
    course = course_of(Itinerary(num_train=1, num_validation=0, batch_size=1, steps=9))

    def found() -> list[int]:
        return [index for index in range(9) if course.ends_attempt(course.iteration(index))]

    assert found() == [8]
    course.adjust(4, Adjustment(halts=True))
    assert found() == [4, 8]
    assert not course.ends_training(course.iteration(4))


def test_a_course_may_begin_anywhere() -> None:
    itinerary = Itinerary(num_train=1, num_validation=0, batch_size=1, steps=9)
    plain = course_of(itinerary)
    later = Course(
        replace(VIEW, itinerary=itinerary, replicas=(ReplicaPlan(device="cpu", num_stages=1, microbatches=1),)), 5
    )
    assert (plain.begins, later.begins) == (0, 5)
    assert later.iteration(5) == plain.iteration(5)
