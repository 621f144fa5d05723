"""Pipelines of two stages: against the graph's own limit, and against torch.distributed.pipelining.

Three parties take turns in slices (slices.py), on the same two cores with one thread each, for the same model, cut and
schedule; all processes are started anew several times, since where they lie in memory makes 3 % of difference:

    weft    a running job; an iteration is the time from the end of one step to the end of the next
    torch   torch.distributed.pipelining over Gloo, a process for each stage; peers/torch_pipeline.py
    alone   each stage's tasks without ever waiting, both stages at once on their cores; peers/stage_tasks.py

The limit is the critical cycle of the iteration graph with the times that its tasks took in one iteration alone: the
median iteration of a slice against that of its neighbour. (Times have a long tail, so the sum of each task's median is
less than any iteration takes, in a pipeline or alone: by 3 % for the small GPT.) Of orders that split backwards there
are two, `zero-bubble` and the one that `measured` makes of the model's times; each has its limit, and the faster one
what would be left without any bubble, the longer stage's tasks one after the other, and as its peer whichever of
torch's schedules is the fastest here.

And of three stages that are unequal: the order that `schedule = "measured"` makes for them, against the fastest of the
named ones that have a stage in each worker, all of which are run. The stages rest for times that they are told
(resting_job.py), so they have as many cores as they want. The times were searched for as some of which much is to be
gained: of random ones it is 2 % at the median, and more than 8 % of a tenth of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from job_steps import rows_of
from measure import Result, interleave, main, ratio_result
from party import Party, party
from slices import ENDLESS, SlicedParty, medians, sliced_job, take_turns

import weft.client.embedded
from weft.client.client import Client
from weft.plan.inspection import Inspection
from weft.plan.plan import Plan
from weft.plan.schedules.named import SCHEDULES
from weft.plan.schedules.planned import planned_grid, planned_schedule
from weft.plan.worker_view import WorkerView
from weft.scheduler.daemon.fork_server import ALLOCATOR
from weft.scheduler.planning.limit import speed_limit
from weft.scheduler.planning.planner import make_plan
from weft.spec.job_spec import JobSpec
from weft.spec.schedule_text import MEASURED

HERE = Path(__file__).resolve().parent
WARM_ITERATIONS = 10
ENVIRONMENT = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}  # the peers get what the workers have


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """prefix of the results' names; args of the entry; slices of so many seconds; goals by schedule."""

    prefix: str
    entry: str = "gpt_job.py:workload"
    args: dict[str, int]
    seconds: float
    over_limit: dict[str, str] = field(default_factory=dict)
    over_no_bubble: dict[str, str] = field(default_factory=dict)
    vs_torch: dict[str, str] = field(default_factory=dict)


CASES = (
    Case(
        prefix="",
        args={"layers": 8, "dim": 256, "heads": 4, "context": 128, "vocabulary": 8192, "samples": 64},
        seconds=4.0,
        over_limit={
            "gpipe": "<= 1.03",
            "1f1b": "<= 1.03",
            "last-stage": "<= 1.03",
            "model-parallel": "<= 1.03",
            "zero-bubble": "<= 1.03",
        },
        over_no_bubble={"zero-bubble": "<= 1.05"},
        vs_torch={"gpipe": ">= 1.0", "1f1b": ">= 1.0", "zero-bubble": ">= 1.08"},
    ),
    Case(
        prefix="small_",
        args={"layers": 4, "dim": 64, "heads": 1, "context": 32, "vocabulary": 512, "samples": 256},
        seconds=0.4,
        over_limit={"1f1b": "<= 1.05"},
        vs_torch={"gpipe": ">= 1.6", "1f1b": ">= 1.2"},
    ),
)


TORCH_SCHEDULES = {"1f1b": 2, "gpipe": 2, "interleaved-zero-bubble": 2, "zero-bubble-v": 4}  # and their stages


FORMS = {"zero-bubble": ("zero-bubble", MEASURED)}  # of ours that take turns in one part


STARTS, ROUNDS = 3, 8  # of all processes; of slices, from each start on


UNEQUAL = [[24, 10], [14, 22], [8, 6]]  # forward and backward of each stage
UNEQUAL_MICROBATCHES = 4


def collect(quick: bool) -> list[Result]:
    return [result for part in PARTS.values() for result in part(quick)]


def pipeline(case: Case, schedule: str, quick: bool) -> list[Result]:
    return _measure(case, schedule, *((1, 4) if quick else (STARTS, ROUNDS)))


def measured_order(quick: bool) -> list[Result]:
    turns, steps = (2, 10) if quick else (5, 20)
    # Here, as for a machine with a core for each stage: the daemon would reckon with the cores that there are.
    order = planned_grid(_planned(_unequal(MEASURED, steps)))
    assert order is not None
    with weft.client.embedded.Daemon(workers=3, threads=1, runs_dir=tempfile.mkdtemp(prefix="weft-bench-")) as client:
        seconds = interleave(
            turns, *(partial(_weft, client, _unequal(each, WARM_ITERATIONS + steps)) for each in (order, *SCHEDULES))
        )
    of_named = dict(zip(SCHEDULES, seconds[1:], strict=True))
    best = min(of_named, key=lambda name: statistics.median(of_named[name]))
    stages = ", ".join(f"{forward} and {backward}" for forward, backward in UNEQUAL)
    return [
        ratio_result(
            "measured_order_vs_best_named",
            of_named[best],
            seconds[0],
            goal=">= 1.10",
            how=f"iteration under the fastest of {', '.join(SCHEDULES)} (it was {best}) ÷ that of the order that was "
            f"made of the model's times; {len(UNEQUAL)} stages whose forward and backward take {stages} ms, "
            f"{UNEQUAL_MICROBATCHES} microbatches",
        )
    ]


def _unequal(schedule: str, steps: int) -> JobSpec:
    entry, args = "resting_job.py:workload", {"milliseconds": UNEQUAL}
    how = {"schedule": schedule, "stages": len(UNEQUAL), "microbatches": UNEQUAL_MICROBATCHES}
    return JobSpec.parse(
        {
            "job": {"entry": entry, "args": args, "steps": steps, "batch_size": 2 * UNEQUAL_MICROBATCHES, "seed": 1},
            "strategy": how,
            "directory": str(HERE),
        }
    )


PARTS: dict[str, Callable[[bool], list[Result]]] = {
    f"{case.prefix.replace('_', '-')}{schedule}": partial(pipeline, case, schedule)
    for case in CASES
    for schedule in dict.fromkeys([*case.vs_torch, *case.over_limit])
}
PARTS["measured-order"] = measured_order


@dataclass(slots=True, kw_only=True)
class Form:
    """An order of ours, and what was measured of it, by slice. text: as `strategy.schedule` has it."""

    name: str
    text: str
    plan: Plan
    seconds: list[float] = field(default_factory=list)  # of an iteration
    limits: list[float] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)


def _measure(case: Case, schedule: str, starts: int, rounds: int) -> list[Result]:
    stages = stages_of(case, schedule)
    forms = [_form(case, name, stages) for name in FORMS.get(schedule, (schedule,))]
    torch_seconds: dict[str, list[float]] = {name: [] for name in _peers_of(case, schedule)}
    for _ in range(starts):
        beside = _start(case, forms, torch_seconds, stages, rounds)
    shape = ", ".join(f"{key} {value}" for key, value in case.args.items() if key != "samples")
    results = [
        ratio_result(
            f"{case.prefix}{form.name.replace('-', '_')}_over_limit",
            form.seconds,
            form.limits,
            goal=case.over_limit.get(form.name),
            how=f"iteration ÷ the graph's limit from task times alone, both cores loaded; GPT {shape}; {beside}",
        )
        for form in forms
    ]
    ours = min(forms, key=lambda form: statistics.median(form.seconds))
    name = f"{case.prefix}{schedule.replace('-', '_')}"
    if goal := case.over_no_bubble.get(schedule):
        how = f"iteration under {ours.name} ÷ the longer stage's tasks, one after the other, both cores loaded"
        results.append(ratio_result(f"{name}_over_no_bubble", ours.seconds, ours.busiest, goal=goal, how=how))
    if torch_seconds:
        best = min(torch_seconds, key=lambda each: statistics.median(torch_seconds[each]))
        which = f"{best}, the fastest of {', '.join(torch_seconds)}" if len(torch_seconds) > 1 else "same schedule"
        of_ours = f", the faster of {' and '.join(form.name for form in forms)}" if len(forms) > 1 else ""
        at_once = " and ".join(str(planned_schedule(ours.plan).in_flight(stage)) for stage in range(len(stages)))
        how = (
            "iteration of torch.distributed.pipelining over Gloo ÷ ours, same cut, cores and allocator; "
            f"{which}; ours: {ours.name}{of_ours}, {at_once} microbatches in flight"
        )
        goal = case.vs_torch.get(schedule)
        results.append(ratio_result(f"{name}_vs_torch", torch_seconds[best], ours.seconds, goal=goal, how=how))
    return results


def _form(case: Case, name: str, stages: list[list[int]]) -> Form:
    """What is made of measured times is made once, and all parties have it as a grid."""
    plan = _planned(_spec(case, name, steps=1000, split=_split(stages)))
    text = planned_grid(plan) if name == MEASURED else name
    assert text is not None
    return Form(name=name, text=text, plan=plan)


def _start(
    case: Case, forms: list[Form], torch_seconds: dict[str, list[float]], stages: list[list[int]], rounds: int
) -> str:
    """Of all processes. What was measured is added to the forms and to torch_seconds."""
    with ExitStack() as stack:
        ours = [
            stack.enter_context(sliced_job(_spec(case, form.text, ENDLESS, _split(stages)), warm=WARM_ITERATIONS))
            for form in forms
        ]
        gloo = [
            SlicedParty(stack.enter_context(torch_peers(case, name, _chunks(stages, TORCH_SCHEDULES[name]))))
            for name in torch_seconds
        ]
        alone = [SlicedParty(stack.enter_context(_stage_peers(case, form, _split(stages)))) for form in forms]
        beside = take_turns([*ours, *gloo, *alone], rounds, case.seconds)
        columns: list[list[list[float]]] = []
        for form, job, peers in zip(forms, ours, alone, strict=True):
            tasks = [_iterations(form.plan, answers, peers.uncounted) for answers in peers.slices()]
            limits = [[speed_limit(form.plan.graph, seconds).seconds for seconds in each] for each in tasks]
            columns += [job.slices(), limits, [[_busiest(form.plan, seconds) for seconds in each] for each in tasks]]
        rows = medians(*columns, *(peers.iterations() for peers in gloo))
    kept = [column for form in forms for column in (form.seconds, form.limits, form.busiest)]
    for values, found in zip([*kept, *torch_seconds.values()], rows, strict=True):
        values += found
    return beside


def _split(stages: list[list[int]]) -> list[int]:
    return [first for first, _ in stages[1:]]


def _peers_of(case: Case, schedule: str) -> list[str]:
    """Of torch's schedules the same one; where torch has it not, all."""
    if schedule not in case.vs_torch:
        return []
    return [schedule] if schedule in TORCH_SCHEDULES else list(TORCH_SCHEDULES)


def _chunks(stages: list[list[int]], count: int) -> list[list[int]]:
    """So many stages: the given ones, or each in two halves."""
    if count == len(stages):
        return stages
    middles = [(first + last) // 2 for first, last in stages]
    return [
        half
        for (first, last), middle in zip(stages, middles, strict=True)
        for half in ([first, middle], [middle, last])
    ]


def _spec(case: Case, schedule: str, steps: int, split: list[int] | None = None) -> JobSpec:
    return JobSpec.parse(
        {
            "job": {"entry": case.entry, "args": case.args, "steps": steps, "batch_size": 16, "seed": 1},
            "strategy": {"schedule": schedule, "stages": 2, "microbatches": 8} | ({"split": split} if split else {}),
            "directory": str(HERE),
        }
    )


def stages_of(case: Case, schedule: str) -> list[list[int]]:
    """[first, last] of each, as the planner cuts; every party has these."""
    return [[stage.first, stage.last] for stage in _planned(_spec(case, schedule, steps=1000)).stages]


def _planned(spec: JobSpec) -> Plan:
    """Its graph gives the limit."""
    script = (
        "import json, sys, torch; torch.set_num_threads(1);"
        "from weft.spec.job_spec import JobSpec; from weft.workload.entry import load_workload;"
        "from weft.workers.devices.host import HostDevice; from weft.workers.inspection.inspection import inspect;"
        "spec = JobSpec.parse(json.loads(sys.argv[1]));"
        "print(json.dumps(inspect(load_workload(spec), spec, HostDevice())))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script, json.dumps(spec.to_wire())],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    ).stdout
    return make_plan(spec, Inspection.from_wire(json.loads(output)), shared_bytes_free=1 << 40)


def _weft(client: Client, spec: JobSpec) -> float:
    """Median iteration of a job on the warm daemon."""
    rows = rows_of(client, client.submit(spec)["job"])
    return statistics.median(row["seconds"] for row in rows[WARM_ITERATIONS:])


def _iterations(plan: Plan, answers: list[dict[str, list[float]]], uncounted: int) -> list[list[float]]:
    """Of a slice, without so many of its first ones: the seconds of each task."""
    seconds = {int(task): times[uncounted:] for answer in answers for task, times in answer.items()}
    return [list(each) for each in zip(*(seconds[task.id] for task in plan.graph.tasks), strict=True)]


def _busiest(plan: Plan, seconds: list[float]) -> float:
    """The lane that has most to do in an iteration, without a wait."""
    return max(sum(seconds[task] for task in program) for program in plan.graph.programs.values())


@contextmanager
def torch_peers(
    case: Case, schedule: str, stages: list[list[int]], allocator: Mapping[str, str] = ALLOCATOR
) -> Iterator[Party]:
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "rendezvous": str(Path(directory, "rendezvous")),
            "spec": _spec(case, "1f1b", 1).to_wire(),
            "stages": stages,
            "schedule": schedule,
            "microbatches": 8,
        }
        configs = [config | {"rank": rank, "core": rank} for rank in range(2)]
        with party("torch_pipeline.py", configs, allocator=allocator) as peers:
            yield peers


@contextmanager
def _stage_peers(case: Case, form: Form, split: list[int]) -> Iterator[Party]:
    spec, plan = _spec(case, form.text, 1000, split).to_wire(), form.plan
    configs = [
        {
            "spec": spec,
            "view": WorkerView.of(plan, stage).to_wire(),
            "loader_view": WorkerView.of(plan, len(plan.stages)).to_wire(),
            "core": stage,
        }
        for stage in range(len(plan.stages))
    ]
    with party("stage_tasks.py", configs) as peers:
        yield peers


if __name__ == "__main__":
    main("pipeline", collect, parts=PARTS)
