"""`weft compare`: which spec each preset comes to, the numbers of a row, what is printed, and wrong usage."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.cli.comparing.compare import DaemonOptions, comparison, row_of, set_agreement, tell_what_differs
from weft.cli.comparing.trial import AS_IS, Trial, make_trials
from weft.cli.screens.display import comparison_page
from weft.cli.verbs.app import _complete_presets
from weft.client.console import make_console
from weft.spec.job_spec import JobSpec, SpecError
from weft.spec.presets import PRESETS
from weft.spec.strategy import Strategy

PROCESS_SECONDS = 180.0
MiB = 1 << 20
SHOWN = {
    "job": "digits-1-ddp",
    "state": "completed",
    "reason": None,
    "error": None,
    "run_dir": "/runs/digits-1-ddp",
    "loss": 0.25,
    "step": 10,
    "iteration_seconds": 0.003,
    "limit_seconds": 0.002,
    "lanes": {
        "cpu-0/compute": {"forward": 1.0, "backward": 2.0, "stall_sync": 1.0},
        "cpu-1/compute": {"forward": 2.0, "stall_data": 1.0, "idle": 1.0},
        "cpu-0/sync": {"sync": 1.0, "stall_gradient": 90.0},
    },
    "overlap": {
        "cpu-0": {"sync": {"hidden": 0.3, "exposed": 0.1}},
        "cpu-1": {"sync": {"hidden": 0.2, "exposed": 0.0}, "update": {"hidden": 0.0, "exposed": 0.4}},
    },
    "peak_bytes": {"cpu-0": 300 * MiB, "cpu-1": 200 * MiB},
    "plan": {"shared_bytes": 3 * MiB, "strategy": {"compile": False}},
}


def trial(spec: Path, preset: str, strategy: str = "", *overrides: str) -> Trial:
    spec.write_text(spec.read_text() + f"[strategy]\n{strategy}\n")
    (made,) = make_trials(spec, overrides, [preset])
    return made


def a_row(spec: Path, preset: str = "ddp", **changes: Any) -> dict[str, Any]:
    (made,) = make_trials(spec, (), [preset])
    return row_of(made, SHOWN | changes)


# --- what is run


def test_what_is_trained_is_kept_from_the_file_and_how_it_is_divided_is_not(spec: Path) -> None:
    made = trial(spec, "ddp", 'microbatches = 8\nclip_norm = 1.0\nprecision = "bf16"\nskip_nonfinite = true')
    strategy = made.spec.strategy
    assert (strategy.clip_norm, strategy.precision, strategy.skip_nonfinite) == (1.0, "bf16", True)
    assert (strategy.microbatches, strategy.replicas, made.left_out) == (1, 2, ("microbatches",))


def test_the_row_counts_before_the_file_and_what_that_leaves_out_is_told(spec: Path) -> None:
    """digits.toml says schedule = "1f1b": kept, it would turn gpipe into 1F1B."""
    made = trial(spec, "gpipe", 'schedule = "1f1b"\nstages = 2\nmicrobatches = 8')
    strategy = made.spec.strategy
    assert (strategy.schedule, strategy.stages, strategy.microbatches) == ("gpipe", 2, 4)
    assert made.left_out == ("schedule", "microbatches")


def test_set_counts_before_the_row(spec: Path) -> None:
    made = trial(spec, "gpipe", "stages = 4", "strategy.stages=3")
    assert (made.spec.strategy.stages, made.left_out) == (3, ())


def test_an_axis_that_is_set_and_cannot_stand_beside_a_row_is_left_out_of_that_one(spec: Path) -> None:
    (cut, listed) = make_trials(spec, ["strategy.stages=3", "strategy.bucket_mib=2.0"], ["1f1b", "hybrid-fine"])
    assert (cut.spec.strategy.stages, cut.spec.strategy.bucket_mib, cut.left_out) == (3, 2.0, ())
    assert (listed.spec.strategy.bucket_mib, listed.left_out) == (2.0, ("stages",))
    with pytest.raises(SpecError, match=r"job\.batch_size"):
        make_trials(spec, ["strategy.stages=3", "job.batch_size=-1"], ["hybrid-fine"])


def test_what_compare_runs_is_what_run_runs(spec: Path) -> None:
    """hybrid-fine beside a file of two stages was compared without the stages, and refused by `weft run`."""
    spec.write_text(spec.read_text() + '[strategy]\nschedule = "1f1b"\nstages = 3\nsplit = [1, 2]\nclip_norm = 2.0\n')
    for made in make_trials(spec, ["job.seed=4", "strategy.bucket_mib=2.0"], PRESETS):
        overrides = [f"strategy.preset={made.preset}", "strategy.bucket_mib=2.0", "job.seed=4"]
        assert made.spec == JobSpec.load(spec, overrides)


@pytest.mark.parametrize(
    ("preset", "strategy", "left_out"),
    [
        ("hybrid-fine", "stages = 2", ("stages",)),
        ("hybrid-fine", "stages = 3\nsplit = [1, 2]", ("stages", "split")),
        ("gpipe", "stages = 3\nsplit = [1, 2]", ("stages", "split")),
        ("ddp", "replicas = 3\nshares = [1.0, 1.0, 2.0]", ("replicas", "shares")),
        ("ddp", "replicas = 3\nstaleness = [0, 0, 1]\nclip_norm = 1.0", ("replicas", "staleness")),
    ],
)
def test_what_the_preset_replaces_in_the_file_is_told(
    spec: Path, preset: str, strategy: str, left_out: tuple[str, ...]
) -> None:
    made = trial(spec, preset, strategy)
    assert made.left_out == left_out
    assert made.spec.strategy.replica_list == Strategy(preset=preset).replica_list


def test_the_files_own_preset_leaves_nothing_behind(spec: Path) -> None:
    made = trial(spec, "1f1b", 'preset = "parameter-server"\nbucket_mib = 2.0')
    assert (made.spec.strategy.replicas, made.spec.strategy.staleness) == (None, 0)
    assert (made.spec.strategy.preset, made.left_out) == ("1f1b", ("bucket_mib",))


@pytest.mark.parametrize("name", AS_IS)
def test_as_is_is_the_file_with_its_own_preset(spec: Path, name: str) -> None:
    made = trial(spec, name, 'preset = "gpipe"\nstages = 3')
    assert (made.spec.strategy.schedule, made.spec.strategy.stages, made.left_out) == ("gpipe", 3, ())


def test_every_preset_can_be_compared_under_a_file_that_gives_every_axis(spec: Path) -> None:
    axes = (
        'schedule = "1f1b"\nstages = 3\nsplit = [1, 2]\nmicrobatches = 8\nrecompute = true\nwindow = 2\nreplicas = 3\n'
    )
    axes += 'sync = "coarse"\nstaleness = [0, 0, 1]\nupdate = "cpu"\nshare = "fixed"\nshares = [1.0, 1.0, 2.0]\n'
    spec.write_text(spec.read_text() + f"[strategy]\n{axes}")
    for made in make_trials(spec, (), PRESETS):
        assert made.spec.strategy == Strategy(preset=made.preset)


def test_two_comparisons_beside_each_other_take_no_id_twice(tmp_path: Path) -> None:
    """Each has looked for a free name before the other's daemon had made its directory."""
    options = DaemonOptions(runs_dir=tmp_path / "runs")
    assert [options.claimed_id("digits-1-ddp") for _ in range(3)] == [
        "digits-1-ddp",
        "digits-1-ddp-2",
        "digits-1-ddp-3",
    ]


def test_steps_replace_the_files_own_length(spec: Path) -> None:
    job = trial(spec, "as-is", "", "job.steps=7").spec.job
    assert (job.steps, job.epochs) == (7, None)


def test_a_python_file_is_compared_with_what_the_options_say_of_it(spec: Path) -> None:
    (listed,) = make_trials(spec.with_name("digits.py"), ["job.batch_size=4", "job.steps=7"], ["hybrid-fine"])
    assert (listed.spec.job.entry, listed.spec.job.steps) == ("digits.py:workload", 7)
    command = [sys.executable, "-m", "weft", "compare", str(spec.with_name("digits.py")), "--steps", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not say how to train it: give --batch-size N" in done.stderr


def test_what_differs_from_the_file_and_stand_ins_are_told_on_stderr(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trial(spec, "hybrid-fine", "stages = 2")
    tell_what_differs([made], DaemonOptions())
    told = capsys.readouterr()
    assert "weft: hybrid-fine: goes without your stages" in told.err
    assert "stand-ins compute on the CPU" in told.err
    assert told.out == ""


# --- where it runs


@pytest.mark.parametrize(("preset", "size"), [("as-is", (1, 0)), ("1f1b", (2, 0)), ("hybrid-fine", (1, 1))])
def test_a_daemon_has_the_workers_that_the_trial_needs(spec: Path, preset: str, size: tuple[int, int]) -> None:
    assert DaemonOptions().sized_for(trial(spec, preset)) == size


def test_workers_that_are_given_are_those_of_every_trial(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(spec.parent)
    monkeypatch.setenv("WEFT_WORKERS", "5")
    made = trial(spec, "1f1b")
    flags: dict[str, Any] = {"threads": None, "runs_dir": None}
    assert DaemonOptions.of(workers=None, stand_ins=2, **flags).sized_for(made) == (5, 2)
    assert DaemonOptions.of(workers=3, stand_ins=None, **flags).sized_for(made) == (3, 0)


# --- a row


def test_a_row_has_stalls_of_the_compute_lanes_alone(spec: Path) -> None:
    stalls = a_row(spec)["stall_percent"]
    assert {cause: share for cause, share in stalls.items() if share} == {"data": 12.5, "sync": 12.5}


def test_a_row_sums_over_workers_and_divides_by_steps(spec: Path) -> None:
    row = a_row(spec)
    assert row["overlap_seconds"] == {
        "sync": {"hidden": pytest.approx(0.05), "exposed": pytest.approx(0.01)},
        "transfer": {"hidden": 0.0, "exposed": 0.0},
        "update": {"hidden": 0.0, "exposed": pytest.approx(0.04)},
    }
    assert (row["peak_bytes"], row["shared_bytes"], row["workers"]) == (500 * MiB, 3 * MiB, {"cpu": 2})
    assert row["limit_ratio"] == pytest.approx(1.5)


def test_a_row_of_a_job_that_never_ran_has_its_reason_and_no_numbers(spec: Path) -> None:
    (made,) = make_trials(spec, (), ["ddp"])
    row = row_of(made, {"job": "digits-1-ddp", "state": "failed", "reason": "daemon-lost", "error": "it died"})
    known = {"preset", "left_out", "workers", "job", "state", "reason", "error"}
    assert {key for key, value in row.items() if value is not None} == known


def test_losses_agree_with_the_first_completed_one_but_for_stale_ones(spec: Path) -> None:
    names = ["parameter-server", "gpipe", "1f1b", "ddp", "as-is", "as-is"]
    losses = [0.9, 0.9, 0.25, 0.25001, 0.26, float("nan")]
    states = ["completed", "failed", *["completed"] * 4]
    trials = make_trials(spec, (), names)
    rows = [
        row_of(made, SHOWN | {"loss": loss, "state": state})
        for made, loss, state in zip(trials, losses, states, strict=True)
    ]
    set_agreement(trials, rows)
    assert [row["agrees"] for row in rows] == [None, None, True, True, False, False]


# --- what is printed


def page(spec: Path, rows: list[dict[str, Any]], *, check: bool = False) -> list[str]:
    stream = io.StringIO()
    comparison_page(make_console(stream), comparison(spec, [], rows), check=check)
    return stream.getvalue().splitlines()


def test_the_table_has_a_row_for_each_preset_and_columns_for_the_stalls_there_were(spec: Path) -> None:
    header, row = page(spec, [a_row(spec)])
    expected = "preset workers state iteration limit ratio stall data stall sync hidden exposed peak memory shared loss"
    assert header.split() == expected.split()
    cells = "ddp | 2 cpu | completed | 3 ms | 2 ms | 1.5 | 12.5 % | 12.5 % | 50 ms | 50 ms | 500.0 MiB | 3.0 MiB | 0.25"
    assert " ".join(row.split()) == cells.replace(" |", "")


def test_reasons_of_failures_stand_below_the_table(spec: Path) -> None:
    failed = a_row(spec, "1f1b", state="failed", reason="invalid-plan", error="needs 2 CPU workers", lanes={})
    *_, reason = page(spec, [a_row(spec), failed])
    assert reason == "1f1b failed (invalid-plan): needs 2 CPU workers"


def test_where_rows_differ_in_whether_units_are_compiled_a_column_says_so(spec: Path) -> None:
    """Of compile = "auto", which a preset keeps as all that is trained, and each row decides for itself."""
    (made,) = make_trials(spec, ["strategy.compile=auto"], ["ddp"])
    assert made.spec.strategy.compile == "auto"
    plans = [{"shared_bytes": 1, "strategy": {"compile": compiled}} for compiled in (True, False)]
    rows = [row_of(made, SHOWN | {"plan": plan}) for plan in plans]
    assert [row["compiled"] for row in rows] == [True, False]
    header, *lines = page(spec, rows)
    assert [line.split()[-1] for line in (header, *lines)] == ["compiled", "yes", "no"]
    assert "compiled" not in page(spec, rows[:1])[0]


@pytest.mark.parametrize(("agrees", "word"), [(True, "yes"), (False, "no"), (None, "-")])
def test_a_check_adds_a_column(spec: Path, agrees: bool | None, word: str) -> None:
    header, row, *why = page(spec, [a_row(spec) | {"agrees": agrees}], check=True)
    assert [line.startswith("agrees, no: ") for line in why] == ([True] if agrees is False else [])
    assert (header.split()[-1], row.split()[-1]) == ("agrees", word)


def test_the_json_says_its_version_and_what_was_asked_for(spec: Path) -> None:
    trials = make_trials(spec, (), ["ddp", "as-is"])
    compared = comparison(spec, trials, [row_of(trials[0], SHOWN)])
    assert (compared["version"], compared["presets"], len(compared["rows"])) == (1, ["ddp", "as-is"], 1)
    json.dumps(compared, allow_nan=False)


def test_the_page_of_the_json_has_every_key_of_a_row(spec: Path) -> None:
    text = Path(__file__).parents[3].joinpath("docs", "compare.md").read_text(encoding="utf-8")
    assert [key for key in (*comparison(spec, [], []), *a_row(spec)) if f"| `{key}` |" not in text] == []


# --- usage


@pytest.mark.parametrize(
    ("name", "message"),
    [("ddpp", "'ddpp' is no preset; did you mean ddp?"), ("zzz", "known here: "), ("as-it", "as-is"), ("", "''")],
)
def test_an_unknown_preset_is_told_with_the_nearest_one(spec: Path, name: str, message: str) -> None:
    with pytest.raises(SpecError, match="--presets: ") as refused:
        make_trials(spec, (), ["ddp", name])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--presets", "ddpp"], "did you mean ddp?"),
        (["--set", "strategy.stage=2"], "did you mean stages?"),
        (["--steps", "0"], "--steps"),
        (["--workers", "-1"], "--workers"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_sentence(spec: Path, arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "weft", "compare", str(spec), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_of_compare_ends_with_an_example() -> None:
    command = [sys.executable, "-m", "weft", "compare", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS, check=True)
    assert done.stdout.splitlines()[-1].strip().startswith("Example: weft compare")


def test_the_shell_completes_the_last_name_of_the_list() -> None:
    assert _complete_presets("ddp,hybrid-") == ["ddp,hybrid-coarse", "ddp,hybrid-fine"]
    assert _complete_presets("as") == ["as-is"]
