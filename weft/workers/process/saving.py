"""Saving: what a job has trained, as one safetensors file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from weft.machine.run_file import replace_by
from weft.transport.memory.directory import Directory


def save_state(directory: Directory, arenas: Iterable[str], path: Path) -> None:
    """The tensors of every arena, whole or not at all. Errors: RunFileError, and the directory's."""
    state = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for arena in arenas
        for name, tensor in directory.find(arena).items().items()
    }
    replace_by(path, partial(_write, state))


def _write(state: dict[str, torch.Tensor], path: Path) -> None:
    """Errors: OSError."""
    try:
        save_file(state, path)
    except SafetensorError as error:  # what the system said is in its text alone
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(
            int(number[1]) if number else None, os.strerror(int(number[1])) if number else str(error)
        ) from error
