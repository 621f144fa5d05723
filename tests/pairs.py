"""Products of axes, thinned: `@pytest.mark.pairs(job=JOBS, stages=(1, 2, 3), schedule=("gpipe", "1f1b"))`.

Such a test runs a few rows of the product, in which any two values of two axes meet; of two axes alone, each value
occurs. With `@pytest.mark.pairs(2, …)` these rows are spread over two days. Few faults need more than two values to
come together (Kuhn, Wallace and Gallo, "Software fault interactions and implications for software testing", 2004). The
rows are others each day; `--exhaustive` runs the whole product.

A row's id is its values: `pytest --exhaustive ID` runs one again on any day.

`@pytest.mark.days(3)`: a long test that runs on one day of three, as long ones on one day as on another. Named alone
it runs on any day, too, with `--exhaustive`.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest


def covering_rows(lengths: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """Of axes with so many values each, by the values' numbers, in the product's order. Greedy, so not the fewest."""
    rows = list(itertools.product(*map(range, lengths)))
    random.Random(seed).shuffle(rows)
    together = min(2, len(lengths) - 1)
    meetings = {row: set(itertools.combinations(enumerate(row), together)) for row in rows}
    missing = set().union(*meetings.values())
    chosen = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(meetings[row] & missing)))
        missing -= meetings[chosen[-1]]
    return sorted(chosen)


def rows_of_day(lengths: Sequence[int], seed: int, days: int = 1) -> list[tuple[int, ...]]:
    """A share of rows that cover together, which the seeds behind one another have in turn."""
    return covering_rows(lengths, seed // days)[seed % days :: days]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run products of axes whole, see tests/pairs.py")
    today = int(datetime.now(UTC).strftime("%Y%m%d"))
    parser.addoption("--pairs-seed", type=int, default=today, help="of the rows that are run of them; today's date")


def without_other_days(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes out what has its turn on another day. What a soak plays has none: it is asked for by its name."""
    if config.getoption("exhaustive"):
        return
    by_days: defaultdict[int, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("days")) is not None and item.get_closest_marker("soak") is None:
            by_days[mark.args[0]].append(item)
    seed = config.getoption("pairs_seed")
    others: set[pytest.Item] = set()
    for days, marked in by_days.items():
        marked.sort(key=lambda item: (-_seconds(item), item.nodeid))
        others.update(item for number, item in enumerate(marked) if (number + seed) % days != 0)
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=list(others))


pytest_collection_modifyitems = without_other_days


def _seconds(item: pytest.Item) -> float:
    mark = item.get_closest_marker("slow")
    return float(mark.kwargs.get("seconds", 1)) if mark is not None else 0.0


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    if config.getoption("exhaustive") or not any(item.get_closest_marker("pairs") for item in items):
        return []
    return [f"products of axes are thinned by --pairs-seed={config.getoption('pairs_seed')}; whole with --exhaustive"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("pairs")
    if mark is None:
        return
    axes = {name: tuple(values) for name, values in mark.kwargs.items()}
    lengths = [len(values) for values in axes.values()]
    if metafunc.config.getoption("exhaustive"):
        numbers = list(itertools.product(*map(range, lengths)))
    else:
        numbers = rows_of_day(lengths, metafunc.config.getoption("pairs_seed"), *mark.args)
    rows = [[values[number] for values, number in zip(axes.values(), row, strict=True)] for row in numbers]
    metafunc.parametrize(list(axes), rows, ids=[_id(dict(zip(axes, row, strict=True))) for row in rows])


def _id(row: dict[str, object]) -> str:
    """Words speak for themselves; numbers and the like with the name of their axis."""
    return ", ".join(value if isinstance(value, str) else f"{axis} {value}" for axis, value in row.items())
