"""Shapes for microbatch sizes that nobody has run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.shapes import Shape, ShapeError, check_affine, shape_of

KNOWN: dict[int, Shape] = {6: (6, 128), 12: (12, 128), 24: (24, 128)}


def test_a_size_between_has_the_shape_between() -> None:
    assert shape_of(7, KNOWN) == (7, 128)
    assert shape_of(1, KNOWN) == (1, 128)
    assert shape_of(24, KNOWN) == (24, 128)


def test_a_dimension_may_hold_several_rows_for_each_sample() -> None:
    assert shape_of(3, {2: (16, 5), 4: (32, 5)}) == (24, 5)


@pytest.mark.parametrize(("size", "known"), [(25, KNOWN), (0, KNOWN), (3, {6: (6,)})])
def test_a_size_that_nothing_is_known_of_is_an_error(size: int, known: dict[int, Shape]) -> None:
    with pytest.raises(KeyError):
        shape_of(size, known)


@pytest.mark.parametrize(
    "known",
    [
        {6: (6, 3), 12: (12, 4), 24: (24, 5)},
        {6: (6,), 12: (12, 1)},
        {6: (36,), 12: (144,), 24: (576,)},
        {6: (3,), 12: (5,), 9: (4,)},
    ],
)
def test_shapes_that_follow_no_rule_are_refused(known: dict[int, Shape]) -> None:
    with pytest.raises(ShapeError):
        check_affine(known)


@given(per_sample=st.integers(0, 9), fixed=st.integers(0, 9), sizes=st.sets(st.integers(1, 99), min_size=2))
def test_shapes_that_grow_evenly_are_known_for_every_size(per_sample: int, fixed: int, sizes: set[int]) -> None:
    known = {size: (size * per_sample + fixed, 7) for size in sizes}
    check_affine(known)
    for size in range(1, max(sizes) + 1):
        assert shape_of(size, known) == (size * per_sample + fixed, 7)
