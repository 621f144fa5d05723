"""What `weft doctor` finds amiss with GPUs, and with their absence."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.cli.doctor.machine_findings import findings
from weft.cli.doctor.preset_fit import fit_presets
from weft.machine.gpus import GpuProcess, Inventory, Missing

_SOUND = runpy.run_path(str(Path(__file__).parents[2] / "sound_facts.py"))
SOUND = _SOUND["SOUND"]
changed, of, the, with_gpu = _SOUND["changed"], _SOUND["of"], _SOUND["the"], _SOUND["with_gpu"]


def test_a_gpu_that_can_be_used_is_no_finding() -> None:
    levels = {finding.check: finding.level for finding in findings(with_gpu())}
    assert {check: level for check, level in levels.items() if level != "ok"} == {"page-locking": "note"}


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("extra", "pip install 'weft[gpu]'"), ("library", "driver"), ("driver", "modprobe"), ("device", "--gpus all")],
)
def test_a_card_that_cannot_be_used_is_a_problem_with_the_remedy_for_its_reason(missing: Missing, remedy: str) -> None:
    facts = replace(
        changed("machine", num_nvidia_cards=2), inventory=Inventory(missing=missing, reason="it is not found")
    )
    finding = the("gpus", facts)
    assert (finding.level, finding.sentence) == ("problem", "2 NVIDIA cards on the PCI bus, but it is not found.")
    assert remedy in finding.remedy


def test_settings_that_ask_for_more_gpus_than_there_are_are_a_problem() -> None:
    first, second = of("gpus", replace(SOUND, crew_error="gpus = 2, and 0 can be used: there are no more"))
    assert (first.level, second.level) == ("problem", "note")
    assert "gpus = 2" in first.sentence
    assert "WEFT_GPUS" in first.remedy


def test_a_machine_without_cards_is_told_of_stand_ins() -> None:
    finding = the("gpus", SOUND)
    assert finding.level == "note"
    assert "--stand-ins 1" in finding.remedy


def test_a_pytorch_without_cuda_beside_a_gpu_is_a_problem() -> None:
    facts = with_gpu()
    facts = replace(facts, software=replace(facts.software, torch_cuda=None))
    assert the("cuda", facts).level == "problem"


def test_a_driver_older_than_pytorchs_cuda_is_a_problem() -> None:
    facts = with_gpu()
    finding = the("cuda", replace(facts, inventory=replace(facts.inventory, driver_cuda="11.8")))
    assert (finding.level, "CUDA 11" in finding.remedy) == ("problem", True)


def test_an_older_driver_of_the_same_major_version_will_do() -> None:
    facts = with_gpu()
    assert the("cuda", replace(facts, inventory=replace(facts.inventory, driver_cuda="12.0"))).level == "ok"


def test_hidden_gpus_are_told() -> None:
    levels = [finding.level for finding in of("cuda", replace(with_gpu(), visible_gpus="1"))]
    assert levels == ["ok", "note"]


def test_the_limit_of_locked_memory_matters_with_a_gpu_only() -> None:
    assert the("page-locking", SOUND).level == "ok"
    assert the("page-locking", with_gpu()).level == "note"
    unlimited = replace(with_gpu(), limits=replace(SOUND.limits, memlock_bytes=None))
    assert the("page-locking", unlimited).level == "ok"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pcie_width": 4}, "4 of its 16 PCIe lanes: copies take 4 times as long"),
        ({"persistence": False}, "persistence"),
        ({"mig": True}, "MIG"),
        ({"processes": (GpuProcess(pid=77, bytes_used=1 << 30),)}, "1.0 GiB of the memory of A GPU"),
    ],
    ids=["width", "persistence", "mig", "processes"],
)
def test_what_costs_speed_on_a_gpu_is_a_note(changes: dict[str, Any], said: str) -> None:
    finding = the("gpu-0", with_gpu(**changes))
    assert finding.level == "note"
    assert said in finding.sentence


def test_the_daemons_own_workers_on_a_gpu_are_no_finding() -> None:
    facts = with_gpu(processes=(GpuProcess(pid=77, bytes_used=None),))
    status = {"version": "0.1.0", "pid": 70, "workers": [{"worker": "gpu-0", "pid": 77, "state": "free"}], "jobs": {}}
    assert the("gpu-0", replace(facts, daemon=replace(facts.daemon, socket="answers", status=status))).level == "ok"


def test_a_link_that_rests_in_a_low_generation_is_no_finding() -> None:
    assert the("gpu-0", with_gpu(pcie_generation=1)).level == "ok"


def test_presets_that_lack_workers_are_one_note_with_what_to_add() -> None:
    finding = the("strategies", replace(SOUND, presets=tuple(fit_presets({"cpu": 1, "gpu": 0}))))
    assert finding.level == "note"
    assert "hybrid-fine" in finding.sentence
    assert "--workers 2" in finding.remedy
    assert "--stand-ins 1" in finding.remedy
