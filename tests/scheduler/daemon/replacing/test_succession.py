"""A daemon that cannot hand everything on refuses to be replaced."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from weft.scheduler.daemon.replacing.succession import Succession, ending_signals
from weft.scheduler.ledger.unwritten import LedgerHealth


def test_a_ledger_that_takes_nothing_is_a_reason_not_to_be_replaced() -> None:
    # One whose file is gone has every row in this process alone.
    others: dict[str, Any] = dict.fromkeys(
        ("settings", "environment", "runtime", "driver", "reception", "door", "http", "is_stopping")
    )
    pool: Any = SimpleNamespace(brood=object)
    ledger: Any = SimpleNamespace(health=LedgerHealth(problem="ledger.sqlite: is gone"))
    caller: Any = None
    told = Succession(**others, pool=pool, ledger=ledger)._become([], "", caller)
    assert told == "the ledger does not take what changes: ledger.sqlite: is gone"


def test_a_terminal_that_closes_ends_a_daemon_that_nobody_has_started_by_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert ending_signals() == [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert ending_signals() == [signal.SIGTERM, signal.SIGINT]
    finally:
        signal.signal(signal.SIGHUP, before)
