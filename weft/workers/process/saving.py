"""Saving: what a job has trained, as one safetensors file."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from weft.machine.run_file import replace_by
from weft.transport.memory.directory import Directory
from weft.workers.snapshots.tensor_file import as_saved, write_tensors


def save_state(directory: Directory, arenas: Iterable[str], path: Path) -> None:
    """The tensors of every arena, whole or not at all. Errors: RunFileError, and the directory's."""
    state = {name: tensor for arena in arenas for name, tensor in directory.find(arena).items().items()}
    replace_by(path, partial(write_tensors, as_saved(state)))
