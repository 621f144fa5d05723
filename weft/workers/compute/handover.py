"""Hand-over: a value that one unit leaves and another takes up, through a place that was planned for it.

`Tensor.copy_` broadcasts and converts, so a value that does not fit its place would be trained on as something else.
Whoever fills a place asks here first. What fits is a plain dense tensor of the place's shape and dtype.
"""

from __future__ import annotations

from typing import TypeGuard

import torch

from weft.workload.workload import WorkloadError

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # exact types: a slot keeps nothing of a subclass


def can_have_gradient(tensor: torch.Tensor) -> bool:
    """By its dtype: autograd differentiates real and complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a slot can hold it: a tensor, dense, and of no class of its own."""
    if not isinstance(value, torch.Tensor) or type(value) not in _PLAIN_TYPES:
        return False
    return value.layout is torch.strided and not value.is_nested and not value.is_quantized


def check_fits(value: object, place: torch.Tensor | None, *, what: str, remedy: str) -> None:
    """Raises WorkloadError with `what` came ("unit 2 (ReLU) passes on"), what was planned, and the remedy. place: None
    where that may have any shape and dtype."""
    if is_plain(value) and (place is None or (value.shape == place.shape and value.dtype is place.dtype)):
        return
    planned = "a plain tensor" if place is None else described(place)
    raise WorkloadError(f"{what} {described(value)}, where {planned} was planned; {remedy}")


def described(value: object) -> str:
    """Shape and dtype of a plain tensor, the kind of anything else."""
    if is_plain(value):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    return f"a {type(value).__name__} of its own kind ({kind})"
