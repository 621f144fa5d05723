"""The daemon's look at a job of which nothing ends: when it asks, whom, and what it does with the answers.

Its clock is the test's, its core the real one; in the place of workers stands what they would say.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weft.metrics.prometheus.exporter import Exporter
from weft.plan.plan import Plan
from weft.scheduler.core.events import Event, TasksFinished, WorkerHung
from weft.scheduler.core.hangs import FIRST
from weft.scheduler.core.job import Phase
from weft.scheduler.daemon import hangs
from weft.scheduler.daemon.hangs import MAX_SECONDS, SILENT_LOOKS, Hangs

_CORE = runpy.run_path(str(Path(__file__).parents[1] / "core" / "test_core.py"))
LEAST = 10.0


class Look:
    """Job "a" in a phase, and a daemon that looks at it once a second."""

    def __init__(self, plan: Plan, phase: Phase, on_hang: str, directory: Path) -> None:
        self.rehearsal = _CORE["Rehearsal"](plan)
        self.rehearsal.submit("a")
        self.rehearsal.bring("a", phase)
        self.log: list[str] = []
        self.kept: dict[str, str] = {}
        files = SimpleNamespace(log=self.log.append, keep=self.kept.__setitem__, path=directory)
        spec = SimpleNamespace(job=SimpleNamespace(on_hang=on_hang, hang_seconds=LEAST))
        changed = SimpleNamespace(notify=lambda: None)
        self.run = SimpleNamespace(spec=spec, files=files, hang=None, attempt=None, asked=None, changed=changed)
        self.asked: list[str] = []
        self.fed: list[Event] = []
        self.begun: list[Coroutine[Any, Any, None]] = []
        pool = SimpleNamespace(pid=lambda worker: os.getpid(), send=lambda worker, message: self.asked.append(worker))
        self.hangs = Hangs(
            self.rehearsal.core,
            cast(Any, {"a": self.run}),
            cast(Any, pool),
            Exporter(),
            lambda what, job, work: self.begun.append(work),
            self.fed.append,
            {},
        )
        self.now = 0.0
        self.answers: dict[str, list[dict[str, Any]]] = {}

    @property
    def job(self) -> Any:
        return self.rehearsal.core.jobs["a"]

    def look(self, times: float) -> None:
        for _ in range(int(times)):
            self.now += 1.0
            before = len(self.asked)
            self.hangs.look(self.now)
            for worker in self.asked[before:]:
                if worker in self.answers:
                    self.hangs.heard(worker, self.job, self.answers[worker])

    async def act(self) -> None:
        """What was begun beside the loop."""
        while self.begun:
            await self.begun.pop()

    def says(self, worker: str, *, seconds: float, waits_for: int | None = None) -> None:
        (lane,) = [lane for lane in self.job.lanes.values() if lane.worker == worker]
        said = {"lane": lane.name, "done": lane.finished, "taken": lane.sent, "waits_for": waits_for}
        self.answers[worker] = [said | {"seconds": seconds}]

    def loader_hangs(self) -> None:
        (task,) = [t.id for t in self.job.plan.graph.tasks if str(t) == "LOAD(0,0)"]
        self.says("loader-0", seconds=FIRST * LEAST)
        self.says("cpu-0", seconds=FIRST * LEAST, waits_for=task)

    def finish_a_task(self) -> None:
        lane = self.job.lanes["cpu-0", "compute"]
        self.rehearsal.tell(TasksFinished("a", self.job.attempt, "cpu-0", lane.name, 1))

    @property
    def told(self) -> list[str]:
        return [line for line in self.log if line.startswith("the job hangs")]


@pytest.fixture
def begin(plan_of: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Look]:
    """Its workers are this process, of which nobody is to take stacks."""
    monkeypatch.setattr(hangs, "stacks_of", lambda pids, native: {name: f"stacks, {name in native}" for name in pids})
    plan = plan_of(stages=1, microbatches=2, steps=20)

    def begin(phase: Phase = Phase.RUNNING, on_hang: str = "restart") -> Look:
        return Look(plan, phase, on_hang, tmp_path)

    return begin


def test_while_anything_ends_nobody_is_asked(begin: Callable[..., Look]) -> None:
    look = begin()
    for _ in range(5):
        look.look(LEAST - 1)
        look.finish_a_task()
    assert look.asked == []


async def test_the_worker_that_holds_up_the_others_is_replaced(begin: Callable[..., Look]) -> None:
    look = begin()
    look.loader_hangs()
    look.look(LEAST + 2)
    assert look.told == [
        "the job hangs, and nothing of it has ended for 11 s: "
        "loader-0/load has been in LOAD(0,0) of step 1 for 100 s, and none like it is known"
    ]
    assert "cpu-0/compute waits for LOAD(0,0) of loader-0/load, for its FORWARD(0,0)" in look.log
    assert look.run.hang is not None
    await look.act()
    assert look.kept == {"stacks-cpu-0.txt": "stacks, False", "stacks-loader-0.txt": "stacks, True"}, "native frames"
    (hung,) = look.fed
    assert isinstance(hung, WorkerHung)
    assert (hung.worker, hung.job, hung.attempt) == ("loader-0", "a", 1)


async def test_a_worker_whose_on_epoch_does_not_return_is_replaced_in_the_time_of_a_first_task(
    begin: Callable[..., Look],
) -> None:
    """It was only told, and the job stood for ever."""
    look = begin()
    look.job.gate, look.run.asked = look.job.iterations_done, "the job's own function"
    look.look(FIRST * LEAST)
    assert look.told == []
    look.look(2)
    (told,) = look.told
    assert told.endswith("Workload.on_epoch has not returned on cpu-0 for 100 s")
    await look.act()
    (hung,) = look.fed
    assert isinstance(hung, WorkerHung)
    assert hung.worker == "cpu-0"


async def test_a_job_that_only_tells_does_so_once_and_says_when_it_goes_on(begin: Callable[..., Look]) -> None:
    look = begin(on_hang="notify")
    look.loader_hangs()
    look.look(5 * LEAST)
    await look.act()
    assert (len(look.told), look.fed) == (1, [])
    look.finish_a_task()
    look.loader_hangs()
    look.look(1)
    assert look.log[-1] == "the job goes on by itself"
    assert look.run.hang is None


def test_one_that_hangs_again_at_the_same_place_gets_twice_the_time(begin: Callable[..., Look]) -> None:
    look = begin()
    look.loader_hangs()
    look.look(LEAST + 2)
    look.finish_a_task()  # no iteration is over
    look.answers.clear()
    look.look(2 * LEAST)
    assert len(look.asked) == 2
    look.look(2)
    assert len(look.asked) > 2
    for work in look.begun:
        work.close()


async def test_a_worker_that_does_not_answer_is_at_fault(begin: Callable[..., Look]) -> None:
    look = begin()
    look.says("cpu-0", seconds=1.0, waits_for=0)
    look.look(FIRST * LEAST + SILENT_LOOKS)
    assert len(look.told) == 1
    assert "loader-0 does not answer" in look.told[0]
    await look.act()
    assert [each.worker for each in look.fed if isinstance(each, WorkerHung)] == ["loader-0"]


@pytest.mark.parametrize(("on_hang", "restarts"), [("restart", True), ("notify", False)])
async def test_where_all_lanes_wait_the_job_is_begun_anew(
    begin: Callable[..., Look], on_hang: str, restarts: bool
) -> None:
    look = begin(on_hang=on_hang)
    for worker in ("cpu-0", "loader-0"):
        look.says(worker, seconds=LEAST, waits_for=0)
    look.look(LEAST + 3)
    assert len(look.told) == 1
    assert "every lane waits and none does anything" in look.told[0]
    await look.act()
    hung = [(each.worker, each.attempt) for each in look.fed if isinstance(each, WorkerHung)]
    assert hung == ([(None, 1)] if restarts else [])


async def test_what_takes_long_to_prepare_is_told_and_nobody_is_killed(begin: Callable[..., Look]) -> None:
    look = begin(Phase.PREPARING)
    look.look(FIRST * LEAST)
    assert look.told == []
    look.look(2)
    assert "preparing has taken 100 s so far, and waits for cpu-0, loader-0" in look.told[0]
    await look.act()
    assert look.fed == []


@pytest.mark.parametrize(
    ("phase", "what"),
    [
        (Phase.PLANNING, "cpu-0 tries the model, whole and cut into stages, and measures it"),
        (Phase.PREPARING, "cpu-0, loader-0 build the model and open the data"),
    ],
)
def test_before_training_the_log_tells_what_takes_its_time(begin: Callable[..., Look], phase: Phase, what: str) -> None:
    look = begin(phase)
    look.look(hangs.NOTED_SECONDS)
    assert look.log == []
    look.look(4 * hangs.NOTED_SECONDS)
    assert look.log == [f"{phase} has taken {seconds} s so far: {what}" for seconds in (15, 30, 60)]
    assert look.run.hang is None


def test_the_time_in_which_the_daemon_did_not_look_does_not_count(begin: Callable[..., Look]) -> None:
    look = begin()
    look.look(1)
    look.now += 1000.0
    look.look(LEAST - MAX_SECONDS - 1)
    assert look.asked == []


@pytest.mark.parametrize(
    "changes",
    [{"lane": "nowhere"}, {"waits_for": 1 << 20}, {"task": 1 << 20}, {"taken": 1 << 20}, {"done": 1 << 19}],
    ids=["a lane", "a task", "its own task", "tasks sent", "tasks done"],
)
def test_an_answer_that_cannot_be_is_refused(begin: Callable[..., Look], changes: dict[str, Any]) -> None:
    look = begin()
    look.look(1)
    look.says("cpu-0", seconds=1.0)
    with pytest.raises(ValueError, match="progress: "):
        look.hangs.heard("cpu-0", look.job, [look.answers["cpu-0"][0] | changes])
