"""What another plan costs a job at an iteration's end: the least that it would be, and what it is.

--only switch: jobs of two stages whose second half of units grows slow, so that they go on with another plan. From the
end of the last iteration before to that of the first one behind, but for one iteration: letting go, preparing, lanes
that run empty and fill again. The same job that stays as it is takes turns, for what the change gains.

--only stop: what it costs to bring all lanes to an iteration's end and to go on from there, which is the least of it.
Nothing is prepared, and nobody is told of a plan.

A CPU replica beside a stand-in by `hybrid-fine`, on a daemon whose jobs stop at every 16th iteration. Twice:

    simulated   the plan in virtual time, each task as long as its median in the job, with such stops and without. The
                daemon answers at once there; `dispatch` tells what its answer takes
    measured    in the job itself, whose other iterations say what is usual, so that both saw the same machine:

    iterations      -1 .. 2     3 .. 6      7 .. 10     11 .. 14       counted from the one that begins behind a stop
                    ▕|        ▏ ▕        ▏  ▕        ▏  ▕        ▏
                    lost: first less second     nothing: third less fourth, where nothing stops: noise alone

What is lost is the time that compute lanes wait more, the mean of the lanes: what they do takes as long as before. The
bubble is what they wait in an iteration without a stop.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import Result, main, ratio_result, value_result

import weft.cli.main
import weft.client.embedded
from weft.metrics.recording.recording import Recording
from weft.metrics.recording.stall_shares import IterationStalls, stall_shares
from weft.plan.graph import Lane
from weft.plan.inspection import Inspection
from weft.plan.kinds import FIRST_STALL, is_compute_lane
from weft.plan.plan import Plan
from weft.plan.rows import Row
from weft.plan.tables import Grant
from weft.scheduler.adapting.lane_state import LaneState
from weft.scheduler.adapting.policy import IterationPolicy
from weft.scheduler.core import dispatch
from weft.scheduler.planning.limit import Milestones
from weft.scheduler.planning.outlook import gradient_milestones
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.planning.simulator import Simulation, simulate
from weft.spec.job_spec import JobSpec

EVERY = 16  # iterations
STOPS = 40  # of a job, behind iterations in which everything becomes warm
WARM = 2 * EVERY
WINDOW = 4
ITERATIONS = 4 * EVERY  # that are simulated
GPT = {"layers": 4, "dim": 64, "heads": 1, "context": 32, "vocabulary": 512, "samples": 256}
STRATEGY = {"preset": "hybrid-fine", "microbatches": 4}

TIRING = {"sample_seconds": 2e-4, "units": 8, "after": 40}
DIMS = {"": 256, "_large": 1024}  # of units: 0.5 and 8.4 million parameters
SWITCHED = {"stages": 2, "microbatches": 4, "window": 32}
SWITCHED_STEPS = 160


class Stops(IterationPolicy[None]):
    """Nothing is adapted beside: what a stop costs is not to be mixed with what other shares or routes bring."""

    @staticmethod
    def applies(plan: Plan) -> bool:
        return True

    def begin(self, lanes: Mapping[Lane, LaneState]) -> None:
        self._lanes = list(lanes.values())
        self._until = EVERY  # iterations; no task of a later one is sent
        super().begin(lanes)

    def come(self, lane: LaneState) -> tuple[Sequence[Grant], Sequence[LaneState]]:
        if any(each.finished < self._until * len(each.program) for each in self._lanes):
            return super().come(lane)
        self._until += EVERY
        for each in self._lanes:
            self._allow(each, each.finished // len(each.program))
        return (), self._lanes

    def _allow(self, lane: LaneState, done: int) -> None:
        super()._allow(lane, done)
        assert lane.allowed is not None
        lane.allowed = min(lane.allowed, self._until * len(lane.program))

    def add(self, rows: Iterable[Row]) -> None:
        pass

    def take(self) -> None:
        return None

    def decide(self, measured: None, first_unsent: int) -> None:
        return None


class _Daemon(weft.client.embedded.Daemon):
    def _command(self, home: Path) -> list[str]:
        """The usual one by way of this script instead of `-m weft`."""
        python, _, _, _, *verb = super()._command(home)
        return [python, __file__, *verb]


class _Figures:
    """Seconds, of each stop."""

    def __init__(self) -> None:
        self.lost: list[float] = []
        self.bubbles: list[float] = []
        self.iterations: list[float] = []

    def add(self, lost: float, bubble: float, iteration: float) -> None:
        self.lost.append(lost)
        self.bubbles.append(bubble)
        self.iterations.append(iteration)


def collect(quick: bool) -> list[Result]:
    return [*collect_switches(quick), *collect_stops(quick)]


def collect_switches(quick: bool) -> list[Result]:
    results = []
    for size, dim in list(DIMS.items())[: 1 if quick else None]:
        changed, seconds, without = [], [], []
        for _ in range(1 if quick else 5):
            shown = _run_tiring(dim, replan=True)
            if changes := shown["plan"]["changes"]:  # none where the machine has so much else to do that nobody can say
                changed += changes
                seconds.append(shown["seconds"])
                without.append(_run_tiring(dim, replan=False)["seconds"])
        if not changed:
            continue
        costs, before, after, expected = (
            [change[key] for change in changed]
            for key in ("seconds", "before_seconds", "iteration_seconds", "expected_seconds")
        )
        how = f"2 stages, 4 microbatches; {TIRING['units']} units of {dim} × {dim}, AdamW"
        results += [
            value_result(f"switch_cost{size}", costs, "ms", scale=1e3, how=f"a whole change of the plan; {how}"),
            ratio_result(f"switch_cost_in_iterations{size}", costs, before, how="÷ an iteration before it"),
            ratio_result(f"switch_gain{size}", before, after, how="an iteration before it ÷ one behind it"),
            ratio_result(f"switch_expected{size}", expected, after, how="what one was expected to take ÷ it"),
            ratio_result(
                f"switch_gain_of_job{size}",
                without,
                seconds,
                how=f"a job of {SWITCHED_STEPS} steps that stays as it is ÷ one that changes",
            ),
        ]
    return results


def _run_tiring(dim: int, *, replan: bool) -> dict[str, Any]:
    """What is shown of it."""
    job = {"entry": "tiring_job.py:workload", "args": TIRING | {"dim": dim}, "batch_size": 32, "seed": 1}
    tables = {"job": job | {"steps": SWITCHED_STEPS}, "strategy": SWITCHED | {"replan": replan}}
    spec = JobSpec.parse(tables | {"directory": str(Path(__file__).parent)})
    with weft.client.embedded.Daemon(workers=2, threads=1, runs_dir=tempfile.mkdtemp(prefix="weft-bench-")) as client:
        result = client.wait(client.submit(spec)["job"], timeout=600)
        assert result["state"] == "completed", result
        shown = client.show(result["job"])
    return dict(shown)


def collect_stops(quick: bool) -> list[Result]:
    simulated, measured, nothing = _Figures(), _Figures(), _Figures()
    with _Daemon(workers=1, stand_ins=1, threads=1, runs_dir=tempfile.mkdtemp(prefix="weft-bench-")) as client:
        for _ in range(1 if quick else 5):
            result = client.wait(client.submit(_spec())["job"], timeout=600)
            assert result["state"] == "completed", result
            recording = Recording.load(Path(result["run_dir"], "recording.msgpack"))
            _simulate(recording, simulated)
            _measure(stall_shares(recording), measured, nothing)
    shape = ", ".join(f"{key} {value}" for key, value in GPT.items() if key != "samples")
    how = f"hybrid-fine on a stand-in beside a CPU worker, 4 microbatches; GPT {shape}"
    return [
        ratio_result(
            "simulated_over_bubble", simulated.lost, simulated.bubbles, how=f"a stop ÷ an iteration's bubble; {how}"
        ),
        ratio_result("simulated_over_iteration", simulated.lost, simulated.iterations, how="a stop ÷ an iteration"),
        ratio_result("measured_over_bubble", measured.lost, measured.bubbles, how="the same, measured"),
        ratio_result("nothing_over_bubble", nothing.lost, nothing.bubbles, how="measured where nothing stops: noise"),
        value_result("simulated_lost", simulated.lost, "ms", scale=1e3, how="a stop"),
        value_result("measured_lost", measured.lost, "ms", scale=1e3, how="a stop"),
        value_result("iteration", measured.iterations, "ms", scale=1e3, how="measured, with no stop near"),
        value_result("bubble", measured.bubbles, "ms", scale=1e3, how="of it, in which a compute lane waits"),
    ]


def _spec() -> JobSpec:
    job = {"entry": "gpt_job.py:workload", "args": GPT, "batch_size": 16, "steps": WARM + STOPS * EVERY, "seed": 1}
    return JobSpec.parse({"job": job, "strategy": STRATEGY, "directory": str(Path(__file__).parent)})


def _measure(stalls: Sequence[IterationStalls], measured: _Figures, nothing: _Figures) -> None:
    for stop in range(WARM, WARM + STOPS * EVERY, EVERY):
        starts = range(stop - 1, stop - 1 + 4 * WINDOW, WINDOW)
        windows = [[each for each in stalls if start <= each.iteration < start + WINDOW] for start in starts]
        assert all(len(window) == WINDOW for window in windows), f"not all iterations about {stop} are recorded"
        waited = [sum(each.seconds * sum(each.shares.values()) for each in window) for window in windows]
        iteration = sum(each.seconds for each in windows[1]) / WINDOW
        measured.add(waited[0] - waited[1], waited[1] / WINDOW, iteration)
        nothing.add(waited[2] - waited[3], waited[3] / WINDOW, iteration)


def _simulate(recording: Recording, figures: _Figures) -> None:
    inspection = Inspection.from_wire(recording.inspection)
    plan = make_plan(JobSpec.parse(recording.spec), inspection, shared_bytes_free=1 << 40)
    seconds = _median_seconds(recording, len(plan.graph.tasks))
    milestones = gradient_milestones(plan, inspection)
    usual, stopped = (_simulation(plan, seconds, milestones, policies) for policies in ((), (Stops,)))
    computing = [lane for lane in plan.graph.programs if is_compute_lane(lane.name)]
    busy = [sum(span.end - span.start for span in usual.spans[lane]) / ITERATIONS for lane in computing]
    bubble = usual.iteration_seconds - statistics.fmean(busy)
    figures.add((stopped.seconds - usual.seconds) / (ITERATIONS / EVERY - 1), bubble, usual.iteration_seconds)


def _simulation(
    plan: Plan, seconds: Sequence[float], milestones: Milestones, policies: tuple[type[Stops], ...]
) -> Simulation:
    dispatch.POLICIES = policies  # type: ignore[assignment]
    return simulate(plan, seconds, iterations=ITERATIONS, milestones=milestones)


def _median_seconds(recording: Recording, num_tasks: int) -> list[float]:
    """Of each task; nothing for one that never ran."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for rows in recording.rows.values():
        for mode, task, _, _, start, end in rows:
            if mode < FIRST_STALL:
                found[task].append(end - start)
    return [statistics.median(found[task]) / 1e9 if task in found else 0.0 for task in range(num_tasks)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["daemon"]:
        dispatch.POLICIES = (Stops,)  # type: ignore[assignment]
        weft.cli.main.main()
    else:
        main("switch", collect, parts={"switch": collect_switches, "stop": collect_stops})
