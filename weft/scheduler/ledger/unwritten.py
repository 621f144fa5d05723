"""What the ledger's disk has not taken yet, and what is to be told of it. Confined to the ledger's thread.

    record ──▶ disk            the rule
    record ──▶ Unwritten       the disk is full or fails: the newest changes of each job wait, and reads see them
               └─ due ──▶ disk at a tick, less and less often; before each submit; at the daemon's end

It is bounded: a job has one entry, and a submit is refused while there is any.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FIRST_PAUSE_SECONDS = 1.0  # between two tries; a tick's
LAST_PAUSE_SECONDS = 8.0  # a disk that fails slowly costs the ledger's thread no more than a part of its time


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerHealth:
    problem: str | None = None  # of the newest try to use the file; None where it worked
    unwritten: tuple[str, ...] = ()  # jobs whose newest state is in memory alone
    unreadable: tuple[str, ...] = ()  # jobs whose rows could not be read and are left as they are

    def to_wire(self) -> dict[str, Any]:
        return {"problem": self.problem, "unwritten": list(self.unwritten), "unreadable": list(self.unreadable)}


class Unwritten:
    """The newest changes of jobs, in the order in which the jobs came; when to try again; how often a try failed."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._errors: Counter[str] = Counter()  # by reason, until they are taken
        self._changes: dict[str, dict[str, Any]] = {}
        self._pause = FIRST_PAUSE_SECONDS
        self._try_at = 0.0

    def __len__(self) -> int:
        return len(self._changes)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._changes))

    def of(self, job: str) -> dict[str, Any]:
        return self._changes.get(job, {})

    def keep(self, job: str, changes: dict[str, Any]) -> None:
        self._changes[job] = self.of(job) | changes

    def forget(self, job: str) -> None:
        self._changes.pop(job, None)

    def failed(self, reason: str, problem: str) -> None:
        """The file could not be used."""
        self._errors[reason] += 1
        self.problem = problem
        if (now := time.monotonic()) >= self._try_at:  # those that come before their time say nothing new
            self._try_at = now + self._pause
            self._pause = min(2 * self._pause, LAST_PAUSE_SECONDS)

    def worked(self) -> None:
        """The file took what was written; that it can be read says nothing of that."""
        self.problem = None
        self._pause = FIRST_PAUSE_SECONDS

    def take_errors(self) -> dict[str, int]:
        taken, self._errors = self._errors, Counter()
        return dict(taken)

    @property
    def is_due(self) -> bool:
        """Something is amiss, and it is time to see whether it still is."""
        return (bool(self._changes) or self.problem is not None) and time.monotonic() >= self._try_at
