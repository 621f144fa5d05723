"""What a lane's tasks measure, in fragments that are told once."""

from __future__ import annotations

from weft.workers.compute.measured import Measured


def test_a_mean_is_the_sum_of_its_parts_each_with_its_weight() -> None:
    measured = Measured()
    for value, weight in ((2.0, 0.25), (4.0, 0.5)):
        measured.add(3, "loss", value, weight)
    measured.add(3, "accuracy", 1.0, 0.5)
    measured.of(3).complete = True
    assert measured.take() == [{"iteration": 3, "means": {"loss": 2.5, "accuracy": 0.5}, "facts": {}}]


def test_a_fragment_is_told_once_and_not_before_it_is_complete() -> None:
    measured = Measured()
    measured.add(0, "loss", 1.0, 1.0)
    assert measured.take() == []
    measured.of(0).complete = True
    measured.add(1, "loss", 2.0, 1.0)
    assert measured.take() == [{"iteration": 0, "means": {"loss": 1.0}, "facts": {}}]
    measured.of(1).complete = True
    assert measured.take() == [{"iteration": 1, "means": {"loss": 2.0}, "facts": {}}]
    assert measured.take() == []


def test_what_is_measured_after_a_fragment_was_told_makes_another_one_of_the_same_iteration() -> None:
    """A report may go out between the last FORWARD, which knows the loss, and UPDATE, which knows the rate."""
    measured = Measured()
    measured.add(0, "loss", 1.0, 1.0)
    measured.of(0).complete = True
    measured.take()
    fragment = measured.of(0)
    fragment.facts["lr"] = 0.1
    fragment.complete = True
    assert measured.take() == [{"iteration": 0, "means": {}, "facts": {"lr": 0.1}}]
