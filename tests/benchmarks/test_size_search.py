from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from size_search import Found, largest


def search(true_size: int, **bounds: int) -> tuple[Found, list[int]]:
    """With the sizes that were tried, where everything up to `true_size` fits."""
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= true_size

    return largest(fits, **bounds), tried


def test_it_doubles_while_sizes_fit_and_then_bisects() -> None:
    found, tried = search(42, first=8, step=2, limit=200, max_tries=20)
    assert tried == [8, 16, 32, 64, 48, 40, 44, 42]
    assert found == Found(42, 44, is_settled=True)


def test_it_halves_where_the_first_size_is_too_large() -> None:
    found, tried = search(7, first=40, step=2, limit=200, max_tries=20)
    assert tried[:3] == [40, 20, 10]
    assert found == Found(6, 8, is_settled=True)


def test_nothing_above_the_limit_is_tried() -> None:
    found, tried = search(1000, first=16, step=2, limit=51, max_tries=20)
    assert tried == [16, 32, 50]
    assert found == Found(50, 52, is_settled=True)


def test_where_nothing_fits_the_size_is_0() -> None:
    assert search(0, first=8, step=2, limit=51, max_tries=20)[0] == Found(0, 2, is_settled=True)


@pytest.mark.parametrize(
    "bound", [{"max_tries": 3}, {"max_tries": 20, "may_go_on": iter([True, True, False]).__next__}]
)
def test_a_search_that_is_cut_short_says_what_it_knows(bound: dict[str, int]) -> None:
    assert search(42, first=8, step=2, limit=200, **bound)[0] == Found(32, 202, is_settled=False)


@given(true_size=st.integers(0, 300), first=st.integers(1, 300), step=st.integers(1, 8), limit=st.integers(0, 300))
def test_it_ends_at_the_largest_multiple_and_tries_no_size_twice(
    true_size: int, first: int, step: int, limit: int
) -> None:
    found, tried = search(true_size, first=first, step=step, limit=limit, max_tries=100)
    assert found.size == min(true_size, limit) // step * step
    assert found.is_settled
    assert len(tried) == len(set(tried))
