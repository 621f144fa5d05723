"""What differs between two specs as they are on the wire: for whoever submits under an id that is another job's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.spec.field_errors import shown, shown_key

MAX_KEYS = 4  # in one sentence

_ABSENT = object()


def what_differs(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """In words; empty where nothing does."""
    found = list(_differing("", there, here))
    told = ", ".join(found[:MAX_KEYS])
    return f"{told} and {len(found) - MAX_KEYS} more" if len(found) > MAX_KEYS else told


def _differing(path: str, there: Any, here: Any) -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in [*there, *(key for key in here if key not in there)]:
            yield from _differing(
                f"{path}.{shown_key(key)}" if path else shown_key(key), there.get(key, _ABSENT), here.get(key, _ABSENT)
            )
    elif there is _ABSENT or here is _ABSENT or there != here:
        yield f"{path} is {_told(there)} there and {_told(here)} here"


def _told(value: object) -> str:
    return "not given" if value is _ABSENT else shown(value)
