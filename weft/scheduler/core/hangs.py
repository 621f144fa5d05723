"""Hangs: whose doing it is that nothing of a job comes to an end any more, and how long is too long. A pure view.

It is asked where no lane of a job has finished a task for a while, with what its workers say of their lanes. Somebody
is at fault, and those that wait for it are not:

    a worker is stopped          nothing in it goes on, whatever it was doing         after the least
    a worker does not answer     its code holds the interpreter, or a disk holds it   after the longest of its deadlines
    a lane is in a task          a loss that sleeps, a dataset that never returns     after that task's deadline
    every lane waits             a fault of Weft's own: no worker is to blame, so     after the least
                                 that all let go and the job goes on

A slow job is no hang. So a deadline follows from what such tasks have taken, generously, and where nothing is known of
them (the first ones build, compile and open what later ones use) it is many times the least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from weft.plan.plan import Plan

MULTIPLE: Final = 10  # of the slowest that was seen, beside the least; arbitrary
FIRST: Final = 10  # times the least, where nothing was seen; arbitrary: compiling takes minutes
MAX_WAITING: Final = 12  # lanes that are told


HangCause = Literal["stopped", "silent", "task", "nobody", "phase"]  # as the exporter has it


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLane:
    worker: str
    name: str
    task: int | None  # its next, begun or not; None where it was sent nothing
    iteration: int  # of that
    seconds: float  # since anything of the lane came to an end
    waits_for: int | None  # a task; None where it is in its own

    def __str__(self) -> str:
        return f"{self.worker}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWorker:
    name: str
    state: Literal["answers", "stopped", "silent"]
    lanes: tuple[SeenLane, ...]  # of one that does not answer: as far as it has told of itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    cause: HangCause
    worker: str | None  # that is to be replaced; None where that would be a guess
    message: str


Slowest = Callable[[SeenLane], float | None]  # seconds of tasks like the one that it is in; None where none is known


def deadline(least: float, slowest: float | None) -> float:
    """Seconds that a task may take."""
    return FIRST * least if slowest is None else least + MULTIPLE * slowest


def find_hang(workers: Sequence[SeenWorker], plan: Plan, quiet: float, least: float, slowest: Slowest) -> Hang | None:
    """quiet: seconds since anything of the job came to an end. least: of those that make a hang. None: not yet."""
    if quiet < least:
        return None
    for worker in workers:
        if worker.state == "stopped":
            return stopped_worker(worker.name)
    for worker in workers:
        if worker.state == "silent" and quiet >= _patience(worker, least, slowest):
            why = "the job's code holds Python's interpreter lock there, or it waits for a disk"
            return Hang(cause="silent", worker=worker.name, message=f"{worker.name} does not answer: {why}")
    busy = [lane for lane in _lanes(workers) if lane.task is not None and lane.waits_for is None]
    late = [lane for lane in busy if lane.seconds >= deadline(least, slowest(lane))]
    if late:
        worst = max(late, key=lambda lane: lane.seconds)
        return Hang(cause="task", worker=worst.worker, message=_of_task(worst, plan, slowest(worst)))
    if busy or any(worker.state == "silent" for worker in workers):
        return None
    message = "every lane waits and none does anything: a fault of Weft's own, not of the job's code; please report it"
    return Hang(cause="nobody", worker=None, message=message)


def stopped_worker(worker: str) -> Hang:
    return Hang(cause="stopped", worker=worker, message=f"{worker} is stopped, as by SIGSTOP")


def _patience(worker: SeenWorker, least: float, slowest: Slowest) -> float:
    """It may be in any of its tasks."""
    return max(
        (deadline(least, slowest(lane)) for lane in worker.lanes if lane.task is not None), default=FIRST * least
    )


def _lanes(workers: Sequence[SeenWorker]) -> Iterator[SeenLane]:
    """Of those that answer."""
    return (lane for worker in workers if worker.state == "answers" for lane in worker.lanes)


def _of_task(lane: SeenLane, plan: Plan, slowest: float | None) -> str:
    assert lane.task is not None
    known = "none like it is known" if slowest is None else f"others like it took {slowest:.3g} s at most"
    task, label = plan.graph.tasks[lane.task], plan.itinerary.label(lane.iteration)
    return f"{lane} has been in {task} of {label} for {lane.seconds:.0f} s, and {known}"


def who_waits(workers: Sequence[SeenWorker], plan: Plan) -> list[str]:
    """A sentence for each lane that waits for another one."""
    names = [worker.name for worker in workers]
    told = []
    for lane in _lanes(workers):
        if lane.task is not None and lane.waits_for is not None:
            source = plan.graph.tasks[lane.waits_for]
            whose = f"{names[source.lane.worker]}/{source.lane.name}"
            told.append(f"{lane} waits for {source} of {whose}, for its {plan.graph.tasks[lane.task]}")
    more = len(told) - MAX_WAITING
    return told[:MAX_WAITING] + ([f"and {more} lanes more wait"] if more > 0 else [])
