"""Rings of slots: which microbatch stands where, and that nothing is made anew for a task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.plan.plan import Ring, Role, SlotValue
from weft.transport.memory.directory import Directory, SharedMemoryGone
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.memory.slots import SlotRing

VALUE = SlotValue(name="0", dtype="float32", shapes={2: (2, 4), 1: (1, 4)}, offset=0, num_bytes=64, stages=(1,))
RING = Ring(
    role=Role.ACTIVATION,
    replica=0,
    writer=0,
    stages=(1,),
    depth=3,
    slot_bytes=64,
    values=(VALUE,),
)


class Blocks:
    """Stands in for the directory: a block by its name, of the size first asked for."""

    def __init__(self) -> None:
        self.made: dict[str, torch.Tensor] = {}

    def block(self, name: str, num_bytes: int, fill: int = 0) -> torch.Tensor:
        return self.made.setdefault(name, torch.full((num_bytes,), fill, dtype=torch.uint8))


def ring_of(blocks: Blocks, microbatches: int = 2, **changes: Any) -> SlotRing:
    return SlotRing(blocks, replace(RING, **changes), microbatches, HostDevice())  # type: ignore[arg-type]  # all that it asks of one


def test_the_writer_and_the_reader_of_a_microbatch_meet_in_one_slot() -> None:
    blocks = Blocks()
    writer, reader = ring_of(blocks), ring_of(blocks)
    for iteration in range(4):
        for microbatch in range(2):
            writer.slot(iteration, microbatch, 2).fill_(10 * iteration + microbatch)
            assert reader.slot(iteration, microbatch, 2).tolist() == [[10 * iteration + microbatch] * 4] * 2


@given(first=st.integers(0, 30), second=st.integers(0, 30))
def test_microbatches_share_a_slot_only_at_a_distance_of_the_depth(first: int, second: int) -> None:
    ring = ring_of(Blocks())
    a, b = (ring.slot(*divmod(number, 2), 2).data_ptr() for number in (first, second))
    assert (a == b) == ((first - second) % 3 == 0)


def test_a_smaller_microbatch_stands_at_the_beginning_of_the_same_slot() -> None:
    ring = ring_of(Blocks())
    large, small = ring.slot(0, 1, 2), ring.slot(0, 1, 1)
    assert (large.shape, small.shape, small.dtype) == ((2, 4), (1, 4), torch.float32)
    small.fill_(7)
    assert large.tolist() == [[7.0] * 4, [0.0] * 4]


def test_slots_do_not_overlap() -> None:
    blocks = Blocks()
    ring = ring_of(blocks)
    ring.slot(0, 1, 2).fill_(1)
    assert not ring.slot(0, 0, 2).any()
    assert not ring.slot(1, 0, 2).any()
    assert blocks.made["activation-0-0"].numel() == 3 * 64


def test_the_view_of_a_slot_is_made_once() -> None:
    ring = ring_of(Blocks())
    assert ring.slot(0, 0, 2) is ring.slot(3, 0, 2)


def test_a_microbatch_size_that_was_not_planned_is_an_error() -> None:
    with pytest.raises(KeyError):
        ring_of(Blocks()).slot(0, 0, 3)


def test_a_devices_own_ring_is_not_shared() -> None:
    blocks = Blocks()
    first, second = (ring_of(blocks, role=Role.INPUT, writer=None, memory="device") for _ in range(2))
    first.slot(0, 0, 2).fill_(1)
    assert first.slot(0, 0, 2).tolist() == [[1.0] * 4] * 2
    assert not second.slot(0, 0, 2).any()
    assert blocks.made == {}


def peers_of(directory: Directory) -> tuple[SlotRing, SlotRing]:
    """The ring of worker 2 that lends it, and that of another worker."""
    ring = replace(RING, memory="peer", lender=2)
    lender, borrower = (SlotRing(directory, ring, 2, StandIn(), position=position) for position in (2, 1))
    return lender, borrower


def test_a_peer_reads_what_the_lender_has_written_and_keeps_it_when_the_slot_is_written_again(
    directory: Directory,
) -> None:
    lender, borrower = peers_of(directory)
    for iteration in range(4):
        lender.slot(iteration, 1, 2).fill_(iteration)
        kept = borrower.read(iteration, 1, 2)
        lender.slot(iteration, 1, 2).fill_(-1)
        assert kept.tolist() == [[iteration] * 4] * 2
        assert borrower.read(iteration, 1, 2).tolist() == [[-1] * 4] * 2


def test_nothing_is_lent_before_it_is_written_to(directory: Directory) -> None:
    """A worker would keep for ever what it has lent to one that failed in its set-up and never opens it."""
    lender, borrower = peers_of(directory)
    nothing_lent = directory.num_bytes()["job"]  # the strides are in the host's memory
    with pytest.raises(SharedMemoryGone):
        borrower.read(0, 0, 2)
    lender.slot(0, 0, 2)
    assert directory.num_bytes() == {"job": nothing_lent + 3 * 64}
    assert not borrower.read(0, 0, 2).any()


def test_the_host_reads_shared_memory_in_place() -> None:
    ring = ring_of(Blocks())
    assert ring.read(0, 0, 2) is ring.slot(0, 0, 2)


def test_a_ring_for_what_has_no_elements_has_a_block_all_the_same() -> None:
    blocks = Blocks()
    ring = ring_of(blocks, slot_bytes=0, values=(replace(VALUE, shapes={1: (1, 0)}),))
    assert ring.slot(0, 0, 1).shape == (1, 0)
    assert blocks.made["activation-0-0"].numel() == 1


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


@pytest.mark.parametrize("memory", ["shared", "device", "peer"])
@pytest.mark.parametrize("kind", [*KINDS, *GAPS])
def test_what_crosses_keeps_its_strides(directory: Directory, kind: str, memory: str) -> None:
    """Kernels sum in the order in which memory lies: a convolution's channels_last output, handed on as contiguous,
    changed the last bits of what the next stage made of it, and so did the gradient of a sum, one number expanded."""
    ring = replace(RING, values=(replace(VALUE, shapes={2: (2, 4, 3, 3)}),), slot_bytes=320, memory=memory, lender=2)
    writer = SlotRing(directory, ring, 2, StandIn(), position=2)
    reader = writer if memory == "device" else SlotRing(directory, ring, 2, StandIn(), position=1)
    plain = torch.arange(72.0).reshape(2, 4, 3, 3)
    writer.write(0, 0, plain, 2)
    value = _with_strides(kind, plain)
    writer.write(0, 1, value, 2)
    read = reader.read(0, 1, 2)
    assert torch.equal(read, value)
    assert read.stride() == value.stride()
    assert reader.read(0, 0, 2).stride() == plain.stride()
    assert torch.equal(reader.read(0, 0, 2), plain)


def test_a_slice_of_something_far_larger_is_handed_on_without_what_lies_between(directory: Directory) -> None:
    ring = SlotRing(directory, RING, 2, HostDevice())
    value = torch.randn(2, 4000)[:, :4]
    ring.write(0, 0, value, 2)
    assert torch.equal(ring.read(0, 0, 2), value)
    assert ring.read(0, 0, 2).untyped_storage().nbytes() < 2 * 4000 * 4
