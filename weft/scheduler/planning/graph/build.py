"""The iteration graph of a placed job: its tasks in the order of their lanes, and every edge between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.graph import Graph
from weft.plan.placement import Placement
from weft.plan.plan import Ring, Role
from weft.scheduler.planning.graph.buckets import BucketGraph
from weft.scheduler.planning.graph.lane_order import LaneOrder
from weft.scheduler.planning.graph.pipeline import GraphBuilder
from weft.spec.strategy import Strategy


def build_graph(
    strategy: Strategy,
    placement: Placement,
    rings: Sequence[Ring],
    *,
    order: LaneOrder | None = None,
    has_buffers: bool = False,
    weighted: bool = False,
    snapshots: bool = False,
) -> Graph:
    """order: unset, lanes take buckets as they come, and each forward is whole. has_buffers: replicas share those of
    the first one. weighted: what a microbatch counts is known once its whole batch is loaded. snapshots: what training
    comes to is copied now and then."""
    builder = GraphBuilder(strategy, placement, all_read=any(ring.role is Role.BATCH for ring in rings))
    builder.load_tasks()
    if placement.synchronisation is not None:
        synchronise = BucketGraph(builder, placement.synchronisation, order or LaneOrder())
        builder.borders = synchronise.borders()
        builder.compute_tasks(synchronise.milestones)
        synchronise.tasks()
        if snapshots:
            builder.snapshot_tasks()
            synchronise.snapshot_tasks()
        builder.flow_edges()
        synchronise.edges()
        if snapshots:
            synchronise.snapshot_edges()
        if snapshots and strategy.verify == "digest":
            synchronise.verify_edges()
    else:
        builder.compute_tasks()
        if snapshots and placement.learns:
            builder.snapshot_tasks()
        builder.flow_edges()
        if placement.learns:
            builder.update_edges()
    for ring in rings:
        builder.ring(ring)
    if has_buffers:
        builder.buffer_edges(recomputes=strategy.recompute)
    if weighted and not strategy.steals:
        builder.weight_edges()
    return builder.graph()
