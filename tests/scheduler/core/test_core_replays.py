"""Transcripts of the core that has an iteration run again: who runs it, when it stands, and who is named."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from weft.plan.graph import Task, backward, forward, grad, load, owned_snapshot, snapshot, sync
from weft.plan.plan import Plan
from weft.plan.tables import Adjustment
from weft.scheduler.core.events import (
    Adjust,
    PauseRequested,
    Prepare,
    RecordIteration,
    RecordReplay,
    RecordState,
    Release,
    ReplayDue,
    SaveResult,
    SnapshotDue,
    SnapshotMissed,
    TaskDigested,
    WorkerJoined,
    WorkerLost,
)
from weft.scheduler.core.job import Phase
from weft.scheduler.core.replaying.replay import Made, ReplayRun, first_differing

_SNAPSHOTS = runpy.run_path(str(Path(__file__).with_name("test_core_snapshots.py")))
Rehearsal, taken = _SNAPSHOTS["Rehearsal"], _SNAPSHOTS["taken"]
STAGES = {"stages": 2, "microbatches": 2, "steps": 30, "window": 4}


class Replays(Rehearsal):  # type: ignore[misc, valid-type]
    """wrong: of each run of the iteration, the tasks that make other bits."""

    def run_again(self, *wrong: set[Task]) -> None:
        self.tell(ReplayDue(job="a", attempt=self.job.attempt))
        for tasks in wrong:
            self.run_once(tasks)

    def run_once(self, wrong: set[Task]) -> None:
        assert self.job.replay is not None
        last = self.job.replay.iteration
        about = {"job": "a", "attempt": self.job.attempt, "iteration": last, "replica": None}
        self.run_to(last)
        for task in self.plan.graph.tasks:
            self.tell(TaskDigested(**about, task=task.id, digest=b"other" if task in wrong else b"bits"))
        self.run_to(last + 1)
        self.release()
        if "a" in self.core.jobs and self.job.phase is Phase.PREPARING:
            self.prepare()


@pytest.fixture
def pipeline(plan_of: Callable[..., Plan]) -> Any:
    return Replays(plan_of(**STAGES))


def task_of(plan: Plan, key: Any) -> Task:
    return plan.graph.by_key()[key]


def test_an_iteration_is_run_again_from_a_snapshot_by_workers_that_have_exchanged_their_places(pipeline: Any) -> None:
    pipeline.run_again(set(), set())
    copied, *compared = pipeline.found(Adjust)
    assert copied.adjustment == Adjustment(snapshot=0)
    following = copied.first_iteration + 1
    assert [(each.first_iteration, each.attempt) for each in compared] == [(following, 1), (following, 2)]
    assert {each.adjustment for each in compared} == {Adjustment(compared=True)}
    again = pipeline.found(Prepare, 2)
    assert [(each.worker, each.position, each.arenas) for each in again] == [
        ("cpu-1", 0, 1),
        ("cpu-0", 1, 1),
        ("loader-0", 2, 1),
    ]
    assert {each.snapshot.iteration for each in again} == {copied.first_iteration}
    (over,) = pipeline.found(RecordReplay)
    assert (over.is_same, pipeline.job.replay) == (True, None)
    at = pipeline.commands.index
    assert at(over) < at(RecordIteration("a", 2, following)), "behind that the next one may be due"
    pipeline.run_to(30)
    assert pipeline.commands[-1] == SaveResult(job="a", attempt=2, arenas=1, worker="cpu-1")
    recorded = [(each.iteration, each.attempt) for each in pipeline.found(RecordIteration)]
    assert recorded == [(n, 1 if n < following else 2) for n in range(30)], "what does not stand is not told"


def test_no_lane_is_sent_what_comes_behind_it_before_it_stands(pipeline: Any) -> None:
    pipeline.run_again(set())
    last = pipeline.job.replay.iteration
    assert pipeline.job.iterations_done == last
    assert {lane.sent for lane in pipeline.job.lanes.values()} != set()
    assert all(lane.sent <= (last + 1) * len(lane.program) for lane in pipeline.job.lanes.values())


def test_one_worker_alone_changes_places_with_one_that_is_free(plan_of: Callable[..., Plan]) -> None:
    rehearsal = Replays(plan_of(**STAGES | {"stages": 1}), others={"cpu-9": "cpu"})
    rehearsal.run_again(set(), set())
    assert rehearsal.job.workers == ("cpu-9", "loader-0")
    assert rehearsal.core.free() == {"cpu": ["cpu-0"]}
    kept = {each.worker: each.keeps for each in rehearsal.found(Release)}
    assert kept == {"cpu-0": False, "loader-0": True}


def test_one_worker_alone_where_none_is_free_runs_it_again_itself(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(**STAGES | {"stages": 1})
    rehearsal = Replays(plan)
    rehearsal.run_again({task_of(plan, snapshot(0, 0))}, set(), set())
    (over,) = rehearsal.found(RecordReplay)
    assert not over.is_same
    assert "cpu-0 has computed other bits in update, stage 0, than two runs that agree" in over.message


@pytest.mark.parametrize("odd", [0, 1])
def test_a_worker_that_was_wrong_once_is_named_and_the_job_goes_on_from_the_runs_that_agree(
    pipeline: Any, odd: int
) -> None:
    """In the first run, or in the second: then it takes a fourth, since the third has the first one's workers."""
    plan = pipeline.plan
    wrong = {task_of(plan, key) for key in (backward(0, 1, 0), snapshot(0, 0), snapshot(0, 1))}
    runs = [set(), set(), set(), set()] if odd else [set(), set(), set()]
    runs[odd] = wrong
    pipeline.run_again(*runs)
    (over,) = pipeline.found(RecordReplay)
    named = "cpu-0" if odd else "cpu-1"
    assert f": {named} has computed other bits in backward, stage 1, microbatch 0, than two runs" in over.message
    assert (over.is_same, pipeline.job.replay, pipeline.job.attempt) == (False, None, len(runs))
    told = [each.message for each in pipeline.found(RecordState) if each.reason == "replay"]
    assert told[1].endswith("it is run once more (attempt 3)")
    assert "backward, stage 1, microbatch 0 on cpu-1 and then on cpu-0" in told[1]
    pipeline.run_to(30)
    assert pipeline.job.phase is Phase.SAVING


def test_of_two_workers_that_differ_each_time_nobody_can_say_which_is_wrong(pipeline: Any) -> None:
    wrong = {task_of(pipeline.plan, forward(0, 0, 0)), task_of(pipeline.plan, snapshot(0, 1))}
    pipeline.run_again(set(), wrong, set(), wrong)
    assert "a" not in pipeline.core.jobs
    failed = pipeline.found(RecordState)[-1]
    assert (failed.state, failed.reason) == ("failed", "corrupted")
    assert "nobody can say which of cpu-0, cpu-1 is wrong" in failed.message
    assert "forward, stage 0, microbatch 0 on cpu-0 and then on cpu-1" in failed.message


def test_what_interrupts_a_replay_ends_it(pipeline: Any) -> None:
    pipeline.run_again()
    assert pipeline.job.replay is not None
    pipeline.tell(PauseRequested(job="a"))
    assert pipeline.job.replay is None
    pipeline.run_to(30)
    pipeline.release()
    assert pipeline.job.phase is Phase.PAUSED


def test_a_snapshot_of_which_a_part_is_missing_ends_it(pipeline: Any) -> None:
    pipeline.run_again()
    pipeline.tell(SnapshotMissed(job="a", attempt=1, iteration=pipeline.job.replay.after))
    assert pipeline.job.replay is None
    pipeline.run_to(30)
    assert (pipeline.job.phase, pipeline.job.attempt) == (Phase.SAVING, 1)


def test_a_worker_that_is_lost_ends_it_too(pipeline: Any) -> None:
    pipeline.run_again(set())
    pipeline.lose("cpu-0")
    assert (pipeline.job.replay, pipeline.job.phase) == (None, Phase.PREPARING)
    pipeline.prepare()
    pipeline.run_to(30)
    assert pipeline.job.phase is Phase.SAVING


def test_one_that_is_lost_between_two_runs_is_waited_for(pipeline: Any) -> None:
    pipeline.tell(ReplayDue(job="a", attempt=1))
    pipeline.run_to(pipeline.job.replay.iteration + 1)
    pipeline.tell(WorkerLost(worker="cpu-0", exit_code=-9))
    pipeline.release()
    assert (pipeline.job.phase, pipeline.job.attempt) == (Phase.MENDING, 2)
    pipeline.tell(WorkerJoined(worker="cpu-0"))
    pipeline.prepare()
    assert pipeline.job.workers == ("cpu-1", "cpu-0", "loader-0")
    pipeline.run_to(pipeline.job.replay.iteration + 1)
    assert [each.is_same for each in pipeline.found(RecordReplay)] == [True]


def test_none_is_begun_beside_another_snapshot_or_at_the_end(pipeline: Any) -> None:
    pipeline.tell(SnapshotDue(job="a", attempt=1))
    assert pipeline.tell(ReplayDue(job="a", attempt=1)) == []
    pipeline.run_to(28)
    assert pipeline.tell(ReplayDue(job="a", attempt=1)) == []
    assert pipeline.job.replay is None


# --- the place of a difference


def test_the_place_is_the_first_task_that_differs(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(**STAGES)
    after = [backward(0, 1, 0), backward(0, 1, 1), snapshot(0, 0), snapshot(0, 1)]
    for first, others in (
        (load(0, 1), [forward(0, 0, 1), *after[1:]]),
        (forward(0, 0, 1), after[1:]),
        (backward(0, 1, 0), after[1:]),
        (snapshot(0, 0), []),
        (snapshot(0, 1), []),
    ):
        assert places(plan, {task_of(plan, key): None for key in (first, *others)}) == [first]


def test_of_replicas_it_is_the_gradient_that_an_owner_has_found(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(replicas=2, microbatches=2, steps=8)
    by_key = plan.graph.by_key()
    found = {by_key[key]: 1 for key in (sync(0, 0), sync(1, 0)) if key in by_key}
    updated = {by_key[key]: None for key in (owned_snapshot(0), owned_snapshot(1)) if key in by_key}
    assert places(plan, found | updated) == [grad(1, 0, 0)]
    assert places(plan, dict.fromkeys(updated)) == [task.key for task in updated]


def places(plan: Plan, wrong: Mapping[Task, int | None]) -> list[Any]:
    one = {Made(task.id, None): b"bits" for task in plan.graph.tasks}
    other = one | {Made(task.id, replica): b"other" for task, replica in wrong.items()}
    found = first_differing(plan.graph, ReplayRun(("cpu-0",), one), ReplayRun(("cpu-1",), other))
    return [task.key for task in found]
