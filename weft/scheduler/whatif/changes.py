"""What-if changes: what `--set KEY=VALUE` means to a recorded job. Pure, but that a schedule's file is read.

workers.NAME.speed           every task of that worker takes 1/F of its time
workers.NAME.LANE.speed      every task of that lane
links.speed                  every copy between host and device; links.h2d.speed, links.d2h.speed: in one direction
load.speed                   every load
strategy.*, job.batch_size   as in a spec: the job is planned anew
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from weft.plan.kinds import KINDS, Kind
from weft.spec.job_spec import JobSpec, SpecError, apply_override
from weft.spec.presets import AUTO, PRESETS
from weft.spec.schedule_text import read_grid_file
from weft.spec.strategy import TRAINED_AXES

MAX_SPEED: Final = 1e9  # a billion times as fast is as good as for nothing
LINKS: Final[Mapping[str, frozenset[Kind]]] = {
    way: frozenset(kind for kind, facts in KINDS.items() if facts.link and way in ("", facts.link))
    for way in ("", "h2d", "d2h")
}
KEYS: Final = (
    "workers.NAME.speed, workers.NAME.LANE.speed, links.speed, links.h2d.speed, links.d2h.speed, load.speed, "
    "strategy.AXIS, job.batch_size"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tasks take 1/factor."""

    key: str
    factor: float
    worker: str = ""  # "": any
    lane: str = ""  # "": any of the worker's
    kinds: frozenset[Kind] = frozenset()  # empty: any

    def touches(self, worker: str, lane: str, kind: Kind) -> bool:
        return self.worker in ("", worker) and self.lane in ("", lane) and (not self.kinds or kind in self.kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    spec: JobSpec  # of the changed job
    replans: bool  # it is another one than the recorded
    speeds: tuple[Speed, ...]


def parse_changes(spec: JobSpec, settings: Sequence[str]) -> Changes:
    """Errors: SpecError that names the key, what is known and the remedy."""
    speeds, overrides = [], []
    for setting in settings:
        key, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or not key:
            raise SpecError(f"--set {setting!r:.80}: write KEY=VALUE, for example workers.cpu-1.speed=2")
        match key.split("."):
            case ["workers", worker, "speed"] if worker:
                speeds.append(Speed(key=key, factor=_factor(key, text), worker=worker))
            case ["workers", worker, lane, "speed"] if worker and lane:
                speeds.append(Speed(key=key, factor=_factor(key, text), worker=worker, lane=lane))
            case ["links", *direction, "speed"] if ".".join(direction) in LINKS:
                speeds.append(Speed(key=key, factor=_factor(key, text), kinds=LINKS[".".join(direction)]))
            case ["load", "speed"]:
                speeds.append(Speed(key=key, factor=_factor(key, text), kinds=frozenset({Kind.LOAD})))
            case ["strategy", _, *_] | ["job", "batch_size"]:
                overrides.append(setting)
            case _:
                raise SpecError(f"--set {key:.80}: unknown key{_suggestion(key)}")
    changed = _changed(spec, overrides)
    return Changes(spec=changed, replans=changed != spec, speeds=tuple(speeds))


def check_speeds(speeds: Iterable[Speed], lanes: Mapping[str, Sequence[str]]) -> None:
    """lanes: of each worker of the changed job. Errors: SpecError for a worker or a lane that it has not."""
    for speed in speeds:
        if speed.worker and speed.worker not in lanes:
            raise SpecError(f"--set {speed.key}: the job has no worker {speed.worker!r:.80}; it has {', '.join(lanes)}")
        if speed.lane and speed.lane not in lanes[speed.worker]:
            raise SpecError(
                f"--set {speed.key}: {speed.worker} has no lane {speed.lane!r:.80}; it has "
                f"{', '.join(lanes[speed.worker])}"
            )


def _factor(key: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor <= MAX_SPEED:
        raise SpecError(
            f"--set {key}: {text!r:.80} is no speed; give a number above 0 and at most {MAX_SPEED:g}, "
            "for example 2 for twice as fast"
        )
    return factor


def _suggestion(key: str) -> str:
    known = [each.strip() for each in KEYS.split(",")]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else f"; known here: {KEYS}"


def _changed(spec: JobSpec, overrides: Sequence[str]) -> JobSpec:
    """A preset replaces the job's own axes, as in `weft run`, and --set counts before both."""
    if not overrides:
        return spec
    given: dict[str, Any] = {}
    for override in overrides:
        apply_override(given, override)
    read_grid_file(given)  # from the working directory: the spec's may be of another machine
    tables = {**spec.to_wire()}
    axes = dict(tables["strategy"])
    asked = given.get("strategy", {})
    for axis, remedy in _CHOICES.items():
        if asked.get(axis) == AUTO:
            raise SpecError(
                f"--set strategy.{axis}: auto is no strategy but a choice, which `weft plan` makes; {remedy}"
            )
    if isinstance(asked.get("preset"), str):
        preset = PRESETS.get(asked["preset"])
        trained = {axis: value for axis, value in axes.items() if axis in TRAINED_AXES}
        axes = trained | dict(preset.axes if preset is not None else {})
    if isinstance(asked.get("prefetch"), dict):
        asked = asked | {"prefetch": {**axes.get("prefetch", {}), **asked["prefetch"]}}
    axes |= asked
    for axis in _CUT if isinstance(axes.get("replicas"), list) else ():
        if axis not in asked:
            axes.pop(axis, None)
    if "stages" in asked and "split" not in asked:
        axes.pop("split", None)
    tables["strategy"] = axes
    tables["job"] = {**tables["job"], **given.get("job", {})}
    return JobSpec.parse(tables, source="--set")


_CHOICES = {"preset": "name another", "compile": "write true or false"}
_CUT = ("stages", "split")  # of every replica; a list of replicas has each one's own
