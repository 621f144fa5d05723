"""What-if on made-up recordings: rows as a job's lanes would have stamped them, from plans in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.metrics.recording.recording import Recording
from weft.plan.inspection import Inspection, UnitFacts
from weft.plan.kinds import KINDS, MODES, Kind
from weft.plan.rows import Row, packed_rows
from weft.scheduler.planning.measured_costs import Line
from weft.scheduler.planning.outlook import MOST_OFF
from weft.scheduler.planning.planner import make_plan
from weft.scheduler.planning.simulator import simulate
from weft.scheduler.runs.recording import lane_name, recorded_programs, recorded_tasks
from weft.scheduler.whatif.answer import what_if
from weft.scheduler.whatif.changes import parse_changes
from weft.scheduler.whatif.doubt import EXPLAINED, predict
from weft.spec.job_spec import JobSpec, SpecError

SCALE = 1_000_000_000
ITERATIONS = 14

RecordingOf = Callable[..., Recording]


@pytest.fixture(scope="session")
def recording_of(
    spec_of: Callable[..., JobSpec], inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> RecordingOf:
    """Of a job that ran exactly as its plan was simulated, its tasks `times` as long as inspected; or of the changed
    seconds that `seconds` makes of the planned."""

    def recording(
        *,
        units: int = 4,
        times: float = 1.0,
        inspection: Inspection | None = None,
        seconds: Callable[[Any, float], float] | None = None,
        wake: float = 0.0,
        **strategy: Any,
    ) -> Recording:
        spec = spec_of(batch_size=strategy.pop("batch_size", 8), **strategy)
        facts = inspection or inspection_of(
            [unit_of(n, small_forward_seconds=0.25, small_backward_seconds=0.5) for n in range(units)],
            load_seconds=0.01,
            update_seconds=0.1,
        )
        plan = make_plan(spec, facts, shared_bytes_free=1 << 40)
        costs = [times * cost for cost in plan.task_seconds]
        if seconds is not None:
            costs = [seconds(task, cost) for task, cost in zip(plan.graph.tasks, costs, strict=True)]
        ran = simulate(plan, costs, iterations=ITERATIONS, wake_seconds=wake)
        counts: dict[str, int] = {}
        names = []
        for kind in plan.workers:
            names.append(f"{kind}-{counts.get(kind, 0)}")
            counts[kind] = counts.get(kind, 0) + 1
        packed = {}
        for lane, spans in ran.spans.items():
            rows: list[Row] = []
            for span in spans:
                mode = MODES.index(KINDS[plan.graph.tasks[span.task].kind].mode)
                rows.append((mode, span.task, span.iteration, -1, round(span.start * SCALE), round(span.end * SCALE)))
            packed[lane_name(lane, tuple(names))] = packed_rows(rows)
        return Recording(
            job="made-up",
            attempt=1,
            clock_ns=0,
            tasks=recorded_tasks(plan, tuple(names)),
            edges=plan.graph.edges,
            programs=recorded_programs(plan, tuple(names)),
            packed=packed,
            finished=ITERATIONS,
            planned=(),
            task_seconds=plan.task_seconds,
            spec=spec.to_wire(),
            inspection=_wire(facts),
            facts={"ended": True, "workers": names},
        )

    return recording


def _wire(facts: Inspection) -> dict[str, Any]:
    def with_pairs(table: dict[str, Any]) -> dict[str, Any]:
        return table | {"shapes": [[size, list(shape)] for size, shape in table["shapes"].items()]}

    wire = asdict(facts)
    for name in ("values", "device_values"):
        wire[name] = [with_pairs(value) for value in wire[name]]
    wire["cut_problems"] = list(facts.cut_problems.items())
    return wire | {name: with_pairs(wire[name]) for name in ("input", "target")}


PLANS = [
    {"stages": 2, "microbatches": 4},
    {"stages": 3, "microbatches": 4, "schedule": "gpipe"},
    {"replicas": 2, "microbatches": 2},
    {"replicas": [{"device": "gpu"}], "update": "cpu", "microbatches": 2},
    {"stages": 2, "microbatches": 2, "clip_norm": 1.0},
]


@pytest.mark.parametrize("strategy", PLANS)
def test_without_a_change_the_answer_is_what_was_measured(recording_of: RecordingOf, strategy: dict[str, Any]) -> None:
    answer = what_if(recording_of(**strategy))
    assert answer.predicted_seconds == answer.measured_seconds
    assert answer.ratio == 1
    assert answer.before == answer.after
    assert answer.before.limit_seconds is not None
    assert answer.before.limit_seconds <= answer.before.iteration_seconds * (1 + 1e-6)


@pytest.mark.parametrize("strategy", PLANS[:2])
def test_the_baseline_of_a_job_that_ran_as_simulated_is_not_off(
    recording_of: RecordingOf, strategy: dict[str, Any]
) -> None:
    answer = what_if(recording_of(times=1.5, **strategy))
    assert answer.baseline_error == pytest.approx(0, abs=1e-6)
    assert answer.doubt is None


@pytest.mark.parametrize("strategy", PLANS)
@pytest.mark.parametrize("setting", ["workers.cpu-0.speed", "workers.cpu-0.compute.speed", "links.speed", "load.speed"])
def test_speed_1_changes_nothing(recording_of: RecordingOf, strategy: dict[str, Any], setting: str) -> None:
    if setting == "workers.cpu-0.compute.speed" and strategy.get("update") == "cpu":
        setting = "workers.cpu-0.sync.speed"
    answer = what_if(recording_of(**strategy), [f"{setting}=1"])
    assert answer.after == answer.before
    assert answer.ratio == 1


@settings(max_examples=25, deadline=None)
@given(
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    worker=st.integers(0, 3),
    factor=st.floats(1.0, 50.0),
)
def test_a_faster_worker_never_makes_the_iteration_longer(
    recording_of: RecordingOf, stages: int, microbatches: int, schedule: str, worker: int, factor: float
) -> None:
    """The plan is a timed event graph: shorter tasks end no task later."""
    recording = recording_of(stages=stages, microbatches=microbatches, schedule=schedule)
    answer = what_if(recording, [f"workers.cpu-{worker % stages}.speed={factor}"])
    assert answer.ratio <= 1 + 1e-9


def test_with_one_worker_for_nothing_the_others_set_the_iteration(recording_of: RecordingOf) -> None:
    recording = recording_of(stages=2, microbatches=4)
    answer = what_if(recording, ["workers.cpu-1.speed=1e9"])
    # cpu-0 has half of the units: 4 forwards of 2 s, 4 backwards of 4 s, half of the update
    assert answer.after.limit_seconds == pytest.approx(4 * 2 + 4 * 4 + 0.05, rel=1e-3)
    assert answer.predicted_seconds == pytest.approx(answer.after.limit_seconds, rel=1e-3)
    assert answer.after.bottleneck == "cpu-0/compute"


def test_twice_as_fast_everywhere_is_half_the_time(recording_of: RecordingOf) -> None:
    speeds = [f"workers.{name}.speed=2" for name in ("cpu-0", "cpu-1", "loader-0")]
    assert what_if(recording_of(stages=2, microbatches=4), speeds).ratio == pytest.approx(0.5)


def test_a_lanes_speed_and_a_worker_s_multiply(recording_of: RecordingOf) -> None:
    recording = recording_of(stages=2, microbatches=4)
    both = what_if(recording, ["workers.cpu-0.speed=2", "workers.cpu-0.compute.speed=3"])
    once = what_if(recording, ["workers.cpu-0.speed=6"])
    assert both.after.iteration_seconds == pytest.approx(once.after.iteration_seconds)


def test_a_faster_link_shortens_transfers_in_its_direction_alone(recording_of: RecordingOf) -> None:
    def slow_copies(task: Any, cost: float) -> float:
        return 9.0 if task.kind in (Kind.DOWN, Kind.UP) else cost

    recording = recording_of(replicas=[{"device": "gpu"}], update="cpu", seconds=slow_copies)
    before = what_if(recording).measured_seconds
    both, down, up = (
        what_if(recording, [f"{link}.speed=9"]).predicted_seconds for link in ("links", "links.d2h", "links.h2d")
    )
    assert before > down == pytest.approx(up)
    assert both < down
    assert before - down == pytest.approx(8.0, rel=1e-2)


def test_another_schedule_and_count_are_those_of_a_run_of_the_changed_job(recording_of: RecordingOf) -> None:
    """A job whose every task took 1.5 times what was inspected, and one of 8 microbatches that really ran so."""
    given_ = {"stages": 2, "microbatches": 2, "schedule": "gpipe", "batch_size": 16}
    recording = recording_of(times=1.5, inspection=None, **given_)
    changed = what_if(recording, ["strategy.microbatches=4", "strategy.schedule=1f1b"])
    assert changed.after.iteration_seconds < changed.before.iteration_seconds
    assert changed.after.bubble_ratio < changed.before.bubble_ratio
    assert changed.ratio == pytest.approx(5 / 6, rel=0.1)  # (m + 1) / m of the work of a stage, by the m of each


def test_a_new_cut_is_costed_from_the_stages_that_were_recorded(recording_of: RecordingOf) -> None:
    """Stage 1 took twice what was inspected; whole, the model takes 1 + 2 halves of it."""

    def slow_half(task: Any, cost: float) -> float:
        return cost * 2 if task.stage == 1 and task.kind in (Kind.FORWARD, Kind.BACKWARD) else cost

    recording = recording_of(stages=2, microbatches=1, seconds=slow_half)
    whole = what_if(recording, ["strategy.stages=1"])
    assert whole.after.limit_seconds == pytest.approx(3 * (2 + 4) + 0.1, rel=0.01)
    assert whole.after.workers == ("cpu-0", "loader-0")


HYBRID = {"replicas": [{"device": "cpu"}, {"device": "gpu"}], "microbatches": 2, "update": "local"}


@pytest.fixture
def hybrid(recording_of: RecordingOf, inspection_of: Any, unit_of: Any) -> Recording:
    """A device that was inspected at a tenth of the host's times, and took twice what was inspected where the host
    took three times that."""

    def units(scale: float) -> list[UnitFacts]:
        small = {"small_forward_seconds": 0.25 * scale, "small_backward_seconds": 0.5 * scale}
        return [unit_of(n, scale, 2 * scale, **small) for n in range(4)]

    inspection = inspection_of(
        units(1.0), device_units=tuple(units(0.1)), update_seconds=1.0, device_update_seconds=0.1
    )

    def ran(task: Any, cost: float) -> float:
        return cost * (2.0 if task.lane.worker == 1 else 3.0)

    return recording_of(inspection=inspection, seconds=ran, **HYBRID)


@pytest.mark.parametrize(("device", "whole"), [("gpu", 2 * 0.1), ("cpu", 3 * 1.0)])
def test_a_replica_alone_is_costed_by_what_was_inspected_and_recorded_on_its_own_kind_of_device(
    hybrid: Recording, device: str, whole: float
) -> None:
    """The whole batch instead of half of it, and the whole update: what that device takes, corrected for it alone. The
    replica of devices is the first now, where the CPU's was."""
    alone = what_if(hybrid, [f"strategy.replicas=[{{ device = '{device}' }}]"])
    computing = 2 * 4 * (1 + 2) * 2  # microbatches, units, forward and backward, of twice the size inspected
    assert alone.after.limit_seconds == pytest.approx(whole * (computing + 1), rel=0.02)


def test_a_kind_of_device_that_computed_nothing_is_taken_to_be_like_the_other_and_that_is_told(
    recording_of: RecordingOf,
) -> None:
    answer = what_if(recording_of(), ["strategy.replicas=[{ device = 'gpu' }]"])
    assert any("nothing of the recorded job computed on a gpu worker" in note for note in answer.notes)
    assert answer.after.iteration_seconds == pytest.approx(answer.before.iteration_seconds, rel=0.1)
    assert not any(
        "nothing of the recorded job" in note for note in what_if(recording_of(), ["strategy.stages=2"]).notes
    )


def test_more_workers_than_there_are_is_an_answer_with_a_note(recording_of: RecordingOf) -> None:
    recording = recording_of(stages=2, microbatches=2)
    answer = what_if(recording, ["strategy.replicas=2"], machine={"cpu": 2, "loader": 1})
    assert any("needs 4 cpu workers and the daemon has 2" in note for note in answer.notes)
    assert any("sync lanes share" in note for note in answer.notes)
    assert answer.after.workers == ("cpu-0", "cpu-1", "cpu-2", "cpu-3", "loader-0")


def test_a_worker_that_only_the_changed_job_has_can_be_slower(recording_of: RecordingOf) -> None:
    recording = recording_of(stages=1, microbatches=4)
    equal = what_if(recording, ["strategy.stages=2"])
    unequal = what_if(recording, ["strategy.stages=2", "workers.cpu-1.speed=0.5"])
    assert unequal.predicted_seconds > equal.predicted_seconds


def lost(recording: Recording, times: float) -> Recording:
    """The rest of every `times` instants of the rows is lost to something that no row tells of."""

    def stretched(row: Row) -> Row:
        start = round(times * row[4])
        return (*row[:4], start, start + row[5] - row[4])

    return replace(recording, packed={lane: packed_rows([*map(stretched, r)]) for lane, r in recording.rows.items()})


@pytest.mark.parametrize("times", [1.05, 1.25, 1.45])
def test_a_simulation_that_is_off_scales_the_prediction_and_makes_it_a_range(
    recording_of: RecordingOf, times: float
) -> None:
    recording = recording_of(stages=2, microbatches=4)
    plain = what_if(recording, ["workers.cpu-0.speed=2"])
    answer = what_if(lost(recording, times), ["workers.cpu-0.speed=2"])
    assert plain.predicted_seconds is not None
    assert answer.after is not None
    assert answer.ratio == pytest.approx(plain.ratio)
    assert answer.predicted_seconds == pytest.approx(times * plain.predicted_seconds, rel=0.1)
    assert answer.baseline_error == pytest.approx(1 / times - 1, abs=0.05)
    ends = answer.predicted_low_seconds, answer.predicted_high_seconds
    if times == 1.05:
        assert (answer.doubt, *ends) == (None, answer.predicted_seconds, answer.predicted_seconds)
    else:
        assert "times what was measured" in str(answer.doubt)
        assert ends == (answer.after.iteration_seconds, answer.predicted_seconds)


def test_a_job_that_the_simulation_does_not_explain_is_not_predicted(recording_of: RecordingOf) -> None:
    """A prediction was printed while the simulation of the job itself was off by 65 %."""
    slow = lost(recording_of(stages=2, microbatches=4), 3.0)
    answer = what_if(slow, ["workers.cpu-0.speed=2"])
    assert answer.baseline_error == pytest.approx(-0.66, abs=0.03)
    numbers = (answer.predicted_seconds, answer.predicted_low_seconds, answer.predicted_high_seconds, answer.ratio)
    assert (*numbers, answer.after) == (None,) * 5
    assert "what the change would bring cannot be told" in str(answer.doubt)
    unchanged = what_if(slow)
    assert (unchanged.predicted_seconds, unchanged.ratio) == (unchanged.measured_seconds, 1)
    assert "does not explain it" in str(unchanged.doubt)


@given(*[st.floats(1e-6, 1e3)] * 3)
def test_a_number_is_told_as_far_as_it_can_be_trusted(measured: float, before: float, after: float) -> None:
    told = predict(measured, before, after, changed=True)
    off = max(before / measured, measured / before)
    assert (told.seconds is None) == (told.ratio is None) == (off > MOST_OFF)
    assert (told.doubt is None) == (abs(before / measured - 1) <= EXPLAINED)
    if told.seconds is not None:
        assert told.low_seconds is not None
        assert told.high_seconds is not None
        assert told.low_seconds <= told.seconds <= told.high_seconds
        assert told.high_seconds <= told.low_seconds * MOST_OFF * (1 + 1e-9)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("nonsense", r"write KEY=VALUE, for example"),
        ("worker.cpu-0.speed=2", r"worker\.cpu-0\.speed: unknown key"),
        ("links.sideways.speed=2", r"unknown key"),
        ("job.steps=5", r"job\.steps: unknown key.*job\.batch_size"),
        ("workers.cpu-7.speed=2", r"no worker 'cpu-7'; it has cpu-0, cpu-1, loader-0"),
        ("workers.cpu-0.sync.speed=2", r"cpu-0 has no lane 'sync'; it has compute"),
        ("load.speed=0", r"'0' is no speed; give a number above 0"),
        ("load.speed=inf", r"'inf' is no speed"),
        ("load.speed=fast", r"'fast' is no speed"),
        ("strategy.microbatches=0", r"strategy\.microbatches"),
        ("strategy.microbatch=2", r"did you mean microbatches"),
        ("strategy.stages=9", r"can be cut into at most 4 stages"),
        ('strategy.split=["7"]', r"strategy\.split: no unit is called '7'; give some of 1, 2, 3"),
        ("job.batch_size=1", r"job\.batch_size = 1 is smaller"),
        ("strategy.preset=nothing", r"is no preset"),
        ("strategy.preset=auto", r"auto is no strategy but a choice, which `weft plan` makes"),
        ("strategy.compile=auto", r"auto is no strategy but a choice, .* makes; write true or false"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_its_remedy(
    recording_of: RecordingOf, setting: str, text: str
) -> None:
    with pytest.raises(SpecError, match=text):
        what_if(recording_of(stages=2, microbatches=4), [setting])


def test_a_preset_gives_its_axes_and_a_setting_counts_before_it(recording_of: RecordingOf) -> None:
    recording = recording_of(stages=1, microbatches=1)
    assert what_if(recording, ["strategy.preset=gpipe"]).after.workers == ("cpu-0", "cpu-1", "loader-0")
    three = what_if(recording, ["strategy.preset=gpipe", "strategy.stages=3"])
    assert len(three.after.workers) == 4


def test_a_schedule_may_be_a_file(recording_of: RecordingOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused as one that had not been read, with the advice to give it with --set."""
    monkeypatch.chdir(tmp_path)
    Path("my.grid").write_text("F0 F1 B0 B1\nF0 F1 B0 B1\n")
    recording = recording_of(stages=2, microbatches=2, schedule="1f1b")
    by_file, by_name = (what_if(recording, [f"strategy.schedule={each}"]) for each in ("my.grid", "gpipe"))
    assert by_file.settings == ("strategy.schedule=my.grid",)
    assert by_file.after == by_name.after
    with pytest.raises(SpecError, match=r"'other\.grid' cannot be read .* is relative to the working directory"):
        what_if(recording, ["strategy.schedule=other.grid"])


def test_a_split_by_name_is_of_the_recorded_units(recording_of: RecordingOf) -> None:
    named = recording_of(stages=2, microbatches=4, split=["1"])
    assert what_if(named, ["strategy.split=[2]"]).ratio < 1
    assert what_if(named, ['strategy.split=["2"]']).ratio == what_if(named, ["strategy.split=[2]"]).ratio
    assert len(what_if(named, ["strategy.stages=3"]).after.workers) == 4, "the split goes with its stages"


def test_a_preset_replaces_the_jobs_strategy_as_it_does_for_a_run(recording_of: RecordingOf) -> None:
    """Three stages were kept beside ddp, and the answer was of another job than `weft run` would have run."""
    recording = recording_of(stages=3, microbatches=4, schedule="gpipe")
    assert len(what_if(recording, ["strategy.preset=ddp"]).after.workers) == 3
    assert len(what_if(recording, ["strategy.preset=hybrid-fine"]).after.workers) == 3


def test_a_wake_up_counts_from_the_end_of_what_was_waited_for(recording_of: RecordingOf) -> None:
    """Rows of a job whose lanes slept on for half a second after each input: their waits say so."""
    recording = recording_of(stages=2, microbatches=2, wake=0.5)
    run_of = {(task, i): (start, end) for rows in recording.rows.values() for _, task, i, _, start, end in rows}
    ids = {task.name: task.id for task in recording.tasks}
    source, target = ids["FORWARD(0,0)"], ids["FORWARD(1,0)"]
    stall = MODES.index("stall_activation")
    waits = [(stall, target, i, source, run_of[source, i][0], run_of[target, i][0]) for i in range(ITERATIONS)]
    rows = sorted([*recording.rows["cpu-1/compute"], *waits], key=lambda row: row[4:])
    answer = what_if(replace(recording, packed={**recording.packed, "cpu-1/compute": packed_rows(rows)}))
    assert answer.wake_seconds == pytest.approx(0.5)
    assert answer.baseline_error == pytest.approx(0, abs=1e-6)


def test_a_job_whose_compute_lanes_hardly_wait_tells_of_a_wake_up_by_its_other_lanes(recording_of: RecordingOf) -> None:
    """Of two waits one was twelve milliseconds late, so every wake-up took six, and nothing could be predicted."""
    recording = recording_of(stages=2, microbatches=2)
    run_of = {(task, i): (start, end) for rows in recording.rows.values() for _, task, i, _, start, end in rows}
    ids = {task.name: task.id for task in recording.tasks}

    def with_waits(lane: str, source: str, target: str, count: int, late: float) -> bytes:
        distance = {(edge.source, edge.target): edge.distance for edge in recording.edges}[ids[source], ids[target]]
        stall, waits = MODES.index("stall_slot"), []
        for i in range(distance, distance + count):
            start, end = run_of[ids[source], i - distance]
            waits.append((stall, ids[target], i, ids[source], start, end + round(late * SCALE)))
        return packed_rows(sorted([*recording.rows[lane], *waits], key=lambda row: row[4:]))

    slot = next(edge for edge in recording.edges if edge.target == ids["LOAD(0,0)"] and edge.distance)
    reader = recording.tasks[slot.source].name
    packed = {
        "cpu-1/compute": with_waits("cpu-1/compute", "FORWARD(0,0)", "FORWARD(1,0)", 2, 6.0),
        "loader-0/load": with_waits("loader-0/load", reader, "LOAD(0,0)", ITERATIONS - slot.distance, 0.25),
    }
    answer = what_if(replace(recording, packed={**recording.packed, **packed}))
    assert answer.wake_seconds == pytest.approx(0.25)


@pytest.mark.parametrize("strategy", [{}, {"stages": 2, "microbatches": 2}, {"replicas": 2, "share": "adaptive"}])
def test_a_batch_is_no_larger_than_the_data_and_that_is_told(
    recording_of: RecordingOf, strategy: dict[str, Any]
) -> None:
    """100 000 samples of 8 were predicted to take as long as if all were there."""
    recording = recording_of(batch_size=4, **strategy)
    all_of_it, more = (what_if(recording, [f"job.batch_size={count}"]) for count in (8, 100_000))
    assert more.predicted_seconds == all_of_it.predicted_seconds
    assert (more.ratio or 0) > 1
    told = "job.batch_size = 100000 is more than the 8 samples of Workload.train; every batch has 8"
    assert [note for note in more.notes if note not in all_of_it.notes] == [told]


def test_of_a_job_whose_batch_was_larger_than_the_data_microbatches_are_parts_of_the_data(
    recording_of: RecordingOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    """Each was taken to have as many samples as the job asked for, beside which what a call costs was nothing."""
    units = [unit_of(n, small_forward_seconds=0.75, small_backward_seconds=1.5) for n in range(2)]
    shapes = {size: (size, 3) for size in (1, 4)}
    inspection = inspection_of(units, small_size=1, input=replace(inspection_of(units).input, shapes=shapes))
    whole, larger = (
        what_if(
            recording_of(inspection=inspection, batch_size=count, stages=2, microbatches=2), ["strategy.microbatches=4"]
        )
        for count in (8, 1000)
    )
    assert larger.predicted_seconds == pytest.approx(whole.predicted_seconds)
    assert (larger.ratio or 0) > 1


def test_a_stream_without_a_length_has_what_a_larger_batch_needs(
    recording_of: RecordingOf, inspection_of: Callable[..., Inspection], unit_of: Callable[..., UnitFacts]
) -> None:
    """What it was inspected to have, its job's steps had needed."""
    inspection = inspection_of([unit_of(0)], num_train=3 * 4, endless=True)
    answer = what_if(recording_of(inspection=inspection, batch_size=4), ["job.batch_size=40"])
    assert answer.ratio == pytest.approx(10, rel=0.1)
    assert not any("more than" in note for note in answer.notes)


def test_an_inner_axis_is_set_and_its_neighbour_kept(spec_of: Callable[..., JobSpec]) -> None:
    spec = spec_of(prefetch={"load": 3, "transfer": 4})
    changes = parse_changes(spec, ["strategy.prefetch.load=1", "job.batch_size=420"])
    assert (changes.spec.strategy.prefetch.load, changes.spec.strategy.prefetch.transfer) == (1, 4)
    assert changes.spec.job.batch_size == 420
    assert changes.replans
    assert not parse_changes(spec, ["job.batch_size=840", "load.speed=2"]).replans


def test_a_recording_without_an_iteration_is_refused(recording_of: RecordingOf) -> None:
    recording = replace(recording_of(stages=2, microbatches=4), packed={})
    with pytest.raises(SpecError, match=r"no two training .*run a job that has ended for more steps"):
        what_if(recording)


@given(
    fixed=st.floats(0, 10),
    each=st.floats(0, 10),
    samples=st.integers(1, 64),
    seconds=st.floats(0.01, 1000),
)
def test_a_corrected_line_goes_through_what_was_recorded(
    fixed: float, each: float, samples: int, seconds: float
) -> None:
    of_call, of_sample = Line(fixed, each).corrections(samples, seconds)
    if fixed + each > 0.01:
        assert min(of_call, of_sample) > 0
        assert math.isclose(of_call * fixed + samples * of_sample * each, seconds, rel_tol=1e-6)
