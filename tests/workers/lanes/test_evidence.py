"""Digests of what tasks make: equal where the bits are, however they lie in memory."""

from __future__ import annotations

import pytest
import torch

from weft.transport.wire.worker_messages import DIGEST_BYTES
from weft.workers.lanes.evidence import digest_of


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_a_digest_is_of_the_bits_and_not_of_where_they_lie(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    transposed = tensor.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert digest_of([tensor]) == digest_of([transposed]) == digest_of([tensor.clone()])
    assert len(digest_of([tensor])) == DIGEST_BYTES
    changed = tensor.clone()
    changed.view(torch.uint8)[2, 5] ^= 1
    assert digest_of([changed]) != digest_of([tensor])


@pytest.mark.parametrize("shape", [(1,), (1, 1), (0, 3)])
def test_strides_that_a_single_element_has_do_not_count(shape: tuple[int, ...]) -> None:
    spread = torch.zeros(()).expand(shape)  # as the gradient of a sum
    assert digest_of([spread]) == digest_of([torch.zeros(shape)])


def test_the_last_bit_of_one_number_counts() -> None:
    numbers = torch.linspace(-1, 1, 1000)
    other = numbers * (1 + 2**-23)
    assert (numbers != other).any()
    assert digest_of([numbers]) != digest_of([other])
    assert digest_of([torch.tensor(0.0)]) != digest_of([torch.tensor(-0.0)])


def test_what_is_not_there_and_what_is_empty_are_told_apart() -> None:
    digests = [digest_of(made) for made in ([], [None], [None, None], [torch.empty(0)], [torch.empty(0, 3)])]
    assert len(set(digests)) == len(digests)


def test_shapes_and_the_order_count() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    assert digest_of([one, two]) != digest_of([two, one])
    assert digest_of([torch.cat([one, two])]) != digest_of([one, two])
    assert digest_of([one.requires_grad_()]) == digest_of([one.detach()])
