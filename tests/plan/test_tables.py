"""Which value holds in which iteration."""

from __future__ import annotations

import pytest

from weft.plan.tables import KEPT, IterationTable


def test_a_value_holds_from_its_first_iteration_on() -> None:
    table = IterationTable((1, 1))
    table.set(5, (3, 1))
    table.set(9, (4, 1))
    assert [table.of(iteration) for iteration in (0, 4, 5, 8, 9, 100)] == [
        (1, 1),
        (1, 1),
        (3, 1),
        (3, 1),
        (4, 1),
        (4, 1),
    ]
    assert table.newest == (9, (4, 1))


def test_values_of_iterations_that_are_past_cannot_change() -> None:
    table = IterationTable(1)
    table.set(5, 2)
    with pytest.raises(AssertionError):
        table.set(4, 3)


def test_only_the_newest_rows_are_kept() -> None:
    table = IterationTable(0)
    for first in range(1, 3 * KEPT):
        table.set(first, first)
    newest = 3 * KEPT - 1
    assert table.of(newest) == newest
    assert table.of(newest - KEPT + 1) == newest - KEPT + 1
