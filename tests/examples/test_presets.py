"""Every preset with every example: `weft run EXAMPLE --set strategy.preset=NAME` is that preset."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from weft.spec.admission import problem_of_crew
from weft.spec.job_spec import JobSpec
from weft.spec.presets import PRESETS
from weft.spec.strategy import TRAINED_AXES, Strategy
from weft.spec.workers_needed import workers_needed

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
PROCESS_SECONDS = 180.0


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_preset_on_the_command_line_is_the_strategy(example: Path, preset: str) -> None:
    """The examples fix `stages = 2`, beside which a list of replicas is refused."""
    spec, replaced = JobSpec.load_replacing(example, [f"strategy.preset={preset}"])
    own, row = JobSpec.load(example).strategy.model_dump(), Strategy(preset=preset).model_dump()
    assert spec.strategy.model_dump() == row | {axis: own[axis] for axis in TRAINED_AXES}
    assert set(replaced) == {axis for axis in ("schedule", "stages", "microbatches") if own[axis] != row.get(axis)}
    assert workers_needed(spec.strategy) == workers_needed(Strategy(preset=preset))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_or_the_machine_is_too_small(example: Path, preset: str) -> None:
    spec = JobSpec.load(example, [f"strategy.preset={preset}"])
    needs = workers_needed(spec.strategy)
    assert problem_of_crew(spec, Counter(needs).elements()) is None
    one_less = Counter({kind: count - 1 for kind, count in needs.items()})
    assert " and this daemon has " in (problem_of_crew(spec, one_less.elements()) or "")


@pytest.mark.days(3)
@pytest.mark.slow
def test_an_example_runs_under_a_preset_with_a_list_of_replicas_and_says_what_it_replaces(tmp_path: Path) -> None:
    """As docs/gpu.md has it; on a stand-in."""
    example = next(path for path in EXAMPLES if path.stem == "digits")
    arguments = ["run", str(example), "--set", "strategy.preset=hybrid-fine", "--stand-ins", "1"]
    arguments += ["--workers", "1", "--set", "job.epochs=1", "--runs-dir", str(tmp_path / "runs"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"weft: preset hybrid-fine replaces stages of {example}\n" in done.stderr
    result = json.loads(done.stdout)
    assert result["state"] == "completed"
    plan = json.loads(Path(result["run_dir"], "plan.json").read_text())
    assert [stage["worker"] for stage in plan["stages"]] == ["gpu-0", "gpu-0", "cpu-0"], "all GPUs: two streams of one"
