"""Placement: which worker holds what, who owns each bucket, and where its update is made."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.buckets import Route
from weft.plan.graph import Lane
from weft.plan.inspection import Inspection, ParameterFacts, UnitFacts
from weft.plan.placement import Placement
from weft.scheduler.planning.partition import partition
from weft.scheduler.planning.placing import place
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import worker_counts, workers_needed

InspectionOf = Callable[..., Inspection]
UnitOf = Callable[..., UnitFacts]
ParameterOf = Callable[..., ParameterFacts]
StrategiesOf = Callable[[int], st.SearchStrategy[Strategy]]
PlacementOf = Callable[..., Placement]

CPU, GPU = {"device": "cpu"}, {"device": "gpu"}


@pytest.fixture
def placement_of(inspection_of: InspectionOf, unit_of: UnitOf) -> PlacementOf:
    """Of a model of two units with a bucket each, the second unit's first; or of the inspection given."""

    def placement(
        inspection: Inspection | None = None, local: frozenset[int] = frozenset(), **strategy: Any
    ) -> Placement:
        inspection = inspection or inspection_of([unit_of(n, parameter_bytes=4000) for n in range(2)])
        resolved = Strategy.model_validate({"bucket_mib": 0.004, **strategy})
        cuts = [partition(inspection.units, replica.stages, replica.split) for replica in resolved.replica_list]
        return place(resolved, inspection, cuts, local)

    return placement


def routes(placement: Placement) -> list[str]:
    assert placement.synchronisation is not None
    return [str(part.route) for part in placement.synchronisation.buckets]


def owners(placement: Placement) -> list[list[str]]:
    """The lanes that own a part of each bucket."""
    sync = placement.synchronisation
    assert sync is not None
    return [[str(sync.owners[owned.owner]) for owned in part.ranges] for part in sync.buckets]


def test_workers_are_cpu_stages_then_hosts_then_devices_then_the_loader(placement_of: PlacementOf) -> None:
    placement = placement_of(replicas=[GPU | {"stages": 2}, CPU])
    assert placement.workers == ("cpu", "gpu", "gpu", "loader")
    assert placement.worker_of == {(0, 0): 1, (0, 1): 2, (1, 0): 0}
    assert placement.loaders == (3,)
    placement = placement_of(replicas=[GPU, GPU])
    assert placement.workers == ("cpu", "gpu", "gpu", "loader"), "their gradients meet on a host"
    assert placement.worker_of == {(0, 0): 1, (1, 0): 2}


@pytest.fixture
def four(inspection_of: InspectionOf, unit_of: UnitOf) -> Inspection:
    return inspection_of([unit_of(n) for n in range(4)])


def test_stages_are_with_the_worker_that_the_schedule_has_them_in(placement_of: PlacementOf, four: Inspection) -> None:
    for schedule, workers in (("interleaved", [0, 1, 0, 1]), ("zero-bubble-v", [0, 1, 1, 0])):
        placement = placement_of(four, stages=4, schedule=schedule, microbatches=4)
        assert [placement.worker_of[holder] for holder in placement.holders()] == workers
        assert {str(placement.compute_lane(*holder)) for holder in placement.holders()} == {"0/compute", "1/compute"}


def test_lines_that_share_a_gpu_have_a_stream_each(placement_of: PlacementOf, four: Inspection) -> None:
    placement = placement_of(four, replicas=[GPU | {"stages": 4, "gpus": 1}], schedule="interleaved", microbatches=4)
    lanes = [str(placement.compute_lane(*holder)) for holder in placement.holders()]
    assert lanes == ["0/compute", "0/compute-1", "0/compute", "0/compute-1"]


@pytest.mark.parametrize(
    ("strategy", "hosts"),
    [
        ({"replicas": [GPU]}, 0),
        ({"replicas": [GPU], "update": "cpu"}, 1),
        ({"replicas": [GPU], "update": "balanced"}, 1),
        ({"replicas": [GPU], "staleness": 1}, 1),
        ({"replicas": [GPU, GPU]}, 1),
        ({"replicas": [GPU, CPU], "update": "cpu"}, 0),
    ],
)
def test_devices_alone_need_a_host_where_gradients_meet_or_updates_are_made(
    strategy: dict[str, Any], hosts: int
) -> None:
    resolved = Strategy.model_validate(strategy)
    needed = workers_needed(resolved)
    assert needed.get("cpu", 0) - sum(replica.device == "cpu" for replica in resolved.replica_list) == hosts
    assert needed["loader"] == 1


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"replicas": [CPU]}, False),
        ({"replicas": [CPU | {"stages": 2}]}, False),
        ({"replicas": [CPU, CPU]}, True),
        ({"replicas": [GPU]}, True),
        ({"replicas": [CPU], "clip_norm": 1.0}, True),
        ({"replicas": [CPU], "skip_nonfinite": True}, True),
        ({"replicas": [CPU], "staleness": 1}, True),
    ],
)
def test_buckets_are_made_where_an_update_concerns_others_than_its_stage(
    placement_of: PlacementOf, strategy: dict[str, Any], expected: bool
) -> None:
    assert (placement_of(**strategy).synchronisation is not None) is expected


def test_tied_parameters_need_buckets_where_a_cut_parts_their_users(
    placement_of: PlacementOf, inspection_of: InspectionOf, unit_of: UnitOf, parameter_of: ParameterOf
) -> None:
    inspection = inspection_of([unit_of(0), unit_of(1)], parameters=(parameter_of(0, 1), parameter_of(1)))
    assert placement_of(inspection).synchronisation is None
    cut = placement_of(inspection, stages=2)
    assert owners(cut) == [["1/sync"], ["0/sync"]], "32 elements, the least that is worth an owner"


def test_a_device_that_holds_tied_parameters_in_two_stages_sums_them_itself(
    placement_of: PlacementOf, inspection_of: InspectionOf, unit_of: UnitOf, parameter_of: ParameterOf
) -> None:
    """It once had no owner, as no host was there, and went on with the gradient of one stage."""
    inspection = inspection_of([unit_of(0), unit_of(1)], parameters=(parameter_of(0, 1), parameter_of(1)))
    placement = placement_of(inspection, replicas=[GPU | {"stages": 2}])
    assert routes(placement) == ["device", "sum"]
    assert owners(placement) == [["1/sync"], ["0/sync"]]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"replicas": [CPU, CPU], "update": "local"}, ["host", "host"]),
        ({"replicas": [GPU], "update": "local"}, ["device", "device"]),
        ({"replicas": [GPU], "update": "cpu"}, ["host", "host"]),
        ({"replicas": [GPU], "update": "balanced"}, ["host", "device"]),
        ({"replicas": [GPU, CPU], "update": "local"}, ["sum", "sum"]),
        ({"replicas": [GPU, CPU], "update": "balanced"}, ["host", "sum"]),
        ({"replicas": [GPU, CPU], "update": "local", "staleness": [0, 1]}, ["host", "host"]),
    ],
)
def test_the_update_of_a_bucket_is_made_where_the_strategy_has_it(
    placement_of: PlacementOf, strategy: dict[str, Any], expected: list[str]
) -> None:
    """balanced: of the two buckets, the second is left to devices. Parameters with versions are the host's."""
    assert routes(placement_of(local=frozenset({1}), **strategy)) == expected


def test_cpu_stages_own_their_part_of_what_they_hold_and_hosts_what_no_cpu_stage_does(
    placement_of: PlacementOf,
) -> None:
    assert owners(placement_of(replicas=[CPU, CPU])) == [["0/sync", "1/sync"]] * 2
    assert owners(placement_of(replicas=[CPU, CPU], sync="coarse")) == [["0/compute", "1/compute"]] * 2
    pipes = placement_of(replicas=[CPU | {"stages": 2}, CPU])
    assert owners(pipes) == [["1/sync", "2/sync"], ["0/sync", "2/sync"]]
    assert owners(placement_of(replicas=[GPU, CPU])) == [["0/sync"]] * 2
    assert owners(placement_of(replicas=[GPU, GPU], sync="coarse")) == [["0/sync"]] * 2
    assert owners(placement_of(replicas=[GPU])) == [["0/sync"]] * 2
    assert owners(placement_of(replicas=[GPU], sync="coarse")) == [["0/compute"]] * 2


def test_a_lane_that_would_own_nothing_is_no_owner(
    placement_of: PlacementOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    """Three replicas and one parameter that nobody may cut: the plan once failed for want of a bucket to begin with."""
    inspection = inspection_of([unit_of(0, parameter_bytes=4000)], elementwise=False)
    placement = placement_of(inspection, replicas=3)
    assert placement.synchronisation is not None
    assert [str(lane) for lane in placement.synchronisation.owners] == ["1/sync"], "the one in the middle"


@pytest.mark.parametrize(
    ("strategy", "speculative"),
    [
        ({"replicas": [CPU, CPU]}, False),
        ({"replicas": [CPU, CPU | {"stages": 2}]}, True),
        ({"replicas": [CPU, CPU | {"stages": 2}], "sync": "coarse"}, False),
        ({"replicas": [GPU], "update": "cpu"}, True),
        ({"replicas": [GPU]}, False),
        ({"replicas": [GPU | {"stages": 2}]}, False),
        ({"replicas": [CPU, GPU | {"stages": 2}]}, True),
        ({"replicas": [GPU | {"stages": 2}], "update": "cpu"}, True),
    ],
)
def test_updates_are_speculative_where_owners_have_time_of_their_own(
    placement_of: PlacementOf, strategy: dict[str, Any], speculative: bool
) -> None:
    for bound in {"clip_norm": 1.0}, {"skip_nonfinite": True}:
        sync = placement_of(**strategy, **bound).synchronisation
        assert sync is not None
        assert (sync.bounded, sync.speculative) == (True, speculative)
    sync = placement_of(**strategy).synchronisation
    assert sync is not None
    assert (sync.bounded, sync.speculative) == (False, False)


@pytest.mark.parametrize(
    ("strategy", "devices_speculate"),
    [
        ({"replicas": [GPU, CPU | {"stages": 2}]}, True),
        ({"replicas": [GPU, GPU]}, True),
        ({"replicas": [GPU, CPU]}, False),
        ({"replicas": [CPU, GPU | {"stages": 2}], "sync": "coarse"}, False),
        ({"replicas": [GPU], "update": "balanced"}, False),
    ],
)
def test_devices_speculate_where_cpu_workers_alone_tell_the_norm(
    placement_of: PlacementOf, strategy: dict[str, Any], devices_speculate: bool
) -> None:
    """Of a bucket that is summed on a device the host knows no norm."""
    sync = placement_of(**strategy, clip_norm=1.0).synchronisation
    assert sync is not None
    assert sync.devices_speculate is devices_speculate


def test_a_replica_is_private_on_a_device_or_where_it_is_stale(placement_of: PlacementOf) -> None:
    placement = placement_of(replicas=[CPU, CPU, GPU], staleness=[0, 2, 0])
    assert [(replica.private, replica.staleness) for replica in placement.replicas] == [
        (False, 0),
        (True, 2),
        (True, 0),
    ]


@settings(deadline=None)
@given(data=st.data())
def test_everything_has_a_worker_of_its_kind_and_every_element_one_owner(
    inspection_of: InspectionOf, unit_of: UnitOf, strategies_of: StrategiesOf, data: st.DataObject
) -> None:
    inspection = inspection_of([unit_of(n, parameter_bytes=data.draw(st.integers(1, 300)) * 4) for n in range(4)])
    strategy = data.draw(strategies_of(4))
    cuts = [partition(inspection.units, replica.stages, replica.split) for replica in strategy.replica_list]
    placement = place(strategy, inspection, cuts, data.draw(st.frozensets(st.integers(0, 3))))
    counted = workers_needed(strategy)
    assert placement.workers == tuple(itertools.chain.from_iterable([kind] * counted[kind] for kind in counted))
    held = {
        worker: {r for (r, _), other in placement.worker_of.items() if other == worker}
        for worker in placement.worker_of.values()
    }
    assert len(held) == sum(worker_counts(strategy))
    assert all(len(replicas) == 1 for replicas in held.values()), "a worker has stages of one replica"
    lanes = {placement.compute_lane(*holder) for holder in placement.holders()}
    lines = sum(len(schedule.programs) for schedule in placement.schedules if schedule is not None)
    assert len(lanes) == lines, "the stages of a line compute in one lane, and each line in its own"
    for (r, _), worker in placement.worker_of.items():
        assert placement.workers[worker] == placement.replicas[r].device
    sync = placement.synchronisation
    if sync is None:
        return
    assert {owned.owner for part in sync.buckets for owned in part.ranges} == set(range(len(sync.owners)))
    assert len(set(sync.owners)) == len(sync.owners)
    for part in sync.buckets:
        assert [0, *(owned.stop for owned in part.ranges)] == [
            *(owned.start for owned in part.ranges),
            part.num_elements,
        ]
        check_owners(placement, part.route, [sync.owners[owned.owner] for owned in part.ranges])


def check_owners(placement: Placement, route: Route, lanes: list[Lane]) -> None:
    kinds = {placement.workers[lane.worker] for lane in lanes}
    assert kinds == ({"gpu"} if route is Route.DEVICE else {"cpu"}), lanes
