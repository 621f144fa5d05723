"""Arenas: where each tensor stands, and that all who look there see the same."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.transport.memory.arena import ALIGNMENT, Arena, Layout, dtype_name, dtype_of, typed

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]


def arena_of(*tensors: tuple[str, torch.Tensor]) -> Arena:
    layout = Layout.of(tensors)
    return Arena(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=6))
def test_every_tensor_has_an_aligned_place_of_its_own(facts: list[tuple[list[int], torch.dtype]]) -> None:
    tensors = [(f"t{number}", torch.empty(shape, dtype=dtype)) for number, (shape, dtype) in enumerate(facts)]
    layout = Layout.of(tensors)
    arena = arena_of(*tensors)
    end = 0
    for entry, (name, tensor) in zip(layout.entries, tensors, strict=True):
        assert entry.offset % ALIGNMENT == 0
        assert entry.offset >= end, "no overlap"
        end = entry.offset + tensor.numel() * tensor.element_size()
        assert end <= layout.num_bytes
        place = arena[name]
        assert (place.shape, place.dtype) == (tensor.shape, tensor.dtype)
        assert place.data_ptr() == arena.block.data_ptr() + entry.offset or place.numel() == 0


def test_what_is_written_in_one_place_changes_no_other() -> None:
    tensors = [(name, torch.empty(3, 5)) for name in "abc"]
    arena = arena_of(*tensors)
    arena["b"].fill_(7.0)
    assert torch.equal(arena["b"], torch.full((3, 5), 7.0))
    assert not arena["a"].any()
    assert not arena["c"].any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(3, 4),
        torch.randn(()),
    ],
    ids=["transposed", "channels last", "permuted", "contiguous", "scalar"],
)
def test_the_strides_of_a_dense_tensor_are_kept(tensor: torch.Tensor) -> None:
    """A kernel may round differently for another order in memory."""
    place = arena_of(("t", tensor))["t"]
    place.copy_(tensor)
    assert place.stride() == tensor.stride()
    assert torch.equal(place, tensor)


def test_a_tensor_with_holes_is_stored_without_them() -> None:
    tensor = torch.randn(8, 8)[::2, ::2]
    arena = arena_of(("t", tensor), ("next", torch.zeros(2)))
    arena["t"].copy_(tensor)
    assert torch.equal(arena["t"], tensor)
    assert not arena["next"].any()


def test_a_tensor_under_two_names_has_one_place() -> None:
    tied = torch.randn(3, 4)
    arena = arena_of(("embedding", tied), ("other", torch.randn(3, 4)), ("head", tied))
    arena["embedding"].fill_(2.0)
    assert torch.equal(arena["head"], torch.full((3, 4), 2.0))
    assert arena["head"].data_ptr() == arena["embedding"].data_ptr()
    assert arena["other"].data_ptr() != arena["head"].data_ptr()
    assert arena.block.numel() == 2 * ALIGNMENT, "two places of 48 bytes"


def test_the_items_are_the_places_by_name() -> None:
    arena = arena_of(("a", torch.randn(2)), ("b", torch.randn(3)))
    assert list(arena.items()) == ["a", "b"]
    assert arena.items()["b"].data_ptr() == arena["b"].data_ptr()
    with pytest.raises(KeyError, match="c"):
        arena["c"]


def test_each_place_has_a_version_of_its_own_for_autograd() -> None:
    """Plain views share their block's counter: autograd would take a write to one for a change of another."""
    arena = arena_of(("a", torch.randn(2)), ("b", torch.randn(2)))
    weight = arena["a"].requires_grad_()
    loss = (weight * weight).sum()
    arena["b"].fill_(3.0)
    loss.backward()
    assert weight.grad is not None


def test_a_block_that_is_too_small_is_refused() -> None:
    layout = Layout.of([("t", torch.empty(100))])
    with pytest.raises(ValueError, match="an arena of 399 bytes cannot hold a layout of 448"):
        Arena(torch.empty(399, dtype=torch.uint8), layout)


def test_an_arena_of_nothing_has_a_block_all_the_same() -> None:
    assert Layout.of([]).num_bytes == ALIGNMENT


def test_a_layout_reaches_another_process_whole() -> None:
    layout = Layout.of([("t", torch.empty(2, 3)), ("u", torch.empty(4, dtype=torch.int64))])
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_a_typed_view_stands_where_it_is_asked_for() -> None:
    block = torch.arange(64, dtype=torch.uint8)
    view = typed(block, 16, (2, 2), "int32")
    assert view.data_ptr() == block.data_ptr() + 16
    view.zero_()
    assert not block[16:32].any()
    assert (block[15], block[32]) == (15, 32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_is_found_by_its_name(dtype: torch.dtype) -> None:
    assert dtype_of(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["floaty", "nn", "", "Tensor", "torch.float32"])
def test_a_name_that_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no torch dtype"):
        dtype_of(name)
