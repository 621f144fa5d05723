"""Field errors: what a user has written into a field that does not take it, a line each: where, what is wrong, what to
write instead.

pydantic finds the mistakes, but its sentences are for those who program with it. Ours stand here, a row of a table for
each of its error types, so that whoever writes a TOML file need not know that Python reads it.
"""

from __future__ import annotations

import datetime
import difflib
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

# pydantic puts the branch of a union, and a mark for a key, into an error's path; `explain` takes these out again
NUMBER, LIST, WORD = "<number>", "<list>", "<word>"
_NO_NAMES = frozenset({NUMBER, LIST, WORD, "[key]"})

MAX_PROBLEMS = 20  # told at once; a frame has room for a hundred thousand
MAX_SHOWN_CHARS = 80  # of a value, a key: the line stays one that can be read

_WHOLE_NUMBER = ("is no whole number", "write one without quotes, for example 4")
_NUMBER = ("is no number", "write one without quotes, for example 0.5")
_TRUTH = ("is neither true nor false", "write true or false, without quotes")
_TEXT = ("is no text", 'write it in quotes, for example "name"')
_TABLE = ("is no table", "write keys and values, for example {{ key = 1 }}")

# error type -> (what the value is, what to write); names in braces are of the error's context
_SENTENCES: Mapping[str, tuple[str, str]] = {
    "bool_parsing": _TRUTH,
    "bool_type": _TRUTH,
    "dict_type": _TABLE,
    "finite_number": ("is no finite number", "write one, for example 0.5"),
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "greater_than": ("is too small", "write a number above {gt}"),
    "greater_than_equal": ("is too small", "write {ge} or more"),
    "int_from_float": ("is no whole number", "write one without point and exponent, for example 4"),
    "int_parsing": _WHOLE_NUMBER,
    "int_parsing_size": ("is too large", "write a number of fewer digits"),
    "int_type": _WHOLE_NUMBER,
    "invalid_key": ("is no text", "write keys as text"),
    "less_than": ("is too large", "write a number below {lt}"),
    "less_than_equal": ("is too large", "write {le} or less"),
    "list_type": ("is no list", "write one, for example [1, 2]"),
    "literal_error": ("is not known here", "write {expected}"),
    "model_type": _TABLE,
    "path_type": ("is no path", "write one in quotes"),
    "string_type": _TEXT,
    "string_unicode": ("is no text in UTF-8", "write it with other characters"),
    "too_long": ("is too long", "write at most {max_length} items"),
    "too_short": ("is too short", "write at least {min_length}"),
}
# Fields that take two kinds of value: pydantic tells only of the one that the value was nearer to.
_EITHER: Mapping[str, str] = {
    "compile": 'write true or false, or "auto"',
    "replicas": 'write a number, or a list with a table for each, for example [{ device = "gpu" }]',
    "staleness": "write a whole number, or a list with one for each replica",
    "stages": 'write a number of stages, or "all" of a replica on GPUs',
    "threads": 'write a whole number, or "all"',
    "working_window": 'write a number of layers, or "auto"',
}
_KINDS = ("bool_type", "int_type", "int_from_float", "literal_error")  # the value was of neither


class SpecError(ValueError):
    """A job spec (or an override of one) that cannot be accepted. The text names the field and the remedy."""


def explain(error: ValidationError, model: type[BaseModel], source: str | Callable[[str], str]) -> str:
    """One line for each problem: the field's path, what is wrong, what to write instead.

    source: where all values come from, or a function of a top-level field that names it and where it comes from.
    """
    lines = []
    problems = error.errors(include_url=False)
    for problem in problems[:MAX_PROBLEMS]:
        path = [part for part in problem["loc"] if part not in _NO_NAMES]
        where = ".".join(map(shown_key, path))
        place = [source, where] if isinstance(source, str) else [source(where)]
        lines.append(": ".join(filter(None, (*place, _sentence(problem, path, model)))))
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more problems; mend these first")
    return "\n".join(lines)


def _sentence(problem: ErrorDetails, path: Sequence[int | str], model: type[BaseModel]) -> str:
    kind = problem["type"]
    match kind:
        case "extra_forbidden":
            return f"unknown key{_suggestion(path, model)}"
        case "missing":
            return f"missing; {_example(path, model)}"
        case "value_error":  # a validator of ours, which names the value
            return problem["msg"].removeprefix("Value error, ")
    last = problem["loc"][-1] if problem["loc"] else ""
    if last == "[key]":
        kind = "invalid_key"
    what, remedy = _SENTENCES.get(kind, ("does not fit", "see the field's description"))
    context = {name: _number(value) for name, value in problem.get("ctx", {}).items()}
    remedy = (
        f"write it in quotes, for example {_text_example(path, model)}"
        if kind == "string_type"
        else remedy.format(**context)
    )
    if last in (NUMBER, LIST, WORD) and kind in _KINDS:
        what, remedy = "does not fit", _EITHER[str(path[-1])]
    return f"{shown(problem['input'])} {what}; {remedy}"


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def shown(value: object) -> str:
    """A value as its writer knows it, cut short."""
    return f"{_SHORT.repr(value):.{MAX_SHOWN_CHARS}}"


def shown_key(key: int | str) -> str:
    """A key as it stands, or quoted where it would break the line; a line is one problem."""
    text = str(key)
    return f"{text:.{MAX_SHOWN_CHARS}}" if text.isprintable() else f"{text!r:.{MAX_SHOWN_CHARS}}"


class _Short(reprlib.Repr):
    """As repr, which fails on what is nested too deep; and what TOML writes in another way than Python, as TOML."""

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_date(self, value: datetime.date, level: int) -> str:
        return value.isoformat()

    repr_datetime = repr_date

    def repr_time(self, value: datetime.time, level: int) -> str:
        return value.isoformat()


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MAX_SHOWN_CHARS


def _example(path: Sequence[int | str], model: type[BaseModel]) -> str:
    """How to add what is missing: a table by its name and what it needs, a value by an example."""
    name, table = path[-1], _section_of(path, model)
    field = None if table is None else table.model_fields.get(str(name))
    if field is None:
        return f"add {name} = ..."
    section = _section_in(field.annotation)
    if section is None:
        values = field.examples or ["..."]
        return f"add {name}, for example {name} = {json.dumps(values[0])}"
    needed = [key for key, own in section.model_fields.items() if own.is_required()]
    return f"add the table [{'.'.join(map(str, path))}]" + (f" with {' and '.join(needed)}" if needed else "")


def _text_example(path: Sequence[int | str], model: type[BaseModel]) -> str:
    """Of a text, as the field's description has it: `5` in quotes were no interval."""
    table = _section_of(path, model) if path else None
    field = None if table is None else table.model_fields.get(str(path[-1]))
    return json.dumps((field.examples if field and field.examples else ["name"])[0])


def _suggestion(path: Sequence[int | str], model: type[BaseModel]) -> str:
    section = _section_of(path, model)
    if section is None:
        return "; leave it out"
    names = difflib.get_close_matches(str(path[-1]), section.model_fields, n=1)
    return f"; did you mean {names[0]}?" if names else f"; known here: {', '.join(sorted(section.model_fields))}"


def _section_of(path: Sequence[int | str], model: type[BaseModel]) -> type[BaseModel] | None:
    """The table in which the last key of the path stands."""
    section = model
    for part in path[:-1]:
        if isinstance(part, int):  # a place in a list
            continue
        field = section.model_fields.get(part)
        inner = None if field is None else _section_in(field.annotation)
        if inner is None:
            return None
        section = inner
    return section


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The table that an annotation takes, alone, in a list or in a union."""
    if parts := get_args(annotation):
        return next((section for part in parts if (section := _section_in(part)) is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
