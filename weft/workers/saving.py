"""Saving: what a job has trained, as one safetensors file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from weft.transport.directory import Directory


class ResultNotSaved(Exception):
    """The file cannot be written. The text names it, with the reason and the remedy."""


def save_state(directory: Directory, arenas: Iterable[str], path: Path) -> None:
    """The tensors of every arena, whole or not at all. Errors: ResultNotSaved, and the directory's."""
    state = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for arena in arenas
        for name, tensor in directory.find(arena).items().items()
    }
    partial = path.with_name(f".{path.name}.partial")
    try:
        _write(state, partial, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        raise ResultNotSaved(
            f"{path}: the trained weights ({num_bytes / 2**20:.1f} MiB) cannot be written: {_told(error)}; make room, "
            "or give another runs_dir, and submit the job again"
        ) from error


def _write(state: dict[str, torch.Tensor], partial: Path, path: Path) -> None:
    save_file(state, partial)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(path)


def _told(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
