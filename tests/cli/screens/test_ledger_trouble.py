"""What is amiss with the ledger, in sentences."""

from __future__ import annotations

from typing import Any

import pytest

from weft.cli.screens.ledger_trouble import ledger_trouble
from weft.scheduler.ledger.unwritten import LedgerHealth


@pytest.mark.parametrize("health", [None, {}, LedgerHealth().to_wire()], ids=["untold", "empty", "sound"])
def test_nothing_is_said_where_nothing_is_amiss(health: Any) -> None:
    assert ledger_trouble(health) == []


def test_each_trouble_is_a_sentence_that_names_some_jobs() -> None:
    jobs = tuple(f"digits-{number}" for number in range(7))
    health = LedgerHealth(problem="/s/ledger.sqlite: full; make room", unwritten=jobs, unreadable=("spoilt",))
    assert ledger_trouble(health.to_wire()) == [
        "the ledger cannot be used: /s/ledger.sqlite: full; make room. Until then submits are refused",
        "the newest state of digits-0, digits-1, digits-2, digits-3, digits-4 and 2 more is in the daemon's memory "
        "alone: make room before it stops, or they run again",
        "the ledger's row of spoilt cannot be read; it is left as it is",
    ]
