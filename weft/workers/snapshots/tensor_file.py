"""Tensor file: tensors by name, as safetensors has them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def as_saved(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors themselves, written from where they lie, and copies of what safetensors does not write: a tensor's
    second name, and another order in memory."""
    places: set[int] = set()
    saved = {}
    for name, tensor in state.items():
        is_again = tensor.data_ptr() in places
        places.add(tensor.data_ptr())
        saved[name] = tensor.clone(memory_format=torch.contiguous_format) if is_again else tensor.contiguous()
    return saved


def write_tensors(state: dict[str, torch.Tensor], path: Path) -> None:
    """Errors: OSError."""
    try:
        save_file(state, path)
    except SafetensorError as error:  # what the system said is in its text alone
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(
            int(number[1]) if number else None, os.strerror(int(number[1])) if number else str(error)
        ) from error
