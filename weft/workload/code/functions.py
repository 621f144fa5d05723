"""Functions of the user's, and what they refer to by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from weft.workload.code.installed import is_installed


def names_in(code: CodeType) -> set[str]:
    """What it asks for by name, code within it too."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """By name: the variables around a function, the globals that it asks for, its defaults; of a method, these and the
    attributes of its object. Of what is installed nothing."""
    match value:
        case partial():
            yield "func", value.func
            yield from ((str(number), each) for number, each in enumerate(value.args))
            yield from value.keywords.items()
        case MethodType(__func__=FunctionType() as function):
            own, names = getattr(value.__self__, "__dict__", {}), names_in(function.__code__)
            yield from ((key, each) for key, each in own.items() if key in names)
            yield function.__name__, function
        case FunctionType() if not is_installed(Path(value.__code__.co_filename)):
            for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    yield key, cell.cell_contents
                except ValueError:  # nothing is in it yet
                    continue
            yield from ((key, value.__globals__[key]) for key in names_in(value.__code__) & value.__globals__.keys())
            yield from ((str(number), each) for number, each in enumerate(value.__defaults__ or ()))
            yield from (value.__kwdefaults__ or {}).items()


def functions_from(value: Any, seen: set[int] | None = None) -> Iterator[FunctionType]:
    """Of the user's, that it calls or may call; itself the first."""
    seen = set() if seen is None else seen
    if id(value) in seen or not isinstance(value, (partial, MethodType, FunctionType)):
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        if is_installed(Path(value.__code__.co_filename)):
            return
        yield value
    for _, part in parts_of(value):
        yield from functions_from(part, seen)
