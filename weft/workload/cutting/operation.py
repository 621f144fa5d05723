"""Operations: what the user's code asks of torch, as sentences name it, with the line that asks."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

KEEP_IN_BUFFERS = "keep in buffers of the model what lasts from call to call"
TWO_WAYS_OUT = "cut elsewhere (strategy.split), or make what is computed there an nn.Module of its own"

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep  # Weft
_AROUND = ("<frozen ", threading.__file__)  # how a process or a thread begins
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions", "")
_WORDS = {
    "__bool__": "if, or bool(),",
    "__contains__": "in",
    "__float__": "float()",
    "__getitem__": "an index",
    "__index__": "a tensor as an index",
    "__int__": "int()",
    "__set__": "an assignment",
    "__setitem__": "an index",
}
_LEFT_OUT = {
    "_nested_tensor_from_mask_left_aligned": " (nn.TransformerEncoder leaves it out with enable_nested_tensor=False)",
}
_NO_WRITES = {"__index__", "__int__", "__invert__"}
_NO_NUMBERS = {"requires_grad_", "share_memory_", "requires_grad", "grad"}  # operations, and attributes that are set


def result_of(func: Callable[..., Any]) -> str:
    return f"the result of {name_of(func)} at {user_line()}"


def asks_for_numbers(func: Callable[..., Any], what: str) -> str:
    """what: whose numbers."""
    line, name = user_line(), getattr(func, "__name__", str(func))
    if getattr(torch.Tensor, name, None) is func:
        name = _WORDS.get(name, f".{name}()")
    name += _LEFT_OUT.get(name, "")
    return f"{name} at {line} needs the numbers of {what.removesuffix(f' at {line}')}"


def name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    return _WORDS.get(name, name.strip("_"))


def is_check(func: Callable[..., Any]) -> bool:
    """Whether torch.distributions asks if its arguments are sound: of those with numbers another stage does."""
    if func is not torch.Tensor.__bool__:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (file := frame.f_code.co_filename).startswith((_TORCH, _HERE)):
        if file.startswith(_DISTRIBUTIONS):
            return True
        frame = frame.f_back
    return False


def by_places(index: Any) -> Any:
    """The same index with places in the place of each mask that has numbers, which tell how many there are."""
    parts = index if type(index) is tuple else (index,)
    if not any(map(_is_mask, parts)):
        return index
    return tuple(place for part in parts for place in (part.nonzero(as_tuple=True) if _is_mask(part) else (part,)))


def _is_mask(part: Any) -> bool:
    return type(part) is torch.Tensor and part.dtype is torch.bool and part.dim() > 0


def writes(name: str) -> bool:
    """Whether an operation writes to its first argument, as torch names it."""
    if name.startswith("__"):
        return name in ("__set__", "__setitem__") or (name.startswith("__i") and name not in _NO_WRITES)
    return name.endswith("_")


def writes_numbers(func: Callable[..., Any]) -> bool:
    """Whether it writes to the numbers of its first argument."""
    name = func.__name__
    is_set = name == "__set__"
    return writes(name) and (getattr(func, "__self__", func).__name__ if is_set else name) not in _NO_NUMBERS


def generators() -> list[torch.Tensor]:
    """States of torch's own ones."""
    return [each.get_state() for each in (torch.default_generator, *torch.cuda.default_generators)]


def user_line() -> str:
    """File and line of whoever called torch: the innermost that is neither torch nor Weft; there is none in a backward
    between two hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE, *_AROUND)):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _short(file: str) -> str:
    """As seen from the job's directory, where it is in there."""
    try:
        return file.removeprefix(os.getcwd() + os.sep)
    except OSError:  # the directory is gone
        return file
