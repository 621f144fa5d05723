"""Trial: one job file under one preset, as `weft compare` runs it. What counts where both name an axis is told here.

    --set  ›  the preset's row  ›  the job file

The row counts before the file, unlike in `weft run`: a file that says schedule = "1f1b" would turn `gpipe` into 1F1B,
and the two would be compared under one plan. An axis that the row does not name is kept from the file, unless the
strategy that comes out could not be (`stages` beside a list of replicas); then it is left out, too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator

from weft.presets import PRESETS
from weft.spec import JobSpec, SpecError

AS_IS = ("as-is", "none")  # instead of a preset: the file as it stands, its own preset included


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """preset: as it was asked for. left_out: axes of the file, or of --set, that `spec` goes without."""

    preset: str
    spec: JobSpec
    left_out: tuple[str, ...] = ()

    @property
    def is_stale(self) -> bool:
        """Whether some replica computes with parameters that lag, so that the losses are other ones by design."""
        return any(self.spec.strategy.staleness_list)


def make_trials(path: Path, overrides: Sequence[str], presets: Iterable[str], steps: int | None) -> list[Trial]:
    """A trial for each preset, in that order. overrides: as in `JobSpec.load`. steps: instead of the file's own length.

    Errors: SpecError for a file or an override that is not valid, and for an unknown preset.
    """
    names = list(presets)
    for name in names:
        _check_name(name)
    file = _JobFile.load(path, overrides)
    assert isinstance(file, _JobFile)
    spec = JobSpec.parse(file.to_wire(), source=str(path))
    if steps is not None:
        job = {key: value for key, value in spec.to_wire()["job"].items() if key != "epochs"}
        spec = JobSpec.parse(spec.to_wire() | {"job": job | {"steps": steps}}, source="--steps")
    spec.check_files()
    axes_set = _axes_set(overrides)
    return [_trial(name, spec, file.strategy_table, axes_set) for name in names]


class _JobFile(JobSpec):
    """A spec that remembers its [strategy] table as it was given: without the row of the table's own preset."""

    _strategy_table: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _remember(cls, tables: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        spec = handler(tables)
        spec._strategy_table = dict(tables.get("strategy", {}))
        return spec

    @property
    def strategy_table(self) -> Mapping[str, Any]:
        return self._strategy_table


def _check_name(name: str) -> None:
    known = [*PRESETS, *AS_IS]
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
    raise SpecError(f"--presets: {name!r:.80} is no preset; {remedy}")


def _axes_set(overrides: Sequence[str]) -> set[str]:
    """The axes that --set gives: those count before a preset's row."""
    keys = [[part.strip() for part in override.partition("=")[0].split(".")] for override in overrides]
    return {parts[1] for parts in keys if parts[0] == "strategy" and len(parts) > 1}


def _trial(name: str, spec: JobSpec, given: Mapping[str, Any], axes_set: set[str]) -> Trial:
    """The spec as it is, or under the preset with as many of the given axes as can be kept."""
    if name in AS_IS:
        return Trial(preset=name, spec=spec)
    row = PRESETS[name].axes
    given = {axis: value for axis, value in given.items() if axis != "preset"}
    overruled = [axis for axis in given if axis in row and axis not in axes_set and given[axis] != row[axis]]
    kept = {axis: value for axis, value in given.items() if axis not in overruled}
    for num_unfit in range(len(kept) + 1):
        for unfit in combinations(kept, num_unfit):
            table = {axis: value for axis, value in kept.items() if axis not in unfit} | {"preset": name}
            try:
                fitting = JobSpec.parse(spec.to_wire() | {"strategy": table})
            except SpecError:
                continue
            return Trial(preset=name, spec=fitting, left_out=(*overruled, *unfit))
    raise AssertionError(f"the row of {name} is no strategy by itself")
