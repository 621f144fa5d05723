"""The iteration graph of a placed job: its tasks in the order of their lanes, and every edge between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.graph import Graph
from weft.plan.kinds import Kind
from weft.plan.placement import Placement
from weft.plan.plan import Ring, Role
from weft.scheduler.planning.graph.buckets import BucketGraph
from weft.scheduler.planning.graph.pipeline import GraphBuilder


def build_graph(
    schedule: str,
    placement: Placement,
    rings: Sequence[Ring],
    *,
    coarse: bool = False,
    has_buffers: bool = False,
    recompute: bool = False,
    weighted: bool = False,
    steals: bool = False,
) -> Graph:
    """coarse: every SYNC waits for every BACKWARD. has_buffers: replicas share those of the first one. recompute:
    BACKWARD changes buffers too, for a while. weighted: what a microbatch counts is known once its whole batch is
    loaded. steals: microbatches are loaded by their number, and a replica's position may come to have any of them."""
    builder = GraphBuilder(schedule, placement, steals=steals, all_read=any(ring.role is Role.BATCH for ring in rings))
    builder.load_tasks()
    builder.compute_tasks()
    if placement.synchronisation is not None:
        synchronise = BucketGraph(builder, placement.synchronisation)
        synchronise.tasks()
        builder.flow_edges()
        synchronise.edges(coarse=coarse)
    else:
        builder.flow_edges()
        if placement.learns:
            builder.update_edges()
    for ring in rings:
        builder.ring(ring)
    if has_buffers:
        builder.buffer_edges(Kind.BACKWARD if recompute else Kind.FORWARD)
    if weighted and not steals:
        builder.weight_edges()
    return builder.graph()
