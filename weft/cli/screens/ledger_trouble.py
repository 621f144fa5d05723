"""What is amiss with the daemon's ledger, in sentences, from the map that `ps` and `status` answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 5  # names in a sentence


def ledger_trouble(health: Mapping[str, Any] | None) -> list[str]:
    """None where nothing is, and of a daemon that does not tell."""
    if not health:
        return []
    lines = []
    if health["problem"]:
        lines.append(f"the ledger cannot be used: {health['problem']}. Until then submits are refused")
    if health["unwritten"]:
        lines.append(
            f"the newest state of {_named(health['unwritten'])} is in the daemon's memory alone: make room before it "
            "stops, or they run again"
        )
    if health["unreadable"]:
        lines.append(f"the ledger's row of {_named(health['unreadable'])} cannot be read; it is left as it is")
    return lines


def _named(jobs: Sequence[str]) -> str:
    rest = len(jobs) - SHOWN
    return ", ".join(jobs[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
