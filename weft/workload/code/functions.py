"""Functions of the user's, and what they refer to by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import getattr_static, unwrap
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

from weft.workload.code.installed import is_installed

Kind = TypeVar("Kind")
Seen = set[tuple[int, ...]]


def names_in(code: CodeType) -> set[str]:
    """What it asks for by name, code within it too."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def words_in(code: CodeType) -> set[str]:
    """In it, of variables around it and of keys, too."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    keys = {each for each in code.co_consts if isinstance(each, str)}
    return names_in(code).union(keys, code.co_freevars, code.co_cellvars, *map(words_in, inner))


def undecorated(value: Any) -> Any:
    """The function that a decorator was given (`torch.no_grad()`, `torch.autocast`), or a class's own was made of; what
    an object that may be called does."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    call = getattr_static(type(value), "__call__", None)
    if isinstance(call, FunctionType) and not is_installed(Path(call.__code__.co_filename)):
        return MethodType(call, value)
    return unwrap(value) if isinstance(value, FunctionType) else value


def contents_of(cell: CellType) -> tuple[Any, ...]:
    """Of a variable around a function."""
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing is in it yet
        return ()


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """By name: the variables around a function, the globals that it asks for, its defaults; of a method, these and what
    it asks its object for. Of what is installed nothing."""
    match undecorated(value):
        case partial() as made:
            yield "func", made.func
            yield from ((str(number), each) for number, each in enumerate(made.args))
            yield from made.keywords.items()
        case MethodType(__self__=owner, __func__=wrapper):
            function = undecorated(wrapper)
            if isinstance(function, FunctionType) and not is_installed(Path(function.__code__.co_filename)):
                names = names_in(function.__code__)
                yield from ((key, each) for key, each in getattr(owner, "__dict__", {}).items() if key in names)
                for key in sorted(names):
                    if isinstance(method := undecorated(getattr_static(type(owner), key, None)), FunctionType):
                        yield key, MethodType(method, owner)
                yield function.__name__, function
        case FunctionType() as function if not is_installed(Path(function.__code__.co_filename)):
            for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                yield from ((key, content) for content in contents_of(cell))
            known = function.__globals__
            yield from ((key, known[key]) for key in names_in(function.__code__) & known.keys())
            yield from ((str(number), each) for number, each in enumerate(function.__defaults__ or ()))
            yield from (function.__kwdefaults__ or {}).items()


def found_from(value: Any, name: str, kind: type[Kind], seen: Seen | None = None) -> Iterator[tuple[str, Kind]]:
    """What of a class a function refers to: by a variable of the function around it, a global, an attribute of its
    object, itself or in a function that it calls. With how it comes there. name: of the function."""
    seen = set() if seen is None else seen
    if _key(value) in seen:
        return
    seen.add(_key(value))
    if isinstance(value, kind):
        yield name, value
    else:
        for key, part in parts_of(value):
            yield from found_from(part, f"{name}.{key}", kind, seen)


def functions_from(value: Any, seen: Seen | None = None) -> Iterator[FunctionType]:
    """Of the user's, that it calls or may call; itself the first."""
    seen, value = set() if seen is None else seen, undecorated(value)
    if _key(value) in seen or not isinstance(value, (partial, MethodType, FunctionType)):
        return
    seen.add(_key(value))
    if isinstance(value, FunctionType):
        if is_installed(Path(value.__code__.co_filename)):
            return
        yield value
    for _, part in parts_of(value):
        yield from functions_from(part, seen)


def _key(value: Any) -> tuple[int, ...]:
    """Methods are made anew by whoever asks for them."""
    return (id(value.__self__), id(value.__func__)) if isinstance(value, MethodType) else (id(value),)
