"""Replica: one copy of the model, as the `replicas` list of a strategy gives it. Pure.

`stages = "all"` is as many stages as there are GPUs, and no fewer than two: where there is one, they share it. How many
that is a daemon knows, so it puts the number there when it takes a job. Whoever has no daemon counts on the least.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from weft.spec.field_errors import NUMBER, WORD, shown
from weft.spec.section import MAX_COUNT, Section

MAX_MICROBATCHES = 1024  # a board word and two slots each; more is a typing error
MAX_STAGES = 256
LEAST_OF_ALL = 2  # stages: a pipeline has two
MAX_SHOWN, MAX_SHOWN_CUTS = 2, 8  # of a list in a message, and of a split in it; arbitrary
_NOTHING: Mapping[str, Any] = MappingProxyType({})


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
_Number = Annotated[int, Field(ge=1, le=MAX_STAGES), Tag(NUMBER)]  # of stages, or of layers


class Replica(Section):
    """One whole copy of the model: where it computes and how it is cut."""

    device: Literal["cpu", "gpu"] = Field(default="cpu", description="kind of worker of all its stages")
    stages: Annotated[_Number | Annotated[Literal["all"], Tag(WORD)], Discriminator(word_or_number)] = Field(
        default=1, description=f"{STAGES}; all: as many as there are GPUs, at least two"
    )
    gpus: int | None = Field(
        default=None,
        ge=1,
        le=MAX_STAGES,
        description="GPUs that its stages are spread over; unset: as `schedule` has it",
    )
    working_window: Annotated[_Number | Annotated[Literal["auto"], Tag(WORD)], Discriminator(word_or_number)] | None = (
        Field(
            default=None,
            description="layers that its GPU holds at once, the others stream from host memory; auto: by measured "
            "times; unset: all",
        )
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
        if self.stages == "all":
            self._check_all()
            return self
        cuts = 0 if self.split is None else len(self.split)
        check_split(self.split, self.stages if self.working_window is None else cuts + 1)
        return self

    def _check_all(self) -> None:
        if self.device == "cpu":
            raise ValueError("stages = 'all' is as many as there are GPUs; write device = 'gpu' beside it, or a number")
        for axis in ("split", "gpus", "working_window"):
            if getattr(self, axis) is not None:
                raise ValueError(
                    f"{axis} cannot stand beside stages = 'all', whose number the machine's GPUs give; give stages a "
                    f"number, or leave {axis} out"
                )

    @model_validator(mode="after")
    def _devices_agree(self) -> Self:
        for axis in ("gpus", "working_window"):
            if self.device == "cpu" and getattr(self, axis) is not None:
                raise ValueError(f"{axis} cannot stand beside device = 'cpu'; leave it out, or write device = 'gpu'")
        if self.gpus is not None and self.gpus > self.num_stages:
            raise ValueError(
                f"gpus = {self.gpus} is more than stages = {self.stages}; a GPU needs a stage, so give fewer GPUs or "
                "more stages"
            )
        if self.working_window is not None and self.num_stages > 1:
            raise ValueError(
                f"stages = {self.stages} cannot stand beside working_window, which streams the layers of one GPU; "
                "leave stages out, and give split where layers are to begin elsewhere than at the model's units"
            )
        return self

    @property
    def num_stages(self) -> int:
        """At least, where that is for a machine to say."""
        return LEAST_OF_ALL if self.stages == "all" else self.stages

    def on(self, num_gpus: int) -> Self:
        """With a number of stages, where it has "all" of so many GPUs, at least one."""
        if self.stages != "all":
            return self
        stages = min(max(LEAST_OF_ALL, num_gpus), MAX_STAGES)
        return self.model_copy(update={"stages": stages, "gpus": num_gpus if num_gpus < stages else None})


def shown_replicas(replicas: Sequence[Replica], give: Mapping[str, Any] = _NOTHING, without: str = "") -> str:
    """A list as TOML has it, for a message; a long one cut short. give: axes that are added to the replicas which have
    several stages, or to all where none has. without: an axis that is left out."""
    has_stages = [replica.num_stages > 1 for replica in replicas]
    tables = [
        _shown(replica, give if own or not any(has_stages) else _NOTHING, without)
        for replica, own in zip(replicas[:MAX_SHOWN], has_stages, strict=False)
    ]
    return f"[{', '.join(tables + ['...'] * (len(replicas) > MAX_SHOWN))}]"


def _shown(replica: Replica, give: Mapping[str, Any], without: str) -> str:
    """What of it does not agree with a number of stages that is given is left out."""
    own = replica.model_dump(exclude_none=True, exclude_defaults=True)
    if replica.working_window is not None:
        give = {axis: value for axis, value in give.items() if axis != "stages"}
    elif "stages" in give:
        own = {axis: value for axis, value in own.items() if axis not in ("split", "gpus")}
    table = {"device": replica.device, **own, **give}
    return f"{{ {', '.join(f'{axis} = {_toml(value)}' for axis, value in table.items() if axis != without)} }}"


def _toml(value: Any) -> str:
    if isinstance(value, list) and len(value) > MAX_SHOWN_CUTS:
        return f"{json.dumps(value[:MAX_SHOWN_CUTS])[:-1]}, ...]"
    return json.dumps(value, ensure_ascii=False)  # words, numbers and lists of them are the same in both
