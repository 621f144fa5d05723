"""What `weft doctor` finds amiss with a machine: facts with one thing wrong, and the finding with its remedy."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.cli.doctor.machine_findings import findings
from weft.machine.cgroups import CgroupLimits

_SOUND = runpy.run_path(str(Path(__file__).parents[2] / "sound_facts.py"))
SOUND, GIB = _SOUND["SOUND"], _SOUND["GIB"]
changed, the = _SOUND["changed"], _SOUND["the"]


def test_a_sound_machine_has_no_problem_and_says_that_it_has_no_gpu() -> None:
    found = findings(SOUND)
    assert [finding.check for finding in found if finding.level != "ok"] == ["gpus"]
    assert not any(finding.level == "problem" for finding in found)


def test_whatever_is_amiss_comes_with_a_remedy_and_nothing_else_does() -> None:
    assert all(bool(finding.remedy) == (finding.level != "ok") for finding in findings(SOUND))


def test_a_quota_below_what_the_workers_take_is_a_problem_with_the_number_that_fits() -> None:
    facts = replace(SOUND, cgroup=CgroupLimits(cpus=2.5, cpus_from="/sys/fs/cgroup/cpu.max"))
    finding = the("processor-quota", facts)
    assert finding.level == "problem"
    assert "/sys/fs/cgroup/cpu.max allows the time of 2.5" in finding.sentence
    assert "workers = 2 " in finding.remedy


def test_a_quota_that_the_workers_keep_within_is_a_note() -> None:
    facts = replace(SOUND, workers={"cpu": 2, "gpu": 0}, cgroup=CgroupLimits(cpus=2.5, cpus_from="cpu.max"))
    assert the("processor-quota", facts).level == "note"


def test_fewer_processors_than_the_machine_has_are_a_note() -> None:
    finding = the("processors", changed("machine", num_online=64))
    assert (finding.level, finding.sentence.partition(";")[0]) == ("note", "This process may use 8 of 64 processors")


def test_more_compute_threads_than_processors_are_a_note() -> None:
    assert the("processors", replace(SOUND, threads=4)).level == "note"


def test_a_memory_limit_below_the_machines_memory_is_a_note_that_names_its_file() -> None:
    facts = replace(SOUND, cgroup=CgroupLimits(memory_bytes=8 * GIB, memory_from="/sys/fs/cgroup/job/memory.max"))
    finding = the("memory", facts)
    assert finding.level == "note"
    assert "64.0 GiB of memory are seen, and /sys/fs/cgroup/job/memory.max allows 8.0 GiB" in finding.sentence


def test_a_memory_limit_that_torch_alone_fills_is_a_problem() -> None:
    facts = replace(SOUND, cgroup=CgroupLimits(memory_bytes=GIB, memory_from="memory.max"))
    finding = the("memory", facts)
    assert finding.level == "problem"
    assert "memory.max" in finding.remedy


def test_memory_that_others_hold_is_a_note() -> None:
    assert the("memory", changed("machine", available_bytes=GIB)).level == "note"


def test_strict_overcommit_is_a_note() -> None:
    finding = the("overcommit", changed("memory_policy", overcommit=2))
    assert finding.level == "note"
    assert "32.0 GiB are left to promise" in finding.sentence


@pytest.mark.parametrize(
    ("shared", "level", "remedy"),
    [
        ({"kind": None, "total_bytes": 0, "free_bytes": 0}, "problem", "mount -t tmpfs"),
        ({"total_bytes": 64 << 20, "free_bytes": 64 << 20}, "problem", "--shm-size"),
        ({"free_bytes": 1 << 20}, "problem", "ls -l /dev/shm"),
        ({"kind": "ext4"}, "problem", "mount -t tmpfs"),
        ({"total_bytes": 2 << 30, "free_bytes": 2 << 30}, "note", "--shm-size"),
    ],
    ids=["absent", "a container's 64 MiB", "full", "on a disk", "small"],
)
def test_shared_memory_that_does_not_hold_a_job_is_told(shared: dict[str, Any], level: str, remedy: str) -> None:
    finding = the("shared-memory", changed("shared_memory", **shared))
    assert finding.level == level
    assert remedy in finding.remedy


def test_a_share_of_a_limited_memory_is_enough_shared_memory() -> None:
    facts = replace(changed("shared_memory", free_bytes=4 * GIB), cgroup=CgroupLimits(memory_bytes=8 * GIB))
    assert the("shared-memory", facts).level == "ok"


@pytest.mark.parametrize("setting", ["never", None])
def test_a_kernel_that_gives_no_huge_pages_is_a_note(setting: str | None) -> None:
    assert the("huge-pages", changed("memory_policy", huge_pages=setting)).level == "note"


def test_too_few_descriptors_are_a_problem_that_grows_with_the_workers() -> None:
    few = changed("limits", nofile=600)
    assert the("open-files", few).level == "ok"
    finding = the("open-files", replace(few, workers={"cpu": 64, "gpu": 0}))
    assert finding.level == "problem"
    assert "LimitNOFILE=4096" in finding.remedy


def test_too_few_processes_are_a_problem() -> None:
    finding = the("processes", changed("limits", nproc=100))
    assert finding.level == "problem"
    assert "LimitNPROC=" in finding.remedy


@pytest.mark.parametrize("check", ["open-files", "processes"])
def test_no_limit_is_enough(check: str) -> None:
    assert the(check, changed("limits", nofile=None, nproc=None)).level == "ok"


def test_a_missing_package_is_a_problem_that_names_it() -> None:
    packages = SOUND.software.packages | {"uvloop": None}
    finding = the("software", changed("software", packages=packages))
    assert (finding.level, "uvloop" in finding.sentence) == ("problem", True)


def test_a_measurement_that_died_is_a_problem() -> None:
    assert the("speeds", replace(SOUND, speeds={"gpus": [], "error": None})).level == "ok"
    finding = the("speeds", replace(SOUND, speeds={"gpus": [], "error": "signal 11: "}))
    assert (finding.level, "signal 11" in finding.sentence) == ("problem", True)
