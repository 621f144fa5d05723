"""Units: whether a job that leaves it open (`compile = "auto"`) runs its units compiled. Pure.

    inspected eager ────▶ choose ─▶ its best plan ─┐
    inspected compiled ─▶ choose ─▶ its best plan ─┴─▶ all steps by each; the compiled one's, and its kernels' reading

Kernels are bits of their own, so this is decided once, and the job keeps it. What it has cost to make kernels for the
inspection is spent either way, and counts no more. A job that may stop early is taken to go on to its last step, or
until its time is up: nobody knows better. Validation is left out, which takes less of what kernels save.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final

from weft.plan.inspection import Inspection
from weft.plan.itinerary import Itinerary
from weft.quantities import duration
from weft.scheduler.planning.choosing.choice import Choice, MakePlan, choose, lines_of, ranked_behind
from weft.scheduler.planning.partition import PlanError
from weft.spec.admission import without_remedy
from weft.spec.candidates import with_units
from weft.spec.job_spec import JobSpec
from weft.spec.presets import AUTO

WORTH_IT: Final = 1.05  # times, of all steps: half of all predictions are 5 % off or less


def choose_with_units(spec: JobSpec, inspection: Inspection, make: MakePlan) -> Choice:
    """As `choose`, of any job. Errors: PlanError."""
    if spec.strategy.compile != AUTO:
        return choose(spec, inspection, make)
    eager = choose(with_units(spec, compiled=False), inspection, make)
    try:
        compiled = _compiled(spec, inspection, make)
    except PlanError as error:
        return _told(spec, eager, None, f"units stay eager, since {without_remedy(str(error))}")
    weighed = _Weighed.of(spec, eager, compiled)
    chosen, other = (compiled, eager) if weighed.pays else (eager, compiled)
    return _told(spec, chosen, other, weighed.told())


def _compiled(spec: JobSpec, inspection: Inspection, make: MakePlan) -> Choice:
    """Errors: PlanError, with the reason why there is none."""
    if inspection.compiled_too is None:
        raise PlanError(inspection.uncompiled or "they were not looked at compiled")
    return choose(with_units(spec, compiled=True), inspection.compiled_too, make)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighed:
    """All steps of a job, in seconds."""

    steps: int
    eager_seconds: float
    compiled_seconds: float  # those until kernels are ready counted
    ready_seconds: float

    @classmethod
    def of(cls, spec: JobSpec, eager: Choice, compiled: Choice) -> _Weighed:
        facts = eager.inspection
        steps, own = Itinerary.of_job(spec.job, facts.num_train, facts.num_validation).steps, _seconds(eager)
        if spec.stop is not None and spec.stop.max_seconds < steps * own:
            steps = math.ceil(spec.stop.max_seconds / own)
        ready = compiled.inspection.ready_seconds
        return cls(
            steps=steps,
            eager_seconds=steps * own,
            compiled_seconds=steps * _seconds(compiled) + ready,
            ready_seconds=ready,
        )

    @property
    def pays(self) -> bool:
        return self.compiled_seconds * WORTH_IT <= self.eager_seconds

    def told(self) -> str:
        eager, compiled = duration(self.eager_seconds), duration(self.compiled_seconds)
        ready = f"{duration(self.ready_seconds)} to have kernels ready counted"
        if self.pays:
            return (
                f"units are compiled: {self.steps} steps are predicted to take {compiled} ({ready}), and {eager} eager"
            )
        return (
            f"units stay eager: {self.steps} steps are predicted to take {eager}, and {compiled} compiled ({ready}); "
            f"it has to be {100 * (WORTH_IT - 1):.0f} % faster"
        )


def _seconds(choice: Choice) -> float:
    return choice.outlook.iteration_seconds


def _told(spec: JobSpec, chosen: Choice, other: Choice | None, why: str) -> Choice:
    """With the other way's candidates beside its own."""
    best, *others = chosen.considered
    ranked = ranked_behind(best, (*others, *(other.considered if other is not None else ())))
    lines = list(lines_of(ranked, chosen.inspection))
    lines = [*(lines if spec.strategy.is_auto else lines[:2]), f"compile: {why}"]  # two candidates need no counting
    plan = dataclasses.replace(chosen.plan, notes=(*lines, *chosen.plan.notes[len(chosen.lines) :]))
    return dataclasses.replace(chosen, plan=plan, considered=ranked, lines=tuple(lines))
