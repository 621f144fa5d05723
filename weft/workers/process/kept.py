"""Kept: what a worker has of a job while that is between two attempts, since another worker of it was lost.

    lanes stopped ── kept ──┬── the next attempt goes on with it: its lanes begin with a snapshot
                            └── or it is let go of, as at a job's end

Model, data, slots and mappings are of the job, its place in the plan and the directory's blocks, not of the attempt.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.machine.checkpoint_files import read_manifest
from weft.plan.worker_view import WorkerView
from weft.transport.memory.directory import Directory
from weft.transport.wire.frames import Message
from weft.workers.lanes.attempt import Attempt
from weft.workers.snapshots.checkpoint import OpenCheckpoint
from weft.workers.snapshots.place import read_place
from weft.workers.snapshots.saved import Saved


@dataclass(slots=True)
class Kept:
    arenas: str  # of the job, whose blocks are mapped
    view: WorkerView
    snapshots: Directory
    attempt: Attempt

    def is_of(self, message: Message) -> bool:
        """Whether a message is for the job, with these blocks."""
        return message["type"] == "prepare" and bool(message["arenas"] == self.arenas)

    def goes_on(self, message: Message) -> bool:
        """Whether what a `prepare` asks for is this, which is rewound then. Errors: SharedMemoryGone."""
        if message["arenas"] != self.arenas or not _is_alike(message["plan"], self.view):
            return False
        begins, saved = begin_of(message["snapshot"], self.view, self.snapshots)
        return saved is not None and self.attempt.rewind(message["plan"], begins, saved)


def _is_alike(one: WorkerView, other: WorkerView) -> bool:
    """But for shares and ways, to which a job comes as it runs."""
    return _without_adjustments(one) == _without_adjustments(other)


def _without_adjustments(view: WorkerView) -> WorkerView:
    sync = view.synchronisation
    return dataclasses.replace(
        view, shares=(), synchronisation=None if sync is None else dataclasses.replace(sync, local=())
    )


def begin_of(snapshot: Any, view: WorkerView, directory: Directory) -> tuple[int, Saved | None]:
    """(the first iteration of an attempt, what it goes on from: nothing, where the worker loads data). snapshot: as the
    daemon says, None for the beginning. directory: of snapshots."""
    if snapshot is None:
        return 0, None
    iteration, place, tasks, path = snapshot
    if path is not None:
        return iteration + 1, OpenCheckpoint(read_manifest(Path(path)))
    parts = () if view.loads_only else tasks
    return iteration + 1, Saved((read_place(directory, place, task, iteration) for task in parts), place)
