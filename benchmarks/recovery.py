"""What snapshots and checkpoints cost while all goes well, and what they save when a worker is killed.

iteration_cost             a job's time over a fixed number of steps, snapshots in it ÷ with recovery = "off"
snapshot_cost              1 + the share of the busiest lane's time in mode snapshot
checkpoint_exposed         what a checkpoint adds to the iterations beside it ÷ the 50 from one to the next
checkpoint_vs_dcp          how long the loop stands still for a checkpoint, by torch.distributed.checkpoint's
                           async_save in the plain loop ÷ ours
checkpoint_added_vs_dcp    what it adds to the iterations beside it, theirs ÷ ours: of one machine's memory, too
after_kill                 seconds from SIGKILL of a worker to the end of the next iteration, less three iterations
lost_work                  iterations that were over and were done again, beside snapshot_interval
each_...                   the same with recovery = "iteration", which copies each iteration
spares_iteration_cost      a job's time over a fixed number of steps, its workers having spares ÷ without
recovery_vs_torchrun       the same seconds of torchrun, whose script goes on from its own checkpoint ÷ ours
resume_under_another_plan  seconds from submit, on a checkpoint of two stages, to the first iteration of one stage

All parties of a row take turns on the same cores, with the same model, batch, optimizer and threads. Kills come at
random moments from SEED on.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from job_steps import rows_of
from killed_jobs import Killed, kill_ours, kill_torchruns
from measure import Result, interleave, make_parser, ratio_result, report, text_table, value_result
from party import Party, ask, party

import weft.client.embedded
from weft.client.client import Client
from weft.metrics.recording.recording import Recording
from weft.plan.kinds import MODE_INDEX
from weft.plan.rows import Row
from weft.spec.job_spec import JobSpec

HERE = Path(__file__).resolve().parent
SEED = 1107
EVERY = 50  # iterations from one checkpoint to the next, of which a share is told
OFTEN = 20  # as they are made here, so that there are many
BESIDE = 12  # iterations, from its own on, by which a checkpoint is over
SAVES = 4  # of async_save in a round
KINDS = ("thread", "staged", "process")  # of async_save, see peers/async_checkpoints.py
ENDLESS = 1_000_000
OFF = {"recovery": "off"}
EACH = {"recovery": "iteration"}
BETWEEN = "from one snapshot to the next, by what the newest one took"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """goal: of iteration_cost. steps: of one turn."""

    name: str
    entry: str
    args: dict[str, int]
    batch_size: int
    steps: int
    goal: str | None = None
    strategy: dict[str, Any] = field(default_factory=dict)

    def spec(self, *, steps: int = 0, strategy: dict[str, Any] | None = None, **tables: Any) -> JobSpec:
        """tables: others than of the job itself, whose keys go into that one."""
        checkpoint = {"checkpoint": tables.pop("checkpoint")} if "checkpoint" in tables else {}
        job = {"entry": self.entry, "args": self.args, "batch_size": self.batch_size, "seed": 1}
        return JobSpec.parse(
            {
                "job": job | {"steps": steps or self.steps} | tables,
                "strategy": self.strategy | (strategy or {}),
                "directory": str(HERE),
                **checkpoint,
            }
        )

    @property
    def what(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.args.items() if key != "samples")


GPT = Case(
    name="gpt",
    entry="gpt_job.py:workload",
    args={"layers": 12, "dim": 256, "heads": 4, "context": 128, "vocabulary": 8192, "samples": 64},
    batch_size=16,
    steps=25,
    goal="<= 1.03",
    strategy={"stages": 2, "microbatches": 8},
)
MLP = Case(
    name="mlp",
    entry="wide_mlp_job.py:workload",
    args={"layers": 3, "width": 4096, "samples": 1024},
    batch_size=64,
    steps=2 * EVERY + 40,
    goal="<= 1.10",
)
SMALL_GPT = replace(
    GPT,
    name="small_gpt",
    args={"layers": 4, "dim": 128, "heads": 4, "context": 64, "vocabulary": 2048, "samples": 256},
    steps=60,
    goal=None,
)
QUICK = {
    "gpt": replace(SMALL_GPT, name="gpt", goal=GPT.goal),
    "mlp": replace(MLP, args={"layers": 3, "width": 1024, "samples": 1024}),
}
PARTS = ("gpt", "mlp", "spares", "kills", "torchrun", "resume")


def collect(quick: bool, only: Sequence[str]) -> list[Result]:
    gpt, mlp = (QUICK["gpt"], QUICK["mlp"]) if quick else (GPT, MLP)
    small = replace(SMALL_GPT, steps=300, strategy={"preset": "ddp", "replicas": 2})
    with (
        tempfile.TemporaryDirectory(prefix="weft-bench-") as runs,
        weft.client.embedded.Daemon(workers=2, threads=1, runs_dir=runs) as client,
    ):
        parts: dict[str, Callable[[], list[Result]]] = {
            "gpt": lambda: cost(client, gpt, 1 if quick else 3),
            "mlp": lambda: checkpoints(client, mlp, 1 if quick else 3),
            "spares": lambda: spares(client, small, 1 if quick else 5),
            "kills": lambda: [row for case in (gpt, mlp) for row in kills(client, case, 2 if quick else 5)],
            "torchrun": lambda: against_torchrun(client, SMALL_GPT, 1 if quick else 5),
            "resume": lambda: resume(client, mlp, 1 if quick else 5),
        }
        return [row for name in PARTS if name in only for row in parts[name]()]


# --- while all goes well


@dataclass(frozen=True, slots=True)
class Ran:
    seconds: list[float]  # of each iteration but the first
    snapshot_share: float  # of the busiest lane's time
    snapshots: dict[int, float] = field(default_factory=dict)  # that it took the busiest lane, by iteration

    @property
    def total(self) -> float:
        return sum(self.seconds)

    def held(self, iteration: int) -> float:
        """By a snapshot of the iteration: to make it, its room before, if that was new, and the next update's wait."""
        return sum(self.snapshots.get(each, 0.0) for each in range(iteration - 1, iteration + 2))


def run(client: Client, spec: JobSpec) -> Ran:
    """To its end. What it leaves on the disk goes."""
    job = client.submit(spec)["job"]
    rows = rows_of(client, job)
    lanes = client.show(job)["lanes"].values()
    share = max(lane.get("snapshot", 0.0) / sum(lane.values()) for lane in lanes)
    took = [snapshots_of(rows) for rows in Recording.load(client.record(job)).rows.values()]
    client.remove(job)
    return Ran([row["seconds"] for row in rows[1:]], share, max(took, key=lambda own: sum(own.values())))


def snapshots_of(rows: Iterable[Row]) -> dict[int, float]:
    """Of a lane, the seconds that it was in mode snapshot, by iteration."""
    seconds: dict[int, float] = {}
    for mode, _, iteration, _, start, end in rows:
        if mode == MODE_INDEX["snapshot"]:
            seconds[iteration] = seconds.get(iteration, 0.0) + (end - start) / 1e9
    return seconds


def take_turns(turns: int, *parties: Callable[[], Ran]) -> list[list[Ran]]:
    """As `interleave`, of runs."""
    runs: list[list[Ran]] = [[] for _ in parties]

    def total(number: int) -> float:
        runs[number].append(parties[number]())
        return runs[number][-1].total

    interleave(turns, *(partial(total, number) for number in range(len(parties))))
    return runs


def cost(client: Client, case: Case, turns: int) -> list[Result]:
    parties = (partial(run, client, spec) for spec in (case.spec(), case.spec(strategy=OFF)))
    return cost_results(case, *take_turns(turns, *parties))


def cost_results(case: Case, ours: Sequence[Ran], without: Sequence[Ran]) -> list[Result]:
    how = f"{case.entry.partition(':')[0]} with {case.what}, batch {case.batch_size}, AdamW, {case.steps} steps"
    return [
        ratio_result(
            f"{case.name}_iteration_cost",
            [each.total for each in ours],
            [each.total for each in without],
            goal=case.goal,
            how=f"seconds of all iterations but the first, snapshots in them ÷ with recovery = 'off'; {how}",
        ),
        value_result(
            f"{case.name}_snapshot_cost",
            [1 + each.snapshot_share for each in ours],
            "x",
            goal="<= 1.01",
            how="1 + the share of the busiest lane's time in mode snapshot, of the same jobs, as the account has it",
        ),
    ]


def spares(client: Client, case: Case, turns: int) -> list[Result]:
    parties = (partial(run, client, case.spec(strategy={"spares": each})) for each in (True, False))
    ours, without = take_turns(turns, *parties)
    what = f"{case.entry.partition(':')[0]} with {case.what}, two replicas, {case.steps} steps"
    return [
        ratio_result(
            "spares_iteration_cost",
            [each.total for each in ours],
            [each.total for each in without],
            goal="<= 1.01",
            how=f"seconds of all iterations but the first, workers having spares ÷ with spares = false; {what}",
        )
    ]


def checkpoints(client: Client, case: Case, turns: int) -> list[Result]:
    """The job with snapshots, without them, and with checkpoints as well; and async_save's loop in every round."""
    theirs: dict[str, list[Saved]] = {kind: [] for kind in KINDS}
    with _async_save(case) as peers:
        for kind in KINDS:
            _saved(peers, kind)  # warm-up: what is copied to is touched for the first time

        def all_kinds() -> Ran:
            for kind in KINDS:
                theirs[kind] += [_saved(peers, kind) for _ in range(SAVES)]
            return Ran([], 0.0)

        specs = (case.spec(), case.spec(strategy=OFF), case.spec(checkpoint={"every": f"{OFTEN} steps"}))
        parties = [partial(run, client, spec) for spec in specs]
        ours, without, written, _ = take_turns(turns, *parties, all_kinds)
    return [*cost_results(case, ours, without), *_checkpoint_results(case, written, theirs)]


def _checkpoint_results(case: Case, written: Sequence[Ran], theirs: dict[str, list[Saved]]) -> list[Result]:
    begins = range(OFTEN - 2, case.steps - OFTEN, OFTEN)  # the iteration that is copied, among those but the first
    held = [took for each in written for begin in begins if (took := each.held(begin + 1))]  # none while one is written
    ours = [each.seconds for each in written]
    held_theirs = {kind: [save.held for save in saves] for kind, saves in theirs.items()}
    added_theirs = {kind: added([save.seconds for save in saves], [0]) for kind, saves in theirs.items()}
    best, quickest = (
        min(held_theirs, key=lambda kind: statistics.median(held_theirs[kind])),
        min(added_theirs, key=lambda kind: added_theirs[kind]),
    )
    how = f"in the plain loop, one process of one thread, the best of {', '.join(KINDS)}: "
    return [
        value_result(
            f"{case.name}_checkpoint_exposed",
            [added(ours, begins) / (EVERY * statistics.median(each for seconds in ours for each in seconds))],
            "of the time",
            goal="<= 0.02",
            how=f"what a checkpoint adds to the {BESIDE} iterations from its own on, over others that are near, "
            f"snapshots in all of them, ÷ {EVERY}; each of the {BESIDE} is the median of {len(ours) * len(begins)} "
            f"checkpoints, one every {OFTEN}",
        ),
        ratio_result(
            f"{case.name}_checkpoint_vs_dcp",
            [statistics.median(held_theirs[best])] * len(held),
            held,
            goal=">= 5",
            how=f"how long the loop stands still for it, by async_save {how}{best} ÷ our lane's in mode snapshot",
        ),
        value_result(
            f"{case.name}_checkpoint_added_vs_dcp",
            [added_theirs[quickest] / added(ours, begins)],
            "x",
            how=f"what it adds to the {BESIDE} iterations, by async_save {how}{quickest} ÷ ours",
        ),
        value_result(f"{case.name}_checkpoint_held", held, "ms", scale=1e3, how="our lane's seconds in mode snapshot"),
        value_result(f"{case.name}_checkpoint_added", [added(ours, begins)], "ms", scale=1e3, how="what ours adds"),
        *(
            value_result(f"{case.name}_async_save_{kind}_held", held_theirs[kind], "ms", scale=1e3, how="theirs")
            for kind in KINDS
        ),
        *(
            value_result(f"{case.name}_async_save_{kind}_added", [added_theirs[kind]], "ms", scale=1e3, how="theirs")
            for kind in KINDS
        ),
    ]


def added(runs: Sequence[Sequence[float]], begins: Sequence[int]) -> float:
    """What a checkpoint adds to the iterations beside it, each of which is the median of those as far behind any
    checkpoint's begin: an iteration of its neighbours' is as good as lost in a mean. It adds to what others take that
    are near: within minutes a machine's speed changes by more."""
    quiet = [(seconds, begin, _quiet_near(seconds, begin, begins)) for seconds in runs for begin in begins]
    return sum(
        statistics.median(seconds[begin + behind] - near for seconds, begin, near in quiet) for behind in range(BESIDE)
    )


def _quiet_near(seconds: Sequence[float], begin: int, begins: Sequence[int]) -> float:
    """The median of the iterations that are beside no checkpoint, of those around this one."""
    beside = {number for each in begins for number in range(each, each + BESIDE)}
    around = range(max(0, begin - OFTEN), min(len(seconds), begin + BESIDE + OFTEN))
    return statistics.median(seconds[number] for number in around if number not in beside)


@dataclass(frozen=True, slots=True)
class Saved:
    """By async_save."""

    seconds: list[float]  # of each iteration, the save in the first
    held: float  # for how long of them the loop stood still for it


@contextmanager
def _async_save(case: Case) -> Iterator[Party]:
    config = {"spec": case.spec().to_wire(), "cores": sorted(os.sched_getaffinity(0)), "threads": 1}
    with party("async_checkpoints.py", [config], environment={"GLOO_SOCKET_IFNAME": "lo"}) as peers:
        yield peers


def _saved(peers: Party, kind: str) -> Saved:
    (answer,) = ask(peers, f"{2 * BESIDE} {kind}")
    return Saved(**answer)


# --- when a worker is killed


def kills(client: Client, case: Case, turns: int) -> list[Result]:
    moments = random.Random(SEED)
    killed, each = [], []
    for _ in range(turns):
        killed.append(kill_ours(client, case.spec(steps=ENDLESS), moments))
        each.append(kill_ours(client, case.spec(steps=ENDLESS, strategy=EACH), moments))
    how = f"{case.entry.partition(':')[0]} with {case.what}; a compute worker, at moments from seed {SEED}"
    return [
        *_kill_results(case.name, killed, how),
        value_result(f"{case.name}_snapshot_interval", [one.between for one in killed], "iterations", how=BETWEEN),
        *_kill_results(f"{case.name}_each", each, f"recovery = 'iteration'; {how}", lost="<= 1"),
        ratio_result(
            f"{case.name}_each_iteration_cost",
            [one.iteration_seconds for one in each],
            [one.iteration_seconds for one in killed],
            how="an iteration where each is copied ÷ one of the same job with snapshots now and then, before the kill",
        ),
    ]


def _kill_results(name: str, killed: Sequence[Killed], how: str, lost: str | None = None) -> list[Result]:
    """lost: the goal of lost_work."""
    return [
        value_result(
            f"{name}_after_kill",
            [one.next_seconds - 3 * one.iteration_seconds for one in killed],
            "s",
            goal="<= 0.5",
            how=f"from SIGKILL to the end of the next iteration, less 3 iterations; {how}",
        ),
        value_result(f"{name}_to_next_iteration", [one.next_seconds for one in killed], "s", how="all of it"),
        value_result(
            f"{name}_to_new_iteration",
            [one.back_seconds for one in killed],
            "s",
            how="from SIGKILL to the end of the first iteration that had not been over before",
        ),
        value_result(f"{name}_iteration", [one.iteration_seconds for one in killed], "s", how="before the kill"),
        value_result(f"{name}_lost_work", [one.lost for one in killed], "iterations", goal=lost, how="done again"),
    ]


def against_torchrun(client: Client, case: Case, turns: int) -> list[Result]:
    moments = random.Random(SEED)
    spec = replace(case, strategy={"preset": "ddp", "replicas": 2}).spec(steps=ENDLESS)
    ours, theirs = [], []
    for _ in range(turns):
        ours.append(kill_ours(client, spec, moments))
        between = ours[-1].between
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
            seconds = between * ours[-1].iteration_seconds
            theirs.append(kill_torchruns(spec, max(1, round(between)), seconds, Path(folder), moments))
    return [*_versus_torchrun(case, ours, theirs), *_seconds_after_kill(ours, theirs)]


def _versus_torchrun(case: Case, ours: Sequence[Killed], theirs: Sequence[Killed]) -> list[Result]:
    return [
        ratio_result(
            "recovery_vs_torchrun",
            [each.next_seconds for each in theirs],
            [each.next_seconds for each in ours],
            goal=">= 20",
            how="from SIGKILL of a process to the end of the next iteration, two replicas of one thread: torchrun with "
            "a monitor interval of 0.1 s and DistributedDataParallel over Gloo, whose script writes a checkpoint as "
            f"often as ours makes a snapshot and goes on from it ÷ ours; gpt_job.py with {case.what}, seed {SEED}",
        ),
        ratio_result(
            "back_vs_torchrun",
            [each.back_seconds for each in theirs],
            [each.back_seconds for each in ours],
            how="the same to the end of the first iteration that had not been over before",
        ),
    ]


def _seconds_after_kill(ours: Sequence[Killed], theirs: Sequence[Killed]) -> list[Result]:
    rows = []
    for name, killed in (("ddp", ours), ("torchrun", theirs)):
        rows += [
            value_result(f"{name}_to_next_iteration", [each.next_seconds for each in killed], "s", how="of that ratio"),
            value_result(f"{name}_lost_work", [each.lost for each in killed], "iterations", how="done again"),
        ]
    return rows


# --- on a checkpoint, under another plan


def resume(client: Client, case: Case, turns: int) -> list[Result]:
    spec = case.spec(steps=8, strategy={"stages": 2}, checkpoint={"every": "4 steps"})
    saved = client.submit(spec)["job"]
    run_dir = Path(client.wait(saved, timeout=600)["run_dir"])
    latest = run_dir / "checkpoints" / "latest"
    while not latest.exists():  # a job may end while it is written
        time.sleep(0.05)
    resumed, fresh = interleave(
        turns,
        lambda: _start_seconds(client, case.spec(steps=8, resume_from=str(latest.resolve()))),
        lambda: _start_seconds(client, case.spec(steps=8)),
    )
    client.remove(saved)
    return [
        value_result(
            "resume_under_another_plan",
            resumed,
            "s",
            how="from submit to the end of the first iteration of one stage, on a checkpoint of two stages; "
            f"{case.entry.partition(':')[0]} with {case.what}",
        ),
        ratio_result("resume_over_start", resumed, fresh, how="the same ÷ of a job that begins at its beginning"),
    ]


def _start_seconds(client: Client, spec: JobSpec) -> float:
    """As in warm_start.py."""
    started = time.monotonic()
    job = client.submit(spec)["job"]
    submitted = time.monotonic() - started
    rows_of(client, job)
    first = client.show(job)["first_iteration_seconds"]
    client.remove(job)
    return float(submitted + first)


def main() -> None:
    parser = make_parser("recovery")
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be given again; default: all")
    arguments = parser.parse_args()
    results = collect(arguments.quick, arguments.only or PARTS)
    print(json.dumps(report("recovery", results), indent=1) if arguments.json else text_table(results))


if __name__ == "__main__":
    main()
