"""Lanes that race: each goes as far as the edges of the graph let it while the others stand still."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from weft.plan.graph import Task
from weft.plan.kinds import Kind
from weft.plan.plan import Plan

SlotsOf = Callable[[Task, bool], tuple[Sequence[str], Sequence[str]]]


def race(plan: Plan, phases: Sequence[bool], rng: random.Random, slots_of: SlotsOf) -> None:
    """Every reader finds its own microbatch in the slot. phases: whether each iteration trains; in validation BACKWARD
    and UPDATE wait for nothing, so less holds the lanes together. slots_of: the names of the rings that a task reads,
    and of those that it writes; asked with whether its iteration trains."""
    graph, depths = plan.graph, {ring.name: ring.depth for ring in plan.rings}
    slots: dict[tuple[str, int], int] = {}
    board = [-1] * len(graph.tasks)
    lanes = {lane: [(i, t) for i in range(len(phases)) for t in program] for lane, program in graph.programs.items()}

    def ready(iteration: int, task: int) -> bool:
        if not phases[iteration] and graph.tasks[task].kind in (Kind.BACKWARD, Kind.UPDATE):
            return True
        return all(board[edge.source] >= iteration - edge.distance for edge in graph.cross_lane_inputs(task))

    while any(lanes.values()):
        able = [lane for lane, queue in lanes.items() if queue and ready(*queue[0])]
        assert able, "a deadlock"
        lane = rng.choice(able)
        for _ in range(rng.randint(1, 20)):
            if not lanes[lane] or not ready(*lanes[lane][0]):
                break
            iteration, number = lanes[lane].pop(0)
            task = graph.tasks[number]
            unit = iteration * plan.microbatches + (task.microbatch or 0)
            reads, writes = slots_of(task, phases[iteration])
            for ring in reads:
                assert slots[ring, unit % depths[ring]] == unit, f"{task} of iteration {iteration} reads {ring}"
            for ring in writes:
                slots[ring, unit % depths[ring]] = unit
            board[number] = iteration
