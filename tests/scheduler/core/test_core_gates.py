"""Transcripts of the core of jobs that may end sooner: nothing is sent behind an epoch that is not judged, and the last
iteration is the same whatever the lanes' pace; and of jobs that are asked to stop where they are."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.plan import Plan
from weft.plan.tables import Adjustment
from weft.scheduler.core.events import (
    Adjust,
    Dispatch,
    EpochJudged,
    JudgeEpoch,
    PauseRequested,
    Prepare,
    RecordIteration,
    RecordSnapshot,
    RecordState,
    ResultSaved,
    ResumeRequested,
    SaveResult,
    SaveSnapshot,
    SnapshotSaved,
    StopRequested,
)
from weft.scheduler.core.job import Phase

_SNAPSHOTS = runpy.run_path(str(Path(__file__).with_name("test_core_snapshots.py")))
Rehearsal = _SNAPSHOTS["Rehearsal"]
EPOCH = 5  # iterations: T T T V V


@pytest.fixture
def plan(
    plan_of: Callable[..., Plan], inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> Plan:
    """Four epochs, with more work sent ahead than there is in an epoch."""
    inspection = inspection_of([unit_of(0), unit_of(1)], num_train=24, num_validation=16)
    plan = plan_of(inspection, stages=2, microbatches=2, batch_size=8, steps=12, window=200)
    return dataclasses.replace(plan, judged=True)


def sent(rehearsal: Any, attempt: int = 1, but: str = "") -> int:
    """The last iteration that a lane was sent anything of. but: a lane that does not count."""
    work = [each.work for each in rehearsal.found(Dispatch, attempt) if each.lane != but]
    return max(iteration for runs in work for iteration, _ in runs)


def judge(rehearsal: Any, stop: str | None = None) -> list[Any]:
    judged = rehearsal.found(JudgeEpoch)[-1]
    event = EpochJudged(job="a", attempt=judged.attempt, iteration=judged.iteration, stop=stop)
    commands: list[Any] = rehearsal.tell(event)
    return commands


def stop(rehearsal: Any) -> list[Any]:
    commands: list[Any] = rehearsal.tell(
        StopRequested(job="a", attempt=rehearsal.job.attempt, reason="2 h of training are over")
    )
    return commands


def ended(rehearsal: Any) -> RecordState:
    rehearsal.tell(ResultSaved(job="a", attempt=rehearsal.job.attempt))
    rehearsal.release()
    state: RecordState = rehearsal.found(RecordState)[-1]
    return state


def test_no_lane_is_sent_anything_behind_an_epoch_that_is_not_judged(plan: Plan) -> None:
    rehearsal = Rehearsal(plan)
    for epoch in range(1, 5):
        rehearsal.run_to(epoch * EPOCH)
        assert sent(rehearsal) == epoch * EPOCH - 1
        asked = JudgeEpoch(job="a", attempt=1, iteration=epoch * EPOCH - 1, worker="cpu-1")
        assert rehearsal.found(JudgeEpoch)[-1] == asked
        assert rehearsal.job.phase is Phase.RUNNING
        judge(rehearsal)
    assert len(rehearsal.found(JudgeEpoch)) == 4, "the last one too: it may be the best"
    assert rehearsal.found(SaveResult)
    assert ended(rehearsal) == RecordState(job="a", state="completed", attempt=1, exit_code=0)


def test_a_job_that_stops_ends_with_the_epoch_that_was_judged(plan: Plan) -> None:
    rehearsal = Rehearsal(plan)
    rehearsal.run_to(EPOCH)
    judge(rehearsal)
    rehearsal.run_to(2 * EPOCH)
    assert isinstance(judge(rehearsal, "it is no better")[-1], SaveResult)
    assert rehearsal.found(RecordIteration)[-1].iteration == 2 * EPOCH - 1
    assert sent(rehearsal) == 2 * EPOCH - 1
    state = ended(rehearsal)
    assert (state.state, state.exit_code) == ("completed", 0)
    assert state.message == "stopped early after step 6: it is no better"


def test_what_stops_after_the_last_epoch_has_not_stopped_early(plan: Plan) -> None:
    rehearsal = Rehearsal(plan)
    for epoch in range(1, 4):
        rehearsal.run_to(epoch * EPOCH)
        judge(rehearsal)
    rehearsal.run_to(4 * EPOCH)
    judge(rehearsal, "it is no better")
    assert ended(rehearsal).message is None


def test_a_job_without_a_rule_has_no_gates(plan: Plan) -> None:
    rehearsal = Rehearsal(dataclasses.replace(plan, judged=False))
    assert sent(rehearsal) >= EPOCH
    rehearsal.run_to(4 * EPOCH)
    assert rehearsal.found(JudgeEpoch) == []
    assert rehearsal.job.phase is Phase.SAVING


def test_a_verdict_of_an_attempt_that_is_over_is_dropped(plan: Plan) -> None:
    rehearsal = Rehearsal(plan)
    rehearsal.run_to(EPOCH)
    assert rehearsal.tell(EpochJudged(job="a", attempt=2, iteration=EPOCH - 1, stop="no")) == []
    assert rehearsal.job.phase is Phase.RUNNING


def test_a_job_that_goes_on_is_judged_again_where_it_makes_an_epochs_end_again(plan: Plan) -> None:
    rehearsal = Rehearsal(dataclasses.replace(plan, window=4))
    rehearsal.run_to(EPOCH)
    judge(rehearsal)
    rehearsal.due()
    rehearsal.run_to(2 * EPOCH)
    assert rehearsal.job.snapshot is not None
    rehearsal.lose()
    rehearsal.prepare()
    assert EPOCH < rehearsal.job.iterations_done < 2 * EPOCH
    rehearsal.run_to(2 * EPOCH)
    assert sent(rehearsal, attempt=2) == 2 * EPOCH - 1
    assert rehearsal.found(JudgeEpoch)[-1] == JudgeEpoch(job="a", attempt=2, iteration=2 * EPOCH - 1, worker="cpu-1")
    judge(rehearsal, "it is no better")
    assert ended(rehearsal).message == "stopped early after step 6: it is no better"


def test_an_epoch_that_was_not_judged_is_judged_before_an_attempt_goes_on_behind_it(
    plan_of: Callable[..., Plan], inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    """Without a validation a snapshot may be of an epoch's last iteration."""
    inspection = inspection_of([unit_of(0)], num_train=24)
    rehearsal = Rehearsal(dataclasses.replace(plan_of(inspection, batch_size=8, steps=12, window=2), judged=True))
    rehearsal.run_to(1)
    (told,) = rehearsal.due()
    assert told.first_iteration == 2
    rehearsal.run_to(3)
    assert rehearsal.job.snapshot is not None
    rehearsal.lose()
    rehearsal.prepare()
    assert rehearsal.commands[-1] == JudgeEpoch(job="a", attempt=2, iteration=2, worker="cpu-0")
    judge(rehearsal)
    rehearsal.run_to(4)
    rehearsal.lose()
    rehearsal.prepare()
    assert len(rehearsal.found(JudgeEpoch)) == 2, "in this attempt it was judged"
    rehearsal.run_to(6)
    assert rehearsal.found(JudgeEpoch)[-1].iteration == 5


def test_what_schedulers_are_stepped_with_is_told_to_all_ahead_of_the_next_epoch_and_again_where_that_is_made_again(
    plan: Plan,
) -> None:
    rehearsal = Rehearsal(dataclasses.replace(plan, window=4))

    def told(value: float) -> list[Any]:
        judged = rehearsal.found(JudgeEpoch)[-1]
        event = EpochJudged(job="a", attempt=judged.attempt, iteration=judged.iteration, measured=value)
        commands: list[Any] = rehearsal.tell(event)
        return commands

    rehearsal.due()
    rehearsal.run_to(EPOCH)
    first, *work = told(0.5)
    assert first == Adjust("a", 1, rehearsal.job.workers, EPOCH, Adjustment(measured=0.5))
    assert {type(each) for each in work} == {Dispatch}
    rehearsal.run_to(EPOCH + 2)
    rehearsal.lose()
    rehearsal.prepare()
    adjusted = [each.adjustment for each in rehearsal.found(Adjust, attempt=2)]
    assert {each.measured for each in adjusted} == {None}, "the epoch before is validated again"
    rehearsal.run_to(EPOCH)
    again, *_ = told(0.5)
    assert again == dataclasses.replace(first, attempt=2, workers=rehearsal.job.workers)
    for epoch in (2, 3):
        rehearsal.run_to(epoch * EPOCH)
        told(0.25)
    rehearsal.run_to(4 * EPOCH)
    assert [each for each in told(0.125) if isinstance(each, Adjust)] == [], "nothing is trained behind the last one"


# --- asked to stop


def test_training_ends_with_the_first_step_of_which_nobody_was_sent_more_than_data_and_all_are_told(plan: Plan) -> None:
    rehearsal = Rehearsal(dataclasses.replace(plan, judged=False, window=4))
    before = sent(rehearsal, but="load")
    assert before < sent(rehearsal) < 2
    (told,) = stop(rehearsal)
    assert told == Adjust("a", 1, rehearsal.job.workers, before + 1, Adjustment(ends=before + 2))
    assert stop(rehearsal) == [], "it is on its way there"
    rehearsal.run_to(before + 2)
    assert sent(rehearsal, but="load") == before + 1
    assert rehearsal.job.phase is Phase.SAVING
    assert ended(rehearsal).message == f"stopped early after step {before + 2}: 2 h of training are over"


def test_it_ends_with_a_step_and_not_inside_a_validation(plan: Plan) -> None:
    rehearsal = Rehearsal(dataclasses.replace(plan, judged=False, window=4))
    rehearsal.run_to(3)
    assert not plan.itinerary.at(sent(rehearsal)).training
    (told,) = stop(rehearsal)
    assert told.adjustment.ends == EPOCH + 1
    rehearsal.run_to(EPOCH + 1)
    assert ended(rehearsal).message == "stopped early after step 4: 2 h of training are over"


def test_at_a_gate_that_is_nearer_it_ends_there(plan: Plan) -> None:
    rehearsal = Rehearsal(plan)
    assert sent(rehearsal) == EPOCH - 1
    assert stop(rehearsal) == []
    rehearsal.run_to(EPOCH)
    judge(rehearsal, "it is no better")
    assert ended(rehearsal).message == "stopped early after step 3: 2 h of training are over", "which was known first"


def test_where_all_has_been_sent_it_ends_as_any_other(plan: Plan) -> None:
    rehearsal = Rehearsal(dataclasses.replace(plan, judged=False, window=4))
    rehearsal.run_to(4 * EPOCH - 1)
    assert stop(rehearsal) == []
    rehearsal.run_to(4 * EPOCH)
    assert ended(rehearsal).message is None


@pytest.mark.parametrize("share", ["adaptive", "stealing"])
def test_a_job_that_is_adjusted_stops_and_passes_gates_too(plan_of: Callable[..., Plan], share: str) -> None:
    plan = plan_of(replicas=2, microbatches=4, steps=12, share=share, window=4)
    per_epoch = plan.itinerary.steps_per_epoch
    rehearsal = Rehearsal(dataclasses.replace(plan, judged=True))
    while rehearsal.job.phase is Phase.RUNNING:
        before = rehearsal.job.iterations_done
        rehearsal.run_to(before + per_epoch)
        judge(rehearsal)
        if before >= 4:
            stop(rehearsal)
    assert rehearsal.job.stopped is not None
    assert rehearsal.job.iterations_done == rehearsal.job.ends < 12


# --- the best


def judged_best(rehearsal: Any, *, is_best: bool) -> list[Any]:
    judged = rehearsal.found(JudgeEpoch)[-1]
    event = EpochJudged(job="a", attempt=judged.attempt, iteration=judged.iteration, is_best=is_best)
    commands: list[Any] = rehearsal.tell(event)
    return commands


@pytest.fixture
def keeping(plan: Plan) -> Any:
    return Rehearsal(dataclasses.replace(plan, keeps_best=True))


def test_of_each_epochs_last_step_there_is_a_copy_and_the_best_goes_to_the_disk(keeping: Any) -> None:
    saved = []
    for epoch, is_best in enumerate((True, False, True, False)):
        keeping.run_to((epoch + 1) * EPOCH)
        assert keeping.found(RecordSnapshot)[-1].snapshot.iteration == epoch * EPOCH + 2
        saved += [each for each in judged_best(keeping, is_best=is_best) if isinstance(each, SaveSnapshot)]
        if is_best:
            keeping.tell(SnapshotSaved(job="a", path="/runs/a"))
    assert [(each.snapshot.iteration, each.snapshot.best) for each in saved] == [(2, True), (2 * EPOCH + 2, True)]
    assert keeping.job.phase is Phase.SAVING


def test_the_best_waits_in_its_place_while_another_is_written(keeping: Any) -> None:
    keeping.run_to(EPOCH)
    judged_best(keeping, is_best=True)
    keeping.run_to(2 * EPOCH)
    assert [each for each in judged_best(keeping, is_best=True) if isinstance(each, SaveSnapshot)] == []
    waiting = keeping.job.best
    assert waiting is not None
    keeping.due()
    keeping.run_to(3 * EPOCH)
    told = {each.adjustment.snapshot for each in keeping.found(Adjust) if each.first_iteration > waiting.iteration}
    assert waiting.place not in told
    (save,) = [each for each in keeping.tell(SnapshotSaved(job="a", path="/r")) if isinstance(each, SaveSnapshot)]
    assert save.snapshot == waiting


def test_a_best_that_still_waits_when_the_job_ends_is_written(keeping: Any) -> None:
    for epoch in range(4):
        keeping.run_to((epoch + 1) * EPOCH)
        judged_best(keeping, is_best=True)
    assert keeping.job.phase is Phase.SAVING
    ended(keeping)
    assert [each.snapshot.iteration for each in keeping.found(SaveSnapshot)] == [2, 3 * EPOCH + 2]


def test_of_two_that_a_pause_writes_the_newer_stays_in_memory_where_it_could_not_be_written(keeping: Any) -> None:
    """The memory was let go of once the first was on the disk, and the job went on from that."""
    keeping.run_to(EPOCH)
    judged_best(keeping, is_best=True)
    keeping.run_to(2 * EPOCH)
    keeping.tell(PauseRequested(job="a"))
    judged_best(keeping, is_best=True)
    keeping.run_to(4 * EPOCH)
    keeping.release()
    assert keeping.job.phase is Phase.PAUSED
    newest = keeping.found(SaveSnapshot)[-1].snapshot
    assert [each.snapshot.iteration for each in keeping.found(SaveSnapshot)] == [2, EPOCH + 2, newest.iteration]
    assert newest.iteration == 2 * EPOCH
    for path in ("/of the first best", "/of the best", None):
        assert keeping.tell(SnapshotSaved(job="a", path=path)) == []
    keeping.tell(ResumeRequested(job="a"))
    keeping.prepare()
    assert {each.snapshot for each in keeping.found(Prepare, attempt=2)} == {newest}
