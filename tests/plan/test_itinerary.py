"""Which iteration does what: the same answer in the daemon and in every worker."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.itinerary import Iteration, Itinerary, microbatch_sizes


def walk(itinerary: Itinerary) -> list[Iteration]:
    return [itinerary.at(index) for index in range(itinerary.num_iterations)]


def test_people_count_training_steps_from_one_and_validations_by_the_step_that_they_follow() -> None:
    itinerary = Itinerary.of(num_train=250, num_validation=120, batch_size=100, epochs=2, steps=None)
    first = ["step 1", "step 2", "step 3", "validation 1 of 2 after step 3", "validation 2 of 2 after step 3"]
    assert [itinerary.label(index) for index in range(6)] == [*first, "step 4"]
    assert itinerary.label(9) == "validation 2 of 2 after step 6"
    short = Itinerary.of(num_train=250, num_validation=10, batch_size=100, epochs=None, steps=4)
    assert [short.label(index) for index in (3, 4, 5)] == [
        "validation after step 3",
        "step 4",
        "validation after step 4",
    ]


@st.composite
def itineraries(draw: st.DrawFn) -> Itinerary:
    epochs = draw(st.none() | st.integers(1, 4))
    return Itinerary.of(
        steps_per_epoch=draw(st.none() | st.integers(1, 12)),
        num_train=draw(st.integers(1, 40)),
        num_validation=draw(st.integers(0, 40)),
        batch_size=draw(st.integers(1, 50)),
        epochs=epochs,
        steps=draw(st.integers(1, 60)) if epochs is None else None,
    )


def test_two_epochs_with_ragged_batches_go_as_the_module_draws_them() -> None:
    iterations = walk(Itinerary.of(num_train=250, num_validation=120, batch_size=100, epochs=2, steps=None))
    assert "".join("T" if each.training else "V" for each in iterations) == "TTTVVTTTVV"
    assert [each.step for each in iterations if each.training] == [0, 1, 2, 3, 4, 5]
    assert [each.size for each in iterations] == [100, 100, 50, 100, 20] * 2
    assert [each.start for each in iterations] == [0, 100, 200, 0, 100] * 2
    assert [each.epoch for each in iterations] == [0] * 5 + [1] * 5
    assert [each.index for each in iterations if each.last_of_validation] == [4, 9]


@given(itineraries())
def test_a_step_has_as_many_samples_as_its_iterations_have(about: Itinerary) -> None:
    """`weft top` told the samples/s of whole batches alone, twice as many as there were with 101 samples in batches of
    100."""
    epoch = [each.size for each in walk(about) if each.training and each.epoch == 0]
    assert about.full_batch >= max(epoch)
    if about.steps >= about.steps_per_epoch:
        assert about.samples_per_step == sum(epoch) / len(epoch)
        assert about.full_batch == max(epoch)


def test_an_epoch_of_so_many_steps_has_whole_batches_alone() -> None:
    about = Itinerary.of(num_train=25, num_validation=1, batch_size=10, epochs=2, steps=None, steps_per_epoch=4)
    iterations = walk(about)
    assert "".join("T" if each.training else "V" for each in iterations) == "TTTTVTTTTV"
    assert [each.size for each in iterations if each.training] == [10] * 8
    assert [each.start for each in iterations if each.training] == [0, 10, 20, 30] * 2
    assert [each.index for each in iterations if each.ends_epoch] == [3, 8]
    assert about.batch_sizes() == {10, 1}


def test_an_unfinished_last_epoch_is_validated_too() -> None:
    iterations = walk(Itinerary.of(num_train=30, num_validation=10, batch_size=10, epochs=None, steps=4))
    assert "".join("T" if each.training else "V" for each in iterations) == "TTTVTV"
    assert iterations[-1].step == 4
    assert iterations[-1].last_of_validation


@given(itineraries())
def test_every_epoch_trains_on_each_sample_once_and_validates_on_each_once(itinerary: Itinerary) -> None:
    for epoch, group in itertools.groupby(walk(itinerary), key=lambda each: each.epoch):
        iterations = list(group)
        training = [each for each in iterations if each.training]
        assert iterations[: len(training)] == training, "training comes first"
        finished = (epoch + 1) * itinerary.steps_per_epoch <= itinerary.steps
        for part, total in ((training, itinerary.num_train), (iterations[len(training) :], itinerary.num_validation)):
            samples = [sample for each in part for sample in range(each.start, each.start + each.size)]
            assert samples == list(range(len(samples)))
            if finished or part is not training:
                assert len(samples) == total


@given(itineraries())
def test_steps_count_up_and_there_are_as_many_as_asked_for(itinerary: Itinerary) -> None:
    iterations = walk(itinerary)
    assert [each.step for each in iterations if each.training] == list(range(itinerary.steps))
    assert [each.index for each in iterations] == list(range(len(iterations)))
    done = 0
    for each in iterations:
        assert each.step == done
        done += each.training


@given(itineraries())
def test_each_validation_ends_exactly_once(itinerary: Itinerary) -> None:
    ends = [each for each in walk(itinerary) if each.last_of_validation]
    num_epochs = walk(itinerary)[-1].epoch + 1
    assert [each.epoch for each in ends] == (list(range(num_epochs)) if itinerary.num_validation else [])


@given(itineraries())
def test_the_batch_sizes_are_those_that_occur(itinerary: Itinerary) -> None:
    assert {each.size for each in walk(itinerary)} == itinerary.batch_sizes()


@pytest.mark.parametrize("index", [-1, 4, 100])
def test_an_iteration_outside_the_job_is_an_index_error(index: int) -> None:
    itinerary = Itinerary.of(num_train=10, num_validation=0, batch_size=5, epochs=2, steps=None)
    with pytest.raises(IndexError, match=rf"iteration {index} of 4"):
        itinerary.at(index)


@given(size=st.integers(0, 100), parts=st.integers(1, 20))
def test_microbatches_are_those_of_tensor_split(size: int, parts: int) -> None:
    assert microbatch_sizes(size, parts) == [len(part) for part in torch.empty(size).tensor_split(parts)]
