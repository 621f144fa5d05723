"""Section: a table of a spec, and how its errors read."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from weft.spec.field_errors import SpecError, explain

MAX_COUNT = 2**31 - 1  # an iteration's number has to fit a board word


class Section(BaseModel):
    """A table of a spec: frozen once it is built, no unknown keys, no conversions. Errors: SpecError."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SpecError(explain(error, type(self), type(self).__name__)) from None

    # For pydantic an __init__ of ours would be one to call for each table inside another, which would lose its path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields:
            raise SpecError(
                f"{type(self).__name__}: {name}: frozen, cannot be changed; build another with {name} = ..."
            )
        super().__setattr__(name, value)
