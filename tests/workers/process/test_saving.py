"""The trained weights reach their file whole, or not at all, and the job says why."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from weft.machine.run_file import RunFileError
from weft.transport.memory.arena import Layout
from weft.transport.memory.directory import Directory
from weft.workers.process.saving import as_saved, save_state
from weft.workload.faults import fault_of


@pytest.fixture
def trained(directory: Directory) -> Directory:
    for name in ("first", "second"):
        directory.create(f"state-{name}", Layout.of([(name, torch.zeros(500))]))[name].fill_(7)
    return directory


def test_every_arena_is_in_the_file_and_nothing_beside_it(trained: Directory, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_state(trained, ["state-first", "state-second"], path)
    assert {name: float(tensor.sum()) for name, tensor in load_file(path).items()} == {"first": 3500, "second": 3500}
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_trained_is_written_from_where_it_lies(tmp_path: Path, directory: Directory) -> None:
    plain, other = torch.randn(3, 4), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    empty = torch.empty(0)
    arena = directory.create("state", Layout.of([("w", plain), ("tied", plain), ("image", other), ("none", empty)]))
    for name, tensor in (("w", plain), ("image", other)):
        arena[name].copy_(tensor)
    state = arena.items()
    saved = as_saved(state)
    assert [name for name in state if saved[name].data_ptr() != state[name].data_ptr()] == ["tied", "image"]
    save_state(directory, ["state"], path := tmp_path / "model.safetensors")
    loaded = load_file(path)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@contextmanager
def no_room() -> Iterator[None]:
    """Files of at most 1,000 bytes: a write beyond is refused, as on a full disk. Also of what pytest says, if that
    goes to a file, so not for longer than it takes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # Python ignores the signal that would come with it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_has_no_room_is_named_and_the_one_before_stays(trained: Directory, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("of the attempt before")
    with no_room(), pytest.raises(RunFileError) as caught:
        save_state(trained, ["state-first", "state-second"], path)
    fault = fault_of(caught.value)
    assert (fault.reason, fault.exit_code) == ("run-directory", 74)
    assert fault.message == f"{path} cannot be written: File too large"
    assert path.read_text() == "of the attempt before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_directory_that_has_gone_is_made_again(trained: Directory, tmp_path: Path) -> None:
    save_state(trained, ["state-first"], tmp_path / "gone" / "model.safetensors")
    assert load_file(tmp_path / "gone" / "model.safetensors").keys() == {"first"}
