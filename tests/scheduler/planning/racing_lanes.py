"""Lanes that race: each goes as far as the edges of the graph let it while the others stand still."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from weft.plan.graph import Lane, Task
from weft.plan.kinds import Kind
from weft.plan.plan import Plan
from weft.plan.schedules.dynamic import PassOrder

SlotsOf = Callable[[Task, bool], tuple[Sequence[str], Sequence[str]]]


def race(plan: Plan, phases: Sequence[bool], rng: random.Random, slots_of: SlotsOf) -> None:
    """Every reader finds its own microbatch in the slot. phases: whether each iteration trains; in validation BACKWARD
    and UPDATE wait for nothing, so less holds the lanes together. slots_of: the names of the rings that a task reads,
    and of those that it writes; asked with whether its iteration trains."""
    graph, depths = plan.graph, {ring.name: ring.depth for ring in plan.rings}
    slots: dict[tuple[str, int], int] = {}
    board = [-1] * len(graph.tasks)
    lanes = {lane: [(i, t) for i in range(len(phases)) for t in program] for lane, program in graph.programs.items()}

    orders = {
        lane: PassOrder((graph.tasks[task] for task in graph.programs[lane]), limit)
        for lane, limit in graph.free.items()
    }

    def ready(iteration: int, task: int) -> bool:
        if not phases[iteration] and graph.tasks[task].kind in (Kind.BACKWARD, Kind.UPDATE):
            return True
        return all(board[edge.source] >= iteration - edge.distance for edge in graph.cross_lane_inputs(task))

    def able(lane: Lane) -> list[int]:
        """Where those tasks of the lane stand that are ready, and that it may begin now."""
        queue = lanes[lane]
        places = orders[lane].places(queue) if lane in orders and queue else [0] * bool(queue)
        return [place for place in places if ready(*queue[place])]

    while any(lanes.values()):
        able_lanes = list(filter(able, lanes))
        assert able_lanes, "a deadlock"
        lane = rng.choice(able_lanes)
        for _ in range(rng.randint(1, 20)):
            if not (places := able(lane)):
                break
            iteration, number = lanes[lane].pop(rng.choice(places))
            if lane in orders:
                orders[lane].begin(number)
            task = graph.tasks[number]
            unit = iteration * plan.microbatches + (task.microbatch or 0)
            reads, writes = slots_of(task, phases[iteration])
            for ring in reads:
                assert slots[ring, unit % depths[ring]] == unit, f"{task} of iteration {iteration} reads {ring}"
            for ring in writes:
                slots[ring, unit % depths[ring]] = unit
            board[number] = iteration
