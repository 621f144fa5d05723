"""Trial: one job file under one preset, as `weft compare` runs it.

    --set  ›  the preset's row  ›  what is trained, as the job file has it  ›  defaults

That is what `weft run FILE --set strategy.preset=NAME` runs: the preset replaces the file's strategy. An axis that
--set gives counts for all presets; beside a row with which it makes no strategy (`stages` beside a list of replicas) it
is left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from weft.spec.job_spec import JobSpec, SpecError, key_of
from weft.spec.presets import AUTO, PRESETS

AS_IS = ("as-is", "none")  # instead of a preset: the file as it stands, its own preset included


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    preset: str  # as it was asked for
    spec: JobSpec
    left_out: tuple[str, ...] = ()  # axes of the file, or of --set, that `spec` goes without

    @property
    def is_stale(self) -> bool:
        """Whether some replica computes with parameters that lag, so that the losses are other ones by design."""
        return any(self.spec.strategy.staleness_list)


def make_trials(path: Path, overrides: Sequence[str], presets: Iterable[str]) -> list[Trial]:
    """A trial for each preset, in that order. path, overrides: as in `JobSpec.load`.

    Errors: SpecError for a file or an override that is not valid, and for an unknown preset.
    """
    names = list(presets)
    for name in names:
        _check_name(name)
    trials = [_trial(name, path, overrides) for name in names]
    for trial in trials:
        trial.spec.check_files()
    return trials


def _check_name(name: str) -> None:
    known = [AUTO, *PRESETS, *AS_IS]
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
    raise SpecError(f"--presets: {name!r:.80} is no preset; {remedy}")


def _trial(name: str, path: Path, overrides: Sequence[str]) -> Trial:
    """The spec as it is, or under the preset with as many of the axes that --set gives as can be kept."""
    if name in AS_IS:
        return Trial(preset=name, spec=JobSpec.load(path, overrides))
    axes = list(dict.fromkeys(axis for axis in map(_axis, overrides) if axis not in ("", "preset")))
    for num_unfit in range(len(axes) + 1):
        for unfit in combinations(axes, num_unfit):
            fitting = [each for each in overrides if _axis(each) not in ("preset", *unfit)]
            try:
                spec, replaced = JobSpec.load_replacing(path, [*fitting, f"strategy.preset={name}"])
            except SpecError as error:
                if not _is_of_axes_together(error, path):
                    raise
                continue
            left_out = dict.fromkeys(axis for axis in (*replaced, *unfit) if axis != "preset")
            return Trial(preset=name, spec=spec, left_out=tuple(left_out))
    raise AssertionError(f"the row of {name} is no strategy by itself")


def _is_of_axes_together(error: SpecError, path: Path) -> bool:
    """Whether each axis is right, but they do not agree: then one can be left out. A typing error is told."""
    return all(line.startswith(f"{path}: strategy: ") for line in str(error).splitlines())


def _axis(override: str) -> str:
    """Of the strategy, or empty for an override of something else."""
    key = key_of(override)
    return key[1] if key[0] == "strategy" and len(key) > 1 else ""
