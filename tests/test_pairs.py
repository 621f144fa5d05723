"""tests/pairs.py: rows in which all pairs of values meet, the same for the same seed; and what pytest makes of them."""

from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAIRS = Path(__file__).with_name("pairs.py")
covering_rows, rows_of_day = (runpy.run_path(str(PAIRS))[name] for name in ("covering_rows", "rows_of_day"))

SHAPES = [(3, 3, 3, 2, 2, 2), (2, 2, 2), (4, 5, 4, 2), (1, 3, 2), (7, 2, 6)]


@pytest.mark.parametrize("lengths", SHAPES, ids=str)
def test_any_two_values_of_two_axes_meet_in_few_rows(lengths: tuple[int, ...]) -> None:
    for seed in range(10):
        rows = covering_rows(lengths, seed)
        for (one, num_ones), (other, num_others) in itertools.combinations(enumerate(lengths), 2):
            met = {(row[one], row[other]) for row in rows}
            assert met == set(itertools.product(range(num_ones), range(num_others)))
        assert rows == sorted(set(rows))
        assert len(rows) < max(math.prod(lengths), 2 * math.prod(sorted(lengths)[-2:]))


def test_of_two_axes_alone_each_value_occurs() -> None:
    rows = covering_rows((23, 3), seed=1)
    assert [one for one, _ in rows] == list(range(23))
    assert {other for _, other in rows} == {0, 1, 2}


def test_the_same_seed_makes_the_same_rows_and_a_month_of_them_makes_all() -> None:
    lengths = (3, 3, 2, 2)
    assert covering_rows(lengths, 20260731) == covering_rows(lengths, 20260731)
    month = {row for day in range(31) for row in covering_rows(lengths, 20260701 + day)}
    assert month == set(itertools.product(*map(range, lengths)))


def test_rows_of_several_days_are_together_those_of_one() -> None:
    lengths = (5, 3, 2)
    for days in (2, 3):
        shares = [rows_of_day(lengths, days * 777 + day, days) for day in range(days)]
        assert sorted(itertools.chain(*shares)) == covering_rows(lengths, 777)
        assert max(map(len, shares)) <= 1 + min(map(len, shares))


def ids(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    """Of the tests that so many arguments collect."""
    items, _ = pytester.inline_genitems(*arguments)
    return [item.nodeid for item in items]


def test_a_row_is_named_by_its_values_and_is_there_under_exhaustive_whatever_the_seed(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(PAIRS.read_text())
    pytester.makeini("[pytest]\nmarkers = pairs\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(
        test_it="""
        import pytest
        @pytest.mark.pairs(job=("digits", "gpt"), stages=(1, 2, 3), window=(None, 1))
        def test_it(job, stages, window): ...
        """
    )
    whole, first, second = (ids(pytester, each) for each in ("--exhaustive", "--pairs-seed=1", "--pairs-seed=2"))
    assert len(whole) == 12
    assert "test_it.py::test_it[gpt, stages 2, window None]" in whole
    assert set(first) < set(whole)
    assert first != second
    for name in (first[0], second[0]):
        assert ids(pytester, "--exhaustive", name) == [name]


def test_what_thinned_is_told_with_the_seed_that_repeats_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(PAIRS.read_text())
    pytester.makeini("[pytest]\nmarkers = pairs\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile("import pytest\n@pytest.mark.pairs(a=(1, 2), b=(3, 4))\ndef test_it(a, b): ...")
    pytester.runpytest_inprocess("-q").stdout.fnmatch_lines("*--pairs-seed=20??????;*")


def test_of_long_tests_each_has_its_day_and_all_are_there_under_exhaustive(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(PAIRS.read_text())
    pytester.makeini("[pytest]\nmarkers =\n  days\n  slow\n  soak\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(
        test_it="""
        import pytest
        @pytest.mark.days(3)
        @pytest.mark.parametrize("number", range(6))
        def test_long(number): ...
        @pytest.mark.days(2)
        @pytest.mark.slow(seconds=9)
        def test_longer(): ...
        def test_short(): ...
        @pytest.mark.days(3)
        @pytest.mark.soak
        def test_soaked(): ...
        """
    )

    def selected(option: str) -> list[str]:
        return [line for line in pytester.runpytest_inprocess("--collect-only", "-q", option).outlines if "::" in line]

    whole = selected("--exhaustive")
    assert len(whole) == 9
    days = [selected(f"--pairs-seed={seed}") for seed in range(20261126, 20261132)]
    assert {name for day in days[:3] for name in day} == set(whole)
    assert [sum("test_long[" in name for name in day) for day in days] == [2] * 6
    assert sum(any("test_longer" in name for name in day) for day in days) == 3
    for name in ("test_it.py::test_short", "test_it.py::test_soaked"):  # a soak asks for what it plays by its name
        assert all(name in day for day in days)
