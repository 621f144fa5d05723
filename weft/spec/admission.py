"""Admission: what of a job can be refused before anybody runs it: from its spec alone, and from the daemon's workers.

Each function gives the sentence that refuses the job, or None. A client asks before it submits, the service before it
acknowledges, the driver of a job that a daemon with fewer workers finds in the ledger, the planner of any spec that it
is given. What only the user's code tells (how the model can be cut, how many samples there are) the planner finds out.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.spec.job_spec import JobSpec
from weft.spec.replica import Replica, shown_replicas
from weft.spec.schedule_text import DYNAMIC, SPLITTING, schedule_title, why_not_stages
from weft.spec.strategy import Strategy
from weft.spec.workers_needed import Host, lines_of, workers_needed

_FLAGS = (  # kind of worker, its flag, its name
    ("cpu", "--workers", "CPU"),
    ("gpu", "--stand-ins", "GPU"),
    ("loader", "--loaders", "loader"),
)


def problem_of_spec(spec: JobSpec) -> str | None:
    """What no machine could plan."""
    strategy = spec.strategy
    for replica in strategy.replica_list:
        if (problem := _problem_of_schedule(strategy, replica)) is not None:
            return f"strategy.{problem}"
    if strategy.steals and (problem := _problem_of_stealing(strategy)) is not None:
        return problem
    compiles = strategy.compile is True  # where that is open, units stay as they are instead
    if compiles and strategy.share == "adaptive" and len(strategy.replica_list) > 1:
        return (
            "strategy.compile = true compiles each size of microbatch, and strategy.share = 'adaptive' has ever other "
            "ones; use share = 'fixed', or compile = false"
        )
    has_stages = any(replica.num_stages > 1 for replica in strategy.replica_list)
    if compiles and strategy.schedule in SPLITTING and has_stages:
        return why_not_compiled(strategy.schedule)
    if strategy.verify == "replay" and (problem := _problem_of_replay(strategy)) is not None:
        return problem
    if spec.job.mode == "forward" and any(replica.working_window for replica in strategy.replica_list):
        return (
            "strategy.replicas: working_window streams what updates change, and job.mode = 'forward' has none; give a "
            f"list without it: replicas = {shown_replicas(strategy.replica_list, without='working_window')}"
        )
    if spec.job.mode == "forward" and spec.stop is not None:
        return "[stop] is about training, and job.mode = 'forward' has none; leave the table out"
    counts = strategy.division[1]
    if spec.job.batch_size < sum(counts):
        all_replicas = f"the {sum(counts)} microbatches that all replicas have together"
        least = f"strategy.microbatches = {counts[0]}" if len(counts) == 1 else all_replicas
        return (
            f"job.batch_size = {spec.job.batch_size} is smaller than {least}; "
            "a microbatch needs at least one sample: give fewer microbatches, or a larger batch"
        )
    return None


def problem_of_crew(spec: JobSpec, kinds: Iterable[str], threads: int = 1) -> str | None:
    """What this daemon has too few workers for. kinds: of each of its workers, those included that are starting.
    threads: of each of its CPU workers."""
    have = list(kinds)
    host = Host(workers=have.count("cpu"), threads=threads)
    for kind, flag, name in _FLAGS:
        needed = workers_needed(spec.strategy, host).get(kind, 0)
        if needed > have.count(kind):
            workers = "worker" if needed == 1 else "workers"
            axis, asked = _asked(spec.strategy, kind)
            return (
                f"strategy.{axis} = {asked} needs {needed} {name} {workers} and this daemon has "
                f"{have.count(kind)}; use fewer {axis}, or start the daemon with {flag} {needed}"
            )
    return None


def why_not_compiled(schedule: str) -> str:
    """Of one that splits backwards."""
    return (
        "strategy.compile = true makes one kernel of a unit's backward, and "
        f"strategy.schedule = {schedule_title(schedule)!r} has it in two parts; use schedule = '1f1b', or "
        "compile = false"
    )


def _problem_of_replay(strategy: Strategy) -> str | None:
    """An iteration has to be made again from a snapshot, as it was, and by other workers."""
    reasons = {
        "a replica on a GPU": any(each.device == "gpu" for each in strategy.replica_list),
        "share = 'stealing'": strategy.steals,
        "recovery = 'off'": strategy.recovery == "off",
        "staleness": any(strategy.staleness_list),
    }
    for reason in (reason for reason, stands in reasons.items() if stands):
        return (
            f"strategy.verify = 'replay' has other CPU workers run an iteration again from a snapshot, and {reason} "
            "cannot stand beside it; leave that out, or use verify = 'off'"
        )
    return None


def _problem_of_schedule(strategy: Strategy, replica: Replica) -> str | None:
    if replica.working_window is not None:
        return None  # its layers take turns in an order of their own
    if (problem := why_not_stages(strategy.schedule, replica.num_stages, strategy.stages_per_worker)) is not None:
        return problem
    lines = lines_of(strategy, replica)
    if replica.gpus is not None and replica.gpus > lines:
        return (
            f"replicas: gpus = {replica.gpus}, and strategy.schedule has the {replica.num_stages} stages in {lines} "
            f"workers; use gpus = {lines}"
        )
    if strategy.schedule == DYNAMIC and (problem := _problem_of_dynamic(strategy, replica)) is not None:
        return problem
    if strategy.steals and lines < replica.num_stages:
        return (
            "share = 'stealing' cannot stand beside a schedule that has several stages in a worker, whose order is "
            "that of all microbatches of a batch; use share = 'fixed' or 'adaptive', or schedule = '1f1b'"
        )
    return None


def _problem_of_dynamic(strategy: Strategy, replica: Replica) -> str | None:
    """A lane has to see what is there before it begins a pass."""
    if replica.device == "gpu":
        return (
            "schedule = 'dynamic' has a lane begin what is there, and a GPU is given its passes before that is known; "
            "use schedule = 'last-stage', which is the order that comes out where all passes take as long"
        )
    if strategy.steals:
        return (
            "schedule = 'dynamic' cannot stand beside share = 'stealing', which fills the places of a fixed order; use "
            "share = 'fixed' or 'adaptive', or schedule = 'last-stage'"
        )
    return None


def _problem_of_stealing(strategy: Strategy) -> str | None:
    """Any replica may take any microbatch, so nothing about one may depend on who does."""
    if isinstance(given := strategy.replicas, list) and set(strategy.microbatch_counts) != {strategy.microbatches}:
        return (
            f"the replicas' microbatches = {strategy.microbatch_counts} cannot stand beside share = 'stealing'; give "
            "strategy.microbatches alone, the parts of a whole batch that replicas take, and a list without any: "
            f"replicas = {shown_replicas(given, without='microbatches')}"
        )
    if len(set(strategy.staleness_list)) > 1:
        return (
            f"strategy.staleness = {strategy.staleness} differs between replicas, and with share = 'stealing' it would "
            "be chance which parameters a sample sees; give one number, or use share = 'fixed' or 'adaptive'"
        )
    return None


def without_remedy(problem: str) -> str:
    """For whoever has not asked for what is refused."""
    return problem.partition("; ")[0]


def _asked(strategy: Strategy, kind: str) -> tuple[str, str]:
    """The axis that asks for workers of a kind, and its value."""
    if kind == "loader":
        return "loaders", str(strategy.loaders)
    if kind == "cpu" and isinstance(strategy.threads, int):
        return "threads", str(strategy.threads)
    if strategy.replicas is None:
        return "stages", str(strategy.stages)
    return "replicas", ", ".join(f"{replica.device} × {replica.num_stages}" for replica in strategy.replica_list)
