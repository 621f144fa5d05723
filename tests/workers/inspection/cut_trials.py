"""A step whole and cut, side by side, for tests: the numbers that it draws are those of a microbatch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from weft.workers.devices.host import HostDevice
from weft.workers.inspection.cut_trial import CutTrial
from weft.workers.inspection.ran import TrialOutcome
from weft.workers.snapshots.stage_attributes import StageAttributes
from weft.workload.cutting.calls import Seed
from weft.workload.cutting.recorded import Recorded
from weft.workload.cutting.recording import StepRecording
from weft.workload.cutting.skipped import SkippedCalls
from weft.workload.randomness import seed_others, seed_unit, unit_key

Step = Callable[[nn.Module, Any], Any]  # returns the loss


def seeding(microbatch: int) -> Seed:
    def seed(number: int) -> None:
        seed_unit(3, 0, microbatch, number)
        seed_others(unit_key(3, 0, microbatch, number))

    return seed


def whole_of(model: nn.Module, step: Step, batch: Any, microbatch: int = 0) -> tuple[Recorded, TrialOutcome]:
    model.zero_grad(set_to_none=True)
    recording = StepRecording(model)
    recorded = recording.run(step, batch, seeding(microbatch))
    with recording.installed_again(seeding(microbatch)):
        recorded.result.backward()
    return recorded, TrialOutcome.of(model, {"loss": recorded.result}, learns=True)


def trial_of(
    model: nn.Module, step: Step, recorded: Recorded, cuts: Sequence[int], *returned: Mapping[Any, Any]
) -> CutTrial:
    """returned: of other runs, what their calls have."""
    skipped = SkippedCalls(recorded.returned, redraws=recorded.redraws)
    for each in returned:
        skipped.learn(each)
    return CutTrial(
        model,
        step,
        recorded,
        cuts,
        skipped,
        HostDevice(),
        values_of=lambda loss: {"loss": loss},
        precision=contextlib.nullcontext,
        attributes=StageAttributes.of(model),
        writing=set(),
    )


def differs(model: nn.Module, batch: Any, trial: CutTrial, whole: TrialOutcome, microbatch: int = 0) -> str | None:
    model.zero_grad(set_to_none=True)
    return whole.difference(TrialOutcome.of(model, trial.run(batch, seeding(microbatch)), learns=True))
