"""Replica: one whole copy of the model in a strategy, and what every table of a spec is."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from weft.spec.field_errors import NUMBER, WORD, SpecError, explain, shown

MAX_MICROBATCHES = 1024  # a board word and two slots each; more is a typing error
MAX_STAGES = 256
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


def word_or_number(value: object) -> str:
    return WORD if isinstance(value, str) else NUMBER


def _numbers_or_names(value: object) -> str:
    return WORD if isinstance(value, list) and any(isinstance(part, str) for part in value) else NUMBER


def _of_one_kind(split: object) -> object:
    if _numbers_or_names(split) == WORD and not all(isinstance(part, str) for part in cast("list[Any]", split)):
        raise ValueError(
            f"{shown(split)} is not all names; write either numbers of units or names of modules, for example "
            '["transformer.h.4", "lm_head"]'
        )
    return split


def check_split(split: list[int] | list[str] | None, stages: int) -> None:
    if split is None:
        return
    if split and stages == 1:
        raise ValueError(
            f"split = {split!s:.80} cuts the model, and stages = 1 does not; give more stages, or no split"
        )
    numbers = [unit for unit in split if isinstance(unit, int)]
    if len(split) != stages - 1 or any(not a < b <= MAX_COUNT for a, b in pairwise([0, *numbers])):
        named = _numbers_or_names(split) == WORD
        what = "names of units in the order in which they run" if named else "growing numbers of units above 0"
        raise ValueError(f"split = {split!s:.80} does not begin {stages} stages; give stages - 1 {what}")
    if len(set(split)) < len(split):
        raise ValueError(f"split = {split!s:.80} has a name twice; give the first unit of each stage but the first")


Split = Annotated[
    Annotated[list[int], Tag(NUMBER)] | Annotated[list[str], Tag(WORD)],
    Discriminator(_numbers_or_names),
    BeforeValidator(_of_one_kind),
    WithJsonSchema({"type": "array", "items": {"type": ["integer", "string"]}}),  # "one of both" takes no empty list
]
STAGES = "contiguous parts of the model, each in a worker of its own if `schedule` does not give workers several"
_Layers = Annotated[int, Field(ge=1, le=MAX_STAGES)]


class Replica(Section):
    """One whole copy of the model: where it computes and how it is cut."""

    device: Literal["cpu", "gpu"] = Field(default="cpu", description="kind of worker of all its stages")
    stages: int = Field(default=1, ge=1, le=MAX_STAGES, description=STAGES)
    gpus: int | None = Field(
        default=None,
        ge=1,
        le=MAX_STAGES,
        description="GPUs that its stages are spread over; unset: as `schedule` has it",
    )
    working_window: (
        Annotated[
            Annotated[_Layers, Tag(NUMBER)] | Annotated[Literal["auto"], Tag(WORD)],
            Discriminator(word_or_number),
        ]
        | None
    ) = Field(
        default=None,
        description="layers that its GPU holds at once, the others stream from host memory; auto: by measured times; "
        "unset: all",
    )
    split: Split | None = Field(
        default=None,
        description="first unit of each stage but the first, by number or by name; unset balances measured times",
    )
    microbatches: int | None = Field(
        default=None, ge=1, le=MAX_MICROBATCHES, description="parts of its share of a batch; unset: the strategy's"
    )

    @model_validator(mode="after")
    def _split_fits_stages(self) -> Self:
        cuts = 0 if self.split is None else len(self.split)
        check_split(self.split, self.stages if self.working_window is None else cuts + 1)
        return self

    @model_validator(mode="after")
    def _devices_agree(self) -> Self:
        for axis in ("gpus", "working_window"):
            if self.device == "cpu" and getattr(self, axis) is not None:
                raise ValueError(f"{axis} cannot stand beside device = 'cpu'; leave it out, or write device = 'gpu'")
        if self.gpus is not None and self.gpus > self.stages:
            raise ValueError(
                f"gpus = {self.gpus} is more than stages = {self.stages}; a GPU needs a stage, so give fewer GPUs or "
                "more stages"
            )
        if self.working_window is not None and self.stages > 1:
            raise ValueError(
                f"stages = {self.stages} cannot stand beside working_window, which streams the layers of one GPU; "
                "leave stages out, and give split where layers are to begin elsewhere than at the model's units"
            )
        return self
