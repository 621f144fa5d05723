"""The page on writing a job: every block of it runs, and every field of a workload and of a job is on it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from safetensors.torch import load_file
from torch import nn

from weft.cli.verbs.app import app
from weft.cli.verbs.options import JobOptions
from weft.spec.job_spec import JobSection, JobSpec
from weft.workload.cutting.recording import StepRecording
from weft.workload.workload import Workload

PAGE = (Path(__file__).parents[1] / "docs" / "your-model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|toml)\n(.*?)```", PAGE, flags=re.DOTALL)
SECONDS = 300.0  # a script takes ten, and several times as long beside eight busy loops


def files() -> dict[str, str]:
    """The blocks that open with the name of a file."""
    named = ((re.match(r"# ([\w.]+)\n", text), text) for _, text in BLOCKS)
    return {match[1]: text for match, text in named if match is not None}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    for name, text in files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(directory: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    environment["WEFT_RUNTIME_DIR"] = str(directory)  # where no daemon is
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_field_of_a_workload_and_of_a_job_is_on_the_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert rows == [*Workload.__dataclass_fields__, *JobSection.model_fields]


def test_the_specs_of_the_page_are_taken(directory: Path) -> None:
    _, stop = (text for kind, text in BLOCKS if kind == "toml")
    spec = JobSpec.load(directory / "circle.toml")
    spec.check_files()
    assert tomllib.loads(files()["circle.toml"])["job"]["args"] == {"hidden": 64}
    assert JobSpec.parse(spec.to_wire() | tomllib.loads(stop)).stop is not None


def test_the_options_of_the_page_are_taken_and_one_line_of_them_is_its_toml(directory: Path) -> None:
    verbs: Any = typer.main.get_command(app)
    specs = []
    for line in re.findall(r"^weft (?:run|submit) circle\.py.*", PAGE, flags=re.MULTILINE):
        _, verb, *arguments = line.split()
        given = verbs.commands[verb].make_context(verb, arguments).params
        options = JobOptions(**{name: given[name] for name in JobOptions.__dataclass_fields__})
        specs.append(options.load(directory / given["spec"]))
    assert len(specs) == 3
    assert specs[1] == JobSpec.load(directory / "circle.toml")


@pytest.mark.days(3)
@pytest.mark.slow(seconds=2)
@pytest.mark.days(3)
@pytest.mark.timeout(900)
def test_the_script_that_the_job_is_made_of_learns(directory: Path) -> None:
    last = run(directory, "script.py").splitlines()[-1]
    assert float(last.partition("accuracy ")[2]) > 0.9


@pytest.mark.slow(seconds=7)
@pytest.mark.days(3)
@pytest.mark.timeout(900)
def test_the_job_trains_from_python_and_its_weights_load_into_plain_pytorch(directory: Path) -> None:
    *_, ended, model = run(directory, "embedded.py").splitlines()
    state, accuracy = ended.split()
    assert state == "completed"
    assert float(accuracy) > 0.9
    assert run(directory, "load.py", model) == "the centre is inside: True\n"
    further = re.findall(r"^`weft (run further\.py .*?)`", PAGE, flags=re.MULTILINE)
    assert len(further) == 1
    arguments = re.sub(r"start=\S+", f"start={model}", further[0]).split()
    told = json.loads(run(directory, "-m", "weft", *arguments, "--stages", "2", "--workers", "2", "--json"))
    assert (told["state"], told["loss"] < 0.3) == ("completed", True), "it goes on from there"


@pytest.mark.slow(seconds=3)
@pytest.mark.days(3)
@pytest.mark.timeout(900)
def test_a_job_file_is_written_for_the_function_of_the_page(directory: Path) -> None:
    lines = re.findall(r"^weft (init circle\.py\S* --.*?)(?: +#.*)?$", PAGE, flags=re.MULTILINE)
    assert len(lines) == 2
    printed = [run(directory, "-m", "weft", *line.split()) for line in lines]
    assert printed[0] == "wide.toml\n"
    assert JobSpec.load(directory / "wide.toml").job.args == {"hidden": 128}
    assert tomllib.loads(printed[1])["job"]["entry"] == "circle.py:workload"


@pytest.mark.slow(seconds=6)
@pytest.mark.days(3)
@pytest.mark.timeout(900)
def test_the_job_trains_as_a_call_from_a_script(directory: Path) -> None:
    numbers, model = run(directory, "call.py").splitlines()
    steps, loss, accuracy = numbers.split()
    assert steps == "80"
    assert float(loss) < 0.5
    assert float(accuracy) > 0.9
    assert run(directory, "load.py", model) == "the centre is inside: True\n"


@pytest.mark.slow(seconds=3)
@pytest.mark.timeout(900)
def test_the_job_trains_as_the_page_has_it_on_the_command_line(directory: Path) -> None:
    assert "--reference" in PAGE
    told = run(directory, "-m", "weft", "run", "circle.toml", "--reference", "--runs-dir", "runs")
    assert float(told.partition("accuracy ")[2].split()[0].rstrip(",")) > 0.9


@pytest.mark.slow(seconds=7)
@pytest.mark.days(3)
@pytest.mark.timeout(900)
def test_the_step_of_the_page_learns_in_one_process_and_in_stages(directory: Path) -> None:
    lines = re.findall(r"^weft (run words\.py.*)$", PAGE, flags=re.MULTILINE)
    assert ["--stages" in line for line in lines] == [False, True]
    for line in lines:
        told = run(directory, "-m", "weft", *line.split(), "--runs-dir", "runs")
        assert float(told.rpartition("accuracy ")[2].split()[0].rstrip(",")) > 0.9


WALKS = {name.removesuffix("_script.py") for name in files() if name.endswith("_script.py")}


@pytest.mark.days(3)
@pytest.mark.slow(seconds=11)
@pytest.mark.timeout(900)
@pytest.mark.pairs(walk=tuple(sorted(WALKS)))  # one a day
def test_a_script_of_the_page_runs_and_its_job_trains_in_stages_what_the_plain_loop_trains(
    directory: Path, walk: str
) -> None:
    assert {"images", "language", "unet", "lit"} == WALKS
    if "transformers" in files()[f"{walk}.py"]:
        pytest.importorskip("transformers")
    assert "loss" in run(directory, f"{walk}_script.py").splitlines()[-1]
    lines = re.findall(rf"^weft (run {walk}\.py.*)$", PAGE, flags=re.MULTILINE)
    assert lines
    found = []
    for line in [*lines, f"{lines[0]} --reference"]:
        told = run(directory, "-m", "weft", *shlex.split(line), "--runs-dir", "runs")
        found.append(load_file(re.findall(r"^model +(\S+)", told, flags=re.MULTILINE)[0]))
    for trained in found[:-1]:
        assert trained.keys() == found[-1].keys()
        assert all(torch.equal(trained[name], tensor) for name, tensor in found[-1].items())


def test_a_line_that_needs_numbers_may_stand_in_a_module(directory: Path) -> None:
    """As the page has it: what is between two blocks, with a state of its own."""
    pasted: dict[str, Any] = {}
    text = next(text for _, text in BLOCKS if "class Rescale" in text)
    exec(compile(text, "your-model.md", "exec", dont_inherit=True), pasted)
    model = nn.Sequential(nn.Linear(4, 4), pasted["Rescale"](), nn.Linear(4, 4))

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = model(batch).sum()
        return total

    found = StepRecording(model).run(step, torch.randn(2, 4), lambda number: None)
    assert found.units == ("0", "1", "2")
    assert found.problems == {}


def test_what_a_function_finds_out_of_an_epoch_is_a_metric(directory: Path) -> None:
    command = next(line for line in PAGE.splitlines() if line.startswith("weft run found.py"))
    run(directory, "-m", *command.replace("--epochs 50", "--epochs 10").split())
    lines = [json.loads(line) for line in (directory / "runs" / "found-1" / "metrics.jsonl").read_text().splitlines()]
    told = {line["epoch"]: line["on_epoch"]["f1"] for line in lines if "on_epoch" in line}
    assert told.keys() == {4, 9}
    assert all(0 < value <= 1 for value in told.values())


@pytest.mark.days(3)
@pytest.mark.slow(seconds=11)
def test_the_mean_of_the_weights_is_the_plain_loops_in_stages(directory: Path) -> None:
    (line,) = re.findall(r"^weft (run averaged\.py.*)$", PAGE, flags=re.MULTILINE)
    found = []
    for options in ([], ["--reference"]):
        told = run(directory, "-m", "weft", *line.split(), *options, "--runs-dir", "runs")
        found.append(load_file(re.findall(r"^model +(\S+)", told, flags=re.MULTILINE)[0]))
    for name, plain in found[1].items():
        assert torch.equal(found[0][name], plain), name
    assert not torch.equal(found[0]["mean.0.weight"], found[0]["net.0.weight"])
    lines = (directory / "runs" / "averaged-1" / "metrics.jsonl").read_text().splitlines()
    means = [json.loads(line)["on_epoch"]["mean_accuracy"] for line in lines if "on_epoch" in line]
    assert len(means) == 10
    assert means[-1] > 0.9


def test_every_other_block_runs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, as a reader would paste them."""
    monkeypatch.chdir(directory)
    for name in ("WEFT_RUN_DIR", "WEFT_WORKER", "WEFT_JOB_ID"):
        monkeypatch.setenv(name, str(directory) if name == "WEFT_RUN_DIR" else "cpu-0")
    pasted: dict[str, Any] = {}
    fragments = [text for kind, text in BLOCKS if kind == "python" and not re.match(r"# [\w.]+\n", text)]
    assert len(fragments) >= 7
    for text in fragments:
        exec(compile(text, "your-model.md", "exec", dont_inherit=True), pasted)
    assert (directory / "notes-cpu-0.txt").read_text() == "of cpu-0\n"
    torch = pasted["torch"]
    assert pasted["model"](torch.zeros(3, 8)).shape == (3, 2)
    item, target = pasted["Augmented"]()[5]
    assert (item.shape, target) == ((2,), 0)
    assert list(pasted["Lines"]())[5][0].shape == (2,)
    assert len(pasted["loader"]) == 8
    scene = pasted["scenes"]([{"image": torch.zeros(3, 4, 4), "boxes": torch.zeros(2, 4), "name": "a"}] * 2)
    assert (scene.image.shape, len(scene.boxes), scene.names) == ((2, 3, 4, 4), 2, ["a", "a"])
    assert pasted["metrics"]["mean_error"](torch.zeros(2, 3), torch.tensor([0, 2])).item() == 1.0
    tokens = torch.tensor([[1, -100], [0, 2]])
    assert pasted["num_tokens"](tokens) == 3
    assert pasted["token_loss"](torch.zeros(2, 2, 3), tokens).shape == ()
    padded = pasted["pad"]([torch.tensor([3, 1]), torch.tensor([5, 2, 4])])
    assert padded["ids"].tolist() == [[3, 1, 0], [5, 2, 4]]
    assert pasted["num_words"](padded) == 5
    optimizer = pasted["optimizer_of"](pasted["model"].parameters())
    assert pasted["scheduler_of"](optimizer).optimizer is optimizer
