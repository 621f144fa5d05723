"""Which presets fit the workers that are there."""

from __future__ import annotations

from weft.cli.doctor.preset_fit import PresetFit, fit_presets
from weft.spec.presets import PRESETS


def fit(preset: str, **there: int) -> PresetFit:
    return next(each for each in fit_presets(there) if each.preset == preset)


def test_every_preset_is_judged_in_the_order_of_the_table() -> None:
    assert [each.preset for each in fit_presets({})] == list(PRESETS)


def test_two_cpu_workers_run_whatever_needs_no_gpu() -> None:
    assert {each.preset for each in fit_presets({"cpu": 2}) if each.runs} == {
        "model-parallel",
        "gpipe",
        "1f1b",
        "ddp",
        "parameter-server",
    }


def test_a_gpu_beside_them_runs_them_all() -> None:
    assert all(each.runs for each in fit_presets({"cpu": 2, "gpu": 1}))


def test_what_is_missing_is_counted_and_comes_with_a_remedy() -> None:
    ddp = fit("ddp", cpu=1, gpu=0)
    assert (ddp.needs, ddp.missing, ddp.remedy) == ({"cpu": 2}, {"cpu": 1}, "--workers 2 (they share the cores)")
    hybrid = fit("hybrid-fine", cpu=1, gpu=0)
    assert (hybrid.missing, hybrid.remedy) == ({"gpu": 1}, "--stand-ins 1 tries it on the CPU")
