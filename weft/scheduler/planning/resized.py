"""Resized: the inspection of a recorded job as one with other microbatches would have had it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from weft.plan.inspection import Inspection, Shape, UnitFacts, ValueFacts
from weft.scheduler.planning.costs import largest_microbatch
from weft.scheduler.planning.measured_costs import inspected_size
from weft.spec.job_spec import JobSpec


def resized(inspection: Inspection, spec: JobSpec, changed: JobSpec) -> Inspection:
    """The inspection as one of the changed job would have been, as far as the planner looks at it."""
    before, after = inspected_size(spec, inspection), largest_microbatch(changed)
    if before == after or largest_microbatch(spec) == after:
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
        load_seconds=inspection.load_seconds * after / max(largest_microbatch(spec), 1),
    )


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
    )


def _resized_values(values: Iterable[ValueFacts], before: int, after: int) -> tuple[ValueFacts, ...]:
    return tuple(replace(value, shapes=_resized_shapes(value.shapes, before, after)) for value in values)


def _resized_shapes(shapes: Mapping[int, Shape], before: int, after: int) -> dict[int, Shape]:
    """By the first dimension, which grows with the samples."""
    if before not in shapes or not shapes[before]:
        return dict(shapes)
    first, *others = shapes[before]
    return {after: (-(-first * after // before), *others)}
