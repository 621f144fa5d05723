"""The ledger's part of /metrics: its jobs, and whether its disk takes what is written."""

from __future__ import annotations

from weft.metrics.prometheus.exporter import Exporter
from weft.scheduler.ledger.ledger import LedgerLook
from weft.scheduler.ledger.unwritten import LedgerHealth


def publish(look: LedgerLook, health: LedgerHealth, exporter: Exporter) -> None:
    """Once a tick."""
    for state, count in (look.counts or {}).items():
        exporter.set("weft_jobs", count, state=state)
    for reason, count in look.errors.items():
        exporter.add("weft_ledger_errors_total", count, reason=reason)
    exporter.set("weft_ledger_writable", health.problem is None)
    exporter.set("weft_ledger_unwritten_jobs", len(health.unwritten))
    exporter.set("weft_ledger_unreadable_jobs", len(health.unreadable))
