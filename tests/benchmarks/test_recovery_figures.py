from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from killed_jobs import Killed, ends_from, killed_after
from recovery import BESIDE, MLP, Ran, added, cost_results, snapshots_of

from weft.plan.kinds import FIRST_STALL, MODE_INDEX
from weft.plan.rows import Row

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "recovery.py"
FORWARD = MODE_INDEX["forward"]


def test_what_a_checkpoint_adds_is_over_the_iterations_that_are_not_beside_one_and_a_burst_is_no_part_of_it() -> None:
    quiet, beside = [1.0] * 10, [1.5, 1.25, *[1.0] * (BESIDE - 2)]
    seconds = [*quiet, *beside, *quiet, *beside]
    burst = [*seconds[:12], 9.0, *seconds[13:]]
    begins = [10, BESIDE + 20]
    assert added([seconds, burst], begins) == pytest.approx(0.75)
    assert added([[1.0] * len(seconds)], begins) == 0.0
    assert added([[1.0] * 40 + [2.0] * 40], [10, 50]) == 0.0, "a machine that is slower from then on"


def test_what_a_snapshot_holds_a_lane_up_for_is_its_own_its_rooms_and_the_next_updates_wait() -> None:
    snapshot = MODE_INDEX["snapshot"]
    spans = ((snapshot, 18, 1), (FORWARD, 19, 50), (snapshot, 19, 2), (snapshot, 20, 4), (snapshot, 20, 8))
    rows: list[Row] = [(mode, 4, iteration, -1, 0, ms * 1_000_000) for mode, iteration, ms in spans]
    ran = Ran([], 0.0, snapshots_of(rows))
    assert ran.held(19) == pytest.approx(0.015)
    assert ran.held(50) == 0.0


def test_an_iteration_is_over_when_the_last_lane_is_and_waits_do_not_count() -> None:
    lanes: list[list[Row]] = [
        [(FORWARD, 0, 6, -1, 0, 60), (FORWARD, 0, 7, -1, 60, 70), (FIRST_STALL, 0, 7, 1, 70, 99)],
        [(FORWARD, 1, 7, -1, 65, 80)],
    ]
    assert ends_from(7, lanes) == {7: 80}


def test_a_kill_costs_the_iterations_since_the_snapshot() -> None:
    """38 iterations are in the snapshot, and 42 were over."""
    ends = {38: 2_000_000_000, 39: 3_000_000_000, 42: 6_000_000_000}
    found = killed_after(1_000_000_000, ends, first=38, done=42, seconds=1.0, between=10.0)
    assert found == Killed(next_seconds=1.0, back_seconds=5.0, iteration_seconds=1.0, lost=4, between=10.0)


def test_a_job_that_was_killed_right_behind_its_snapshot_has_lost_nothing() -> None:
    found = killed_after(0, {38: 2_000_000_000}, first=38, done=38, seconds=1.0, between=10.0)
    assert (found.lost, found.back_seconds) == (0, found.next_seconds)


def test_costs_are_ratios_of_whole_runs() -> None:
    ours, without = Ran([1.0, 2.0], 0.02), Ran([1.0, 1.0], 0.0)
    iterations, snapshots = cost_results(MLP, [ours], [without])
    assert (iterations.value, iterations.is_reached()) == (1.5, False)
    assert (snapshots.value, snapshots.is_reached()) == (1.02, False)


ROWS = {
    "resume": {"resume_under_another_plan", "resume_over_start"},
    "torchrun": {"recovery_vs_torchrun", "back_vs_torchrun"},
    "mlp": {"mlp_iteration_cost", "mlp_snapshot_cost", "mlp_checkpoint_exposed", "mlp_checkpoint_vs_dcp"},
}


@pytest.mark.days(6)
@pytest.mark.slow(seconds=20)
@pytest.mark.timeout(600)  # ten times as long beside eight busy loops
@pytest.mark.pairs(part=tuple(ROWS))  # one a day
def test_a_part_goes_through_all_steps(part: str) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--json", "--only", part]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert ROWS[part] <= {row["name"] for row in json.loads(finished.stdout)["results"]}
