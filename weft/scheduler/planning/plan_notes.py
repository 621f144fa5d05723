"""Plan notes: what the user of a job should know of its plan, in a line each; and what no plan has as the plain loop,
of a step that changes parameters by itself or hooks gradients, and is refused for. Pure.

                                  one replica                                several replicas
changed, and not trained          a part of the stage's state, as buffers    refused: each would have its own
changed, and trained              where the host's own tensor is trained     refused
with a hook behind its `grad`     as in the plain loop                       refused: it would see a part
changed under recompute           refused: changed twice                     refused
kept where nobody knows of it     refused under recompute                    told in a note
changed by backward, too          refused where another forward is between   refused likewise
read by backward, from attributes refused likewise                           refused likewise
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from weft.plan.division import divide
from weft.plan.inspection import Inspection
from weft.plan.itinerary import Itinerary
from weft.plan.kinds import Kind
from weft.plan.placement import Cuts, Placement
from weft.plan.plan import Plan
from weft.plan.schedules.schedule import Schedule
from weft.quantities import duration, size
from weft.scheduler.planning.memory import snapshot_bytes
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.planning.placing import why_not_resident
from weft.spec.job_spec import JobSpec
from weft.spec.schedule_text import schedule_title
from weft.spec.strategy import Strategy

_ELSEWHERE = (
    "a step that is run again, with the parameters, buffers and random numbers that it had, comes to another loss, so "
    "it keeps something in an attribute, in a global or in a generator of its own"
)
NAMED_MODULES = 3  # of those that depend on the batch; more would not fit a line


def plan_notes(spec: JobSpec, inspection: Inspection, why_no_snapshots: str | None, cuts: Cuts = ()) -> Iterator[str]:
    if inspection.slowness:
        yield _slowness_note(inspection)
    if inspection.varying_shapes:
        yield _shapes_note(inspection)
    if spec.strategy.compile:
        yield _compiled_note(inspection)
    if spec.strategy.resident and (why := why_not_resident(inspection)) is not None:
        yield f"data: not resident on GPUs, since {why}"
    if spec.job.mode != "train":
        return
    if why_no_snapshots is not None and spec.strategy.recovery != "off":
        yield f"snapshots: none, since {why_no_snapshots}; after a lost worker the job begins again"
    if why_no_snapshots is None and spec.strategy.recovery == "iteration":
        yield _copies_note(inspection)
    if why_no_snapshots is not None and spec.strategy.verify == "replay":
        yield "verify: no iteration is run again, since there is no snapshot to begin with"
    if inspection.lost_attributes:
        yield (
            f"state: a step changes {_listed(inspection.lost_attributes)}, which no snapshot or checkpoint has, so it "
            "begins anew after a lost worker or a resume; keep numbers, text or tensors there, or in buffers"
        )
    replicas = spec.strategy.replica_list
    yield from (*_lost_beside_notes(inspection), *_of_epoch_notes(inspection, cuts, spec.strategy))
    in_parts = len(replicas) > 1 or replicas[0].device != "cpu" or replicas[0].stages != 1
    bounded = spec.strategy.clip_norm is not None or spec.strategy.skip_nonfinite
    if inspection.joint_optimizer and (in_parts or bounded):
        yield (
            "optimizer: what its step makes of a parameter depends on the others that it updates, and here stages, or "
            "buckets, are updated apart, so it is not the plain loop's; one stage of one replica on the CPU, without "
            "clip_norm and skip_nonfinite, has that"
        )
    if inspection.optimizer_draws and in_parts:
        yield (
            "optimizer: its step draws random numbers, by the step and the first parameter of those that are updated "
            "together; one stage of one replica draws what the plain loop does, others draw other numbers"
        )
    if inspection.loss_in_parts and sum(spec.strategy.division[1]) > 1:
        yield _loss_note(inspection, sum(spec.strategy.division[1]))
    if inspection.scheduler_span is not None:
        yield from _scheduler_note(spec, inspection, inspection.scheduler_span)
    if inspection.batch_modules:
        yield from _batch_note(spec, inspection)
    if inspection.written and (most := max(spec.strategy.division[1])) > 1:
        yield (
            f"state: the step itself changes {_listed(inspection.written)}, with each of the "
            f"{most} microbatches of a batch, and so a count or a mean goes on by as many at "
            "once; let it reckon with that, or give strategy.microbatches = 1"
        )
    if len(replicas) > 1:
        yield from _state_note(inspection)
        if inspection.keeps_elsewhere:
            yield f"state: {_ELSEWHERE}, and each replica has it for itself; only one computes what the plain loop does"


def _slowness_note(inspection: Inspection) -> str:
    listed = (
        f"{slowness:.3g} s on {kind.upper()} worker {number}"
        for kind, own in inspection.slowness.items()
        for number, slowness in enumerate(own)
        if slowness != 1.0
    )
    return f"workers: unequal; 1 s of the inspecting one's work takes {', '.join(listed)}"


def _shapes_note(inspection: Inspection) -> str:
    *others, last = map(str, inspection.varying_shapes)
    return (
        f"shapes: a tensor of the batch came as {', '.join(others)} and {last} in microbatches of one size; slots have "
        "room for the largest of the first batches, and grow where a larger one comes"
    )


def _copies_note(inspection: Inspection) -> str:
    num_bytes = snapshot_bytes(inspection)
    return (
        f"snapshots: each iteration is copied, {size(num_bytes)} in all, which would take a lane that had "
        f"all of it {duration(num_bytes / inspection.copy_bytes_per_second)} more"
    )


def _scheduler_note(spec: JobSpec, inspection: Inspection, span: int) -> Iterator[str]:
    """Most training loops call the `step()` of such a scheduler once an epoch."""
    itinerary = Itinerary.of_job(spec.job, inspection.num_train, inspection.num_validation)
    per_epoch = itinerary.steps_per_epoch
    if per_epoch > 1 and span * per_epoch <= itinerary.steps:
        yield (
            f"scheduler: its step() comes after each of {itinerary.steps} training steps, and it is written for "
            f"{span}; if these are epochs, say so by Workload.scheduler_every = 'epoch'"
        )


def _loss_note(inspection: Inspection, num_microbatches: int) -> str:
    ends = f"a step of {num_microbatches} microbatches is not that of the whole batch"
    return f"loss: {told_of_loss(inspection)}, and {ends}"


def told_of_loss(inspection: Inspection) -> str:
    """Why a batch with it comes to something else in parts."""
    whole, parts = inspection.loss_in_parts
    return (
        f"{whole:.4g} of some samples together, and {parts:.4g} as the mean of two parts, so it is no mean over "
        "samples (a sum, a mean over something else without Workload.weight, a comparison of samples)"
    )


def _compiled_note(inspection: Inspection) -> str:
    if inspection.compiled:
        return f"compiled: {_listed(inspection.compiled)}"
    return (
        "compiled: nothing, since every unit is a single layer of torch's own, which is one kernel already; make one "
        "module of the layers that belong together"
    )


def _batch_note(spec: JobSpec, inspection: Inspection) -> Iterator[str]:
    """Where the batch is divided, what a module makes of a whole one is another number. The plain loop of
    `weft run --reference` divides it alike, so nothing else would say so."""
    batch_size = min(spec.job.batch_size, inspection.num_train)
    sizes = {part.size for parts in divide(batch_size, *spec.strategy.division) for part in parts if part.size}
    if sizes == {batch_size}:
        return
    samples = " or ".join(map(str, sorted(sizes)[-2:]))
    samples += " sample" if samples == "1" else " samples"
    alone = "microbatches = 1" if len(spec.strategy.division[1]) == 1 else "one replica with microbatches = 1"
    yield (
        f"batch statistics: {_listed(inspection.batch_modules)} take means and variances of each microbatch of "
        f"{samples}, not of the batch of {batch_size}; {alone} takes the batch's"
    )


def _state_note(inspection: Inspection) -> Iterator[str]:
    """The plain loop has the buffers of one model, a job those of each replica."""
    if carrying := [
        f"{unit.name.rstrip('.') or 'the model'} ({unit.kind})" for unit in inspection.units if unit.carries_state
    ]:
        yield (
            f"buffers: forward of {_listed(carrying)} computes with what the forward before has left in a buffer, and "
            "each replica has buffers of its own; only one replica computes what the plain loop does"
        )


def _lost_beside_notes(inspection: Inspection) -> Iterator[str]:
    if lost := inspection.lost_beside.get("scheduler"):
        yield (
            f"scheduler: its rates are asked of a function that changes {_listed(lost)}, which no snapshot or "
            "checkpoint has: it begins anew after a lost worker or a resume, and where a worker updates several stages "
            "it changes once for each; let the function go by the number of the step that it is given"
        )
    if lost := inspection.lost_beside.get("optimizer"):
        yield (
            f"optimizer: its step, or a hook on it, changes {_listed(lost)}, which no snapshot or checkpoint has: it "
            "begins anew after a lost worker or a resume, and each process that updates has its own; keep numbers in "
            "the optimizer's groups, and tensors in its state of each parameter"
        )
    for sampler in inspection.lost_beside.get("sampler", ()):
        yield (
            f"data: {sampler}, gave two orders when it was asked twice for epoch 0, so samples come in another order "
            "after a lost worker or a resume; let it draw by torch's generator alone, know the epoch by set_epoch(e)"
        )


def _of_epoch_notes(inspection: Inspection, cuts: Cuts, strategy: Strategy) -> Iterator[str]:
    names, keepers = (inspection.lost_beside.get(key, ()) for key in ("on_epoch", "on_epoch_units"))
    earlier = {unit.name for unit in inspection.units[: cuts[-1][0] if cuts else 0]}
    if elsewhere := [name for name, unit in zip(names, keepers, strict=True) if unit in earlier]:
        yield (
            f"on_epoch: it refers to {_listed(elsewhere)}, which a forward in an earlier stage changes, and runs in "
            "the last one's process, which has none of that; keep it in a buffer, or use strategy.stages = 1"
        )
    if (others := sorted({*names} - {*elsewhere})) and (strategy.recompute or len(strategy.replica_list) > 1):
        yield (
            f"on_epoch: it refers to {_listed(others)}, which a step changes; of several replicas it finds what the "
            "first has, and under recompute each forward may change it twice; what a step returns is reported by "
            "validations, of all of them and once"
        )


def _listed(modules: Sequence[str]) -> str:
    more = len(modules) - NAMED_MODULES
    return ", ".join(modules[:NAMED_MODULES]) + (f" and {more} more" if more > 0 else "")


def lines_of_plan(plan: Plan, workers: tuple[str, ...]) -> Iterator[str]:
    """What a job's log says of its plan."""
    parts = "1 microbatch" if plan.microbatches == 1 else f"{plan.microbatches} microbatches"
    yield (
        f"plan: {plan.schedule}, {parts}, {plan.summary(workers)}; "
        f"predicted {duration(plan.predicted_iteration_seconds)} an iteration "
        f"(limit {duration(plan.limit_seconds)})"
    )
    yield from plan.notes
    if doubt := doubt_of_batch(plan.itinerary):
        yield doubt


def doubt_of_batch(itinerary: Itinerary) -> str | None:
    """What is taken although it is probably not meant."""
    if itinerary.batch_size <= itinerary.num_train:
        return None
    samples = "one sample" if itinerary.num_train == 1 else f"{itinerary.num_train} samples"
    return (
        f"warning: job.batch_size = {itinerary.batch_size} is more than the {samples} of "
        f"Workload.train; every batch has {itinerary.num_train}"
    )


# --- refused


def changing_in(
    inspection: Inspection, units: Container[int] | None = None, *, trained: bool = False
) -> tuple[str, ...]:
    """Names of the parameters that the step changes, and nobody trains, or updates do as well; in some units alone,
    where these are given."""
    return tuple(
        each.changed_as
        for each in inspection.parameters
        if each.changed_as is not None and each.trained is trained
        if units is None or any(unit in units for unit in each.units or (0,))
    )


def check_changes(spec: JobSpec, inspection: Inspection) -> None:
    """Errors: PlanError."""
    if spec.job.mode != "train":
        return
    strategy = spec.strategy
    if strategy.recompute and inspection.keeps_elsewhere and not inspection.keeps_numbers:
        raise PlanError(
            f"strategy.recompute = true runs each forward twice, and {_ELSEWHERE}, which would be changed twice; keep "
            "in buffers (register_buffer) what lasts, draw from torch's, numpy's or Python's own generator, or leave "
            "recompute out"
        )
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


def check_backward_changes(
    spec: JobSpec, inspection: Inspection, cuts: Sequence[Cuts], schedules: Sequence[Schedule | None]
) -> None:
    """In the plain loop what a microbatch's backward changes stands when the next one's forward begins. schedules: of
    each replica; None: layers take turns. Errors: PlanError."""
    strategy = spec.strategy
    replicas = zip(strategy.replica_list, cuts, schedules, strict=True)
    for replica, stages, schedule in replicas if spec.job.mode == "train" else ():
        for stage, (first, last) in enumerate(stages):
            units = inspection.units_on(replica.device)[first:last]
            unit = next((each for each in units if each.backward_changes is not None), None)
            count = replica.microbatches or strategy.microbatches
            at_once = count if schedule is None else schedule.in_flight(stage)
            if inspection.mixes_microbatches and at_once > 1 and not strategy.recompute:
                raise PlanError(
                    "a microbatch's backward comes to other gradients where another one's forward has run since (a "
                    "module keeps in an attribute what its backward takes, or counts there in backward, too), and "
                    f"strategy.schedule = {schedule_title(strategy.schedule)!r} has {at_once} microbatches at once; "
                    "keep that in ctx, use schedule = 'model-parallel', or strategy.recompute = true"
                )
            if unit is None:
                continue
            is_split = schedule is not None and any(each.kind is Kind.INPUT for each in schedule.passes(stage))
            if at_once == 1 and not is_split:
                continue
            what = f"{at_once} microbatches at once there" if at_once > 1 else "a backward in two parts"
            raise PlanError(
                f"backward of {unit.name or 'the model'} ({unit.kind}) changes {unit.backward_changes!r:.80}, as "
                "forward does (torch.utils.checkpoint computes that again); in the plain loop the next microbatch's "
                f"forward comes behind it, and strategy.schedule = {schedule_title(strategy.schedule)!r} has {what}; "
                "use schedule = 'model-parallel', or strategy.recompute = true in the place of the model's own "
                "checkpoints"
            )


def check_updates(strategy: Strategy, inspection: Inspection, placement: Placement) -> None:
    """Errors: PlanError."""
    _check_sparse(strategy, inspection, placement)
    if placement.learns and inspection.step_hook is not None:
        _check_step_hook(strategy, inspection.step_hook, placement)
    if placement.synchronisation is not None and inspection.set_by_step is not None:
        raise PlanError(
            f"the step sets {inspection.set_by_step} of the optimizer, and where parameters are updated by buckets "
            "(several replicas, a device, strategy.clip_norm or skip_nonfinite) others have their own; give "
            "Workload.scheduler, or train one replica on the CPU without these"
        )


def _check_sparse(strategy: Strategy, inspection: Inspection, placement: Placement) -> None:
    """Buckets are dense."""
    name = next((each.sparse_as for each in inspection.parameters if each.sparse_as is not None), None)
    if name is None or placement.synchronisation is None:
        return
    num_replicas = len(placement.replicas)
    if strategy.clip_norm is not None or strategy.skip_nonfinite:
        field = "clip_norm" if strategy.clip_norm is not None else "skip_nonfinite"
        why, remedy = f"strategy.{field} looks at dense ones", f"leave {field} out"
    elif num_replicas > 1:
        why, remedy = f"{num_replicas} replicas add up dense ones", "train one replica"
    elif placement.replicas[0].private:
        why = "a replica on a device, or a stale one, hands dense ones to its updates"
        remedy = "train on the CPU without staleness"
    else:
        why, remedy = "stages that share a parameter add up dense ones", "cut where no parameter is shared"
    raise PlanError(
        f"the parameter {name!r:.80} gets a sparse gradient, and {why}; build its nn.Embedding or nn.EmbeddingBag with "
        f"sparse=False, or {remedy}"
    )


def _check_step_hook(strategy: Strategy, hook: str, placement: Placement) -> None:
    """In the plain loop it is called once a step, and finds the whole model as it is updated."""
    num_replicas, num_stages = len(placement.replicas), len(placement.cuts[0])
    if placement.synchronisation is None and num_stages == 1:
        return
    if num_replicas > 1:
        why, remedy = f"each of {num_replicas} replicas has a model of its own", "train one replica"
    elif placement.replicas[0].private:
        why = "a replica on a device, or a stale one, is updated bucket by bucket"
        remedy = "train on the CPU without staleness"
    elif num_stages > 1:
        why, remedy = f"each of {num_stages} stages has an optimizer and a part of the model", "use stages = 1"
    else:
        field = "clip_norm" if strategy.clip_norm is not None else "skip_nonfinite"
        why, remedy = f"strategy.{field} has a model updated bucket by bucket", f"leave {field} out"
    raise PlanError(
        f"a hook around the optimizer's step, {hook}, is called once a step in the plain loop and finds all of the "
        f"model there, and {why}; {remedy}, or, where it looks at the optimizer's own parameters alone, override "
        "`step` in an optimizer class of your own"
    )
