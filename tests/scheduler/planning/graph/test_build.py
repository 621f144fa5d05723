"""The edges suffice: every reader finds what it should, however the lanes race. And what edges of each kind mean."""

from __future__ import annotations

import dataclasses
import random
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.buckets import Route
from weft.plan.course import Course
from weft.plan.graph import Graph, Lane, Task
from weft.plan.inspection import Inspection, ParameterFacts, UnitFacts
from weft.plan.itinerary import Itinerary
from weft.plan.kinds import KINDS, Cause, Kind
from weft.plan.placement import Placement
from weft.plan.plan import Plan
from weft.plan.tables import Adjustment
from weft.plan.worker_view import WorkerView
from weft.scheduler.planning.graph.build import build_graph
from weft.scheduler.planning.graph.lane_order import lane_order
from weft.scheduler.planning.partition import partition
from weft.scheduler.planning.placing import place
from weft.scheduler.planning.rings import make_rings
from weft.spec.replica import Replica
from weft.spec.strategy import Prefetch, Strategy

_MODEL = runpy.run_path(str(Path(__file__).with_name("memory_model.py")))

CPU, GPU = {"device": "cpu", "stages": 1}, {"device": "gpu", "stages": 1}
PIPE = {"device": "cpu", "stages": 2, "split": [1]}
PIPE_ON_GPU = PIPE | {"device": "gpu"}

PlanOf = Callable[..., Plan]
InspectionOf = Callable[..., Inspection]
UnitOf = Callable[..., UnitFacts]
ParameterOf = Callable[..., ParameterFacts]
StrategiesOf = Callable[[int], st.SearchStrategy[Strategy]]


class Race:
    """Runs every iteration of a case, lanes in any order, and lets nothing but the board order them."""

    def __init__(self, case: Any, rng: random.Random) -> None:
        self._case, self._rng = case, rng
        self._board = [-1] * len(case.graph.tasks)
        self._posted: dict[tuple[int, int], dict[Lane, int]] = {}
        self._clocks: dict[Lane, dict[Lane, int]] = {lane: {} for lane in case.graph.programs}
        self._memory = _MODEL["Memory"]()
        self._workers = _MODEL["Workers"](case, self._post, rng)

    def to_end(self) -> None:
        count = self._case.course.itinerary.num_iterations
        queues = {
            lane: [(index, task) for index in range(count) for task in program][::-1]
            for lane, program in self._case.graph.programs.items()
        }
        while any(queues.values()):
            able = [lane for lane, queue in queues.items() if queue and self._is_ready(*queue[-1])]
            assert able, "a deadlock"
            queue = queues[self._rng.choice(able)]
            while queue and self._is_ready(*queue[-1]):
                self._run(*queue.pop())

    def _waits(self, index: int, number: int) -> Iterable[tuple[int, int]]:
        """(task, iteration) for each word that the lane waits for, as weft.workers.lanes.lane does."""
        task, i = self._case.graph.tasks[number], self._case.course.iteration(index)
        if (not i.learns and KINDS[task.kind].learns) or not self._workers.takes(task, i):
            return
        stale = task.kind is Kind.UP and self._case.placement.replicas[task.replica].staleness > 0
        for edge in self._case.graph.cross_lane_inputs(number):
            if self._workers.skips(edge, task, i):
                continue
            needed = index - edge.distance
            if stale and edge.cause is Cause.UPDATE:
                needed = self._case.course.update_of(self._workers.next_version(task, i))
            if needed >= 0:
                yield edge.source, needed

    def _is_ready(self, index: int, number: int) -> bool:
        return all(self._board[source] >= needed for source, needed in self._waits(index, number))

    def _run(self, index: int, number: int) -> None:
        task, i = self._case.graph.tasks[number], self._case.course.iteration(index)
        clock = self._clocks[task.lane]
        for waited in self._waits(index, number):
            for lane, tick in self._posted[waited].items():
                clock[lane] = max(clock.get(lane, 0), tick)
        me = _MODEL["Running"](f"{task} of iteration {index}", task.lane, clock, self._memory)
        if (i.learns or not KINDS[task.kind].learns) and self._workers.takes(task, i):
            self._workers.run(task, i, me)
        self._post(task, index)

    def _post(self, task: Task, index: int) -> None:
        """The first time counts: who waits may go on from then."""
        self._board[task.id] = index
        self._posted.setdefault((task.id, index), dict(self._clocks[task.lane]))


def make_case(
    strategy: Strategy,
    inspection: Inspection,
    itinerary: Itinerary,
    rng: random.Random,
    *,
    local: frozenset[int] = frozenset(),
    has_buffers: bool = False,
) -> Any:
    """In every fifth iteration some parameter of a bucket gets no gradient."""
    cuts = [
        partition(inspection.units, len(replica.split or ()) + 1, replica.split) for replica in strategy.replica_list
    ]
    windows = [replica.working_window for replica in strategy.replica_list]
    placement = place(strategy, inspection, cuts, local, windows=windows, learns=not itinerary.forward_only)
    rings = make_rings(strategy, inspection, placement)
    order = lane_order(strategy, inspection, placement)
    graph = build_graph(strategy, placement, rings, order=order, has_buffers=has_buffers, weighted=inspection.weighted)
    course = Course(
        WorkerView(
            position=0,
            stages=(),
            replicas=placement.replicas,
            shares=tuple(strategy.share_list),
            share="stealing" if strategy.steals else "fixed",
            recompute=strategy.recompute,
            itinerary=itinerary,
            rings=rings,
            num_tasks=len(graph.tasks),
            programs={},
            waits={},
            wakes=frozenset(),
            first_stages=(),
            synchronisation=placement.synchronisation,
            reporter=None,
        )
    )
    set_routes(course, placement, rng)
    grads = [task for task in graph.tasks if task.kind is Kind.GRAD]
    absent = [(t, i) for t in grads for i in range(itinerary.num_iterations) if rng.random() < 0.2]
    numbers = range(sum(replica.microbatches for replica in placement.replicas))
    weightless = [(i, n) for i in range(itinerary.num_iterations) for n in numbers if rng.random() < 0.1]
    return _MODEL["Case"](
        strategy=strategy,
        placement=placement,
        rings={ring.name: ring for ring in rings},
        graph=graph,
        course=course,
        has_buffers=has_buffers,
        weighted=inspection.weighted,
        absent=frozenset(((task.replica, task.stage), task.bucket, i) for task, i in absent),
        weightless=frozenset(weightless) if inspection.weighted else frozenset(),
        taken=taken(course, rng) if course.steals else {},
    )


def set_routes(course: Course, placement: Placement, rng: random.Random) -> None:
    """Each bucket that may goes any way in each iteration."""
    sync = placement.synchronisation
    either = [p.index for p in sync.buckets if p.route is Route.EITHER] if sync else []
    for index in range(1, course.itinerary.num_iterations):
        course.adjust(index, Adjustment(local=[bucket for bucket in either if rng.random() < 0.5]))


def taken(course: Course, rng: random.Random) -> dict[tuple[int, int, int], int]:
    """Each microbatch of each batch goes to the next position of any replica."""
    taken: dict[tuple[int, int, int], int] = {}
    for index in range(course.itinerary.num_iterations):
        free = [iter(range(count)) for count in course.microbatches]
        for part in course.parts(course.iteration(index))[0]:
            if part.size:
                replica = rng.randrange(len(free))
                taken[index, replica, next(free[replica])] = part.number
    return taken


@st.composite
def itineraries(draw: st.DrawFn, num_microbatches: int) -> Itinerary:
    """Ragged last batches, validation or none, an epoch that is cut off."""
    batch_size = num_microbatches + draw(st.integers(0, 3))
    forward_only = draw(st.integers(0, 9)) == 9
    return Itinerary(
        num_train=draw(st.integers(1, 3 * batch_size)),
        num_validation=0 if forward_only else draw(st.sampled_from([0, 1, 2 * batch_size])),
        batch_size=batch_size,
        steps=draw(st.integers(3, 6)),
        forward_only=forward_only,
    )


@pytest.mark.slow(seconds=5)
@settings(max_examples=75, deadline=None)
@given(data=st.data(), rng=st.randoms(use_true_random=False))
def test_every_reader_finds_what_it_should_however_the_lanes_race(
    inspection_of: InspectionOf,
    unit_of: UnitOf,
    parameter_of: ParameterOf,
    strategies_of: StrategiesOf,
    data: st.DataObject,
    rng: random.Random,
) -> None:
    """Replicas of any kind and cut, with tied parameters, owners anywhere, clipping, staleness and empty shares."""
    units = [unit_of(number) for number in range(data.draw(st.integers(3, 5)))]
    users = st.sets(st.integers(0, len(units) - 1), min_size=1, max_size=3).map(sorted)
    parameters = [
        parameter_of(*those, num_elements=data.draw(st.sampled_from([1, 300])), state=())
        for those in data.draw(st.lists(users, min_size=1, max_size=6))
    ]
    inspection = inspection_of(
        units,
        parameters=tuple(parameters),
        elementwise=data.draw(st.booleans()),
        weighted=data.draw(st.booleans()),
        update_seconds=data.draw(st.sampled_from([0.0, 100.0])),  # next to a second of each forward, two of a backward
    )
    strategy = data.draw(strategies_of(len(units)))
    case = make_case(
        strategy,
        inspection,
        data.draw(itineraries(sum(strategy.microbatch_counts))),
        rng,
        local=data.draw(st.frozensets(st.integers(0, 6))),
        has_buffers=data.draw(st.booleans()),
    )
    case.graph.check()
    Race(case, rng).to_end()


@pytest.mark.slow(seconds=2)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), rng=st.randoms(use_true_random=False))
def test_parts_of_a_forward_find_what_they_read_however_the_lanes_race(
    inspection_of: InspectionOf, unit_of: UnitOf, parameter_of: ParameterOf, data: st.DataObject, rng: random.Random
) -> None:
    """A bucket for each unit, some that several units read, updates that are late, and replicas of any kind."""
    units = [unit_of(number) for number in range(data.draw(st.integers(2, 6)))]
    parameters = [parameter_of(number, num_elements=300, state=()) for number in range(len(units))]
    if data.draw(st.booleans()):
        parameters.append(parameter_of(0, len(units) - 1, num_elements=300, state=()))
    inspection = inspection_of(units, parameters=tuple(parameters), update_seconds=100.0)
    strategy = Strategy(
        replicas=data.draw(st.sampled_from([[CPU, CPU], [GPU], [GPU, CPU], [GPU, GPU], [PIPE, CPU], [PIPE_ON_GPU]])),
        update=data.draw(st.sampled_from(["local", "cpu", "balanced"])),
        microbatches=data.draw(st.integers(1, 2)),
        bucket_mib=0.001,
        clip_norm=data.draw(st.none() | st.just(1.0)),
        waits="layer",
    )
    itinerary = data.draw(itineraries(sum(strategy.microbatch_counts)).filter(lambda each: not each.forward_only))
    case = make_case(strategy, inspection, itinerary, rng, local=data.draw(st.frozensets(st.integers(0, 6))))
    case.graph.check()
    Race(case, rng).to_end()


@pytest.mark.slow(seconds=2)
@pytest.mark.pairs(2, transfer=(2, 5), loaders=(2, 3), shares=([1.0, 0.0], [1.0, 1.0]))
def test_what_microbatches_count_has_room_for_loaders_that_go_ahead_of_devices_that_go_ahead_of_others(
    inspection_of: InspectionOf, unit_of: UnitOf, loaders: int, transfer: int, shares: list[float]
) -> None:
    """A loader of one device's microbatches overwrote a weight of seven iterations before, which another device had
    still to read: that each fetches ahead was thought of for one of the two."""
    inspection = inspection_of([unit_of(number) for number in range(3)], weighted=True)
    strategy = Strategy.model_validate(
        {
            "replicas": [PIPE_ON_GPU | {"gpus": 1, "microbatches": 1}, GPU | {"microbatches": 2}],
            "staleness": [1, 0],
            "shares": shares,
            "prefetch": {"load": 1, "transfer": transfer},
            "loaders": loaders,
        }
    )
    itinerary = Itinerary(num_train=1, num_validation=6, batch_size=3, steps=3 * transfer)
    for seed in range(30):
        Race(make_case(strategy, inspection, itinerary, rng := random.Random(seed)), rng).to_end()


@pytest.mark.parametrize("settings", [{"replicas": 2, "clip_norm": 1.0}, {"replicas": [{"device": "gpu"}]}])
def test_the_model_notices_when_a_later_part_does_not_wait(
    inspection_of: InspectionOf, unit_of: UnitOf, settings: dict[str, Any]
) -> None:
    units = [unit_of(number, parameter_bytes=2000) for number in range(4)]
    strategy = Strategy.model_validate({"bucket_mib": 1e-3, "update": "cpu", "waits": "layer", **settings})
    itinerary = Itinerary(num_train=12, num_validation=8, batch_size=4, steps=6)
    case = make_case(strategy, inspection_of(units, update_seconds=100.0), itinerary, random.Random(0))
    parts = [task.id for task in case.graph.tasks if task.kind is Kind.FORWARD and task.holder == (0, 0)]
    assert len(parts) >= 3
    for part in parts:
        kept = [e for e in case.graph.edges if e.target != part or e.cause is not Cause.UPDATE]
        with pytest.raises(AssertionError, match=r"a race: |reads "):
            Race(
                dataclasses.replace(case, graph=Graph(case.graph.tasks, tuple(kept), case.graph.programs)),
                random.Random(0),
            ).to_end()


@pytest.mark.slow(seconds=7)
@settings(max_examples=75, deadline=None)
@given(data=st.data(), rng=st.randoms(use_true_random=False))
def test_a_bucket_may_go_either_way_in_each_iteration(
    inspection_of: InspectionOf,
    unit_of: UnitOf,
    parameter_of: ParameterOf,
    strategies_of: StrategiesOf,
    data: st.DataObject,
    rng: random.Random,
) -> None:
    """The optimizer's state and the newest parameters are where they are needed, whichever ways follow one another."""
    units = [unit_of(number) for number in range(3)]
    parameters = [parameter_of(number, num_elements=300, state=()) for number in (0, 1, 1, 2)]
    if data.draw(st.booleans()):
        parameters.append(parameter_of(0, 2, num_elements=300, state=()))
    inspection = inspection_of(
        units,
        parameters=tuple(parameters),
        elementwise=data.draw(st.booleans()),
        update_seconds=data.draw(st.sampled_from([0.0, 100.0])),
    )
    drawn = data.draw(strategies_of(len(units)).filter(lambda each: any(r.device == "gpu" for r in each.replica_list)))
    strategy = drawn.model_copy(update={"update": "balanced", "staleness": 0, "share": "fixed"})
    itinerary = data.draw(itineraries(sum(strategy.microbatch_counts)).filter(lambda each: not each.forward_only))
    case = make_case(strategy, inspection, itinerary, rng, local=data.draw(st.frozensets(st.integers(0, 6))))
    assert any(part.route is Route.EITHER for part in case.placement.synchronisation.buckets)
    case.graph.check()
    Race(case, rng).to_end()


@pytest.mark.slow(seconds=5)
@settings(max_examples=75, deadline=None)
@given(data=st.data(), rng=st.randoms(use_true_random=False))
def test_layers_of_a_working_window_take_turns_however_the_lanes_race(
    inspection_of: InspectionOf, unit_of: UnitOf, parameter_of: ParameterOf, data: st.DataObject, rng: random.Random
) -> None:
    """Some in buckets together, some that share a parameter; beside another replica or alone."""
    units = [unit_of(number) for number in range(data.draw(st.integers(1, 6)))]
    parameters = [parameter_of(number, num_elements=300) for number in range(len(units)) for _ in range(2)]
    if data.draw(st.booleans()):
        parameters.append(parameter_of(0, len(units) - 1, num_elements=300))
    inspection = inspection_of(units, parameters=tuple(parameters), weighted=data.draw(st.booleans()))
    layers = list(range(1, len(units)))
    window = Replica(device="gpu", working_window=data.draw(st.integers(1, len(units))), split=layers)
    others = [Replica(device=device) for device in data.draw(st.sampled_from([[], [], ["cpu"], ["gpu"]]))]
    strategy = Strategy(
        replicas=data.draw(st.permutations([window, *others])),
        microbatches=data.draw(st.integers(1, 3)),
        update="cpu",
        recompute=data.draw(st.booleans()),
        sync=data.draw(st.sampled_from(["coarse", "fine"])),
        bucket_mib=data.draw(st.sampled_from([0.001, 1.0])),
        clip_norm=data.draw(st.none() | st.just(1.0)),
    )
    itinerary = data.draw(itineraries(sum(strategy.microbatch_counts)).filter(lambda each: not each.forward_only))
    case = make_case(strategy, inspection, itinerary, rng, has_buffers=data.draw(st.booleans()))
    case.graph.check()
    Race(case, rng).to_end()


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_weights_of_a_batch_stay_while_the_loaders_of_other_replicas_run_ahead(
    inspection_of: InspectionOf, unit_of: UnitOf, rng: random.Random
) -> None:
    """Each loader has one replica's microbatches alone, and nothing but its batches holds one replica to the other."""
    strategy = Strategy(replicas=2, loaders=2, prefetch=Prefetch(load=5, transfer=1))
    itinerary = Itinerary(num_train=2, num_validation=0, batch_size=2, steps=24, forward_only=True)
    Race(make_case(strategy, inspection_of([unit_of(0)], weighted=True), itinerary, rng), rng).to_end()


CLIPPED = {"clip_norm": 1.0}
BALANCED = {"update": "balanced"}


@pytest.mark.parametrize(
    ("source", "target", "settings"),
    [
        (Kind.LOAD, Kind.FETCH, {"replicas": [GPU]}),
        (Kind.BACKWARD, Kind.LOAD, {"replicas": [CPU]}),
        (Kind.FETCH, Kind.LOAD, {"replicas": [GPU]}),
        (Kind.BACKWARD, Kind.FETCH, {"replicas": [GPU]}),
        (Kind.FORWARD, Kind.FORWARD, {"replicas": [PIPE]}),
        (Kind.BACKWARD, Kind.BACKWARD, {"replicas": [PIPE]}),
        (Kind.GRAD, Kind.SYNC, {"replicas": [CPU, CPU]}),
        (Kind.GRAD, Kind.DOWN, {"replicas": [GPU, CPU]}),
        (Kind.DOWN, Kind.SYNC, {"replicas": [GPU, CPU]}),
        (Kind.UPDATE, Kind.FORWARD, {"replicas": [CPU, CPU]}),
        (Kind.UPDATE, Kind.UP, {"replicas": [GPU], "update": "cpu"}),
        (Kind.UPDATE, Kind.UP, {"replicas": [CPU, CPU], "staleness": [0, 1]}),
        (Kind.UP, Kind.FORWARD, {"replicas": [GPU], "update": "cpu"}),
        (Kind.BACKWARD, Kind.UP, {"replicas": [GPU], "staleness": 1, "update": "cpu"}),
        (Kind.SYNC, Kind.UP, {"replicas": [GPU, CPU]}),
        (Kind.UP, Kind.UPDATE, {"replicas": [GPU, CPU]}),
        (Kind.UP, Kind.DOWN, {"replicas": [GPU, GPU]}),
        (Kind.UP, Kind.BACKWARD, {"replicas": [CPU, GPU]}),
        (Kind.UPDATE, Kind.DOWN, {"replicas": [GPU, CPU]}),
        (Kind.UPDATE, Kind.REFRESH, {"replicas": [GPU, CPU]}),
        (Kind.REFRESH, Kind.FORWARD, {"replicas": [CPU, GPU]}),
        (Kind.SYNC, Kind.UPDATE, {"replicas": [CPU, CPU], "sync": "coarse"} | CLIPPED),
        (Kind.SYNC, Kind.VALIDATE, {"replicas": [PIPE, CPU]} | CLIPPED),
        (Kind.VALIDATE, Kind.FORWARD, {"replicas": [PIPE, CPU]} | CLIPPED),
        (Kind.VALIDATE, Kind.DOWN, {"replicas": [GPU | {"stages": 2, "split": [1]}, CPU]} | CLIPPED),
        (Kind.VALIDATE, Kind.FORWARD, {"replicas": [CPU, GPU | {"stages": 2, "split": [1]}]} | CLIPPED),
        (Kind.GRAD, Kind.DOWN, {"replicas": [GPU]} | BALANCED),
        (Kind.GRAD, Kind.SYNC, {"replicas": [GPU]} | BALANCED),
        (Kind.DOWN, Kind.SYNC, {"replicas": [GPU]} | BALANCED),
        (Kind.UPDATE, Kind.FORWARD, {"replicas": [GPU]} | BALANCED),
        (Kind.UPDATE, Kind.UP, {"replicas": [GPU]} | BALANCED),
        (Kind.UP, Kind.FORWARD, {"replicas": [GPU]} | BALANCED),
        (Kind.SYNC, Kind.VALIDATE, {"replicas": [GPU]} | BALANCED | CLIPPED),
        (Kind.VALIDATE, Kind.FORWARD, {"replicas": [GPU]} | BALANCED | CLIPPED),
        (Kind.UPDATE, Kind.UP, {"replicas": [GPU, GPU]} | BALANCED),
        (Kind.SYNC, Kind.UP, {"replicas": [GPU, CPU]} | BALANCED),
        (Kind.SYNC, Kind.UPDATE, {"replicas": [GPU, GPU], "sync": "coarse"} | BALANCED | CLIPPED),
    ],
)
def test_the_model_notices_when_an_edge_is_missing(
    inspection_of: InspectionOf,
    unit_of: UnitOf,
    parameter_of: ParameterOf,
    source: Kind,
    target: Kind,
    settings: dict[str, Any],
) -> None:
    """Otherwise the test above would prove nothing."""
    strategy = Strategy.model_validate({"bucket_mib": 1e-3, **settings})
    parameters = (parameter_of(0, state=()), parameter_of(1, num_elements=500, state=()))
    inspection = inspection_of([unit_of(0), unit_of(1)], parameters=parameters)
    itinerary = Itinerary(num_train=12, num_validation=8, batch_size=4, steps=6)
    case = make_case(strategy, inspection, itinerary, random.Random(0))
    Race(case, random.Random(0)).to_end()
    graph = case.graph
    kept = [
        edge
        for edge in graph.edges
        if (graph.tasks[edge.source].kind, graph.tasks[edge.target].kind) != (source, target)
    ]
    assert len(kept) < len(graph.edges)
    with pytest.raises(AssertionError, match=r"a race: |reads "):
        Race(
            dataclasses.replace(case, graph=Graph(graph.tasks, tuple(kept), graph.programs)), random.Random(0)
        ).to_end()


# --- what the edges mean


def sources_of(plan: Plan, task: Task, distance: int | None = None) -> list[str]:
    """Names of the tasks that it waits for, at one distance or any."""
    edges = [edge for edge in plan.graph.inputs(task.id) if distance in (None, edge.distance)]
    return sorted(str(plan.graph.tasks[edge.source]) for edge in edges)


def tasks_of(plan: Plan, kind: Kind) -> list[Task]:
    return [task for task in plan.graph.tasks if task.kind is kind]


def test_coarse_synchronisation_waits_for_every_backward_and_fine_for_a_buckets_own_gradients(plan_of: PlanOf) -> None:
    pipe = {"device": "cpu", "stages": 2, "microbatches": 2}
    fine, coarse = (plan_of(replicas=[pipe, pipe], bucket_mib=1e-4, sync=sync) for sync in ("fine", "coarse"))
    last = {"BACKWARD(0,1)", "BACKWARD(1,1)", "BACKWARD(r1,0,1)", "BACKWARD(r1,1,1)"}
    for plan in fine, coarse:
        for sync in tasks_of(plan, Kind.SYNC):
            stage = 1 - sync.bucket
            waits = {f"GRAD({stage},b{sync.bucket})", f"GRAD(r1,{stage},b{sync.bucket})"}
            assert set(sources_of(plan, sync)) == waits | (last if plan is coarse else set())
    assert {task.lane.name for task in tasks_of(fine, Kind.SYNC)} == {"sync"}
    assert {task.lane.name for task in tasks_of(coarse, Kind.SYNC)} == {"compute"}


def test_an_update_waits_for_every_owners_last_sync_where_the_norm_bounds_it(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    """Alone it is put off until then; where owners have time to hide it, it goes ahead and is validated."""
    inspection = inspection_of([unit_of(number, parameter_bytes=4000) for number in range(2)])
    plan = plan_of(inspection, replicas=2, clip_norm=1.0)
    for update in tasks_of(plan, Kind.UPDATE):
        assert sources_of(plan, update) == ["SYNC(o0,b0)", "SYNC(o1,b0)"]
    assert not tasks_of(plan, Kind.VALIDATE)
    plan = plan_of(inspection, replicas=2, stages=2, clip_norm=1.0)
    for update in tasks_of(plan, Kind.UPDATE):
        assert sources_of(plan, update) == [f"SYNC(o{update.owner},b{update.bucket})"]
    for validate in tasks_of(plan, Kind.VALIDATE):
        assert len(sources_of(plan, validate)) == len(tasks_of(plan, Kind.SYNC)) == 4
    for forward in tasks_of(plan, Kind.FORWARD):
        waits = [name[:8] for name in sources_of(plan, forward, 1)]
        assert waits.count("VALIDATE") == 2
        assert "UPDATE(o" not in waits


def test_a_device_updates_with_a_sum_beside_the_rest_of_its_backward_unless_all_is_coarse(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    inspection = inspection_of([unit_of(number, parameter_bytes=4000) for number in range(2)])
    replicas = [{"device": "gpu", "stages": 2, "gpus": 1}, {"device": "cpu"}]
    fine, coarse = (plan_of(inspection, replicas=replicas, sync=sync) for sync in ("fine", "coarse"))
    for plan in fine, coarse:
        own = [task for task in tasks_of(plan, Kind.UPDATE) if task.owner is None]
        assert len(own) == 2
        for task in own:
            last = [f"BACKWARD({task.stage},0)"] if plan is coarse else []
            assert sources_of(plan, task) == [*last, f"UP({task.stage},b{task.bucket})"]
            assert task.lane.name.startswith("compute" if plan is coarse else "sync")


def test_what_a_device_updates_beside_its_backward_is_copied_behind_that(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    """Where a CPU replica trains, its owners show it."""
    inspection = inspection_of([unit_of(0, parameter_bytes=4000)])
    for other, updates in (("gpu", ["UPDATE(0,b0)"]), ("cpu", [])):
        plan = plan_of(inspection, replicas=[{"device": "gpu"}, {"device": other}])
        first = next(task for task in tasks_of(plan, Kind.SNAPSHOT) if task.owner is None)
        assert sources_of(plan, first) == updates


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_tied_parameter_changes_when_no_later_stage_reads_it_in_the_second_part_of_a_backward(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, parameter_of: ParameterOf, device: str
) -> None:
    """Its gradient is whole with the first stage's backward, which the first part of the second's is enough for."""
    inspection = inspection_of([unit_of(0), unit_of(1)], parameters=(parameter_of(0, 1),))
    replica = {"device": device, "stages": 2}
    plan = plan_of(inspection, schedule="zero-bubble", microbatches=2, replicas=[replica], update="cpu")
    writes = [task for task in tasks_of(plan, Kind.UPDATE if device == "cpu" else Kind.UP) if task.stage != 0]
    assert writes
    assert all("WEIGHT(1,1)" in sources_of(plan, task) for task in writes)


def test_a_tied_parameters_gradient_comes_from_the_first_of_its_stages_and_all_wait_for_its_update(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf, parameter_of: ParameterOf
) -> None:
    inspection = inspection_of([unit_of(0), unit_of(1)], parameters=(parameter_of(0, 1),))
    for device, ends in (("cpu", ["GRAD(0,b0)"]), ("gpu", ["DOWN(0,b0)"])):
        plan = plan_of(inspection, replicas=[{"device": device, "stages": 2}], update="cpu")
        assert [str(task) for task in tasks_of(plan, Kind.GRAD)] == ["GRAD(0,b0)"]
        assert all(sources_of(plan, task) == ends for task in tasks_of(plan, Kind.SYNC))
        updated = {name[:2] for task in tasks_of(plan, Kind.FORWARD) for name in sources_of(plan, task, 1)}
        assert updated >= {"UP"}
        assert len(tasks_of(plan, Kind.UP)) == (2 if device == "gpu" else 0)


def test_a_stale_replicas_parameters_come_up_from_as_many_updates_back(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    plan = plan_of(inspection_of([unit_of(0, parameter_bytes=4000)]), replicas=3, staleness=[0, 1, 2])
    updates = ["UPDATE(o0,b0)", "UPDATE(o1,b0)", "UPDATE(o2,b0)"]
    ups = {task.replica: sources_of(plan, task, task.replica) for task in tasks_of(plan, Kind.UP)}
    assert ups == {1: updates, 2: updates}
    for forward in tasks_of(plan, Kind.FORWARD):
        waits = [name for name in sources_of(plan, forward, 1) if name.startswith("U")]
        assert waits == ([f"UP(r{forward.replica},0,b0)"] if forward.replica else updates)


def test_the_loader_waits_for_devices_to_fetch_and_for_others_to_compute(plan_of: PlanOf) -> None:
    plan = plan_of(replicas=[{"device": "gpu"}, {"device": "cpu"}], prefetch={"load": 3})
    waits = {str(task): sources_of(plan, task, 3) for task in tasks_of(plan, Kind.LOAD)}
    assert waits == {"LOAD(0,0)": ["FETCH(0,0)"], "LOAD(r1,0,0)": ["BACKWARD(r1,0,0)"]}


def test_where_targets_weigh_a_microbatch_its_batch_is_loaded_whole_first(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    inspection = inspection_of([unit_of(0)], weighted=True)
    replicas = [{"device": "cpu", "microbatches": 3}, {"device": "cpu", "microbatches": 2}]
    plan = plan_of(inspection, replicas=replicas)
    for task in tasks_of(plan, Kind.FORWARD):
        assert task.microbatch or "LOAD(0,2)" in sources_of(plan, task, 0), "the last in the loader's order"


def test_each_loaders_last_load_ends_what_a_batch_waits_for(
    plan_of: PlanOf, inspection_of: InspectionOf, unit_of: UnitOf
) -> None:
    weighted = plan_of(inspection_of([unit_of(0)], weighted=True), microbatches=4, loaders=2)
    first, *_ = tasks_of(weighted, Kind.FORWARD)
    assert {"LOAD(0,2)", "LOAD(1,3)"} <= set(sources_of(weighted, first, 0))
    stealing = plan_of(microbatches=4, loaders=2, replicas=2, share="stealing")
    for task in tasks_of(stealing, Kind.FORWARD):
        assert task.microbatch or {"LOAD(0,2)", "LOAD(1,3)"} == set(sources_of(stealing, task, 0))


def test_a_loader_waits_for_slots_once_a_batch_but_where_any_of_its_loads_may_be_the_first(plan_of: PlanOf) -> None:
    def waits(**settings: Any) -> dict[str, list[str]]:
        plan = plan_of(loaders=2, **settings)
        return {str(task): sources_of(plan, task, depth) for task in tasks_of(plan, Kind.LOAD) for depth in (2, 3)}

    last = "BACKWARD(0,3)"
    assert waits(microbatches=4, prefetch={"load": 3}) == {
        "LOAD(0,0)": [last],
        "LOAD(1,1)": [last],
        "LOAD(0,2)": [],
        "LOAD(1,3)": [],
    }
    assert waits(prefetch={"load": 2}) == {"LOAD(0,0)": ["BACKWARD(0,0)"], "LOAD(1,0)": ["BACKWARD(0,0)"]}


def test_buffers_are_read_between_two_changes(plan_of: PlanOf) -> None:
    """Under recompute a backward changes them as well, until it puts them back."""
    for recompute, changes in ((False, "FORWARD(0,0)"), (True, "BACKWARD(0,0)")):
        plan = plan_of(replicas=2, recompute=recompute)
        own, other = tasks_of(plan, Kind.FORWARD)
        assert changes in sources_of(plan, other, 1)
        assert "FORWARD(r1,0,0)" in sources_of(plan, own, 1)


def test_a_job_that_only_runs_forward_has_nothing_to_update(plan_of: PlanOf) -> None:
    plan = plan_of(mode="forward", replicas=2, stages=2)
    assert {task.kind for task in plan.graph.tasks} == {Kind.LOAD, Kind.FORWARD, Kind.BACKWARD}
    assert plan.synchronisation is None


def test_an_owner_looks_behind_all_forwards_whether_what_they_have_read_was_as_it_had_left_it(plan_of: PlanOf) -> None:
    """A validation was told before the next update found that a bit had changed."""
    graphs = {
        verify: plan_of(replicas=2, stages=2, microbatches=2, verify=verify).graph for verify in ("digest", "off")
    }
    for verify, graph in graphs.items():
        forwards = {task.id for task in graph.tasks if task.kind is Kind.FORWARD}
        owned = [task for task in graph.tasks if task.kind is Kind.SNAPSHOT and task.owner is not None]
        assert len(forwards) == 8
        assert owned
        for task in owned:
            waits = {edge.source for edge in graph.inputs(task.id) if edge.distance == 0}
            assert waits == (forwards if verify == "digest" else set())
