"""Plans: from a worker's inspection of a job to the plan that the core goes on with; beside the loop, for seconds."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from weft.machine.free_memory import free_memory
from weft.machine.run_file import load
from weft.plan.inspection import Inspection
from weft.plan.plan import Plan
from weft.scheduler.core.events import CancelRequested, Event, JobPlanned, Snapshot
from weft.scheduler.daemon.replacing.estate import Estate
from weft.scheduler.daemon.savers import Savers
from weft.scheduler.planning.choosing.choice import MakePlan, choose
from weft.scheduler.planning.choosing.roles import roles_of, with_roles
from weft.scheduler.planning.choosing.told import told
from weft.scheduler.planning.partition import PlanError
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.runs.checkpoints import find_checkpoint
from weft.scheduler.runs.run import Run
from weft.spec.job_spec import JobSpec
from weft.spec.strategy import Strategy
from weft.transport.wire.frames import Message

CHOSEN: Final = "strategy.json"  # of a job whose strategy was chosen: which
MAX_CHOSEN_BYTES: Final = 1 << 21  # a grid of a schedule may be in it


class Fail(Protocol):
    def __call__(self, job: str, attempt: int, reason: str, error: Exception | str, *, exit_code: int) -> None: ...


class Plans:
    """feed: one event to the core. fail: an attempt of a job."""

    def __init__(self, estate: Estate, savers: Savers, feed: Callable[[Event], None], fail: Fail) -> None:
        self._estate = estate
        self._savers = savers
        self._feed = feed
        self._fail = fail

    async def make(self, message: Message) -> None:
        """message: by which the inspection has come. Nothing of what it is made from changes: it may be made anew."""
        name, attempt = message["job"], message["attempt"]
        job, run = self._estate.core.jobs.get(name), self._estate.runs.get(name)
        if job is None or run is None or job.attempt != attempt:
            return
        try:
            facts = message["inspection"] | self._estate.device_facts.of(job.workers)
            facts["peer_access"] = self._estate.crew.has_peer_access(job.workers)
            facts["host"] = asdict(self._estate.crew.host)
            inspection, run.inspection = Inspection.from_wire(facts), facts
            free = free_memory()
            make = partial(make_plan, shared_bytes_free=free.shared, host_bytes_free=free.host)
            if run.spec.plan_for is not None:
                choice = await asyncio.to_thread(choose, run.spec, inspection, make)
                roles = await asyncio.to_thread(roles_of, choice.spec, inspection, make)
                run.planned = told(choice, roles, inspection, shared_bytes_free=free.shared, host_bytes_free=free.host)
                self._feed(CancelRequested(job=name, discard=True))
                return
            plan = await self._choose(run, inspection, make)
            if inspection.host.gpus:
                plan = await asyncio.to_thread(with_roles, plan, run.spec, inspection, make)
            checkpoint = await self._checkpoint_of(run, plan)
        except PlanError as error:
            self._fail(name, attempt, "invalid-plan", error, exit_code=2)
        else:
            self._feed(JobPlanned(job=name, attempt=attempt, plan=plan, checkpoint=checkpoint))

    async def _choose(self, run: Run, inspection: Inspection, make: MakePlan) -> Plan:
        """From then on the job's strategy is the one that was chosen, in other attempts and daemons, too."""
        if not run.spec.strategy.is_auto:
            return await asyncio.to_thread(make, run.spec, inspection)
        choice = await asyncio.to_thread(choose, run.spec, inspection, make)
        run.spec = choice.spec
        run.files.keep(CHOSEN, json.dumps(choice.spec.strategy.model_dump(exclude_none=True), indent=2) + "\n")
        return choice.plan

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
            run.recorded = max(run.recorded, found.recorded)
            run.training.keep(found.checkpoint.iteration, found.standing)
            run.files.log(f"goes on from {found.checkpoint.path}")
        return found.checkpoint


def with_chosen(spec: JobSpec, run_dir: Path) -> JobSpec:
    """As it went on, where its strategy was chosen before."""
    if not spec.strategy.is_auto:
        return spec
    try:
        table = json.loads(load(run_dir / CHOSEN, MAX_CHOSEN_BYTES, owner=os.geteuid()))
        return spec.model_copy(update={"strategy": Strategy.model_validate(table)})
    except (OSError, ValueError):  # it was not; or it is chosen once more
        return spec
