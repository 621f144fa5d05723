"""Plans: from a worker's inspection of a job to the plan that the core goes on with, and from what its tasks took to
another one; beside the loop, for seconds."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, cast

from weft.machine.crew import Crew
from weft.machine.free_memory import FreeMemory, free_memory
from weft.machine.run_file import load
from weft.plan.inspection import Inspection
from weft.plan.plan import Plan
from weft.scheduler.adapting.switching import SAMPLE
from weft.scheduler.core.events import CancelRequested, Event, JobPlanned, PlanImproved, Snapshot
from weft.scheduler.daemon.guard import Guard
from weft.scheduler.daemon.hearing import DeviceFacts
from weft.scheduler.daemon.replacing.estate import Estate
from weft.scheduler.daemon.savers import Savers
from weft.scheduler.planning.choosing.better import Running, better
from weft.scheduler.planning.choosing.choice import MakePlan
from weft.scheduler.planning.choosing.kept_plans import KeptPlans, key_of, plan_to_keep
from weft.scheduler.planning.choosing.roles import roles_of, with_roles
from weft.scheduler.planning.choosing.told import told
from weft.scheduler.planning.choosing.units import choose_with_units
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.runs.checkpoints import compiled_before, find_checkpoint
from weft.scheduler.runs.run import CHOSEN, Run
from weft.spec.candidates import instead_of, is_undecided, on_one_worker, with_units
from weft.spec.job_spec import JobSpec
from weft.spec.presets import AUTO
from weft.spec.strategy import Strategy
from weft.transport.wire.frames import Message

MAX_CHOSEN_BYTES: Final = 1 << 21  # a grid of a schedule may be in it


class Fail(Protocol):
    def __call__(self, job: str, attempt: int, reason: str, error: Exception | str, *, exit_code: int) -> None: ...


class Plans:
    """feed: one event to the core. fail: an attempt of a job."""

    def __init__(self, estate: Estate, savers: Savers, feed: Callable[[Event], None], fail: Fail, guard: Guard) -> None:
        self._estate = estate
        self._savers = savers
        self._feed = feed
        self._fail = fail
        self._guard = guard
        self._kept = KeptPlans()

    async def make(self, message: Message) -> None:
        """message: by which the inspection has come. Nothing of what it is made from changes: it may be made anew."""
        name, attempt = message["job"], message["attempt"]
        job, run = self._estate.core.jobs.get(name), self._estate.runs.get(name)
        if job is None or run is None or job.attempt != attempt:
            return
        try:
            crew, devices = self._estate.crew, self._estate.device_facts
            of_machine = facts_of_machine(crew, devices, job.workers, job.inspector)
            run.inspection = message["inspection"] | of_machine
            if "compiled_too" in run.inspection:
                run.inspection["compiled_too"] |= of_machine
            inspection = Inspection.from_wire(run.inspection)
            free = free_memory()
            make = partial(make_plan, shared_bytes_free=free.shared, host_bytes_free=free.host)
            if run.spec.plan_for is not None:
                choice = await asyncio.to_thread(choose_with_units, run.spec, inspection, make)
                roles = await asyncio.to_thread(roles_of, choice.spec, choice.inspection, make)
                run.planned = told(choice, roles, shared_bytes_free=free.shared, host_bytes_free=free.host)
                self._feed(CancelRequested(job=name, discard=True))
                return
            if run.spec.strategy.is_open:
                plan, inspection = await self._choose(run, inspection, make)
            else:
                plan = await self._of_given(run, inspection, free, make)
            if inspection.host.gpus:
                plan = await asyncio.to_thread(with_roles, plan, run.spec, inspection, make)
            checkpoint = await self._checkpoint_of(run, plan)
        except PlanError as error:
            self._fail(name, attempt, "invalid-plan", error, exit_code=2)
        else:
            instead = instead_of(run.spec, self._estate.crew.host)
            self._feed(JobPlanned(job=name, attempt=attempt, plan=plan, checkpoint=checkpoint, instead=instead))

    async def _of_given(self, run: Run, inspection: Inspection, free: FreeMemory, make: MakePlan) -> Plan:
        """By the strategy that it gives; as before, where nothing has changed since."""
        spec, run.given = run.spec, None
        key = key_of(spec, run.inspection, free)
        if (plan := self._kept.find(key)) is not None:
            return plan
        if (plan := await asyncio.to_thread(plan_to_keep, make_plan, spec, inspection, free)) is None:
            return await asyncio.to_thread(make, spec, inspection)
        self._kept.keep(key, plan)
        return plan

    async def _choose(self, run: Run, inspection: Inspection, make: MakePlan) -> tuple[Plan, Inspection]:
        """And by what it was planned: which the run has from now on, as it has the strategy."""
        given, run.given = run.spec, None
        choice = await asyncio.to_thread(choose_with_units, given, inspection, make)
        strategy = choice.spec.strategy
        if given.strategy.is_auto:
            if not is_undecided(given):  # what was chosen by predictions may be chosen by what was measured, too
                strategy = strategy.model_copy(update={"replan": strategy.replan is not False})
            run.given = with_units(given, compiled=strategy.compile is True)
        run.inspection = _of_units(run.inspection, compiled=strategy.compile is True)
        run.choose(choice.spec.model_copy(update={"strategy": strategy}))
        return choice.plan, choice.inspection

    @staticmethod
    def fall_back(run: Run) -> None:
        """From what was chosen though nobody had asked for a choice."""
        run.choose(on_one_worker(run.spec))
        run.given, run.exception = None, None

    # --- another plan for a job that runs

    def is_due(self, run: Run) -> bool:
        """After an iteration: whether the job is to be planned again. Tells what the newest change has brought."""
        attempt, switching = run.attempt, run.switching
        assert attempt is not None
        switching.note_end(attempt.progress.ended_ns)
        newest = attempt.progress.pace.newest(SAMPLE) if switching.is_due(attempt.progress.step) else None
        if newest is None:
            return False
        if switching.newest is not None:
            run.files.log(switching.judge(newest[1]))
        return switching.take_due(attempt.progress.step, attempt.progress.steps_left, newest[1])

    async def improve(self, run: Run) -> None:
        """Tells the core of a better plan, if there is one and it pays. Whatever goes wrong, the job goes on."""
        with self._guard.around(f"another plan for {run.job}"):
            await self._improve(run)

    async def _improve(self, run: Run) -> None:
        attempt, free = run.attempt, free_memory()
        if attempt is None or (newest := attempt.progress.pace.newest(SAMPLE)) is None:
            return
        own, plan = attempt.plan.shared_bytes, attempt.plan  # of which it will have let go
        beside = sum(plan.activation_bytes) + sum(plan.optimizer_bytes)
        make = partial(make_plan, shared_bytes_free=free.shared + own, host_bytes_free=free.host + own + beside)
        times = attempt.books.times.medians(newest[0])
        running = Running(plan=attempt.plan, task_seconds=times, iteration_seconds=newest[1])
        inspection = Inspection.from_wire(run.inspection)
        found = await asyncio.to_thread(better, run.spec, run.given or run.spec, running, inspection, make)
        left, copying = attempt.progress.steps_left, attempt.snapshots.newest_seconds
        if run.attempt is not attempt or found is None or not run.switching.pays(found.gain, left, copying):
            return
        self._feed(PlanImproved(job=run.job, attempt=attempt.number, plan=found.plan, message=found.told))
        job = self._estate.core.jobs.get(run.job)
        if job is not None and job.improved is found.plan:  # the core stops it for that
            run.better = found

    async def _checkpoint_of(self, run: Run, plan: Plan) -> Snapshot | None:
        """What the job goes on from, if there is anything on the disk, and nothing newer. Errors: PlanError."""
        job = self._estate.core.jobs.get(run.job)
        if job is None or job.snapshot is not None:
            return None
        await self._savers.wait(run.job)
        if run.spec.job.resume_from is not None:  # a job that has just been cancelled is still being written
            await self._savers.wait_for(Path(run.spec.directory, run.spec.job.resume_from))
        found = await asyncio.to_thread(find_checkpoint, run, plan)
        if run.job not in self._estate.runs:  # it was cancelled meanwhile
            return None
        for line in found.refused:
            run.files.log(line)
        if found.checkpoint is not None:
            run.recorded |= found.recorded
            run.training.keep(found.checkpoint.iteration, found.standing)
            run.files.log(f"goes on from {found.checkpoint.path}")
        return found.checkpoint


def _of_units(facts: Message, *, compiled: bool) -> Message:
    """What was found out of units as they will run."""
    if compiled and "compiled_too" in facts:
        return cast("Message", facts["compiled_too"])
    return {name: value for name, value in facts.items() if name not in ("compiled_too", "uncompiled")}


def facts_of_machine(crew: Crew, devices: DeviceFacts, workers: Sequence[str], inspector: int) -> dict[str, Any]:
    """What an inspection has of a job's workers, and no worker can tell."""
    free = devices.each("device_bytes")
    return devices.of(workers) | {
        "peer_access": crew.has_peer_access(workers),
        "host": asdict(crew.host),
        "gpu_bytes": [free[worker] for worker in workers if worker in free],
        "slowness": crew.slowness(workers, workers[inspector], devices.each("probe_seconds")),
    }


def with_chosen(spec: JobSpec, run_dir: Path) -> JobSpec:
    """As it went on, where its strategy was chosen before; with units compiled or not as those of the job from whose
    checkpoint it goes on, where that is left open."""
    if not spec.strategy.is_open:
        return spec
    try:
        table = json.loads(load(run_dir / CHOSEN, MAX_CHOSEN_BYTES, owner=os.geteuid()))
        return spec.model_copy(update={"strategy": Strategy.model_validate(table)})
    except (OSError, ValueError):  # it was not; or it is chosen once more
        compiled = compiled_before(spec, run_dir) if spec.strategy.compile == AUTO else None
        return spec if compiled is None else with_units(spec, compiled=compiled)
