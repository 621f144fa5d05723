"""The states of a job. Shared by the core, the ledger and whoever shows a job.

queued → planning → running ⇄ paused
                       ⇅
                    recovering
any of these → completed | failed | cancelled        (terminal: never changes again)
"""

from __future__ import annotations

import enum


class JobState(enum.StrEnum):
    QUEUED = "queued"
    PLANNING = "planning"
    RUNNING = "running"
    PAUSED = "paused"
    RECOVERING = "recovering"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL_STATES


TERMINAL_STATES = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})
WAITING_STATES = frozenset({JobState.QUEUED, JobState.PAUSED})  # without workers, whatever it has come to before
UNFINISHED_STATES = frozenset(JobState) - TERMINAL_STATES
