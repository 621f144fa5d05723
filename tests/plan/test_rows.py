from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.rows import FIELDS_PER_ROW, pack, unpack

numbers = st.integers(-(2**63), 2**63 - 1)
rows = st.lists(st.tuples(*[numbers] * FIELDS_PER_ROW), max_size=8)


@given(rows)
def test_rows_arrive_as_they_were_stamped(given_rows: list[tuple[int, ...]]) -> None:
    data = pack([number for row in given_rows for number in row])
    assert len(data) == 8 * FIELDS_PER_ROW * len(given_rows)
    assert list(unpack(data)) == given_rows


@pytest.mark.parametrize("count", [1, 5, 7, 11])
def test_numbers_that_are_no_whole_rows_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} numbers are no whole number of rows of 6"):
        unpack(pack([0] * count))


@pytest.mark.parametrize("size", [1, 47, 49])
def test_bytes_that_are_no_whole_numbers_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple of item size"):
        unpack(bytes(size))


def test_a_number_beyond_64_bits_is_refused_where_it_is_stamped() -> None:
    with pytest.raises(OverflowError):
        pack([2**63, 0, 0, 0, 0, 0])
