"""The places of a task's snapshots: two that take turns, made anew where what is copied has changed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from weft.machine.free_memory import SharedMemoryFull
from weft.transport.memory.directory import Directory, SharedMemoryGone
from weft.workers.devices.host import HostDevice
from weft.workers.snapshots.beside import LEAST_BYTES
from weft.workers.snapshots.held import VALUES, Extent, Held, Piece
from weft.workers.snapshots.place import SnapshotPlaces, arena_name, read_place

TASK = "stage-0-0"


def held_of(*shape: int, number: float = 0.0, **changes: Any) -> Held:
    held = Held(replica=0, buffers={"mean": torch.full((3,), float(number))}, **changes)
    held.add_whole("weight", VALUES, torch.full(shape, float(number)))
    return held


def values_of(held: Held) -> list[float]:
    return [float(tensor.unique().item()) for tensor in held.tensors()]


@pytest.fixture
def places(directory: Directory) -> SnapshotPlaces:
    return SnapshotPlaces(directory, TASK, HostDevice())


def test_what_was_held_comes_back_whole(directory: Directory, places: SnapshotPlaces) -> None:
    flat = torch.arange(10.0)
    matrix = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    held = Held(
        replica=1,
        buffers={"mean": torch.ones(2), "count": torch.tensor(7)},
        states={"weight": {"step": torch.tensor(3.0), "rows": torch.ones(2, 1)}},
        options={"weight": {"lr": 0.1, "betas": (0.9, 0.99)}},
        scheduler={"last_epoch": 3},
    )
    held.pieces.append(Piece(VALUES, [Extent("a", 0, 0, 4), Extent("b", 2, 4, 10)], flat))
    held.add_whole("weight", "exp_avg", matrix)
    places.write(0, 5, held)
    found = read_place(directory, 0, TASK, 5)
    assert found.replica == 1
    assert [(piece.entry, list(piece.extents)) for piece in found.pieces] == [
        (VALUES, [Extent("a", 0, 0, 4), Extent("b", 2, 4, 10)]),
        ("exp_avg", [Extent("weight", 0, 0, 0)]),
    ]
    assert all(map(torch.equal, found.tensors(), held.tensors()))
    assert found.pieces[1].tensor.stride() == matrix.stride(), "kernels sum in the order of memory"
    assert list(found.buffers) == ["mean", "count"]
    assert found.options == held.options
    assert found.scheduler == held.scheduler
    assert float(found.states["weight"]["step"]) == 3.0
    assert torch.equal(found.states["weight"]["rows"], torch.ones(2, 1))


def test_options_of_a_group_are_there_once(directory: Directory, places: SnapshotPlaces) -> None:
    """As often as there are parameters they were most of what each worker had to read before it could go on."""
    own, other = {"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2}
    held = held_of(4, options={**dict.fromkeys(map(str, range(50)), own), "other": other})
    assert held.plain()["options"] == [own, other]
    places.write(0, 5, held)
    assert read_place(directory, 0, TASK, 5).options == held.options


def test_it_is_a_copy(directory: Directory, places: SnapshotPlaces) -> None:
    held = held_of(4, number=1.0)
    places.write(0, 5, held)
    for tensor in held.tensors():
        tensor.fill_(2.0)
    assert values_of(read_place(directory, 0, TASK, 5)) == [1.0, 1.0]


def test_what_updates_change_is_copied_beside_and_the_rest_at_once(
    directory: Directory, places: SnapshotPlaces
) -> None:
    """A forward may change a buffer before the copy is waited for."""
    held = held_of(LEAST_BYTES // 4, number=1.0, fixed={"frozen": torch.ones(2)})
    copying = places.write(0, 5, held, beside=True)
    assert copying is not None
    held.buffers["mean"].fill_(2.0)
    copying.wait()
    held.pieces[0].tensor.fill_(2.0)
    assert values_of(read_place(directory, 0, TASK, 5)) == [1.0, 1.0, 1.0]


def test_what_is_small_is_copied_at_once(directory: Directory, places: SnapshotPlaces) -> None:
    held = held_of(LEAST_BYTES // 4 - 1, number=1.0)
    assert places.write(0, 5, held, beside=True) is None
    held.pieces[0].tensor.fill_(2.0)
    assert values_of(read_place(directory, 0, TASK, 5)) == [1.0, 1.0]


def test_so_is_all_where_the_system_has_no_thread_more(
    directory: Directory, places: SnapshotPlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    held = held_of(LEAST_BYTES // 4, number=1.0)
    assert places.write(0, 5, held, beside=True) is None
    held.pieces[0].tensor.fill_(2.0)
    assert values_of(read_place(directory, 0, TASK, 5)) == [1.0, 1.0]


def test_two_places_take_turns(directory: Directory, places: SnapshotPlaces) -> None:
    for iteration in range(5):
        places.write(iteration % 2, iteration, held_of(4, number=iteration))
        found = [read_place(directory, each % 2, TASK, each) for each in range(max(0, iteration - 1), iteration + 1)]
        assert [values_of(each)[0] for each in found] == [
            float(each) for each in range(max(0, iteration - 1), iteration + 1)
        ]


def test_a_place_is_made_once_for_as_long_as_nothing_changes(directory: Directory, places: SnapshotPlaces) -> None:
    places.write(0, 0, held_of(4, options={"weight": {"lr": 0.1}}))
    block = directory.find(arena_name(0, TASK)).block
    for iteration in range(1, 4):
        places.write(0, iteration, held_of(4, number=iteration, options={"weight": {"lr": 0.1 / iteration}}))
    again = directory.find(arena_name(0, TASK)).block
    assert again.data_ptr() == block.data_ptr()
    assert values_of(read_place(directory, 0, TASK, 3)) == [3.0, 3.0]


@pytest.mark.parametrize(
    "changed",
    [
        held_of(5, number=2.0),
        held_of(2, 2, number=2.0),
        held_of(4, number=2.0, options={"weight": {"text": "x" * 9999}}),
    ],
    ids=["larger", "of another shape", "with more facts"],
)
def test_a_place_is_made_anew_where_what_is_copied_has_changed(
    directory: Directory, places: SnapshotPlaces, changed: Held
) -> None:
    for place in (0, 1):
        places.write(place, place, held_of(4, number=1.0))
    places.write(0, 2, changed)
    found = read_place(directory, 0, TASK, 2)
    assert [each.shape for each in found.tensors()] == [each.shape for each in changed.tensors()]
    assert values_of(found) == [2.0, 2.0]
    assert found.options == changed.options
    assert values_of(read_place(directory, 1, TASK, 1)) == [1.0, 1.0], "the other one stays"


def test_an_optimizer_that_has_not_stepped_yet_needs_more_room_later(
    directory: Directory, places: SnapshotPlaces
) -> None:
    places.write(0, 0, held_of(4))
    held = held_of(4, number=1.0, states={"weight": {"step": torch.tensor(1.0)}})
    held.add_whole("weight", "exp_avg", torch.full((4,), 1.0))
    places.write(0, 2, held)
    assert values_of(read_place(directory, 0, TASK, 2)) == [1.0, 1.0, 1.0]


def test_another_attempts_task_writes_where_the_one_before_has_left_its_own(
    directory: Directory, places: SnapshotPlaces
) -> None:
    """Its worker maps what the last one has left; the one that the attempt goes on from is not touched."""
    places.write(0, 0, held_of(4, number=1.0))
    places.write(1, 3, held_of(4, number=2.0))
    goes_on = read_place(directory, 1, TASK, 3)
    again = SnapshotPlaces(directory, TASK, HostDevice())
    again.write(0, 6, held_of(4, number=3.0))
    assert values_of(goes_on) == values_of(read_place(directory, 1, TASK, 3)) == [2.0, 2.0]
    assert values_of(read_place(directory, 0, TASK, 6)) == [3.0, 3.0]


def test_room_is_made_before_the_copy_comes(directory: Directory, places: SnapshotPlaces) -> None:
    """Of what was there before there is nothing to be seen."""
    assert not places.expects(1)
    places.expect(1, held_of(4, number=1.0))
    assert places.expects(1)
    assert not places.expects(0)
    places.close()
    block = directory.find(arena_name(1, TASK)).block
    places.write(1, 6, held_of(4, number=3.0, fixed={"frozen": torch.full((2,), 3.0)}))
    assert values_of(read_place(directory, 1, TASK, 6)) == [3.0, 3.0, 3.0]
    places.write(1, 8, held_of(4, number=4.0, fixed={"frozen": torch.full((2,), 4.0)}))
    assert values_of(read_place(directory, 1, TASK, 8)) == [4.0, 4.0, 3.0], "what nobody trains is copied once"
    assert directory.find(arena_name(1, TASK)).block.data_ptr() != block.data_ptr(), "it looks otherwise than expected"


def test_a_room_that_looks_as_expected_is_the_one_that_is_written(directory: Directory, places: SnapshotPlaces) -> None:
    held = held_of(4, number=1.0, fixed={"frozen": torch.full((2,), 1.0)})
    places.expect(0, held)
    places.close()
    block = directory.find(arena_name(0, TASK)).block
    places.write(0, 6, held)
    assert values_of(read_place(directory, 0, TASK, 6)) == [1.0, 1.0, 1.0], "the first copy is of all"
    assert directory.find(arena_name(0, TASK)).block.data_ptr() == block.data_ptr()


def test_a_copy_waits_for_its_room(directory: Directory, places: SnapshotPlaces) -> None:
    for place in range(2):
        held = held_of(1 << 20, number=place)
        places.expect(place, held)
        places.write(place, place, held)
        assert values_of(read_place(directory, place, TASK, place)) == [float(place)] * 2


def test_a_room_that_cannot_be_had_beside_is_told_by_the_copy(
    directory: Directory, places: SnapshotPlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise SharedMemoryFull("there is none")

    monkeypatch.setattr(Directory, "create", full)
    places.expect(0, held_of(4))
    places.close()
    with pytest.raises(SharedMemoryFull, match="there is none"):
        places.write(0, 0, held_of(4))
    monkeypatch.undo()
    places.write(0, 0, held_of(4, number=1.0))
    assert values_of(read_place(directory, 0, TASK, 0)) == [1.0, 1.0]


def test_another_attempt_finds_the_room_of_the_one_before(directory: Directory, places: SnapshotPlaces) -> None:
    places.write(0, 0, held_of(4, number=1.0))
    block = directory.find(arena_name(0, TASK)).block
    again = SnapshotPlaces(directory, TASK, HostDevice())
    again.write(0, 6, held_of(4, number=3.0, options={"weight": {"lr": 0.1}}))
    assert values_of(read_place(directory, 0, TASK, 6)) == [3.0, 3.0]
    assert directory.find(arena_name(0, TASK)).block.data_ptr() == block.data_ptr()


def test_one_of_another_iteration_is_as_good_as_none(directory: Directory, places: SnapshotPlaces) -> None:
    places.write(0, 4, held_of(4))
    with pytest.raises(SharedMemoryGone, match=r"snapshot-0-stage-0-0 is of iteration 4, not 6"):
        read_place(directory, 0, TASK, 6)


def test_one_that_was_never_made_is_gone(directory: Directory) -> None:
    with pytest.raises(SharedMemoryGone):
        read_place(directory, 0, TASK, 6)


@pytest.mark.parametrize(
    ("damage", "byte"),
    [(slice(None), 0), (slice(None), 255), (slice(0, 8), 0), (slice(8, 24), 0), (slice(8, 24), 255)],
    ids=str,
)
def test_one_that_is_not_as_it_was_written_is_gone(
    directory: Directory, places: SnapshotPlaces, damage: slice, byte: int
) -> None:
    """The job can begin again; a ValueError would end it."""
    places.write(0, 4, held_of(4))
    directory.find(arena_name(0, TASK))["facts"][damage] = byte
    with pytest.raises(SharedMemoryGone):
        read_place(directory, 0, TASK, 4)


def test_whichever_byte_of_it_is_another_it_is_gone_or_read(directory: Directory, places: SnapshotPlaces) -> None:
    """What is no longer a name may be a number, a list that is too short, or a place that there is none of."""
    places.write(0, 4, held_of(4, options={"weight": {"lr": 0.1}}, states={"weight": {"step": torch.tensor(3.0)}}))
    facts = directory.find(arena_name(0, TASK))["facts"]
    num_gone = 0
    for number in range(int(facts[0]) + (int(facts[1]) << 8) + 8):
        for byte in (0, 1, 255):
            before, facts[number] = int(facts[number]), byte
            try:
                read_place(directory, 0, TASK, 4)
            except SharedMemoryGone:
                num_gone += 1
            facts[number] = before
    assert num_gone
    assert values_of(read_place(directory, 0, TASK, 4)) == [0.0, 0.0]


def test_nothing_has_to_be_held() -> None:
    """A stage of nothing but functions has neither parameters nor buffers."""
    assert Held().tensors() == []
    assert Held.of(Held().layout(), Held().plain(), []) == Held()
