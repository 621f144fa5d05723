from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.reference.loop import train
from weft.spec.job_spec import JobSpec
from weft.workload.entry import load_workload, unload
from weft.workload.units import units
from weft.workload.workload import Workload

SPEC = Path(__file__).parents[2] / "examples" / "digits.toml"

pytest.importorskip("sklearn", reason="scikit-learn, which brings the digits, is not installed")


@pytest.fixture(scope="module")
def workload() -> Workload:
    spec = JobSpec.load(SPEC)
    workload = load_workload(spec)
    unload(spec, ())
    return workload


def test_a_fifth_of_the_1797_digits_is_held_out_and_no_digit_is_in_both_parts(workload: Workload) -> None:
    (inputs, targets), (held_out, held_out_targets) = workload.train, workload.validation
    assert (len(inputs), len(held_out)) == (1438, 359)
    assert (inputs.shape[1:], inputs.dtype, targets.dtype) == ((64,), torch.float32, torch.int64)
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert set(held_out_targets.tolist()) == set(range(10))
    assert not {tuple(row) for row in inputs.tolist()} & {tuple(row) for row in held_out.tolist()}


def test_the_split_is_the_same_whatever_the_seed(workload: Workload) -> None:
    spec = JobSpec.load(SPEC, ["job.seed=8"])
    other = load_workload(spec)
    unload(spec, ())
    assert torch.equal(other.train[0], workload.train[0])
    assert not torch.equal(other.model[0].weight, workload.model[0].weight)


def test_the_model_can_be_cut_into_three_stages_that_each_have_parameters(workload: Workload) -> None:
    assert sum(any(True for _ in module.parameters()) for _, module in units(workload.model)) == 3


@pytest.mark.slow
def test_the_example_as_shipped_learns_to_read_digits() -> None:
    result = train(JobSpec.load(SPEC))
    assert len(result.losses) == 20 * 15
    assert result.validations[-1]["accuracy"] >= 0.95
    assert result.losses[-1] < 0.1 < result.losses[0]
