"""What the core knows of all jobs and workers, what it asks about them, and the one way in which a phase changes."""

from __future__ import annotations

from weft.scheduler.core import queue
from weft.scheduler.core.job import MOVES, Job, Phase, Worker


class IllegalMove(AssertionError):
    """A bug of ours: the machine was asked for a move that its table does not have. Carries the job's story."""


class State:
    def __init__(self, workers: dict[str, str]) -> None:
        """workers: name -> kind ("cpu" or "loader") of every worker that the daemon should keep running."""
        self.jobs: dict[str, Job] = {}  # those that have not ended
        self.workers = {name: Worker(name, kind) for name, kind in workers.items()}
        self.draining = False
        self._now = 0.0
        self._sequence = 0

    def queue(self) -> list[Job]:
        """The jobs that wait, in the order in which they will start."""
        return queue.in_order(job for job in self.jobs.values() if job.phase is Phase.QUEUED)

    def free(self) -> dict[str, list[str]]:
        """Workers that are up and hold no job, by kind."""
        return queue.free_workers(self.workers.values())

    def _active(self) -> list[Job]:
        """Jobs whose workers are at work for them."""
        return [job for job in self.jobs.values() if job.phase not in (Phase.QUEUED, Phase.PAUSED, Phase.RELEASING)]

    def _current(self, name: str, attempt: int, phase: Phase) -> Job | None:
        """The job if the event belongs to its present attempt and phase; else the event is late and dropped."""
        job = self.jobs.get(name)
        return job if job is not None and job.attempt == attempt and job.phase is phase else None

    def _move(self, job: Job, phase: Phase, cause: str) -> None:
        if phase not in MOVES[job.phase]:
            raise IllegalMove(self._story(job, f"{job.phase} → {phase} is not in the table"))
        job.story.append(f"{job.phase} → {phase}: {cause}")
        job.phase = phase

    def _story(self, job: Job, problem: str) -> str:
        return f"{job.name}, attempt {job.attempt}: {problem}; " + "; ".join(job.story)
