"""Resized: the inspection of a job as one with other microbatches would have had it. Pure.

Of a recorded job, for a what-if: shapes are guessed. Of one whose strategy was still to be chosen, every shape that it
may come to need was looked at, and only times are worked out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from weft.plan.division import divide, sizes_that_occur
from weft.plan.inspection import Inspection, Shape, TensorFacts, UnitFacts, ValueFacts
from weft.plan.itinerary import Itinerary
from weft.scheduler.planning.costs import largest_microbatch
from weft.scheduler.planning.measured_costs import inspected_size
from weft.spec.job_spec import JobSpec
from weft.spec.workers_needed import threads_of

_Sized = TypeVar("_Sized", TensorFacts, ValueFacts)


def resized(inspection: Inspection, spec: JobSpec, changed: JobSpec) -> Inspection:
    """The inspection as one of the changed job would have been, as far as the planner looks at it."""
    before, recorded = inspected_size(spec, inspection), largest_microbatch(spec, inspection.num_train)
    if inspection.endless:
        inspection = replace(inspection, num_train=(changed.job.given_steps or 0) * changed.job.batch_size)
    after = largest_microbatch(changed, inspection.num_train)
    if after in (before, recorded):
        return inspection
    return replace(
        inspection,
        units=tuple(_resized_unit(unit, inspection, before, after) for unit in inspection.units),
        device_units=tuple(_resized_unit(unit, inspection, before, after) for unit in inspection.device_units),
        values=_resized_values(inspection.values, before, after),
        device_values=_resized_values(inspection.device_values, before, after),
        input=replace(inspection.input, shapes=_resized_shapes(inspection.input.shapes, before, after)),
        target=inspection.target
        and replace(inspection.target, shapes=_resized_shapes(inspection.target.shapes, before, after)),
        load_seconds=inspection.load_seconds * after / max(recorded, 1),
    )


def fitted(inspection: Inspection, spec: JobSpec) -> Inspection:
    """What an inspection for many strategies says of this one: shapes of its own microbatches, seconds of its largest
    one, with its threads. Any other inspection is as it was."""
    if spec.strategy.threads is not None:
        inspection = inspection.with_threads(threads_of(spec.strategy, inspection.host))
    if not inspection.timed_size:
        return inspection
    own = divide(min(spec.job.batch_size, inspection.num_train), *spec.strategy.division)
    before, after = inspection.timed_size, max(part.size for parts in own for part in parts)
    sizes = _occurring(inspection, spec)
    if inspection.is_cut_by_calls:
        given = replace(inspection.input, shapes=_resized_shapes(inspection.input.shapes, before, max(sizes)))
    else:
        given = _of_sizes(inspection.input, sizes)
    return replace(
        inspection,
        units=tuple(_resized_unit(unit, inspection, before, after) for unit in inspection.units),
        device_units=tuple(_resized_unit(unit, inspection, before, after) for unit in inspection.device_units),
        values=tuple(_of_sizes(value, sizes) for value in inspection.values),
        device_values=tuple(_of_sizes(value, sizes) for value in inspection.device_values),
        input=given,
        target=inspection.target and _of_sizes(inspection.target, sizes),
        load_seconds=inspection.load_seconds * after / before,
        timed_size=0,
    )


def was_looked_at(inspection: Inspection, spec: JobSpec) -> bool:
    """Whether each size of the spec's microbatches was, of which shapes have to be known; by whole workers, which pass
    nothing on. A batch of a model that is cut by its own forward may be of any."""
    return inspection.is_cut_by_calls or _occurring(inspection, spec) <= inspection.input.shapes.keys()


def why_refused(inspection: Inspection, spec: JobSpec) -> str | None:
    """As a reason, where the user's code raises for a size of the spec's microbatches. Shares that adapt may come to
    any below the largest."""
    sizes = _occurring(inspection, spec)
    if spec.strategy.share == "adaptive":
        sizes = set(range(max(sizes) + 1))
    first = min(sizes & inspection.refused_sizes.keys(), default=None)
    return None if first is None else f"a microbatch of size {first} raises {inspection.refused_sizes[first]}"


def _occurring(inspection: Inspection, spec: JobSpec) -> set[int]:
    """Sizes of the spec's microbatches; where shares adapt, all that were looked at and may be."""
    itinerary = Itinerary.of_job(spec.job, inspection.num_train, inspection.num_validation)
    sizes = sizes_that_occur(itinerary.batch_sizes(), *spec.strategy.division)
    if spec.strategy.share == "adaptive":
        sizes |= inspection.input.shapes.keys() | {size for value in inspection.values for size in value.shapes}
    return sizes


def _of_sizes(facts: _Sized, sizes: Collection[int]) -> _Sized:
    return replace(facts, shapes={size: shape for size, shape in facts.shapes.items() if size in sizes})


def _resized_unit(unit: UnitFacts, inspection: Inspection, before: int, after: int) -> UnitFacts:
    def at(seconds: float, small: float) -> float:
        if not 0 < inspection.small_size < before:
            return seconds * after / before
        each = max((seconds - small) / (before - inspection.small_size), 0.0)
        return max(seconds + (after - before) * each, 0.0)

    return replace(
        unit,
        forward_seconds=at(unit.forward_seconds, unit.small_forward_seconds),
        backward_seconds=at(unit.backward_seconds, unit.small_backward_seconds),
        kept_bytes=round(unit.kept_bytes * after / before),
    )


def _resized_values(values: Iterable[ValueFacts], before: int, after: int) -> tuple[ValueFacts, ...]:
    return tuple(replace(value, shapes=_resized_shapes(value.shapes, before, after)) for value in values)


def _resized_shapes(shapes: Mapping[int, Shape], before: int, after: int) -> dict[int, Shape]:
    """By the first dimension, which grows with the samples."""
    if before not in shapes or not shapes[before]:
        return dict(shapes)
    first, *others = shapes[before]
    return {after: (-(-first * after // before), *others)}
