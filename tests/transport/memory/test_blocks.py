"""Blocks that cannot be made: what is told, and that nothing is left."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator

import pytest
import torch

from weft.machine.free_memory import SharedMemoryFull
from weft.transport.memory.blocks import SHARED_MEMORY, Blocks, Wanted

MIB = 1 << 20


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_block_above_the_limit_of_files_is_told_as_that(limit_files: Callable[[int], None]) -> None:
    """The advice was to make /dev/shm larger, which had room enough."""
    before, blocks = set(SHARED_MEMORY.glob("torch_*")), Blocks()
    blocks.open("job", Wanted("small", MIB))
    limit_files(2 * MIB)
    with pytest.raises(SharedMemoryFull, match=r"^4\.0 MiB more .* for job/large .* beside the 1\.0 MiB") as refused:
        blocks.open("job", Wanted("large", 4 * MIB))
    assert "no file above 2.0 MiB here (RLIMIT_FSIZE). Start the daemon after `ulimit -f unlimited`" in str(
        refused.value
    )
    assert "/dev/shm" not in str(refused.value)
    assert set(SHARED_MEMORY.glob("torch_*")) <= before
    assert [held.num_bytes for held in blocks.open("job", Wanted("other", 2 * MIB))] == [2 * MIB]


def test_a_block_that_is_below_it_is_told_with_what_is_free(
    limit_files: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(num_bytes: int) -> torch.UntypedStorage:
        raise RuntimeError("No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)
    limit_files(2 * MIB)
    with pytest.raises(SharedMemoryFull, match=r"\(28\); /dev/shm has \d+ MiB free\. Free some, .* /dev/shm larger$"):
        Blocks().open("job", Wanted("small", MIB))
