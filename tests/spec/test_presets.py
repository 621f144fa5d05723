"""Presets: each row is a strategy that validates, and the table shows all of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from weft.spec.job_spec import JobSpec
from weft.spec.presets import PRESETS, presets_table
from weft.spec.replica import Replica
from weft.spec.strategy import Strategy

EACH_PRESET = pytest.mark.parametrize("name", PRESETS)
GPU, CPU = Replica(device="gpu", microbatches=1), Replica(device="cpu", microbatches=1)
HYBRID = (Replica(device="gpu", stages=2, gpus=1, microbatches=4), Replica(device="cpu", microbatches=1))


def spec_of(name: str) -> JobSpec:
    job = {"entry": "digits.py:workload", "steps": 1, "batch_size": 8}
    return JobSpec.parse({"job": job, "strategy": {"preset": name}})


@EACH_PRESET
def test_a_preset_is_its_axes_and_the_defaults(name: str) -> None:
    strategy = spec_of(name).strategy
    assert strategy == Strategy(**PRESETS[name].axes).model_copy(update={"preset": name})
    assert all(axis in Strategy.model_fields for axis in PRESETS[name].axes)


@EACH_PRESET
def test_a_resolved_preset_is_the_same_on_the_other_side_of_the_wire(name: str) -> None:
    spec = spec_of(name)
    assert JobSpec.parse(spec.to_wire()) == spec
    assert JobSpec.parse(spec.to_wire()).to_wire() == spec.to_wire()


@EACH_PRESET
def test_a_preset_has_a_source_and_an_idea_of_one_sentence(name: str) -> None:
    preset = PRESETS[name]
    assert preset.source[-4:].isdigit() or preset.source == "Weft's own"
    assert preset.idea.endswith(".")
    assert preset.idea.count(".") == 1


@pytest.mark.parametrize(
    ("name", "replicas", "axes"),
    [
        ("ddp", (CPU, CPU), {"sync": "fine", "staleness": 0, "update": "local", "share": "fixed"}),
        ("parameter-server", (CPU, CPU), {"sync": "fine", "staleness": 1, "update": "cpu"}),
        ("zero-offload", (GPU,), {"sync": "fine", "update": "cpu"}),
        ("cotrain", (GPU,), {"sync": "fine", "update": "balanced"}),
        ("hyscale", (GPU, CPU), {"update": "local", "share": "adaptive"}),
        ("hybrid-coarse", HYBRID, {"sync": "coarse", "update": "local", "share": "adaptive"}),
        ("hybrid-fine", HYBRID, {"sync": "fine", "update": "local", "share": "adaptive"}),
        ("gpipe", (Replica(stages=2, microbatches=4),), {"schedule": "gpipe"}),
        ("1f1b", (Replica(stages=2, microbatches=4),), {"schedule": "1f1b"}),
        ("model-parallel", (Replica(stages=2, microbatches=1),), {}),
    ],
)
def test_a_preset_comes_to_these_replicas_and_axes(
    name: str, replicas: tuple[Replica, ...], axes: dict[str, Any]
) -> None:
    strategy = spec_of(name).strategy
    assert strategy.replica_list == replicas
    assert {axis: getattr(strategy, axis) for axis in axes} == axes


def test_a_row_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["ddp"].axes["replicas"] = 3  # type: ignore[index]  # what is tested
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["ddp"]  # type: ignore[index]  # what is tested


def test_the_table_has_every_row_every_axis_and_every_source() -> None:
    head, rule, *rows = presets_table().splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    assert rule == "| " + " | ".join(["---"] * len(columns)) + " |"
    for row, (name, preset) in zip(rows, PRESETS.items(), strict=True):
        cells = dict(zip(columns, (cell.strip() for cell in row.strip("|").split("|")), strict=True))
        assert (cells.pop("preset"), cells.pop("idea"), cells.pop("source")) == (
            f"`{name}`",
            preset.idea,
            preset.source,
        )
        assert {axis for axis, cell in cells.items() if cell} == preset.axes.keys()


def test_the_module_prints_its_table_and_the_strategy_imports_no_torch() -> None:
    command = [sys.executable, "-W", "error", "-m", "weft.spec.presets"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == presets_table()
    program = "import sys, weft.spec.strategy; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
