"""Values of classes that cannot change in place: they come back as they were, whoever has made the class."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import pytest

from weft.workers.snapshots.attributes import Attributes, check_kept
from weft.workers.snapshots.plain import packed, unpacked
from weft.workload.workload import WorkloadError


class Phase(enum.Enum):
    WARM = 0
    MAIN = 1


class Ways(enum.Flag):
    ONE = 1
    OTHER = 2


class Pair(NamedTuple):
    rate: float
    phase: Phase


_PAIR = Pair(1.0, Phase.WARM)


@dataclasses.dataclass(frozen=True)
class Config:
    weight: float = 1.0
    pair: Pair = _PAIR


@dataclasses.dataclass
class Open:
    weight: float = 1.0


def variables() -> dict[str, Any]:
    return {"phase": Phase.WARM, "ways": Ways.ONE, "config": Config(), "phases": [], "later": None, "open": Open()}


def test_they_come_back() -> None:
    one, other = variables(), variables()
    own, its = Attributes({"Workload.step": one}), Attributes({"Workload.step": other})
    config = Config(2.0, Pair(0.5, Phase.MAIN))
    one |= {"phase": Phase.MAIN, "ways": Ways.ONE | Ways.OTHER, "config": config, "later": Phase.MAIN}
    one["phases"].append(Phase.MAIN)
    its.restore(check_kept(unpacked(packed(own.changed()))))
    assert {key: each for key, each in other.items() if key != "open"} == {
        key: each for key, each in one.items() if key != "open"
    }
    assert other["phase"] is Phase.MAIN
    assert type(other["config"].pair) is Pair


def test_what_can_change_in_place_and_classes_that_nobody_has_are_told() -> None:
    own, known = variables(), {"phase": None}
    mine, its = Attributes({"Workload.step": own}), Attributes({"Workload.step": known})
    own["open"], known["phase"] = Open(2.0), Phase.MAIN  # type: ignore[assignment]
    assert mine.lost() == ["Workload.step.open (a Open)"]
    assert its.lost() == ["Workload.step.phase (a Phase)"]


def test_a_class_with_other_members_is_refused_by_name() -> None:
    one, other = variables(), variables()
    own, its = Attributes({"Workload.step": one}), Attributes({"Workload.step": other})
    one["phase"] = Phase.MAIN
    kept = own.changed()
    mark, _, name = kept["Workload.step"]["phase"]
    with pytest.raises(WorkloadError, match="a Phase of other fields or members"):
        its.restore({"Workload.step": {"phase": (mark, ["GONE"], name)}})
    with pytest.raises(WorkloadError, match="a Config of other fields or members"):
        its.restore({"Workload.step": {"config": (mark, [{"weight": 1.0}], name.replace("Phase", "Config"))}})
