"""Copies: the SNAPSHOTs of one worker in one attempt: which iterations have one, where it goes, and when it is whole.

    SNAPSHOT(i)     all of it in its lane; or what no update changes, and the rest beside the lane, from here on
    UPDATE(i+1)     waits for what is copied beside; so does every task that changes parameters or optimizer state

A worker whose copy goes on beside says so before its SNAPSHOT is over ("copying"), and when it is there ("copied") or
is not to be used ("uncopied"), before the next update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from weft.machine.free_memory import SharedMemoryFull
from weft.plan.course import Course
from weft.plan.graph import Task
from weft.plan.itinerary import Iteration
from weft.plan.plan import snapshot_name
from weft.transport.memory.directory import Directory
from weft.workers.devices.device import Memory
from weft.workers.snapshots.beside import CopyBeside
from weft.workers.snapshots.held import Held
from weft.workers.snapshots.place import SnapshotPlaces

Tell = Callable[..., None]
Versions = tuple[int, ...]


class Copied(Protocol):
    """What training has come to, in one worker."""

    def hold(self, task: Task, iteration: Iteration) -> Held:
        """What a SNAPSHOT copies, as it is now."""

    def check(self, task: Task, iteration: Iteration) -> None:
        """That it was as the updates had left it, where they tell. Errors: StateCorrupted."""

    def versions(self) -> Versions:
        """Of the parameters, as autograd counts what changes them; updates of ours do not count."""


class Copies:
    """directory: of the job's snapshots. copied: what is copied. tell: gets "copying", "copied" and "uncopied", with
    the iteration. beside: whether nothing but updates in this worker changes what they change."""

    def __init__(
        self,
        tasks: Iterable[Task],
        directory: Directory,
        device: Memory,
        course: Course,
        copied: Copied,
        tell: Tell | None,
        *,
        beside: bool,
    ) -> None:
        self._places = {task.id: SnapshotPlaces(directory, snapshot_name(task), device) for task in tasks}
        self._course = course
        self._copied = copied
        self._tell = tell
        self._beside = beside
        self._under_way: dict[int, tuple[Iteration, CopyBeside, Versions]] = {}  # by task, its lane's own
        self._why_not: str | None = None  # the last one could not be made

    def takes(self, task: Task, iteration: Iteration) -> bool:
        """Whether the iteration has one, or the task has to make room for one that is told; or no update has waited for
        the one before."""
        is_told = self._course.snapshot_place(iteration) is not None or self._lacking(task, iteration) is not None
        return is_told or task.id in self._under_way

    def run(self, task: Task, iteration: Iteration) -> None:
        place, places = self._course.snapshot_place(iteration), self._places[task.id]
        self.finish([task.id])
        try:
            if place is not None:
                self._write(task, place, iteration)
            elif (lacking := self._lacking(task, iteration)) is not None:
                places.expect(lacking, self._copied.hold(task, iteration))
        except SharedMemoryFull as error:
            self._fail(iteration, str(error))
        self._copied.check(task, iteration)

    def finish(self, tasks: Sequence[int]) -> int | None:
        """Waits for what is copied beside, of some tasks of the calling lane, which alone changes that. One that was
        waited for; None where there was none."""
        if not self._under_way:  # as good as always
            return None
        waited_for = None
        for task in tasks:
            if (under_way := self._under_way.pop(task, None)) is not None:
                self._finish(*under_way)
                waited_for = task
        return waited_for

    def _finish(self, iteration: Iteration, copying: CopyBeside, versions: Versions) -> None:
        copying.wait()
        if versions != self._copied.versions():
            self._beside = False
            self._fail(iteration, "a step has changed parameters while they were copied; the next ones wait for it")
        elif self._tell is not None:
            self._tell("copied", iteration=iteration.index, seconds=copying.seconds)

    def notices(self) -> Iterator[str]:
        """What people should know of how it went."""
        if self._why_not is not None:
            yield f"a snapshot could not be made: {self._why_not}"

    def close(self) -> None:
        """The lanes have ended: nothing is copied any more, and no room made."""
        for _, copying, _ in self._under_way.values():
            copying.leave()
        self._under_way.clear()
        for places in self._places.values():
            places.close()

    def reopen(self) -> None:
        """After `close`, of another attempt."""
        self._why_not = None
        for places in self._places.values():
            places.reopen()

    def _write(self, task: Task, place: int, iteration: Iteration) -> None:
        """In the lane, where no update may follow in this attempt: it is to be whole with the iteration then."""
        beside = self._beside and not self._course.ends_attempt(iteration)
        copying = self._places[task.id].write(place, iteration.index, self._copied.hold(task, iteration), beside=beside)
        if copying is not None:
            self._under_way[task.id] = iteration, copying, self._copied.versions()
            if self._tell is not None:
                self._tell("copying", iteration=iteration.index)

    def _lacking(self, task: Task, iteration: Iteration) -> int | None:
        """The place of the next snapshot, where it has no room yet."""
        place = self._course.next_snapshot_place(iteration)
        return None if place is None or self._places[task.id].expects(place) else place

    def _fail(self, iteration: Iteration, why: str) -> None:
        self._why_not = why
        if self._tell is not None:
            self._tell("uncopied", iteration=iteration.index)
