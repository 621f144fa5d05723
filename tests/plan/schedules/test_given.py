"""Given: a job whose order cannot be is refused before anybody takes it, with the file, the line and the remedy.

`weft submit` once took a job whose grid was a deadlock. It failed when it got its workers, and named no file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.plan.schedules.given import problem_of_job
from weft.spec.job_spec import JobSpec
from weft.spec.schedule_text import read_grid_file

SpecOf = Callable[..., JobSpec]
GOOD, DEAD, WRONG = "F0 F1 B0 B1\nF0 B0 F1 B1\n", "F0 B0 F1 B1\nF0 F1 B0 B1\n", "# of two\nF0 B0\nF0 X0\n"
GPU = {"device": "gpu"}


def read(directory: Path, text: str) -> str:
    (directory / "my.grid").write_text(text)
    tables: dict[str, Any] = {"directory": str(directory), "strategy": {"schedule": "my.grid"}}
    read_grid_file(tables)
    schedule: str = tables["strategy"]["schedule"]
    return schedule


@pytest.mark.parametrize(
    ("text", "axes", "told"),
    [
        (DEAD, {"stages": 2, "microbatches": 2}, "line 1 stands at B0 and waits for B0 of line 2; line 2 stands at F1"),
        (WRONG, {"stages": 2}, "line 3: 'X0' is no pass; write . for a wait"),
        ("", {}, "no worker has a pass; write a line for each worker"),
        (
            GOOD,
            {"stages": 3, "microbatches": 2},
            "the grid has strategy.stages = 2 and strategy.microbatches = 2, and",
        ),
        (GOOD, {"replicas": [{"stages": 2}, {"stages": 2, "microbatches": 2}]}, "the grid has strategy.stages = 2"),
        (DEAD, {"preset": "auto"}, "line 1 stands at B0"),
        (DEAD, {"replicas": [GPU | {"stages": "all", "microbatches": 2}]}, "line 1 stands at B0"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_with_its_file(
    spec_of: SpecOf, tmp_path: Path, text: str, axes: dict[str, Any], told: str
) -> None:
    problem = problem_of_job(spec_of(batch_size=8, schedule=read(tmp_path, text), **axes))
    assert (problem or "").startswith(f"strategy.schedule: my.grid: {told}")


def test_one_that_no_file_had_is_refused_without(spec_of: SpecOf) -> None:
    problem = problem_of_job(spec_of(batch_size=8, schedule=DEAD, stages=2, microbatches=2)) or ""
    assert problem.startswith("strategy.schedule: line 1 stands at B0")


@pytest.mark.parametrize(
    "axes",
    [
        {"stages": 2, "microbatches": 2},
        {"replicas": [{"stages": 2, "microbatches": 2}, GPU | {"stages": "all", "microbatches": 3}]},
        {"replicas": [GPU | {"working_window": 1}], "update": "cpu"},
        {"preset": "auto"},
    ],
)
def test_one_that_may_come_to_fit_is_taken(spec_of: SpecOf, tmp_path: Path, axes: dict[str, Any]) -> None:
    """How many stages "all" GPUs have, and which the planner chooses, is known later."""
    assert problem_of_job(spec_of(batch_size=8, schedule=read(tmp_path, GOOD), **axes)) is None


def test_what_is_wrong_with_all_the_rest_of_a_spec_is_told_as_ever(spec_of: SpecOf) -> None:
    assert (problem_of_job(spec_of(batch_size=2, microbatches=4)) or "").startswith("job.batch_size = 2 is smaller")
