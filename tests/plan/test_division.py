"""Division: every sample of a batch goes to one microbatch, in order, and shares are kept to within one sample; every
microbatch is loaded by one loader."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.division import Part, Turns, divide, replica_sizes
from weft.plan.itinerary import microbatch_sizes
from weft.spec.strategy import Strategy

SHARES = st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any)


def test_a_batch_is_divided_as_the_module_draws_it() -> None:
    assert divide(10, [0.7, 0.3], [2, 1]) == [[Part(0, 0, 4), Part(1, 4, 3)], [Part(2, 7, 3)]]


@given(size=st.integers(0, 10_000), shares=SHARES)
def test_shares_are_kept_to_within_one_sample(size: int, shares: list[float]) -> None:
    sizes = replica_sizes(size, shares)
    assert sum(sizes) == size
    for part, share in zip(sizes, shares, strict=True):
        exact = size * share / sum(shares)
        assert abs(part - exact) < 1 + 1e-6 * size
        assert part == 0 or share > 0


@given(size=st.integers(0, 1000), weights=st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any))
def test_shares_need_not_add_up_to_one(size: int, weights: list[int]) -> None:
    shares = [float(weight) for weight in weights]
    assert replica_sizes(size, shares) == replica_sizes(size, [share * 8 for share in shares])


def test_who_lacks_most_of_a_sample_gets_the_next_one_and_the_first_of_equals() -> None:
    assert replica_sizes(10, [0.54, 0.26, 0.2]) == [5, 3, 2]
    assert replica_sizes(2, [1, 1, 1]) == [1, 1, 0]


def test_equal_shares_of_a_number_that_divides_are_equal() -> None:
    """Tenths are no binary fractions; largest remainders in floats would depend on their rounding."""
    assert replica_sizes(1000, [0.1] * 10) == [100] * 10
    assert replica_sizes(30, [0.1, 0.2, 0.3]) == [5, 10, 15]


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [1.0, -0.5]])
def test_shares_that_give_nobody_work_are_refused(shares: list[float]) -> None:
    with pytest.raises(ValueError, match=r"give numbers of 0 or more, at least one of them above 0"):
        replica_sizes(4, shares)


@given(data=st.data(), size=st.integers(0, 1000), shares=SHARES)
def test_every_sample_is_in_one_microbatch_and_in_order(data: st.DataObject, size: int, shares: list[float]) -> None:
    counts = data.draw(st.tuples(*[st.integers(1, 8)] * len(shares)))
    parts = divide(size, shares, counts)
    assert [len(own) for own in parts] == list(counts)
    flat = [part for own in parts for part in own]
    assert [part.number for part in flat] == list(range(sum(counts)))
    start = 0
    for part in flat:
        assert part.start == start
        start += part.size
    assert start == size
    for own, whole in zip(parts, replica_sizes(size, shares), strict=True):
        assert [part.size for part in own] == microbatch_sizes(whole, len(own))


def test_one_replica_has_the_microbatches_of_the_plain_loop() -> None:
    assert [part.size for part in divide(10, [3.0], [4])[0]] == [3, 3, 2, 2]


@given(data=st.data(), shares=SHARES)
def test_shares_that_follow_speed_make_no_microbatch_of_one_sample(data: st.DataObject, shares: list[float]) -> None:
    """Of a batch with two for each; of a smaller one they are as they would be."""
    counts = data.draw(st.tuples(*[st.integers(1, 5)] * len(shares)))
    size = data.draw(st.integers(0, 6 * sum(counts)))
    fixed, parts = divide(size, shares, counts), divide(size, shares, counts, "adaptive")
    if size < 2 * sum(counts):
        assert parts == fixed
        return
    flat = [part for own in parts for part in own]
    assert 1 not in {part.size for part in flat}
    assert [part.number for part in flat] == list(range(sum(counts)))
    assert [part.start for part in flat] == [sum(part.size for part in flat[:n]) for n in range(len(flat))]
    samples = [sum(part.size for part in own) for own in parts]
    assert sum(samples) == size
    before = replica_sizes(size, shares)
    assert [count > 0 for count in samples] == [count > 0 for count in before]
    assert sum(max(0, a - b) for a, b in zip(samples, before, strict=True)) == before.count(1), "no more than they lack"
    again = divide(size, [float(count) for count in samples], counts, "adaptive")
    assert again == parts, "a run is repeated by the samples that it recorded"


def test_a_part_too_small_for_its_microbatches_has_fewer_of_them() -> None:
    sizes = [[part.size for part in own] for own in divide(24, [0.88, 0.12], [2, 2], "adaptive")]
    assert sizes == [[11, 10], [3, 0]]


COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(loaders=st.integers(1, 7), counts=COUNTS, iterations=st.integers(1, 20))
def test_loaders_take_turns_at_the_order_of_one(loaders: int, counts: tuple[int, ...], iterations: int) -> None:
    turns = Turns(loaders, counts)
    places = [(i, p) for i in range(iterations) for p in range(len(turns.order()))]
    had = [[n for n in range(loaders) if turns.has(n, p, i)] for i, p in places]
    assert had == [[number % loaders] for number in range(len(places))]
    for (_, position), (loader,) in zip(places, had, strict=True):
        assert loader in turns.takers_of(position)


@given(loaders=st.integers(1, 7), counts=COUNTS)
def test_a_task_stands_in_no_lane_in_which_it_never_runs(loaders: int, counts: tuple[int, ...]) -> None:
    turns = Turns(loaders, counts)
    for position in range(sum(counts)):
        having = {n for n in range(loaders) for i in range(loaders) if turns.has(n, position, i)}
        assert having == set(turns.takers_of(position))
        assert len(having) == turns.takers


def test_replicas_first_microbatches_come_first_and_stolen_ones_are_of_the_batch() -> None:
    two = Strategy(replicas=[{"microbatches": 3}, {"microbatches": 2}], loaders=2)
    assert Turns.of(two).order() == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    stealing = Strategy(replicas=2, microbatches=2, share="stealing", loaders=2)
    assert Turns.of(stealing).order() == [(0, 0), (0, 1)]


def test_there_are_slots_for_what_the_other_loaders_load_meanwhile() -> None:
    def ahead(loaders: int, *counts: int) -> int:
        return Turns(loaders, counts).batches_ahead(2)

    assert [ahead(1, 1), ahead(1, 4), ahead(2, 4), ahead(4, 4)] == [2, 2, 2, 2]
    assert [ahead(2, 1), ahead(3, 1), ahead(3, 2), ahead(4, 1, 1)] == [3, 4, 3, 3]
