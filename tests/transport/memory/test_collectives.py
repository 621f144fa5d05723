"""The reduction against plain sums in the same order, bit for bit, wherever the result goes; and who owns what."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.transport.memory.collectives import TILE_BYTES, Reduction

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TILE_ELEMENTS = TILE_BYTES // 4  # of float32
LENGTHS = [1, 7, TILE_ELEMENTS - 1, TILE_ELEMENTS, 3 * TILE_ELEMENTS + 5]


def random_sources(num_sources: int, length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Of very different sizes, so that another order of the additions gives another result."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(length, generator=generator) * 3.0 ** (i % 3)).to(dtype) for i in range(num_sources)]


def plain_sum(sources: list[Tensor]) -> Tensor:
    total = sources[0].clone()
    for source in sources[1:]:
        total = total + source
    return total


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread has kernels of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def squares_of(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


@pytest.mark.pairs(dtype=DTYPES, length=LENGTHS, num_sources=(1, 2, 3, 5))
def test_the_sum_is_the_plain_sum_bit_for_bit_and_the_squares_are_of_the_sum(
    dtype: torch.dtype, length: int, num_sources: int
) -> None:
    sources = random_sources(num_sources, length, dtype)
    expected = plain_sum(sources)
    kept = [source.clone() for source in sources]
    out = torch.full_like(sources[0], math.nan)
    squares = Reduction(out, sources).run(squares=True)
    assert torch.equal(bits(out), bits(expected))
    assert squares == pytest.approx(squares_of(expected), rel=1e-12 if dtype is torch.float64 else 1e-5)
    assert all(torch.equal(bits(source), bits(before)) for source, before in zip(sources, kept, strict=True))


@given(num_sources=st.integers(1, 6), data=st.data(), seed=st.integers(0, 99))
def test_out_may_be_any_of_the_sources_and_even_several_of_them(
    num_sources: int, data: st.DataObject, seed: int
) -> None:
    tensors = random_sources(num_sources, 33, seed=seed)
    sources = [tensors[i] for i in data.draw(st.lists(st.integers(0, num_sources - 1), min_size=1, max_size=6))]
    expected = plain_sum(sources)
    out = data.draw(st.sampled_from(tensors))
    Reduction(out, sources).run(squares=False)
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("place", range(4))
def test_in_place_over_several_tiles_no_tile_reads_what_another_has_written(place: int) -> None:
    sources = random_sources(4, 2 * TILE_ELEMENTS + 3)
    expected = plain_sum(sources)
    Reduction(sources[place], sources).run(squares=True)
    assert torch.equal(sources[place], expected)


def test_the_order_of_the_sources_is_the_order_of_the_additions() -> None:
    large, small = torch.tensor([1e8]), torch.tensor([1.0])
    out = torch.empty(1)
    Reduction(out, [large, -large, small]).run(squares=False)
    assert out.item() == 1.0
    Reduction(out, [large, small, -large]).run(squares=False)
    assert out.item() == 0.0


def test_a_reduction_is_run_again_on_what_the_sources_hold_by_then() -> None:
    first, second = random_sources(2, 100)
    reduction = Reduction(first, [first, second])
    for value in (1.0, 2.0):
        first.fill_(value)
        second.fill_(3.0)
        assert reduction.run(squares=True) == 100 * (value + 3.0) ** 2
        assert torch.equal(first, torch.full((100,), value + 3.0))


def test_one_source_in_place_is_left_as_it_is_and_squared() -> None:
    source = torch.tensor([3.0, -0.0, 4.0])
    assert Reduction(source, [source]).run(squares=True) == 25.0
    assert torch.equal(bits(source), bits(torch.tensor([3.0, -0.0, 4.0])))


def test_without_squares_it_says_zero() -> None:
    first, second = random_sources(2, 10)
    assert Reduction(first, [first, second]).run(squares=False) == 0.0


@pytest.mark.pairs(dtype=DTYPES, value=(math.nan, math.inf, -math.inf), place=(0, TILE_ELEMENTS + 3))
def test_a_value_that_is_not_finite_is_seen_in_the_squares(dtype: torch.dtype, value: float, place: int) -> None:
    first, second = random_sources(2, 2 * TILE_ELEMENTS, dtype)
    second[place] = value
    squares = Reduction(first, [first, second]).run(squares=True)
    assert math.isnan(squares) if math.isnan(value) else squares == math.inf


def test_infinities_of_both_signs_make_a_nan_and_it_is_seen() -> None:
    first, second = torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0])
    assert math.isnan(Reduction(first, [first, second]).run(squares=True))


@pytest.mark.parametrize("value", [1e30, 3e38], ids=["the squares", "the sum"])
def test_what_is_beyond_the_dtype_is_infinite_without_a_warning(value: float) -> None:
    first, second = torch.full((10,), value), torch.full((10,), value)
    assert Reduction(first, [first, second]).run(squares=True) == math.inf


def test_squares_of_halves_are_summed_in_float32() -> None:
    source = torch.full((4096,), 300.0, dtype=torch.float16)  # 300 * 300 is beyond float16
    assert Reduction(source, [source]).run(squares=True) == 4096 * 300.0**2


def test_an_empty_range_has_no_squares() -> None:
    empty = torch.ones(8)[8:]
    assert Reduction(empty, [empty, torch.ones(0), torch.ones(0)]).run(squares=True) == 0.0


def test_neighbouring_ranges_of_one_block_are_reduced_apart() -> None:
    first, second = random_sources(2, 64)
    expected = plain_sum([first, second])
    Reduction(first[:32], [first[:32], second[:32]]).run(squares=False)
    Reduction(second[32:], [first[32:], second[32:]]).run(squares=False)
    assert torch.equal(torch.cat([first[:32], second[32:]]), expected)


@pytest.mark.parametrize(
    ("out", "sources", "says"),
    [
        (torch.ones(3), [], "no sources"),
        (torch.ones(3, dtype=torch.int64), [torch.ones(3, dtype=torch.int64)], "contiguous floats"),
        (torch.ones(3, 2), [torch.ones(3, 2)], "contiguous floats"),
        (torch.ones(6)[::2], [torch.ones(3)], "contiguous floats"),
        (torch.ones(3), [torch.ones(3), torch.ones(4)], "source 1"),
        (torch.ones(3), [torch.ones(3).double()], "source 0"),
        (torch.ones(3), [torch.ones(6)[::2]], "source 0"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(out: Tensor, sources: list[Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Reduction(out, sources)


def test_an_out_that_overlaps_a_source_in_part_is_refused() -> None:
    block = torch.ones(9)
    with pytest.raises(ValueError, match="overlaps"):
        Reduction(block[:8], [block[1:]])
    Reduction(block[:4], [block[4:8]]).run(squares=False)
