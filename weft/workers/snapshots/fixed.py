"""Fixed: values of the user's classes that cannot change in place: members of an enum, named tuples, frozen
dataclasses.

They are written by their parts, and made of these again by a class of which one has stood when the model was built.
"""

from __future__ import annotations

import dataclasses
from enum import Enum, Flag
from typing import Any

from weft.workload.workload import WorkloadError


def is_fixed(kind: type) -> bool:
    if issubclass(kind, Enum):
        return True
    if issubclass(kind, tuple):
        return kind is not tuple and kind.__new__ is not tuple.__new__ and hasattr(kind, "_fields")
    how = vars(kind).get("__dataclass_params__")  # a class that inherits it may have anything besides
    return how is not None and bool(how.frozen)


def parts_of_fixed(value: Any) -> list[Any]:
    match value:
        case Flag():
            return [value.value]
        case Enum():
            return [value.name]
        case tuple():
            return list(value)
    own = getattr(value, "__dict__", {})  # what `__post_init__` has added, too
    names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
    return [{name: getattr(value, name) for name in names} | own]


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def fixed_of(kind: type | None, parts: list[Any]) -> Any:
    """kind: None where nobody has any, as where it is only looked whether this can be read. Errors: WorkloadError."""
    try:
        return None if kind is None else _made(kind, parts)
    except (LookupError, ValueError) as error:
        raise WorkloadError(
            f"what was saved has a {kind.__name__ if kind else kind:.80} of other fields or members than it has now "
            f"({error!s:.80}); go on with the code that has saved it"
        ) from error


def _made(kind: type, parts: list[Any]) -> Any:
    if issubclass(kind, Enum):
        return kind(parts[0]) if issubclass(kind, Flag) else kind[parts[0]]
    if issubclass(kind, tuple):
        names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        return tuple.__new__(kind, [part for _, part in zip(names, parts, strict=True)])
    made: Any = object.__new__(kind)
    for key in {each.name: None for each in dataclasses.fields(made)} | parts[0]:
        object.__setattr__(made, key, parts[0][key])
    return made
