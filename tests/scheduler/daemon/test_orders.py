"""What a saver is told of a checkpoint: whether it is one of those that `keep` counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.plan.inspection import Inspection, UnitFacts
from weft.scheduler.core.events import Snapshot
from weft.scheduler.daemon.orders import saver_order
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.runs.run import PlannedAttempt
from weft.spec.job_spec import JobSpec
from weft.spec.stopping import Standing


@pytest.mark.parametrize(
    ("every", "step", "snapshot", "is_counted"),
    [
        ("50 steps", 100, {"to_disk": True}, True),
        ("50 steps", 100, {"to_disk": True, "best": True}, True),
        ("50 steps", 100, {"best": True}, True),  # that of its turn was left out
        ("50 steps", 110, {"best": True}, False),
        ("50 steps", 110, {}, True),  # at the job's end
        ("10 min", 110, {"best": True}, False),
        ("10 min", 110, {"best": True, "to_disk": True}, True),
        (None, 110, {"best": True}, False),
    ],
)
def test_a_best_one_is_counted_where_the_interval_names_its_step(
    spec_of: Callable[..., JobSpec],
    unit_of: Callable[..., UnitFacts],
    inspection_of: Callable[..., Inspection],
    every: str | None,
    step: int,
    snapshot: dict[str, Any],
    is_counted: bool,
) -> None:
    spec = spec_of(steps=200, batch_size=8)
    spec = type(spec).parse(spec.to_wire() | {"checkpoint": {"every": every, "keep_best": "loss"}})
    plan = make_plan(spec, inspection_of([unit_of(0)], num_validation=8), shared_bytes_free=1 << 40)
    run: Any = SimpleNamespace(
        job="line-1",
        spec=spec,
        attempt=PlannedAttempt("line-1", 1, plan, ("cpu-0", "loader-0")),
        files=SimpleNamespace(path=Path("line-1")),
        training=SimpleNamespace(at=lambda iteration: Standing()),
    )
    order = saver_order(Snapshot(iteration=plan.itinerary.update_of(step), **snapshot), run)
    assert (order["step"], order["counted"]) == (step, is_counted)
