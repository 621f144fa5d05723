"""Orders: what a worker is told of the job that it holds, as messages; what it answers is in hearing.py."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, assert_never

from weft.plan.worker_view import WorkerView
from weft.scheduler.core.events import HandMemoryOn, JudgeEpoch, PlanJob, Prepare, Release, SaveResult, Snapshot
from weft.scheduler.core.job import Phase
from weft.scheduler.daemon.replacing.estate import Estate
from weft.scheduler.runs.checkpoints import adjusted_behind, training_of
from weft.scheduler.runs.run import Run
from weft.scheduler.runs.run_directory import MODEL
from weft.spec.candidates import all_threads
from weft.spec.workers_needed import cores_lent, threads_of
from weft.transport.wire.frames import Message

KEPT = 2  # checkpoints, of a job whose spec does not say


def order_of(command: JudgeEpoch | PlanJob | Prepare | SaveResult | Release | HandMemoryOn, estate: Estate) -> Message:
    run = estate.runs[command.job]
    about = {
        "job": command.job,
        "attempt": command.attempt,
        "spec": run.spec.to_wire(),
        "run_dir": str(run.files.path),
    }
    match command:
        case JudgeEpoch():
            assert run.attempt is not None
            to_save = run.attempt.plan.arenas_to_save()
            return {"type": "epoch", **about, "values": run.epoch, "arenas_to_save": to_save}
        case PlanJob():
            about |= {"code": run.code}
            return {"type": "inspect", **about, **_cores(estate, command.job, 0), **_choices(estate, command.job)}
        case Prepare():
            view, snapshot = WorkerView.of(command.plan, command.position).to_wire(), command.snapshot
            goes_on = None if snapshot is None else [*_about(snapshot), snapshot.path]
            snapshots = arenas_name(command.job, None)
            arenas = arenas_name(command.job, command.arenas)
            about |= {"arenas": arenas, "snapshots": snapshots, "snapshot": goes_on, "code": run.code}
            waits_for_nobody = command.attempt == command.arenas  # later ones: the others stand still meanwhile
            computes = estate.crew[command.worker].kind == "cpu"
            about |= {"spare": command.plan.has_spares and computes and waits_for_nobody}
            return {"type": "prepare", **about, "plan": view, **_cores(estate, command.job, command.position)}
        case SaveResult():
            assert run.attempt is not None
            about |= {"arenas": arenas_name(command.job, command.arenas)}
            to_save = run.attempt.plan.arenas_to_save()
            return {"type": "save", **about, "path": str(run.files.path / MODEL), "arenas_to_save": to_save}
        case Release():
            return {"type": "release", **about, "keeps": command.keeps}
        case HandMemoryOn():
            return {"type": "hand-memory-on", **about}
    assert_never(command)


def blocks_kept_for(worker: str, estate: Estate) -> str:
    """The name of the blocks of a job that has lost the worker and goes on; empty where there is none."""
    for job in estate.core.jobs.values():
        if worker in job.positions and worker not in job.workers and (job.keeps or job.phase is Phase.MENDING):
            return arenas_name(job.name, job.arenas)
    return ""


def saver_order(snapshot: Snapshot, run: Run) -> dict[str, Any]:
    """Of a process that writes one, see weft.workers.process.saver."""
    assert run.attempt is not None
    plan, checkpoint = run.attempt.plan, run.spec.checkpoint
    step, every = plan.itinerary.at(snapshot.iteration).step + 1, plan.checkpoint_steps
    is_due = snapshot.to_disk or (every is not None and step % every == 0)
    return {
        "arenas": arenas_name(run.job, None),
        "snapshot": _about(snapshot),
        "run_dir": str(run.files.path),
        "step": step,
        "training": training_of(run.spec, plan) | {"compile": run.spec.strategy.compile},
        "standing": run.training.at(snapshot.iteration).to_wire(),
        "adjusted": adjusted_behind(run.attempt, snapshot.iteration),
        "keep": KEPT if checkpoint is None else checkpoint.keep,
        "best": snapshot.best,
        "counted": is_due or not snapshot.best,
        "path": snapshot.path,
    }


def _cores(estate: Estate, name: str, position: int) -> Message:
    """With how many threads the job's worker computes, and where; None and nowhere: as ever."""
    strategy, host, workers = estate.runs[name].spec.strategy, estate.crew.host, estate.core.jobs[name].workers
    lent = [workers[place] for place in cores_lent(strategy, host, position)]
    return {"threads": threads_of(strategy, host) if lent else None, "cores": estate.crew.cores_of(lent)}


def _choices(estate: Estate, name: str) -> Message:
    """What a job's strategy may be chosen for, and with how many threads else it is measured, where: None with none."""
    host, workers = estate.crew.host, estate.core.jobs[name].workers
    threads = all_threads(estate.runs[name].spec, host)
    cores = [] if threads is None else estate.crew.cores_of(each for each in workers if estate.crew[each].kind == "cpu")
    return {"host": asdict(host), "all_threads": threads, "all_cores": cores}


def _about(snapshot: Snapshot) -> list[Any]:
    return [snapshot.iteration, snapshot.place, list(snapshot.tasks)]


def arenas_name(job: str, attempt: int | None) -> str:
    """A job's name in the directory. attempt: that has begun the blocks; nothing of the one before is in them. None: of
    the job's snapshots, which outlive an attempt."""
    return f"{job}@{'snapshots' if attempt is None else attempt}"
