"""Who works for a daemon, on which device and cores."""

from __future__ import annotations

import os
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.machine.crew import Crew, CrewError, make_crew, muster, peers_of, usable_gpus
from weft.machine.gpus import Gpu, Inventory, Peers
from weft.spec.settings import Settings

A_GPU: Gpu = runpy.run_path(str(Path(__file__).parents[1] / "sound_facts.py"))["GPU"]
CUDA = "13.0"


def gpu(index: int, node: int | None = None) -> Gpu:
    return replace(A_GPU, index=index, uuid=f"GPU-{index}{index}{index}{index}-0000", name="Some GPU", numa_node=node)


TWO = Inventory(gpus=(gpu(0), gpu(1)))
NONE = Inventory(missing="library", reason="there is no NVIDIA driver library (libnvidia-ml.so.1)")


def cores_of(crew: Crew) -> dict[str, tuple[int, ...]]:
    return {member.name: member.cores for member in crew.members if member.kind != "loader"}


def test_every_gpu_gets_a_worker_by_its_uuid_and_cores_for_its_lanes() -> None:
    crew = make_crew(Settings(workers=2), TWO.gpus, range(8), {})
    assert [(m.name, m.device) for m in crew.members if m.kind == "gpu"] == [
        ("gpu-0", "GPU-0000-0000"),
        ("gpu-1", "GPU-1111-0000"),
    ]
    assert cores_of(crew) == {"cpu-0": (0,), "cpu-1": (1,), "gpu-0": (2, 3), "gpu-1": (4, 5)}
    assert str(crew) == "2 CPU workers, 2 Some GPU workers"


def test_cpu_workers_take_what_the_gpus_leave() -> None:
    crew = make_crew(Settings(threads=2), TWO.gpus, range(16), {})
    assert [name for name in cores_of(crew) if name.startswith("cpu")] == [f"cpu-{n}" for n in range(6)]


def test_a_gpu_has_cores_of_its_node_where_there_are_some() -> None:
    near = {0: frozenset({0, 1, 2, 3}), 1: frozenset({4, 5, 6, 7})}
    crew = make_crew(Settings(workers=2), (gpu(0, node=1), gpu(1, node=0)), range(8), near)
    assert cores_of(crew) == {"cpu-0": (2,), "cpu-1": (3,), "gpu-0": (4, 5), "gpu-1": (0, 1)}


def test_nobody_is_pinned_where_not_everybody_can_have_cores_of_their_own() -> None:
    crew = make_crew(Settings(workers=3), (gpu(0),), range(4), {})
    assert not crew.is_pinned
    assert set(cores_of(crew).values()) == {()}


@pytest.mark.parametrize(("quota", "processors"), [(None, 4.0), (1.5, 1.5), (64.0, 4.0)])
def test_the_planner_is_told_how_many_processors_all_workers_have(quota: float | None, processors: float) -> None:
    host = make_crew(Settings(workers=6), (), range(4), {}, quota=quota).host
    assert (host.workers, host.processors, host.stand_ins) == (6, processors, False)
    assert make_crew(Settings(workers=1, stand_ins=1), (), range(4), {}, quota=quota).host.stand_ins


def test_each_worker_that_computes_has_a_loader_beside_it() -> None:
    crew = make_crew(Settings(workers=2, stand_ins=1), (), range(4), {})
    assert sum(member.kind == "loader" for member in crew.members) == 3
    assert crew["gpu-0"].device == "stand-in"
    assert {crew["loader-2"].lane, crew["gpu-0"].lane} == {"load", "compute"}


def test_there_are_more_loaders_where_a_job_wants_several() -> None:
    for workers, count in (1, 3), (4, 4):
        crew = make_crew(Settings(workers=workers, loaders=3), (), range(4), {})
        assert sum(member.kind == "loader" for member in crew.members) == count


def pair(first: int, second: int, access: bool | None) -> Peers:
    return Peers(first=first, second=second, access=access, nvlink=False)


def test_workers_have_peer_access_where_every_two_of_their_gpus_can_read_each_other() -> None:
    gpus = tuple(gpu(index) for index in range(4))
    pairs = [
        pair(0, 1, True),
        pair(0, 2, True),
        pair(1, 2, True),
        pair(0, 3, True),
        pair(1, 3, False),
        pair(2, 3, None),
    ]
    peers = peers_of(Inventory(gpus=gpus, peers=tuple(pairs)))
    crew = make_crew(Settings(workers=2), gpus, range(16), {}, peers)
    assert crew.has_peer_access(["cpu-0", "gpu-0", "gpu-1", "gpu-2", "loader-0"])
    assert crew.has_peer_access(["gpu-3", "gpu-0"])
    assert not crew.has_peer_access(["gpu-0", "gpu-1", "gpu-3"])
    assert not crew.has_peer_access(["gpu-2", "gpu-3"])


def test_a_gpu_that_is_cut_into_instances_has_no_peers() -> None:
    cut = Inventory(gpus=(gpu(0), replace(gpu(1), mig=True)), peers=(pair(0, 1, True),))
    assert peers_of(cut) == frozenset()


def test_stand_ins_have_peer_access() -> None:
    assert make_crew(Settings(workers=1, stand_ins=2), (), range(4), {}).has_peer_access(["gpu-0", "gpu-1"])


def test_workers_on_slower_cores_take_longer() -> None:
    speeds = {0: 1.0, 1: 1.0, 2: 0.95, 3: 0.5}
    crew = make_crew(Settings(workers=4), (), range(4), {}, core_speeds=speeds)
    workers = ["cpu-0", "cpu-1", "cpu-2", "cpu-3", "loader-0"]
    assert crew.slowness(workers, "cpu-0", {}) == {"cpu": [1.0, 1.0, 1.0, 2.0]}
    assert crew.slowness(workers, "cpu-3", {}) == {"cpu": [0.5, 0.5, pytest.approx(0.526, abs=1e-3), 1.0]}
    assert crew.slowness(workers[:3], "cpu-0", {}) == {}, "a twentieth is nothing"
    unpinned = make_crew(Settings(workers=8), (), range(4), {}, core_speeds=speeds)
    assert unpinned.slowness(["cpu-3", "cpu-4"], "cpu-3", {}) == {}
    beside = make_crew(Settings(workers=1, stand_ins=3), (), range(4), {}, core_speeds=speeds)
    assert beside.slowness(["cpu-0", "gpu-0", "gpu-2"], "gpu-0", {}) == {"cpu": [1.0], "gpu": [1.0, 2.0]}


def test_gpus_of_several_models_take_what_a_probe_took_them_and_those_of_one_are_alike() -> None:
    gpus = (gpu(0), gpu(1), replace(gpu(2), name="Other GPU"))
    crew = make_crew(Settings(workers=2), gpus, range(16), {})
    assert crew.is_unlike
    assert not make_crew(Settings(workers=2), gpus[:2], range(16), {}).is_unlike
    took, workers = {"gpu-0": 0.010, "gpu-1": 0.013, "gpu-2": 0.025}, ["cpu-0", "gpu-0", "gpu-1", "gpu-2"]
    assert crew.slowness(workers, "gpu-0", took) == {"cpu": [1.0], "gpu": [1.0, 1.0, 2.5]}
    assert crew.slowness(workers[2:], "gpu-1", took) == {"gpu": [1.0, 2.5]}
    assert crew.slowness(["gpu-2", "gpu-0"], "gpu-2", took) == {"gpu": [1.0, pytest.approx(0.4)]}
    assert crew.slowness(workers[:3], "gpu-0", took) == {}
    assert crew.slowness(workers, "gpu-0", {"gpu-0": 0.01}) == {}, "the other one has not told"


@pytest.mark.parametrize(
    ("settings", "visible", "uuids"),
    [
        ({}, None, ["GPU-0000-0000", "GPU-1111-0000"]),
        ({"gpus": 1}, None, ["GPU-0000-0000"]),
        ({"gpus": 0}, None, []),
        ({"stand_ins": 1}, None, []),
        ({"stand_ins": 1, "gpus": 0}, None, []),
        ({}, "1", ["GPU-1111-0000"]),
        ({}, "GPU-11,0", ["GPU-1111-0000", "GPU-0000-0000"]),
        ({}, "1,-1,0", ["GPU-1111-0000"]),
        ({}, "", []),
        ({}, "GPU-", []),
    ],
)
def test_all_visible_gpus_are_used_if_not_told_otherwise(
    settings: dict[str, Any], visible: str | None, uuids: list[str]
) -> None:
    assert [each.uuid for each in usable_gpus(Settings(**settings), TWO, CUDA, visible)] == uuids


def test_gpus_without_a_pytorch_that_is_built_for_them_are_not_used() -> None:
    assert usable_gpus(Settings(), TWO, None, None) == ()


@pytest.mark.parametrize(
    ("settings", "inventory", "built_for", "visible", "text"),
    [
        ({"gpus": 1}, NONE, CUDA, None, "gpus = 1, and 0 can be used: there is no NVIDIA driver library"),
        ({"gpus": 3}, TWO, CUDA, None, "gpus = 3, and 2 can be used: there are no more; ask for fewer"),
        ({"gpus": 2}, TWO, CUDA, "0", "gpus = 2, and 1 can be used: CUDA_VISIBLE_DEVICES hides the others"),
        ({"gpus": 1}, TWO, None, None, "gpus = 1, and 0 can be used: the installed PyTorch is built without CUDA"),
        ({"gpus": 1, "stand_ins": 1}, TWO, CUDA, None, "gpus = 1 beside stand_ins = 1; have the one or the other"),
    ],
)
def test_gpus_that_cannot_be_had_are_an_error_that_says_why(
    settings: dict[str, Any], inventory: Inventory, built_for: str | None, visible: str | None, text: str
) -> None:
    with pytest.raises(CrewError) as error:
        usable_gpus(Settings(**settings), inventory, built_for, visible)
    assert str(error.value).startswith(text)


def test_this_machine_has_a_crew() -> None:
    crew = muster(Settings(workers=2, gpus=0))
    assert crew.kinds() == {"cpu-0": "cpu", "cpu-1": "cpu", "loader-0": "loader", "loader-1": "loader"}
    assert crew.host.processors is not None
    assert 0 < crew.host.processors <= len(os.sched_getaffinity(0))
