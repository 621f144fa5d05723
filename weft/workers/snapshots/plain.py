"""Plain data: what optimizers and schedulers keep beside tensors of elements, as bytes that are read without running
anything.

    on the disk         torch's own format, read by its loader that takes plain data alone
    in snapshots        msgpack, where it has all that there is: it is read in a twentieth of the time
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import torch

from weft.transport.memory.arena import dtype_name, dtype_of

NAMES = "surrogatepass"  # an attribute of a model may have any name
_TUPLE, _SCALAR = range(2)  # msgpack's types of ours
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # of msgpack's numbers
_MOST_DEPTH = 32  # arbitrary: each tuple in another is a call of msgpack's from itself, and some hundred end the stack
_NUMBER = "weft: a tensor without dimensions"  # torch's format has a file for each tensor, and counts of steps are many
_REFUSED = re.compile(r"WeightsUnpickler error:\s*(.+?)( by default)?(\. Please|\n|$)")


def encoded(value: Any, *, numbers: bool = True) -> bytes:
    """Of numbers, text, tensors, and lists, tuples and mappings of them. A number of numpy's comes back as Python's: a
    learning rate is one where a lambda calls numpy. numbers: tensors without dimensions are written as such, which
    takes a small part of the time, and others than `decoded` cannot read them."""
    file = io.BytesIO()
    torch.save(_written(value, numbers=numbers), file)
    return file.getvalue()


def decoded(data: bytes) -> Any:
    """Raises ValueError for what is no plain data."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about formats of other versions: nothing reads them
            return _with_numbers(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception as error:  # of damaged bytes torch's loader raises whatever it stumbles over
        raise ValueError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """A line. Of torch's refusal it is what was refused, without advice on how to load it all the same."""
    refused = _REFUSED.search(str(error))
    return refused[1] if refused else str(error).partition("\n")[0] or type(error).__name__


def packed(value: Any) -> bytes:
    """As `encoded`, for `unpacked` of the same Weft."""
    try:
        return _msgpack(_simplified(value))
    except (_NotSimpleError, ValueError):
        return _msgpack(encoded(value))


def unpacked(data: bytes) -> Any:
    """Raises ValueError for what is no plain data."""
    value = msgpack.unpackb(data, unicode_errors=NAMES, strict_map_key=False, ext_hook=_extended)
    return decoded(value) if isinstance(value, bytes) else value


class _NotSimpleError(Exception):
    pass


def _msgpack(value: Any) -> bytes:
    data: bytes = msgpack.packb(value, unicode_errors=NAMES)
    return data


def _simplified(value: Any, depth: int = 0) -> Any:
    """Errors: _NotSimpleError, for what would not come back as it is."""
    kind, depth = type(value), depth + 1
    if value is None or kind in (bool, float, str) or (kind is int and _LEAST <= value <= _MOST):
        return value
    if depth > _MOST_DEPTH:
        raise _NotSimpleError
    if kind is dict:
        return {_simplified(key, depth): _simplified(part, depth) for key, part in value.items()}
    if kind is list:
        return [_simplified(part, depth) for part in value]
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _msgpack([_simplified(part, depth) for part in value]))
    if isinstance(value, np.generic):
        return _simplified(value.item(), depth)
    if kind is torch.Tensor and value.dim() == 0:
        return msgpack.ExtType(_SCALAR, _msgpack([dtype_name(value.dtype), _simplified(value.item(), depth)]))
    raise _NotSimpleError


def _extended(code: int, data: bytes) -> Any:
    parts = msgpack.unpackb(data, unicode_errors=NAMES, strict_map_key=False, ext_hook=_extended)
    if code == _TUPLE:
        return tuple(parts)
    if code != _SCALAR:
        raise ValueError(f"msgpack's type {code}")
    name, number = parts
    return torch.tensor(number, dtype=dtype_of(name))


def why_not_plain(make: Callable[[], Any]) -> str | None:
    """Why what it makes would not come back; None where it would."""
    try:
        decoded(encoded(make()))
    except Exception as error:  # an object of the user's may refuse in any way
        return f"{type(error).__name__}: {error}"
    return None


def _written(value: Any, *, numbers: bool) -> Any:
    if numbers and isinstance(value, torch.Tensor) and value.dim() == 0 and type(value) is torch.Tensor:
        return (_NUMBER, dtype_name(value.dtype), value.item())
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: _written(part, numbers=numbers) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_written(part, numbers=numbers) for part in value)
    return value


def _with_numbers(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 3 and value[0] == _NUMBER:
        return torch.tensor(value[2], dtype=dtype_of(value[1]))
    if type(value) is dict:
        return {key: _with_numbers(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_numbers(part) for part in value)
    return value
