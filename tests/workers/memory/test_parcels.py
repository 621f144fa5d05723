"""Parcels: several tensors in a slot, found on the other side as they were, however they differ from the last ones."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.inspection import slot_bytes
from weft.plan.plan import Ring, Role, SlotValue
from weft.transport.memory.directory import Directory
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.memory.parcels import MAX_DIMENSIONS, DoesNotFit, ParcelRing

MEMORIES = ("shared", "device", "peer")
Shape = tuple[int, ...]


def ring_of(*shapes: Shape, dtypes: tuple[str, ...] = (), **changes: Any) -> Ring:
    """Of values of these shapes, float32 where nothing else is said, in three slots."""
    values: list[SlotValue] = []
    end = 0
    for number, shape in enumerate(shapes):
        dtype = dtypes[number] if dtypes else "float32"
        num_bytes = slot_bytes({1: shape}, getattr(torch, dtype).itemsize)
        values.append(
            SlotValue(name=f"{number}", dtype=dtype, shapes={1: shape}, offset=end, num_bytes=num_bytes, stages=(1,))
        )
        end += num_bytes
    facts: dict[str, Any] = {
        "role": Role.ACTIVATION,
        "replica": 0,
        "writer": 0,
        "stages": (1,),
        "depth": 3,
        "lender": 2,
    }
    return Ring(**facts | {"values": tuple(values), "slot_bytes": end} | changes)


def ends_of(directory: Directory, ring: Ring) -> tuple[ParcelRing, ParcelRing]:
    """Of worker 2, which writes, and of worker 1; of a device's own ring they are one."""
    writer = ParcelRing(directory, ring, 2, StandIn(), position=2)
    return writer, writer if ring.memory == "device" else ParcelRing(directory, ring, 2, StandIn(), position=1)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.stride() == other.stride() and one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("memory", MEMORIES)
def test_tensors_of_several_dtypes_come_over_as_they_were(directory: Directory, memory: str) -> None:
    dtypes = ("float32", "int64", "bool", "bfloat16", "complex64")
    writer, reader = ends_of(directory, ring_of(*[(2, 3)] * 5, dtypes=dtypes, memory=memory))
    numbers = torch.arange(6).reshape(2, 3)
    for iteration in range(4):
        for microbatch in range(2):
            sent = [(numbers + iteration + microbatch).to(getattr(torch, dtype)) for dtype in dtypes]
            writer.write(iteration, microbatch, sent)
            assert all(map(same, reader.read(iteration, microbatch), sent))


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_is_not_there_is_none_also_where_something_was(directory: Directory, memory: str) -> None:
    writer, reader = ends_of(directory, ring_of((4,), (2, 2), memory=memory, depth=1))
    assert reader.read(0, 0) == [None, None]
    one, other = torch.arange(4.0), torch.ones(2, 2)
    for sent in ([one, None], [None, other], [one, other], [None, None], [None, other]):
        writer.write(0, 0, sent)
        assert all(map(same, reader.read(0, 0), sent))


def test_only_the_values_that_are_asked_for_are_read(directory: Directory) -> None:
    writer, reader = ends_of(directory, ring_of((4,), (2,), (3,)))
    sent = [torch.rand(4), torch.rand(2), torch.rand(3)]
    writer.write(0, 0, sent)
    found = reader.read(0, 0, [0, 2])
    assert len(found) == 2
    assert same(found[0], sent[0])
    assert same(found[1], sent[2])
    assert reader.read(0, 0, []) == []


def test_a_value_may_be_put_alone_and_the_others_stay(directory: Directory) -> None:
    writer, reader = ends_of(directory, ring_of((4,), (2,)))
    first, second = torch.rand(4), torch.rand(2)
    writer.put(0, 0, 1, second)
    writer.put(0, 0, 0, first)
    assert all(map(same, reader.read(0, 0), [first, second]))


@given(first=st.integers(0, 30), second=st.integers(0, 30))
def test_microbatches_share_a_slot_only_at_a_distance_of_the_depth(first: int, second: int) -> None:
    ring = ParcelRing(_Blocks(), ring_of((2, 4)), 2, HostDevice())  # type: ignore[arg-type]  # all that it asks of one
    addresses = []
    for number in (first, second):
        ring.write(*divmod(number, 2), [torch.zeros(2, 4)])
        (found,) = ring.read(*divmod(number, 2))
        assert found is not None
        addresses.append(found.data_ptr())
    assert (addresses[0] == addresses[1]) == ((first - second) % 3 == 0)


class _Blocks:
    """Stands in for the directory."""

    def __init__(self) -> None:
        self.all: dict[str, torch.Tensor] = {}

    def block(self, name: str, num_bytes: int, fill: int = 0) -> torch.Tensor:
        return self.all.setdefault(name, torch.full((num_bytes,), fill, dtype=torch.uint8))

    def made(self, name: str) -> torch.Tensor:
        return self.all[name]

    def forget(self, name: str) -> None:
        del self.all[name]


def come_over(blocks: _Blocks, ring: Ring, shapes: list[Shape]) -> None:
    """One tensor after another, to a reader that looks at each, and to one that looks at every third."""
    writer, reader, late = (ParcelRing(blocks, ring, 1, HostDevice()) for _ in range(3))  # type: ignore[arg-type]  # as above
    for iteration, shape in enumerate(shapes):
        sent = torch.randn(shape)
        writer.write(iteration, 0, [sent])
        assert same(reader.read(iteration, 0)[0], sent)
        if iteration % 3 == 2:
            assert same(late.read(iteration, 0)[0], sent)


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=12),
    depth=st.integers(1, 2),
)
def test_shapes_may_change_from_one_microbatch_to_the_next(shapes: list[Shape], depth: int) -> None:
    """A reader that looks at some of them alone finds what stands there now."""
    come_over(_Blocks(), ring_of((4, 4, 4), depth=depth), shapes)


def test_in_the_steady_state_a_reader_gets_the_tensor_that_it_had_before(directory: Directory) -> None:
    """Nothing is allocated for the hand-over."""
    ring = ParcelRing(directory, ring_of((2, 4), depth=1), 2, HostDevice())
    ring.write(0, 0, [torch.zeros(2, 4)])
    (before,) = ring.read(0, 0)
    ring.write(0, 1, [torch.ones(2, 4)])
    assert ring.read(0, 1)[0] is before


def test_what_no_row_can_tell_of_is_refused_and_its_neighbours_stay_whole(directory: Directory) -> None:
    writer, reader = ends_of(directory, ring_of((4,), (4, 4), (4,)))
    sent = [torch.rand(4), torch.rand(4, 4), torch.rand(4)]
    writer.write(0, 0, sent)
    text = r"the value '1' has 65 dimensions, of 64 at most between two stages; reshape it, or leave this place out"
    with pytest.raises(DoesNotFit, match=text) as refused:
        writer.write(0, 0, [sent[0], torch.zeros([1] * (MAX_DIMENSIONS + 1)), sent[2]])
    assert refused.value.number == 1
    assert all(map(same, reader.read(0, 0), sent))


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_does_not_fit_its_place_gets_a_larger_one_and_its_neighbours_stay_whole(
    directory: Directory, memory: str
) -> None:
    writer, reader = ends_of(directory, ring_of((4,), (4, 4), (0,), memory=memory))
    for iteration, length in enumerate((4, 9, 10, 40, 3, 41, 2, 300)):
        sent = [torch.rand(4), torch.rand(4, length).t(), torch.rand(length)]
        for microbatch in range(2):
            writer.write(iteration, microbatch, sent)
        for microbatch in range(2):
            assert all(map(same, reader.read(iteration, microbatch), sent))
    assert writer.growing.count > 0
    assert writer.growing.told().startswith("activation-0-0 from 128 B to ")
    assert reader.growing.count == (writer.growing.count if memory == "device" else 0)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_value_that_is_put_alone_grows_alone(directory: Directory, memory: str) -> None:
    writer, reader = ends_of(directory, ring_of((4,), (4,), memory=memory))
    first, second, other = torch.rand(4), torch.rand(40), torch.rand(50)
    writer.put(0, 0, 0, first)
    writer.put(0, 0, 1, second)
    assert all(map(same, reader.read(0, 0), [first, second]))
    writer.put(0, 0, 1, None)
    assert all(map(same, reader.read(0, 0), [first, None]))
    writer.put(0, 0, 1, other)
    assert all(map(same, reader.read(0, 0), [first, other]))
    assert writer.growing.count == 1


@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=20))
def test_readers_find_what_has_grown_however_often_they_look(shapes: list[Shape]) -> None:
    blocks = _Blocks()
    ring = ring_of((2, 2), depth=2)
    come_over(blocks, ring, shapes)
    grown = [name for name in blocks.all if name.startswith(("activation-0-0-0-0-", "activation-0-0-1-0-"))]
    assert len(grown) <= ring.depth, "those before are kept by nobody"


def test_lanes_that_share_a_ring_make_room_beside_each_other(directory: Directory) -> None:
    """Stages of one GPU have a lane each. A slot grew while the other lane laid out a new shape, and the job failed by
    "dictionary changed size during iteration"."""

    def write(ring: ParcelRing, microbatch: int) -> None:
        for length in range(1, 300):
            ring.put(0, microbatch, 0, torch.zeros(length))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as lanes:
            for _ in range(10):
                ring = ParcelRing(directory, ring_of((4,), memory="device"), 2, StandIn())
                for written in [lanes.submit(write, ring, microbatch) for microbatch in range(2)]:
                    written.result()
                assert ring.growing.count >= 2
    finally:
        sys.setswitchinterval(before)


def test_a_place_that_has_grown_is_of_the_steady_state_again(directory: Directory) -> None:
    ring = ParcelRing(directory, ring_of((2, 4), depth=1), 2, HostDevice())
    ring.write(0, 0, [torch.zeros(20, 4)])
    (before,) = ring.read(0, 0)
    ring.write(0, 1, [torch.ones(20, 4)])
    assert ring.read(0, 1)[0] is before
    assert before is not None
    assert before.tolist() == [[1.0] * 4] * 20


def test_what_is_smaller_than_planned_or_of_another_dtype_fits(directory: Directory) -> None:
    writer, reader = ends_of(directory, ring_of((4, 4)))
    for sent in (torch.rand(2, 3), torch.rand(2, 4, dtype=torch.float64), torch.arange(8), torch.tensor(3)):
        writer.write(0, 0, [sent])
        assert same(reader.read(0, 0)[0], sent)
    assert writer.growing.count == 0


def test_a_ring_for_what_has_no_elements_has_a_block_all_the_same(directory: Directory) -> None:
    writer, reader = ends_of(directory, ring_of((1, 0)))
    writer.write(0, 0, [torch.zeros(1, 0)])
    assert same(reader.read(0, 0)[0], torch.zeros(1, 0))


def test_a_peer_keeps_what_it_has_read_when_the_slot_is_written_again(directory: Directory) -> None:
    lender, borrower = ends_of(directory, ring_of((2, 4), memory="peer"))
    for iteration in range(4):
        lender.write(iteration, 1, [torch.full((2, 4), float(iteration))])
        (kept,) = borrower.read(iteration, 1)
        lender.write(iteration, 1, [torch.full((2, 4), -1.0)])
        assert kept is not None
        assert kept.tolist() == [[iteration] * 4] * 2
        assert same(borrower.read(iteration, 1)[0], torch.full((2, 4), -1.0))


def test_nothing_is_lent_before_it_is_written_to(directory: Directory) -> None:
    """A worker would keep for ever what it has lent to one that failed in its set-up and never opens it."""
    lender, borrower = ends_of(directory, ring_of((2, 4), memory="peer"))
    nothing_lent = directory.num_bytes()["job"]  # the rows are in the host's memory
    assert borrower.read(0, 0) == [None]
    assert directory.num_bytes() == {"job": nothing_lent}
    lender.write(0, 0, [torch.zeros(2, 4)])
    assert directory.num_bytes() == {"job": nothing_lent + 3 * 64}


def _with_strides(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Tensors of shape (2, 4, 3, 3) as units hand them on."""
    match kind:
        case "contiguous":
            return x.contiguous()
        case "channels_last":
            return x.contiguous(memory_format=torch.channels_last)
        case "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "expanded":
            return x[:, :1].expand(-1, 4, -1, -1)
        case "one number":
            return x[:1, :1, :1, :1].expand(2, 4, 3, 3)
        case "expanded and transposed":
            return x[:, :, :1].transpose(1, 3).contiguous().transpose(1, 3).expand(-1, -1, 3, -1)
        case "real part":
            return torch.complex(x, x).real
        case "slice":
            return torch.cat([x, x], 1)[:, 1:5]
        case "every second":
            return torch.cat([x, x], 3)[..., ::2]
    raise AssertionError(kind)


KINDS = ("contiguous", "channels_last", "transposed", "expanded", "one number", "expanded and transposed", "real part")
GAPS = ("slice", "every second")


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", [*KINDS, *GAPS])
def test_what_crosses_keeps_its_strides(directory: Directory, kind: str, memory: str) -> None:
    """Kernels sum in the order in which memory lies: a convolution's channels_last output, handed on as contiguous,
    changed the last bits of what the next stage made of it, and so did the gradient of a sum, one number expanded."""
    writer, reader = ends_of(directory, ring_of((3,), (2, 4, 3, 3), memory=memory))
    plain, beside = torch.arange(72.0).reshape(2, 4, 3, 3), torch.rand(3)
    writer.write(0, 0, [beside, plain])
    value = _with_strides(kind, plain)
    writer.write(0, 1, [beside, value])
    assert all(map(same, reader.read(0, 1), [beside, value]))
    assert all(map(same, reader.read(0, 0), [beside, plain]))


def test_strides_may_change_from_one_microbatch_to_the_next(directory: Directory) -> None:
    writer, reader = ends_of(directory, ring_of((2, 4, 3, 3), depth=1))
    plain = torch.arange(72.0).reshape(2, 4, 3, 3)
    for kind in (*KINDS, *reversed(KINDS)):
        value = _with_strides(kind, plain)
        writer.write(0, 0, [value])
        assert same(reader.read(0, 0)[0], value)


def test_a_slice_of_something_far_larger_is_handed_on_without_what_lies_between(directory: Directory) -> None:
    writer, reader = ends_of(directory, ring_of((2, 4)))
    value = torch.randn(2, 4000)[:, :4]
    writer.write(0, 0, [value])
    (read,) = reader.read(0, 0)
    assert read is not None
    assert torch.equal(read, value)
    assert read.untyped_storage().nbytes() < 2 * 4000 * 4
