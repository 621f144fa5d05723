"""The step log: what `metrics.jsonl` holds, also while a job writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.metrics.recording.step_log import (
    Logged,
    Step,
    StepLogError,
    StepLogReader,
    Validation,
    logged_in,
    read_step_log,
)
from weft.plan.itinerary import Itinerary


def step(number: int, **changes: Any) -> dict[str, Any]:
    values = {"loss": 1 / number, "lr": 0.1, "grad_norm": None, "skipped": False, "samples": 10, "seconds": 0.5}
    return {"step": number, "epoch": 0, **values, **changes}


def line(**values: Any) -> str:
    return json.dumps(values) + "\n"


def test_steps_and_validations_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        line(**step(1, seconds=None))
        + line(**step(2, shares=[6, 4]))
        + line(step=2, epoch=0, validation={"loss": 0.5, "accuracy": None})
    )
    log = read_step_log(path)
    assert log.steps == [
        Step(step=1, epoch=0, loss=1.0, lr=0.1, grad_norm=None, samples=10, seconds=None),
        Step(step=2, epoch=0, loss=0.5, lr=0.1, grad_norm=None, samples=10, seconds=0.5),
    ]
    assert log.validations == [Validation(step=2, epoch=0, values={"loss": 0.5, "accuracy": None})]


def test_a_line_that_is_not_whole_yet_comes_with_the_next_reading(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = line(**step(1)) + line(**step(2))
    path.write_text(text[:-20])
    reader = StepLogReader(path)
    assert [entry.step for entry in reader.read() or ()] == [1]
    path.write_text(text)
    assert [entry.step for entry in reader.read() or ()] == [2]
    assert reader.read() == []


@pytest.mark.parametrize("steps", [1, 2, 3], ids="with {} steps by then".format)
def test_a_reader_is_told_when_training_starts_over(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(**step(1)) + line(**step(2)))
    reader = StepLogReader(path)
    assert len(reader.read() or ()) == 2
    again = list(range(1, 1 + steps))
    path.write_text("".join(line(**step(number) | {"seconds": 0.25}) for number in again))
    assert reader.read() is None
    assert [entry.step for entry in reader.read() or ()] == again


@pytest.mark.parametrize(
    "bad",
    [
        *("[]\n", "{}\n", "nonsense\n", '{"step": 1}\n', "\n", "x" * (1 << 20)),
        '{"step": 1, "epoch": 0, "loss": "low", "lr": 1, "grad_norm": null, "samples": 1, "seconds": null}\n',
        '{"step": null, "epoch": 0, "loss": 1, "lr": 1, "grad_norm": null, "samples": 1, "seconds": null}\n',
        '{"step": 1, "epoch": 0, "validation": {"loss": []}}\n',
    ],
)
def test_a_file_of_something_else_is_refused_by_its_line(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(**step(1)) + bad)
    with pytest.raises(StepLogError, match=r"metrics\.jsonl, line 2, is no line of a step log"):
        read_step_log(path)


def test_what_a_function_tells_of_an_epoch_stands_with_its_validation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = Itinerary(batch_size=2, num_train=4, num_validation=2, steps=4, forward_only=False)
    assert logged_in(path, whole) == Logged()
    lines = [
        (step(1), Logged(1, 0)),
        (step(2), Logged(2, 0)),
        ({"step": 2, "epoch": 0, "validation": {"loss": 0.5}}, Logged(3, 0)),
        ({"step": 2, "epoch": 0, "on_epoch": {"f1": 0.25}}, Logged(3, 1)),
        (step(3) | {"epoch": 1}, Logged(4, 1)),
        (step(4) | {"epoch": 1}, Logged(5, 1)),
        ({"step": 4, "epoch": 1, "on_epoch": {"f1": None}}, Logged(6, 2)),
    ]
    for entry, logged in lines:
        with path.open("a") as file:
            file.write(line(**entry))
        assert logged_in(path, whole) == logged
    log = read_step_log(path)
    assert [(each.step, dict(each.values)) for each in log.validations] == [
        (2, {"loss": 0.5, "f1": 0.25}),
        (4, {"f1": None}),
    ]
