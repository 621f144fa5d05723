from __future__ import annotations

import pytest
import torch
from gpu_gpt_job import workload
from gpu_models import SIZES, TINY, Gpt


@pytest.mark.parametrize("model", [*SIZES.values(), TINY], ids=[*SIZES, "tiny"])
def test_the_number_of_parameters_is_that_of_the_model_that_is_built(model: Gpt) -> None:
    with torch.device("meta"):
        built = workload(**model.args(samples=1)).model
    assert model.num_parameters() == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(("name", "billions"), [("0.1b", 0.1), ("1b", 1.0), ("4b", 4.0)])
def test_a_size_has_the_parameters_of_its_name(name: str, billions: float) -> None:
    assert SIZES[name].num_parameters() / 1e9 == pytest.approx(billions, rel=0.03)


def test_a_model_is_made_with_the_same_numbers_wherever_it_is_made() -> None:
    first, second = (workload(**TINY.args(samples=4)) for _ in range(2))
    for mine, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(first.train[0], second.train[0])


def test_a_model_begins_as_the_examples_gpt_does() -> None:
    """With a loss that is near that of no prediction, so with weights that are set at all."""
    made = workload(**TINY.args(samples=4))
    inputs, targets = made.train
    loss = made.loss(made.model(inputs), targets).item()
    assert loss == pytest.approx(torch.tensor(float(TINY.vocabulary)).log().item(), rel=0.02)
