"""The SNAPSHOTs of one worker: what goes on beside its lane is over, and told, before its next update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.machine.free_memory import SharedMemoryFull
from weft.plan.graph import Lane, Task
from weft.plan.itinerary import Iteration
from weft.plan.kinds import Kind
from weft.plan.plan import snapshot_name
from weft.transport.memory.directory import Directory, SharedMemoryGone
from weft.workers.devices.host import HostDevice
from weft.workers.snapshots.beside import LEAST_BYTES
from weft.workers.snapshots.copies import Copies
from weft.workers.snapshots.held import VALUES, Held
from weft.workers.snapshots.place import SnapshotPlaces, read_place

LANE = Lane(0, "compute")
TASKS = [Task(id=number, kind=Kind.SNAPSHOT, lane=LANE, replica=0, stage=number) for number in range(2)]


class Training:
    """Two stages of one worker, and the places that snapshots of them were told; a course, and what is copied."""

    def __init__(self) -> None:
        self.parameters = [torch.zeros(LEAST_BYTES // 4) for _ in TASKS]
        self.mean = torch.zeros(3)
        self.places: dict[int, int] = {}
        self.last = 1000  # the last iteration before an end, of the attempt too, or a validation
        self.checked: list[int] = []
        self.told: list[tuple[str, int]] = []

    def snapshot_place(self, iteration: Iteration) -> int | None:
        return self.places.get(iteration.index)

    def next_snapshot_place(self, iteration: Iteration) -> int | None:
        return next((place for index, place in self.places.items() if index > iteration.index), None)

    def ends_attempt(self, iteration: Iteration) -> bool:
        return iteration.index == self.last

    def hold(self, task: Task, iteration: Iteration) -> Held:
        held = Held(replica=0, buffers={"mean": self.mean})
        held.add_whole(f"weight-{task.id}", VALUES, self.parameters[task.id].data)
        return held

    def check(self, task: Task, iteration: Iteration) -> None:
        self.checked.append(iteration.index)

    def versions(self) -> tuple[int, ...]:
        return tuple(each._version for each in self.parameters)

    def update(self) -> None:
        """As updates of ours do it: autograd does not count it."""
        for each in self.parameters:
            each.data.add_(1.0)

    def tell(self, what: str, *, iteration: int, seconds: float = 0.0) -> None:
        assert seconds >= 0.0
        self.told.append((what, iteration))


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def copies_of(directory: Directory, training: Training) -> Any:
    def make(*, beside: bool = True) -> Copies:
        course: Any = training
        return Copies(TASKS, directory, HostDevice(), course, training, training.tell, beside=beside)

    return make


def at(index: int) -> Any:
    return SimpleNamespace(index=index, learns=True)


def run(copies: Copies, index: int) -> None:
    for task in TASKS:
        if copies.takes(task, at(index)):
            copies.run(task, at(index))


def values(directory: Directory, place: int, iteration: int) -> list[float]:
    """Of each task: its parameter and its buffer."""
    found = [read_place(directory, place, snapshot_name(task), iteration) for task in TASKS]
    return [float(tensor.unique().item()) for held in found for tensor in held.tensors()]


def test_the_next_update_waits_and_what_a_forward_changes_is_of_before(
    directory: Directory, training: Training, copies_of: Any
) -> None:
    copies = copies_of()
    training.places = {4: 0}
    for index in range(8):
        run(copies, index)
        training.mean.add_(1.0)  # the forward of the next iteration
        finished = copies.finish(range(len(TASKS)))
        assert (finished is not None) is (index == 4)
        if index == 4:
            assert finished in {task.id for task in TASKS}
            assert training.told == [("copying", 4)] * 2 + [("copied", 4)] * 2
        training.update()
    assert values(directory, 0, 4) == [4.0, 4.0, 4.0, 4.0]
    assert len(training.told) == 4


@pytest.mark.parametrize("why", ["an end or a validation comes next", "others change it, too"])
def test_it_is_made_in_the_lane_where(directory: Directory, training: Training, copies_of: Any, why: str) -> None:
    copies = copies_of(beside=why != "others change it, too")
    training.places, training.last = {4: 0}, 4
    for index in range(5):
        run(copies, index)
        training.update()
    assert values(directory, 0, 4) == [4.0, 0.0, 4.0, 0.0]
    assert training.checked.count(4) == len(TASKS)
    assert copies.finish(range(len(TASKS))) is None
    assert training.told == []


def test_a_lane_waits_for_its_own_copies_alone(directory: Directory, training: Training, copies_of: Any) -> None:
    """An owner and a stage of one worker may have a lane each, and neither changes what the other's task copies."""
    copies = copies_of()
    training.places = {4: 0}
    run(copies, 4)
    assert copies.finish([1]) == 1
    assert training.told[2:] == [("copied", 4)]
    assert copies.finish([1]) is None
    assert not copies.takes(TASKS[1], at(5))
    assert copies.takes(TASKS[0], at(5))
    assert copies.finish([0]) == 0
    assert training.told[3:] == [("copied", 4)]


def test_where_no_update_waits_for_it_the_next_iteration_ends_with_it(
    directory: Directory, training: Training, copies_of: Any
) -> None:
    """Of which the daemon takes it that the snapshot is whole."""
    copies = copies_of()
    training.places = {4: 0}
    for index in (4, 5):
        run(copies, index)
        assert len(training.told) == 2 + 2 * (index == 5)
    assert training.told[2:] == [("copied", 4)] * 2
    assert not copies.takes(TASKS[0], at(6))


def test_a_step_that_changes_parameters_meanwhile_spoils_it_and_the_next_is_made_in_the_lane(
    directory: Directory, training: Training, copies_of: Any
) -> None:
    """Nobody has seen it do that when it was tried."""
    copies = copies_of()
    training.places = {2: 0, 5: 1}
    for index in range(8):
        run(copies, index)
        if index >= 2:
            training.parameters[1].mul_(2.0)  # within a forward
        copies.finish(range(len(TASKS)))
        training.update()
        if index == 2:
            assert training.told == [("copying", 2)] * 2 + [("uncopied", 2)] * 2
            (told,) = copies.notices()
            assert "changed parameters" in told
    assert len(training.told) == 4
    assert values(directory, 1, 5) == [5.0, 0.0, 23.0, 0.0]


def test_an_attempt_that_ends_leaves_what_it_copies_and_another_may_have_the_place(
    directory: Directory, training: Training, copies_of: Any
) -> None:
    copies = copies_of()
    training.places = {1: 0}
    run(copies, 1)
    copies.close()
    assert copies.finish(range(len(TASKS))) is None
    copies.reopen()
    training.update()
    training.told.clear()
    run(copies, 1)
    assert copies.finish(range(len(TASKS))) is not None
    assert training.told == [("copying", 1)] * 2 + [("copied", 1)] * 2
    assert values(directory, 0, 1) == [1.0, 0.0, 1.0, 0.0]


def test_one_for_which_there_is_no_memory_is_told_and_the_lane_goes_on(
    directory: Directory, training: Training, copies_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: Any, **__: Any) -> None:
        raise SharedMemoryFull("it is full")

    monkeypatch.setattr(SnapshotPlaces, "write", write)
    copies = copies_of()
    training.places = {0: 0}
    run(copies, 0)
    assert training.told == [("uncopied", 0)] * 2
    assert list(copies.notices()) == ["a snapshot could not be made: it is full"]
    assert copies.finish(range(len(TASKS))) is None
    with pytest.raises(SharedMemoryGone):
        values(directory, 0, 0)
