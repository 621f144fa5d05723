"""Buckets: every trained parameter once, cut wherever a replica is, aligned, and shared out among owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.buckets import (
    ALIGNMENT_BYTES,
    FIRST_BUCKET_BYTES,
    Bucket,
    OwnedRange,
    make_buckets,
    owned_ranges,
)
from weft.plan.inspection import ParameterFacts

ParameterOf = Callable[..., ParameterFacts]
Stages = list[list[tuple[int, int]]]

WHOLE = [[(0, 12)]]
MIB = 1 << 20


def parameters_in(bucket: Bucket) -> list[int]:
    return [place.parameter for place in bucket.places]


def test_the_parameters_used_last_come_first(parameter_of: ParameterOf) -> None:
    """Their gradients are the first that backward has."""
    parameters = [parameter_of(unit, num_elements=MIB) for unit in (0, 0, 1, 2)]
    buckets = make_buckets(parameters, WHOLE, 8 * MIB)
    assert [parameters_in(bucket) for bucket in buckets] == [[3], [2, 1], [0]]
    assert [bucket.index for bucket in buckets] == [0, 1, 2]


def test_the_first_bucket_is_small_so_that_its_synchronisation_begins_early(parameter_of: ParameterOf) -> None:
    parameters = [parameter_of(unit, num_elements=MIB // 16) for unit in range(12)]  # 256 KiB each
    sizes = [sum(place.num_elements * 4 for place in b.places) for b in make_buckets(parameters, WHOLE, 2 * MIB)]
    assert sizes == [FIRST_BUCKET_BYTES, 2 * MIB]
    sizes = [bucket.num_bytes for bucket in make_buckets(parameters, WHOLE, MIB // 2)]
    assert sizes == [MIB // 2] * 6, "no larger than the others either"


def test_one_parameter_larger_than_a_bucket_has_one_to_itself(parameter_of: ParameterOf) -> None:
    parameters = [parameter_of(0), parameter_of(1, num_elements=10_000), parameter_of(2)]
    assert [parameters_in(b) for b in make_buckets(parameters, WHOLE, 1000)] == [[2], [1], [0]]


def test_a_bucket_lies_in_one_stage_of_each_replica(parameter_of: ParameterOf) -> None:
    """As the module draws it: cut wherever any replica is."""
    parameters = [parameter_of(unit) for unit in range(4)]
    buckets = make_buckets(parameters, [[(0, 2), (2, 4)], [(0, 3), (3, 4)]], MIB)
    assert [parameters_in(bucket) for bucket in buckets] == [[3], [2], [1, 0]]
    assert [bucket.holders for bucket in buckets] == [((0, 1), (1, 1)), ((0, 1), (1, 0)), ((0, 0), (1, 0))]


def test_a_parameter_that_two_stages_use_is_held_by_both(parameter_of: ParameterOf) -> None:
    parameters = [parameter_of(0, 2), parameter_of(0), parameter_of(2)]
    buckets = make_buckets(parameters, [[(0, 1), (1, 2), (2, 3)]], MIB)
    assert {parameters_in(b)[0]: b.holders for b in buckets} == {0: ((0, 0), (0, 2)), 1: ((0, 0),), 2: ((0, 2),)}


def test_of_each_replica_the_first_stage_that_uses_a_parameter_has_its_gradient(parameter_of: ParameterOf) -> None:
    """The others hand theirs on to it. All parameters of a bucket are the same stages'."""
    cuts = [[(0, 1), (1, 2), (2, 3)], [(0, 3)], [(0, 1), (1, 3)]]
    (bucket,) = make_buckets([parameter_of(1, 2), parameter_of(1, 2)], cuts, MIB)
    assert bucket.holders == ((0, 1), (0, 2), (1, 0), (2, 1))
    assert bucket.gradient_holders == ((0, 1), (1, 0), (2, 1))


def test_parameters_of_one_group_lie_together(parameter_of: ParameterOf) -> None:
    """A weight and a bias in turn, in two groups: a step is then one call for each group."""
    parameters = [parameter_of(unit, group=number % 2) for unit in range(3) for number in range(2)]
    (bucket,) = make_buckets(parameters, WHOLE, MIB)
    assert parameters_in(bucket) == [4, 2, 0, 5, 3, 1]


def test_dtypes_have_buckets_of_their_own(parameter_of: ParameterOf) -> None:
    parameters = [parameter_of(unit, dtype=dtype, itemsize=size) for unit in (0, 1) for dtype, size in TYPES]
    buckets = make_buckets(parameters, WHOLE, MIB)
    assert sorted((bucket.dtype, bucket.itemsize, len(bucket.places)) for bucket in buckets) == [
        (*each, 2) for each in sorted(TYPES)
    ]


TYPES = [("float32", 4), ("bfloat16", 2), ("float64", 8)]


@st.composite
def models(draw: st.DrawFn, parameter_of: ParameterOf) -> tuple[list[ParameterFacts], Stages]:
    num_units = draw(st.integers(1, 6))
    cuts = st.sets(st.integers(1, num_units)).map(lambda cut: list(pairwise(sorted({0, num_units} | cut))))
    parameters = []
    for _ in range(draw(st.integers(0, 8))):
        dtype, itemsize = draw(st.sampled_from(TYPES))
        parameters.append(
            parameter_of(
                *sorted(draw(st.sets(st.integers(0, num_units - 1), min_size=1, max_size=2))),
                num_elements=draw(st.integers(1, 300)),
                dtype=dtype,
                itemsize=itemsize,
                trained=draw(st.booleans()),
                group=draw(st.integers(0, 1)),
            )
        )
    return parameters, draw(st.lists(cuts, min_size=1, max_size=3))


@given(data=st.data(), bucket_bytes=st.integers(64, 3000))
def test_every_trained_parameter_has_one_aligned_place_in_one_bucket(
    parameter_of: ParameterOf, data: st.DataObject, bucket_bytes: int
) -> None:
    parameters, stages = data.draw(models(parameter_of))
    buckets = make_buckets(parameters, stages, bucket_bytes)
    trained = [index for index, facts in enumerate(parameters) if facts.trained]
    assert sorted(index for bucket in buckets for index in parameters_in(bucket)) == trained
    end = 0
    for bucket in buckets:
        assert bucket.offset == end
        end += bucket.num_bytes
        assert bucket.num_bytes % ALIGNMENT_BYTES == 0
        size = sum(parameters[index].num_bytes for index in parameters_in(bucket))
        assert size <= bucket_bytes or len(bucket.places) == 1
        check_places(bucket, parameters)
        for place in bucket.places:
            assert bucket.holders == tuple(
                (replica, stage)
                for replica, cuts in enumerate(stages)
                for stage, (first, last) in enumerate(cuts)
                if set(range(first, last)) & set(parameters[place.parameter].units)
            )


def check_places(bucket: Bucket, parameters: Sequence[ParameterFacts]) -> None:
    ends = [0]
    for place in bucket.places:
        facts = parameters[place.parameter]
        assert (facts.dtype, facts.num_elements) == (bucket.dtype, place.num_elements)
        assert place.offset * bucket.itemsize % ALIGNMENT_BYTES == 0
        assert 0 <= place.offset - ends[-1] < ALIGNMENT_BYTES // bucket.itemsize
        ends.append(place.offset + place.num_elements)
    assert 0 <= bucket.num_elements - ends[-1] < ALIGNMENT_BYTES // bucket.itemsize


@given(data=st.data(), owners=st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), whole=st.booleans())
def test_owned_ranges_cover_a_bucket_and_do_not_overlap(
    parameter_of: ParameterOf, data: st.DataObject, owners: list[int], whole: bool
) -> None:
    parameters, stages = data.draw(models(parameter_of))
    for bucket in make_buckets(parameters, stages, 2000):
        ranges = owned_ranges(bucket, owners, elementwise=not whole)
        assert [part.owner for part in ranges] == [o for o in owners if o in {part.owner for part in ranges}]
        bounds = [part.start for part in ranges] + [ranges[-1].stop]
        assert bounds[0] == 0
        assert bounds[-1] == bucket.num_elements
        assert [part.stop for part in ranges] == bounds[1:]
        assert all(a < b for a, b in pairwise(bounds))
        assert all(start * bucket.itemsize % ALIGNMENT_BYTES == 0 for start in bounds)
        if whole:
            assert set(bounds) <= {place.offset for place in bucket.places} | {bucket.num_elements}


def test_owners_of_elements_get_nearly_equal_parts_and_owners_of_parameters_whole_ones(
    parameter_of: ParameterOf,
) -> None:
    parameters = [parameter_of(0, num_elements=32 * count) for count in (1, 1, 6)]
    (bucket,) = make_buckets(parameters, WHOLE, MIB)  # places 6, 1, 1
    assert owned_ranges(bucket, [4, 7], elementwise=True) == (
        OwnedRange(owner=4, start=0, stop=128),
        OwnedRange(owner=7, start=128, stop=256),
    )
    assert owned_ranges(bucket, [4, 7], elementwise=False) == (
        OwnedRange(owner=4, start=0, stop=192),
        OwnedRange(owner=7, start=192, stop=256),
    )


@pytest.mark.parametrize("elementwise", [True, False])
def test_an_owner_for_whom_nothing_is_left_gets_no_range(parameter_of: ParameterOf, elementwise: bool) -> None:
    (bucket,) = make_buckets([parameter_of(0)], WHOLE, MIB)
    (only,) = owned_ranges(bucket, [0, 1, 2], elementwise=elementwise)
    assert (only.start, only.stop) == (0, bucket.num_elements)
