from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from weft.reference.loop import train
from weft.spec.job_spec import JobSpec
from weft.workload.units import units

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "examples" / "gpt.toml"
SMALL = {"layers": 2, "dim": 16, "heads": 2, "context": 8, "samples": 20, "validation_samples": 3}


@pytest.fixture(scope="module")
def gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weft_example_gpt", ROOT / "examples" / "gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_model_is_embedding_blocks_and_head_and_gives_logits_for_each_position(gpt: ModuleType) -> None:
    workload = gpt.workload(**SMALL, vocabulary=300)
    assert [prefix for prefix, _ in units(workload.model)] == ["embedding.", "block0.", "block1.", "head."]
    inputs, targets = torch.stack([workload.train[0][0]] * 5), torch.stack([workload.train[0][1]] * 5)
    assert (inputs.shape, inputs.dtype, targets.shape, targets.dtype) == ((5, 8), torch.int64, (5, 8), torch.int64)
    assert workload.model(inputs).shape == (5, 8, 300)


def test_a_position_sees_itself_and_those_before_it_and_no_later_one(gpt: ModuleType) -> None:
    model = gpt.workload(**SMALL).model.eval()
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 200
    with torch.no_grad():
        before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:5], after[:5])
    assert all(not torch.equal(before[position], after[position]) for position in range(5, 8))


def test_dropout_acts_in_embedding_attention_and_residuals_and_only_in_training(gpt: ModuleType) -> None:
    model = gpt.workload(**SMALL, dropout=0.5).model
    for part, value in (
        (model.embedding, torch.arange(8).unsqueeze(0)),
        (model.block0.attention[1], torch.ones(1, 8, 16)),
        (model.block0.attention, torch.randn(1, 8, 16)),
        (model.block0.mlp, torch.randn(1, 8, 16)),
    ):
        assert not torch.equal(part.train()(value), part(value))
        assert torch.equal(part.eval()(value), part(value))


def test_windows_are_spread_over_the_text_and_their_targets_are_the_next_bytes(gpt: ModuleType) -> None:
    windows = gpt.Windows(torch.arange(101, dtype=torch.uint8), context=10, count=4)
    assert [windows[index][0][0].item() for index in range(len(windows))] == [0, 22, 45, 68]
    inputs, targets = windows[3]
    assert inputs.tolist() == list(range(68, 78))
    assert targets.tolist() == list(range(69, 79))


def test_more_windows_than_starts_still_end_within_the_text(gpt: ModuleType) -> None:
    windows = gpt.Windows(torch.arange(12, dtype=torch.uint8), context=10, count=100)
    assert {len(windows[index][1]) for index in range(100)} == {10}
    assert windows[99][1][-1].item() == 11


def test_training_and_validation_take_their_windows_from_different_parts_of_the_file(
    gpt: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "text").write_bytes(bytes([1]) * 180 + bytes([2]) * 20)
    workload = gpt.workload(**SMALL, path=str(tmp_path / "text"))
    assert {token for index in range(20) for token in workload.train[index][1].tolist()} == {1}
    assert {token for index in range(3) for token in workload.validation[index][0].tolist()} == {2}


def test_the_loss_without_knowledge_is_eight_bits_for_each_byte(gpt: ModuleType) -> None:
    logits, targets = torch.zeros(2, 8, 256), torch.randint(256, (2, 8))
    assert gpt.bits_per_byte(logits, targets).item() == pytest.approx(8)
    assert gpt.cross_entropy(logits, targets).item() == pytest.approx(math.log(256))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dim": 10, "heads": 4}, "dim = 10 is not divisible by heads = 4"),
        ({"vocabulary": 255}, "vocabulary = 255: text is bytes, give at least 256"),
        ({"dropout": 1.0}, r"dropout = 1\.0: give at least 0 and less than 1"),
        ({"dropout": -0.1}, r"dropout = -0\.1"),
        ({"layers": 0}, "layers = 0: give at least 1"),
        ({"heads": 0}, "heads = 0: give at least 1"),
        ({"context": 0}, "context = 0: give at least 1"),
        ({"samples": 0}, "samples = 0: give at least 1"),
        ({"validation_samples": -1}, "validation_samples = -1: give at least 0"),
        ({"path": "no/such/file"}, "path = 'no/such/file': cannot be read .* give the path of a text file"),
        ({"path": "."}, r"path = '\.': cannot be read"),
        ({"path": "a\0b"}, "cannot be read"),
    ],
)
def test_an_argument_that_cannot_be_is_named_with_its_value(
    gpt: ModuleType, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        gpt.workload(**{**SMALL, **arguments})


@pytest.mark.parametrize("num_bytes", [0, 17])
def test_text_that_is_too_short_is_told_with_the_length_that_it_needs(
    gpt: ModuleType, tmp_path: Path, num_bytes: int
) -> None:
    """A context of 8 takes 9 bytes for a window, one to train on and one to validate."""
    text = tmp_path / "text"
    text.write_bytes(b"x" * num_bytes)
    with pytest.raises(ValueError, match=f"text: {num_bytes} bytes of text, but context = 8 takes at least 18"):
        gpt.workload(**SMALL, path=str(text))
    text.write_bytes(b"x" * 18)
    assert gpt.workload(**SMALL, path=str(text)).train[0][0].tolist() == [ord("x")] * 8


def test_no_validation_samples_mean_no_validation(gpt: ModuleType) -> None:
    assert gpt.workload(**{**SMALL, "validation_samples": 0}).validation is None


@pytest.mark.slow
def test_some_steps_on_the_standard_librarys_sources_learn_something() -> None:
    result = train(JobSpec.load(SPEC, ["job.args.samples=640", "job.args.layers=2", "job.epochs=1"]))
    assert result.losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert result.losses[-1] < 0.75 * result.losses[0]
    assert result.validations[0]["bits_per_byte"] < 6.5
