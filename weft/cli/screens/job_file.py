"""Job file: a job in TOML that says of each key what it is for, with those that a model asks for filled in.

Every field of the spec stands in it, under the spec's own description: what is not filled in is a comment, with its
default, or where it has none with an example.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from weft.cli.screens.toml_text import toml
from weft.quantities import size
from weft.spec.job_spec import CheckpointSection, JobSection, ProfileSection, StopSection
from weft.spec.strategy import Strategy
from weft.transport.wire.frames import Message

WIDTH = 100  # columns of a comment
MAX_UNITS = 64  # lines of a model; one of more is told by its first ones
BATCH_SIZE, EPOCHS, STEPS = 32, 10, 1000  # arbitrary, to begin with
MICROBATCHES = 4  # as the presets that are pipelines have it

# of what is unset by default: a value that could stand there
EXAMPLES: Mapping[str, Any] = {
    "epochs": EPOCHS,
    "steps": STEPS,
    "steps_per_epoch": 500,
    "preset": "1f1b",
    "stages_per_worker": 2,
    "window": 8,
    "threads": "all",
    "replicas": 2,
    "waits": "layer",
    "shares": [1.0, 1.0],
    "clip_norm": 1.0,
    "spares": True,
    "replan": True,
    "resume_from": "runs/digits-1",
    "every": "1 epoch",
    "keep_best": "loss",
    "best": "min",
}
STOP_EXAMPLES: Mapping[str, Any] = {"metric": "loss", "mode": "min", "max_time": "2 h"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    entry: str
    args: Mapping[str, Any]  # given; what the function has by default is told beside
    facts: Message  # of `weft.workload.description`
    num_cores: int  # that can be used here

    def text(self, name: str) -> str:
        """The file. name: its own."""
        sections = [*self._head(name), "", *_section("job", JobSection, self.job(), self._examples())]
        sections += _section("strategy", Strategy, self.strategy(), self._examples())
        sections += _section("checkpoint", CheckpointSection, None, EXAMPLES)
        sections += _section("stop", StopSection, None, STOP_EXAMPLES)
        return "\n".join([*sections, *_section("profile", ProfileSection, None, {})]).rstrip() + "\n"

    def job(self) -> dict[str, Any]:
        """The keys of [job] that are filled in."""
        known = isinstance(self.facts["train"], int)
        length = {"epochs": EPOCHS} if known else {"steps": STEPS}
        most = self.facts["train"] if known else BATCH_SIZE
        batch_size = self.facts["batch_size"] or max(1, min(BATCH_SIZE, most))
        args = {"args": dict(self.args)} if self.args else {}
        return {"entry": self.entry, **args, **length, "batch_size": batch_size, "seed": 0}

    def strategy(self) -> dict[str, Any]:
        """The keys of [strategy] that are filled in: two stages where the model and the machine have two parts."""
        parts = sum(parameters > 0 for _, _, parameters in self.facts["units"])
        stages = min(2, parts, self.num_cores) or 1
        return {"stages": stages, "microbatches": min(MICROBATCHES, self.job()["batch_size"]) if stages > 1 else 1}

    def _examples(self) -> Mapping[str, Any]:
        return {**EXAMPLES, "args": self.facts["args"], "split": [self._middle()]}

    def _middle(self) -> str | int:
        """The unit with which the second half of the model begins; by its parameters, where nothing else is known."""
        units = self.facts["units"]
        if not self._is_cut_by_calls:
            return max(1, len(units) // 2)
        before = [0, *accumulate(parameters for _, _, parameters in units)]
        places = sorted(range(1, len(units)), key=lambda unit: abs(2 * before[unit] - before[-1]))
        return str(units[places[0]][0]) if places else 1

    @property
    def _is_cut_by_calls(self) -> bool:
        cut: bool = self.facts["cut_by_calls"]
        return cut

    def _head(self, name: str) -> Iterator[str]:
        yield f"# weft run {name}                 here and now"
        yield f"# weft run {name} --reference     the plain loop, to compare with"
        yield f"# weft compare {name}             every preset of [strategy], one after another"
        yield f"# weft submit {name} -f           in the daemon that runs"
        yield "#"
        yield from _comment(self.headline())
        for field in ("train", "validation"):
            yield from _comment(self._data(field))
        yield "#"
        yield from _units(self.facts["units"], numbered=not self._is_cut_by_calls)

    def headline(self) -> str:
        """The model in a line."""
        facts = self.facts
        frozen = f", {facts['frozen']:,} of them frozen" if facts["frozen"] else ""
        count = len(facts["units"])
        cut = "one unit, for one stage" if count == 1 else f"{count} units, between which stages may begin"
        if self._is_cut_by_calls and count > 1:
            cut = (
                f"{count} modules with which stages may begin, if a step calls each once; Weft tries it before training"
            )
        return f"{facts['model']}: {facts['parameters']:,} parameters ({size(facts['bytes'])}){frozen}; {cut}."

    def _data(self, field: str) -> str:
        what = {"train": "Training", "validation": "Validation"}[field]
        match self.facts[field]:
            case None:
                return f"{what} data: none."
            case int(count):
                return f"{what} data: {count:,} samples."
            case problem:
                return f"{what} data: {problem}."


def _units(units: Sequence[Sequence[Any]], *, numbered: bool) -> Iterator[str]:
    """The table of units, which `split` names: by their numbers too, where these are known."""
    rows = [("unit" if numbered else "", "module", "parameters")]
    for place, (name, kind, parameters) in enumerate(units[:MAX_UNITS]):
        rows.append((str(place) if numbered else "", f"{name} {kind}".strip(), f"{parameters:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, module, parameters in rows:
        first = f"{number:>{widths[0]}}  " if numbered else ""
        yield f"#   {first}{module:<{widths[1]}}  {parameters:>{widths[2]}}"
    if len(units) > MAX_UNITS:
        yield f"#   and {len(units) - MAX_UNITS} more"


def _section(
    name: str, model: type[BaseModel], given: Mapping[str, Any] | None, examples: Mapping[str, Any]
) -> Iterator[str]:
    """A table. given: what is filled in; None: the whole table is a comment."""
    yield f"[{name}]" if given is not None else f"# [{name}]"
    yield from _comment((model.__doc__ or "").partition("\n")[0])
    yield ""
    for key, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        value = (given or {}).get(key, examples.get(key) if key in examples else default)
        words = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        yield from _comment((field.description or "") + (f" ({' or '.join(map(toml, words))})" if words else ""))
        yield f"{'' if key in (given or {}) else '# '}{key} = {toml(value)}"
        yield ""


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
