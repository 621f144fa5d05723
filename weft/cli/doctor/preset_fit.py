"""Which presets this machine can run: what each needs beside what there is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.spec.presets import PRESETS
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import workers_needed


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetFit:
    preset: str
    needs: dict[str, int]  # numbers of workers by kind, without the loader
    missing: dict[str, int]  # the same
    remedy: str  # empty where nothing is missing

    @property
    def runs(self) -> bool:
        return not self.missing


def fit_presets(there: Mapping[str, int]) -> list[PresetFit]:
    """there: workers by kind."""
    return [_fit(preset, there) for preset in PRESETS]


def _fit(preset: str, there: Mapping[str, int]) -> PresetFit:
    needs = {kind: n for kind, n in workers_needed(Strategy(preset=preset)).items() if kind != "loader"}
    missing = {kind: n - there.get(kind, 0) for kind, n in needs.items() if n > there.get(kind, 0)}
    remedies = []
    if "cpu" in missing:
        remedies.append(f"--workers {needs['cpu']} (they share the cores)")
    if "gpu" in missing:
        remedies.append(f"--stand-ins {needs['gpu']} tries it on the CPU")
    return PresetFit(preset=preset, needs=needs, missing=missing, remedy=", ".join(remedies))
