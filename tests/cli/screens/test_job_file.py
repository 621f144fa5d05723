"""A job file that is made for a model: a spec as it stands, and every key of a spec with what it is for."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from weft.cli.screens.job_file import MAX_UNITS, JobFile
from weft.spec.job_spec import CheckpointSection, JobSection, JobSpec, ProfileSection, StopSection
from weft.spec.strategy import Strategy

FACTS: dict[str, Any] = {
    "model": "Sequential",
    "parameters": 28,
    "frozen": 0,
    "bytes": 112,
    "cut_by_calls": False,
    "units": [["0", "Linear", 12], ["1", "ReLU", 0], ["2", "Linear", 16]],
    "train": 800,
    "validation": 200,
    "batch_size": None,
    "args": {"hidden": 64, "name": 'a "quoted" one'},
}


def made(args: dict[str, Any] | None = None, num_cores: int = 8, **facts: Any) -> JobFile:
    return JobFile(entry="train.py:workload", args=args or {}, facts=FACTS | facts, num_cores=num_cores)


def parsed(file: JobFile, text: str | None = None) -> JobSpec:
    return JobSpec.parse(tomllib.loads(text or file.text("train.toml")) | {"directory": "/"})


def test_the_file_is_a_spec_with_what_the_model_asks_for() -> None:
    spec = parsed(made())
    assert spec.job == JobSection(entry="train.py:workload", epochs=10, batch_size=32)
    assert spec.strategy == Strategy(stages=2, microbatches=4)
    assert spec.profile is None


@pytest.mark.parametrize(
    ("changes", "stages", "microbatches", "batch_size", "length"),
    [
        ({"num_cores": 1}, 1, 1, 32, "epochs"),
        ({"units": [["", "MLP", 28]]}, 1, 1, 32, "epochs"),
        ({"units": [["0", "Flatten", 0], ["1", "Linear", 28]]}, 1, 1, 32, "epochs"),
        ({"train": 3}, 2, 3, 3, "epochs"),
        ({"train": "Workload.train is None; give data"}, 2, 4, 32, "steps"),
        ({"batch_size": 100}, 2, 4, 100, "epochs"),
    ],
)
def test_what_is_filled_in_fits_model_data_and_machine(
    changes: dict[str, Any], stages: int, microbatches: int, batch_size: int, length: str
) -> None:
    spec = parsed(made(**changes))
    assert (spec.strategy.stages, spec.strategy.microbatches) == (stages, microbatches)
    assert spec.job.batch_size == batch_size
    assert getattr(spec.job, length) is not None


@pytest.mark.parametrize("stages", [1, 2])
def test_every_field_stands_in_the_file_and_each_comment_can_be_made_a_key(stages: int) -> None:
    """But for those that say the same twice: epochs and steps, a preset's axes, shares of replicas that are none."""
    text = made(num_cores=stages).text("train.toml")
    keys = re.findall(r"^(?:# )?(\w+) = ", text, flags=re.MULTILINE)
    sections = (JobSection, Strategy, CheckpointSection, StopSection, ProfileSection)
    assert keys == [name for section in sections for name in section.model_fields]
    for line in re.findall(r"^# \w+ = .*", text, flags=re.MULTILINE):
        key = line.split()[1]
        given = text.replace(line, line.removeprefix("# "))
        given = given.replace("epochs = 10", "") if key == "steps" else given
        given = given.replace("# replicas", "replicas") if key == "shares" else given
        given = given.replace("stages = 1", "stages = 2") if key == "split" else given
        given = given.replace("# [profile]", "[profile]") if key in ("first", "iterations") else given
        given = given.replace("# [checkpoint]", "[checkpoint]") if key in CheckpointSection.model_fields else given
        given = given.replace("# every =", "every =") if key in ("keep", "best") else given
        if key in StopSection.model_fields and line != '# mode = "train"':
            given = given.replace("# [stop]", "[stop]").replace("# metric =", "metric =")
        parsed(made(), given)


def test_each_key_has_its_description_and_a_choice_its_words() -> None:
    text = made().text("train.toml").replace("\n# ", " ")
    for field in (*JobSection.model_fields.values(), *Strategy.model_fields.values()):
        assert field.description in text
    assert '("coarse" or "fine")' in text


def test_the_head_tells_the_model_its_units_and_the_data() -> None:
    text = made(frozen=12, validation=None).text("train.toml")
    assert "# weft run train.toml " in text
    assert "# Sequential: 28 parameters (112 B), 12 of them frozen; 3 units, between which stages may begin." in text
    assert "# Training data: 800 samples.\n# Validation data: none." in text
    assert "#      1  1 ReLU             0\n" in text
    one = made(units=[["", "MLP", 28]], train="no length; give it one").text("train.toml")
    assert "one unit, for one stage." in one
    assert "#      0  MLP             28\n" in one
    assert "# Training data: no length; give it one." in one


def test_of_a_model_that_is_cut_by_its_calls_the_modules_are_named_and_not_numbered() -> None:
    units = [["embed", "Embedding", 4], ["h.0", "Block", 8], ["h.1", "Block", 8], ["head", "Linear", 2]]
    file = made(model="Reader", units=units, cut_by_calls=True)
    text = file.text("train.toml")
    assert "; 4 modules with which stages may begin, if a step calls each once; Weft tries it" in file.headline()
    assert "#   embed Embedding           4\n" in text
    assert '\n# split = ["h.1"]\n' in text
    assert parsed(file).strategy == Strategy(stages=2, microbatches=4)
    alone = made(units=[["", "MLP", 28]], cut_by_calls=True)
    assert "one unit, for one stage." in alone.headline()
    assert "\n# split = [1]\n" in alone.text("train.toml")


def test_a_model_of_very_many_units_is_told_by_the_first() -> None:
    text = made(units=[[str(n), "Linear", 1] for n in range(MAX_UNITS + 3)]).text("train.toml")
    assert "#   and 3 more" in text
    assert len(text.splitlines()) < 300


def test_arguments_are_filled_in_where_they_are_given_and_else_told() -> None:
    assert '# args = { hidden = 64, name = "a \\"quoted\\" one" }' in made().text("train.toml")
    assert parsed(made(args={"hidden": 128})).job.args == {"hidden": 128}
