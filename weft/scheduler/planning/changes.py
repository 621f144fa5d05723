"""Changes: what a job refuses of a step that changes parameters by itself, or hooks that change gradients. Pure.

                                  one replica                                several replicas
changed, and not trained          a part of the stage's state, as buffers    refused: each would have its own
changed, and trained              where the host's own tensor is trained     refused
with a hook behind its `grad`     as in the plain loop                       refused: it would see a part
changed under recompute           refused: changed twice                     refused
"""

from __future__ import annotations

from collections.abc import Container

from weft.plan.inspection import Inspection
from weft.scheduler.planning.partition import PlanError
from weft.spec.job_spec import JobSpec
from weft.spec.strategy import Strategy


def changing_in(inspection: Inspection, units: Container[int] | None = None) -> tuple[str, ...]:
    """Names of the parameters that nobody trains and the step changes; in some units alone, where these are given."""
    return tuple(
        each.changed_as
        for each in inspection.parameters
        if each.changed_as is not None and not each.trained
        if units is None or any(unit in units for unit in each.units or (0,))
    )


def check_changes(spec: JobSpec, inspection: Inspection) -> None:
    """Errors: PlanError."""
    if spec.job.mode != "train":
        return
    strategy = spec.strategy
    for each in inspection.parameters:
        why = None
        if each.changed_as is not None:
            why = _why_not_changed(strategy, each.changed_as, trained=each.trained)
        elif each.hooked_as is not None and each.trained and len(strategy.replica_list) > 1:
            why = (
                f"a hook of the parameter {each.hooked_as!r:.80} (register_post_accumulate_grad_hook) takes what has "
                f"come to its `grad` so far, and of {len(strategy.replica_list)} replicas each has a part of that; use "
                "register_hook, which takes the gradient of each microbatch, strategy.clip_norm, or one replica"
            )
        if why is not None:
            raise PlanError(why)


def _why_not_changed(strategy: Strategy, name: str, *, trained: bool) -> str | None:
    kind = "which the optimizer trains, too" if trained else "which is not trained (a teacher's mean, most likely)"
    told = f"the step itself changes the parameter {name!r:.80}, {kind}"
    if strategy.recompute:
        return (
            f"strategy.recompute = true runs each forward twice, and {told}: it would be changed twice; make what a "
            "step changes buffers (register_buffer), or leave recompute out"
        )
    if len(strategy.replica_list) > 1:
        return (
            f"{told}, and each of {len(strategy.replica_list)} replicas would change one of its own, where the plain "
            "loop has one; use one replica"
        )
    is_private = strategy.replica_list[0].device != "cpu" or any(strategy.staleness_list)
    if trained and is_private:
        return (
            f"{told}, and a replica on a device, or a stale one, has a copy of its own, which the next update "
            "overwrites; compute what is needed of it anew in each forward (torch.nn.utils.parametrize), or train one "
            "replica on the CPU without staleness"
        )
    return None
