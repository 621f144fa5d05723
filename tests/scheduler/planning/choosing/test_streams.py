"""Streams: a candidate's GPU computes in one, whatever number of stages its schedule gives it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from weft.plan.inspection import Inspection, UnitFacts
from weft.scheduler.planning.planner import make_plan
from weft.spec.candidates import candidates
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import Host


def test_no_candidate_has_stages_in_streams_of_their_own_on_a_gpu(
    spec_of: Callable[..., JobSpec], inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    """A prediction takes each stream to be as fast as a GPU. Several stages one after the other are no such thing."""
    make = partial(make_plan, shared_bytes_free=1 << 40, checked=False)
    inspection = inspection_of([unit_of(number) for number in range(8)], link_bytes_per_second=1e9, num_train=64)
    num_stages = set()
    for each in candidates(spec_of(preset="auto", batch_size=64), Host(gpus=2)):
        replicas = each.strategy.replica_list
        if all(replica.num_stages == 1 for replica in replicas) or each.strategy.schedule == "measured":
            continue
        plan = make(each, inspection)
        computing = [lane for lane in plan.graph.programs if lane.name.startswith("compute")]
        assert len(computing) == len({lane.worker for lane in computing}), each.strategy
        num_stages |= {replica.num_stages for replica in replicas if replica.device == "gpu"}
    assert num_stages == {2, 4}, "of interleaved schedules two on each GPU"
