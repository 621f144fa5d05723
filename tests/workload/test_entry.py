from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.spec.job_spec import JobSpec
from weft.workload.code.entry_file import module_name
from weft.workload.entry import LOADED_BEFORE, files_of_job, foreign_modules, load_workload, unload
from weft.workload.faults import fault_of
from weft.workload.workload import Workload, WorkloadError

SOURCE = """
import torch, weft

def workload(hidden: int = 3, **changes) -> weft.Workload:
    model = torch.nn.Linear(hidden, 1)
    parts = dict(model=model, loss=torch.nn.MSELoss(), train=(torch.zeros(4, hidden), torch.zeros(4, 1)),
                 optimizer=lambda parameters: torch.optim.SGD(parameters))
    return weft.Workload(**{**parts, **changes})
"""

Write = Callable[..., JobSpec]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes an entry file and gives a spec for it; what its job imported is unloaded after the test."""
    before, path_before = set(sys.modules), list(sys.path)

    def spec(source: str = SOURCE, entry: str = "job.py:workload", **args: Any) -> JobSpec:
        (tmp_path / "job.py").write_text(source, encoding="utf-8")
        return JobSpec(job={"entry": entry, "args": args, "epochs": 1, "batch_size": 1}, directory=str(tmp_path))

    yield spec
    unload(spec(), before)
    assert sys.path == path_before
    assert not sys.dont_write_bytecode or sys.flags.dont_write_bytecode


def test_the_entry_function_is_called_with_the_arguments_of_the_spec(write: Write) -> None:
    workload = load_workload(write(hidden=5))
    assert isinstance(workload, Workload)
    assert workload.model.in_features == 5


def test_the_same_seed_gives_the_same_model_whatever_was_drawn_before(write: Write) -> None:
    first = load_workload(write()).model.weight
    torch.rand(10)
    assert torch.equal(load_workload(write()).model.weight, first)


def test_so_it_does_of_values_that_python_and_numpy_draw(write: Write) -> None:
    drawn = "torch.tensor([random.random(), float(numpy.random.rand())])"
    spec = write(SOURCE.replace("torch.zeros(4, hidden)", drawn).replace("import torch", "import random, numpy, torch"))
    first, second = (load_workload(spec).train[0] for _ in range(2))
    assert torch.equal(first, second)


def test_the_same_seed_gives_the_same_model_whatever_an_import_drew(write: Write, tmp_path: Path) -> None:
    """The second time the module is there already and draws nothing."""
    (tmp_path / "drawing.py").write_text("import torch\ntorch.rand(10)")
    spec = write(SOURCE.replace("import torch, weft", "import torch, weft, drawing"))
    first = load_workload(spec).model.weight
    assert torch.equal(load_workload(spec).model.weight, first)


def test_what_the_file_draws_at_import_depends_on_the_seed_alone(write: Write) -> None:
    spec = write(SOURCE.replace("torch.zeros(4, hidden)", "DRAWN") + "\nDRAWN = torch.rand(4, 3)\n")
    first = load_workload(spec).train[0]
    torch.rand(10)
    assert torch.equal(load_workload(spec).train[0], first)


def test_a_module_written_a_moment_ago_is_found(write: Write, tmp_path: Path) -> None:
    """Python lists a directory again only when its time of change differs, and some file systems count in seconds."""
    (tmp_path / "first.py").write_text("HIDDEN = 2")
    load_workload(write(SOURCE.replace("(hidden, 1)", "(__import__('first').HIDDEN, 1)")))
    changed = tmp_path.stat()
    (tmp_path / "second.py").write_text("HIDDEN = 4")
    spec = write(SOURCE.replace("(hidden, 1)", "(__import__('second').HIDDEN, 1)"))
    os.utime(tmp_path, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert load_workload(spec).model.in_features == 4


def test_modules_beside_the_entry_can_be_imported_during_import_and_call(write: Write, tmp_path: Path) -> None:
    (tmp_path / "at_import.py").write_text("HIDDEN = 2")
    (tmp_path / "at_call.py").write_text("EXTRA = 5")
    source = SOURCE.replace(
        "import torch, weft", "import torch, weft\nfrom at_import import HIDDEN"
    ).replace("(hidden, 1)", "(HIDDEN + __import__('at_call').EXTRA, 1)")  # fmt: skip
    assert load_workload(write(source)).model.in_features == 7


PARSED = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=6)
arguments = parser.parse_args()
"""


def test_a_parser_of_arguments_in_the_file_gives_its_defaults(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's own arguments are numbers, and `weft run --reference` has those of the command: a file that asks for
    its own at its top, as most scripts do, ended with "unrecognized arguments"."""
    own = ["weft", "run", "job.py", "--reference"]
    monkeypatch.setattr(sys, "argv", own)
    before = set(sys.modules)
    source = SOURCE.replace("(hidden, 1)", "(arguments.hidden, 1)")
    spec = write(PARSED + source.replace("return", "parser.parse_args(); return"))
    for _ in range(2):
        assert load_workload(spec).model.in_features == 6
        assert sys.argv == [str(spec.entry_file)]  # which what is called later may ask for, too
    unload(spec, before)
    assert sys.argv is own


def test_so_it_does_after_a_file_that_has_changed_them_or_failed(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["weft", "run"]
    monkeypatch.setattr(sys, "argv", own)
    before = set(sys.modules)
    spec = write(
        "import sys\nsys.argv += ['--hidden', '7']\n" + PARSED + "workload = 0\nraise KeyError(arguments.hidden)"
    )
    with pytest.raises(KeyError, match="7"):
        load_workload(spec)
    unload(spec, before)
    assert (sys.argv is own, own) == (True, ["weft", "run"])


def test_a_dataclass_in_the_entry_file_finds_its_module(write: Write) -> None:
    settings = "import dataclasses\n@dataclasses.dataclass\nclass Settings:\n    hidden: 'int' = 1\n"
    assert load_workload(write(settings + SOURCE))


def test_an_edited_file_takes_effect_at_once_in_the_next_job(write: Write, tmp_path: Path) -> None:
    """Same size, same second: Python's bytecode cache, were it written, would not see the change."""
    source = SOURCE.replace("import torch, weft", "import torch, weft\nfrom package.part import HIDDEN")
    (tmp_path / "package").mkdir()  # a namespace package: it has no __init__.py, and no __file__
    for hidden in (2, 4):
        (tmp_path / "package" / "part.py").write_text(f"HIDDEN = {hidden}")
        before = set(sys.modules)
        spec = write(source.replace("(hidden, 1)", f"(HIDDEN + {hidden}, 1)"))
        assert load_workload(spec).model.in_features == 2 * hidden
        unload(spec, before)
        assert not {"package", "package.part"} & set(sys.modules)
    assert not list(tmp_path.rglob("*.pyc"))


def test_a_file_that_is_loaded_again_has_code_of_its_own(write: Write) -> None:
    """What torch.compile keeps of a function it keeps with its code."""
    codes = []
    for _ in range(2):
        spec = write()
        load_workload(spec)
        codes.append(sys.modules[module_name(spec.entry_file)].workload.__code__)
        unload(spec, set(sys.modules))
    assert codes[0] == codes[1]
    assert codes[0] is not codes[1]


def test_unloading_takes_what_the_job_imported_and_keeps_what_was_there_before(write: Write, tmp_path: Path) -> None:
    (tmp_path / "earlier.py").write_text("")
    (tmp_path / "own.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    try:
        importlib.import_module("earlier")
        before = set(sys.modules)
        importlib.import_module("own")
        unload(write(), before)
        assert "earlier" in sys.modules
        assert "own" not in sys.modules
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("earlier", None)


def test_unloading_keeps_weft_and_installed_packages_even_under_the_jobs_directory() -> None:
    """A job in the root of a project, with the virtual environment inside, took torch itself out of the process."""
    names = {"weft.spec.job_spec", "torch.utils.data", "json.decoder"}
    kept = {name: sys.modules[name] for name in names}
    spec = JobSpec(job={"entry": "job.py:workload", "epochs": 1, "batch_size": 1}, directory="/")
    try:
        unload(spec, set(sys.modules) - names)
        assert names <= set(sys.modules)
    finally:
        sys.modules.update(kept)


def test_source_from_another_directory_is_known_as_the_jobs_too(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module in `../lib` was kept for the worker's next job, edited or another's of the same name, and its inspection
    was taken for that of the same code."""
    library, before = tmp_path.parent / f"{tmp_path.name}-library", set(sys.modules)
    library.mkdir()
    (library / "weft_test_layers.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(library)])
    spec = write(f"import weft_test_layers\n{SOURCE}")
    load_workload(spec)
    assert files_of_job(spec, before) == sorted([spec.entry_file, library / "weft_test_layers.py"])
    unload(spec, before)
    assert foreign_modules(before) == ["weft_test_layers"]
    monkeypatch.delitem(sys.modules, "weft_test_layers")


def test_nested_folders_without_an_init_are_forgotten_whichever_goes_first(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "parts" / "models" / "blocks" / "deep" / "net.py"
    path.parent.mkdir(parents=True)
    path.write_text("HIDDEN = 7\n")
    spec, before = write(f"from parts.models.blocks.deep.net import HIDDEN\n{SOURCE}"), set(sys.modules)
    for _ in range(2):
        load_workload(spec)
        assert path in files_of_job(spec, before)
        unload(spec, before)
        assert [name for name in sys.modules if name.startswith("parts")] == []


def test_a_folder_whose_parent_the_jobs_code_has_taken_away_is_no_error(write: Write, tmp_path: Path) -> None:
    (tmp_path / "parts" / "models").mkdir(parents=True)
    spec, before = write(f"import sys, parts.models\ndel sys.modules['parts']\n{SOURCE}"), set(sys.modules)
    load_workload(spec)
    assert files_of_job(spec, before) == [spec.entry_file]
    unload(spec, before)


def test_an_entry_file_that_fails_to_import_leaves_no_module_behind(write: Write) -> None:
    before = set(sys.modules)
    with pytest.raises(ZeroDivisionError):
        load_workload(write("workload = 1 / 0"))
    assert set(sys.modules) == before


@pytest.mark.parametrize("begin", ["", "def workload():\n    "])
@pytest.mark.parametrize(
    ("where", "line", "home", "command"),
    [
        ("pkg", "from .net import Net", "", "weft run pkg.job:workload"),
        ("pkg", "from pkg.net import Net", "", "weft run pkg.job:workload"),
        ("pkg/deep", "from ..net import Net", "", "weft run pkg.deep.job:workload"),
        ("pkg/deep", "import pkg.net", "", "weft run pkg.deep.job:workload"),
        ("pkg/deep", "import beside", "", "weft run pkg.deep.job:workload"),
        ("pkg/no-name", "import beside", "", 'entry = "pkg/no-name/job.py:workload"'),
        ("other/pkg", "from pkg.net import Net", "other", "weft run pkg.job:workload"),
    ],
)
def test_an_import_that_needs_another_directory_is_told_with_the_command_for_it(
    tmp_path: Path, begin: str, where: str, line: str, home: str, command: str
) -> None:
    place = tmp_path / where
    place.mkdir(parents=True)
    (tmp_path / "pkg").mkdir(exist_ok=True)
    for folder in ("pkg", "pkg/deep"):
        if (tmp_path / folder).is_dir() and where.startswith("pkg"):
            (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "beside.py").touch()
    (place / "job.py").write_text(f"workload = 0\n{begin}{line}")
    job = {"entry": "job.py:workload", "epochs": 1, "batch_size": 4}
    with pytest.raises(ImportError) as caught:
        load_workload(JobSpec.model_validate({"job": job, "directory": str(place)}))
    (note,) = caught.value.__notes__
    assert f"directory be {tmp_path / home}: " in note
    assert command in note


PICKLED = """
import pickle
class Vocabulary: pass
assert pickle.loads(b"c__main__\\nVocabulary\\n.") is Vocabulary
def workload():
    import __main__
    assert pickle.loads(b"c__main__\\nVocabulary\\n.") is Vocabulary
    assert getattr(__main__, "__path__", None) is getattr(__main__, "no_such_name", None) is None
    return made()
"""


def test_what_a_script_has_pickled_as_its_own_is_the_files_until_it_is_unloaded(write: Write) -> None:
    """A model that `torch.save` had written whole could not be loaded: the worker's own `__main__` was asked."""
    spec = write(SOURCE.replace("def workload", "def made") + PICKLED)
    for _ in range(2):
        load_workload(spec)
        unload(spec, ())
        assert not hasattr(sys.modules["__main__"], "Vocabulary")


@pytest.mark.parametrize("line", ["import weft_no_such_module", "from weft import no_such_name", "import data"])
def test_an_import_that_fails_for_another_reason_has_no_such_advice(tmp_path: Path, line: str) -> None:
    (place := tmp_path / "jobs").mkdir()
    (tmp_path / "data").mkdir()  # a folder that is no package, and that the job's file is not in
    (place / "job.py").write_text(f"workload = 0\n{line}")
    job = {"entry": "job.py:workload", "epochs": 1, "batch_size": 4}
    with pytest.raises(ImportError) as caught:
        load_workload(JobSpec.model_validate({"job": job, "directory": str(place)}))
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    "file", ["weft_test_jobs/train.py", "weft_test_jobs/__init__.py", "weft_test_jobs/deep/train.py"]
)
def test_a_file_in_a_folder_imports_as_a_module_of_that_package(write: Write, tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    (path.parent / "net.py").write_text("HIDDEN = 7\n")
    (tmp_path / "weft_test_jobs" / "root.py").write_text("ABOVE = 1\n")
    above = ".." if "deep" in file else "."
    path.write_text(f"{SOURCE}\nfrom .net import HIDDEN\nfrom {above} import root\nassert root.ABOVE\n")
    with warnings.catch_warnings(action="error"):
        workload = load_workload(spec := write(entry=f"{file}:workload"))
    assert isinstance(workload, Workload)
    assert path.parent / "net.py" in files_of_job(spec, ())
    before = set(sys.modules)
    unload(spec, ())
    assert {name for name in before - set(sys.modules) if name.partition(".")[0] == "weft_test_jobs"} >= {
        "weft_test_jobs",
        "weft_test_jobs.root",
    }


def test_another_import_that_fails_says_all_itself(write: Write) -> None:
    with pytest.raises(ImportError) as caught:
        load_workload(write("from torch import workload"))
    assert not hasattr(caught.value, "__notes__")


def test_a_missing_file_is_named_with_the_field(tmp_path: Path) -> None:
    spec = JobSpec(job={"entry": "no.py:workload", "epochs": 1, "batch_size": 1}, directory=str(tmp_path))
    with pytest.raises(WorkloadError, match=r"job\.entry: .*no\.py' is not a file"):
        load_workload(spec)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("job.py:worklod", r"job\.entry: .*job\.py has no 'worklod'; did you mean workload\?"),
        ("job.py:xyz", r"job\.entry: .*job\.py has no 'xyz'; it defines: workload$"),
        ("job.py:__name__", r"job\.entry: '__name__' in .*job\.py is str, not a function"),
    ],
)
def test_an_entry_that_names_no_function_is_refused_with_a_remedy(write: Write, entry: str, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        load_workload(write(entry=entry))


def test_a_script_that_trains_at_import_is_refused_before_a_line_of_it_runs(write: Write, tmp_path: Path) -> None:
    """It was trained to its end, and told only then that it has no such function."""
    script = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nfor loss in []:\n    loss.backward()\n"
    with pytest.raises(WorkloadError, match=r"has no 'workload'; .*backward\(\) at line 4"):
        load_workload(write(script))
    assert not (tmp_path / "ran").exists()


def test_of_many_functions_a_line_is_told(write: Write) -> None:
    functions = "".join(f"def step_{number}(): pass\n" for number in range(20))
    with pytest.raises(WorkloadError, match=r"it defines: step_0, .*, step_7 and 12 more$"):
        load_workload(write(functions, entry="job.py:xyz"))


def test_arguments_that_do_not_fit_are_told_with_the_signature(write: Write) -> None:
    with pytest.raises(WorkloadError, match=r"job\.args: got an unexpected keyword argument 'hiden'.*workload\(hidden"):
        load_workload(write(SOURCE.replace(", **changes", "").replace("{**parts, **changes}", "parts"), hiden=1))
    with pytest.raises(WorkloadError, match=r"job\.args: missing a required argument: 'hidden'"):
        load_workload(write(SOURCE.replace(": int = 3", "")))


def test_a_type_error_inside_the_users_code_passes_unchanged(write: Write) -> None:
    with pytest.raises(TypeError, match="can only concatenate"):
        load_workload(write("def workload():\n    return [] + ()\n"))


def test_a_step_takes_the_place_of_the_loss_and_model_and_data_need_no_names(write: Write) -> None:
    source = """
import torch, weft

def workload():
    return weft.Workload(torch.nn.Linear(1, 1), [1, 2], step=lambda model, batch: model(batch).sum(),
                         validate=lambda model, batch: model(batch).mean(), collate=torch.tensor,
                         weight=len, optimizer=torch.optim.SGD)
"""
    workload = load_workload(write(source))
    assert (workload.train, workload.loss, workload.metrics) == ([1, 2], None, {})


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("None", "job.entry: workload returned None; it must return a weft.Workload"),
        ("made(model=[])", r"Workload.model is list; give a torch\.nn\.Module"),
        ("made(model=torch.nn.Linear)", r"Workload.model is the class Linear; give a .*, such as Linear\("),
        ("made(loss=1.5)", "Workload.loss is float; give a function"),
        (
            "made(loss=torch.nn.MSELoss)",
            r"Workload.loss is the class MSELoss; give a module of it, such as MSELoss\(\)",
        ),
        ("made(loss=None)", "Workload.loss and Workload.step are both missing; give loss.output, target., or step"),
        ("made(step=max)", "Workload.loss and Workload.step are both given; leave out one"),
        ("made(loss=None, step=[max])", "Workload.step is list; give a function"),
        ("made(loss=None, step=max, metrics={'a': abs})", "Workload.metrics goes with Workload.loss; let Workload.st"),
        ("made(loss=None, step=max, validate=1)", "Workload.validate is int; give a function, or leave it out"),
        ("made(validate=max)", "Workload.validate goes with Workload.step; with Workload.loss, give Workload.metrics"),
        ("made(collate='pad')", "Workload.collate is str; give a function, or leave it out"),
        ("made(optimizer='adam')", "Workload.optimizer is str; give a function"),
        ("made(weight=2)", "Workload.weight is int; give a function, or leave it out"),
        ("made(start=3)", "Workload.start is int; give the path of a safetensors file, or a state dict"),
        ("made(scheduler_metric=1)", "Workload.scheduler_metric is int; give 'loss', or the name of a metric"),
        ("made(scheduler='cosine')", "Workload.scheduler is str; give a function, or leave it out"),
        ("made(metrics=['accuracy'])", "Workload.metrics is list; give a mapping from names to functions"),
        (
            "made(loss=None, step=lambda model, x, y: None)",
            r"Workload.step is called with \(model, batch\), and takes \(model, x, y\): missing .* 'y'",
        ),
        ("made(loss=lambda output: None)", r"Workload.loss is called with \(output, target\), and takes \(output\)"),
        (
            "made(optimizer=lambda: None)",
            r"takes \(\): too many .*; give one that takes that, .*`lambda parameters: \.\.\.` with your call in it$",
        ),
        ("made(scheduler=lambda o, lr: None)", r"Workload.scheduler is called with \(optimizer\), and takes \(o, lr\)"),
        ("made(on_epoch=lambda: None)", r"Workload.on_epoch is called with \(values\), and takes \(\): too many"),
        ("made(metrics={'a': lambda y: y})", r"Workload.metrics\['a'\] is called with \(output, target\), and takes"),
        ("made(metrics={'accuracy': 1})", r"Workload.metrics\['accuracy'\] is int; give a function"),
        ("made(metrics={1: abs})", "Workload.metrics: the name 1 is no text; give one in UTF-8"),
        ("made(metrics={'a\\udc00': abs})", r"Workload.metrics: the name 'a.udc00' is no text; give one in UTF-8"),
        (
            "made(epoch_metrics='f1')",
            "Workload.epoch_metrics is str; give a list of the names that Workload",
        ),
        ("made(epoch_metrics=[1], on_epoch=print)", "Workload.epoch_metrics: the name 1 is no text; give one in UTF-8"),
        ("made(epoch_metrics=['loss'], on_epoch=print)", "Workload.epoch_metrics: 'loss' stands for something else"),
        ("made(epoch_metrics=['f1', 'f1'], on_epoch=print)", "Workload.epoch_metrics: 'f1' stands for something else"),
        ("made(epoch_metrics=['f1'])", "Workload.epoch_metrics is given without Workload.on_epoch, which returns them"),
        ("made(metrics={'loss': abs})", "Workload.metrics: 'loss' is always reported; give the metric another name"),
    ],
)
def test_a_result_that_is_no_whole_workload_is_refused_by_field(write: Write, result: str, text: str) -> None:
    source = SOURCE.replace("def workload(", "def made(") + f"\ndef workload():\n    return {result}\n"
    with pytest.raises(WorkloadError, match=text):
        load_workload(write(source))


ONCE = """
if hasattr(sys, "done_by_a_job"):
    raise RuntimeError("done before")
sys.done_by_a_job = True
"""


@pytest.mark.parametrize("where", ["the file", "the function"])
def test_an_error_that_only_a_later_load_has_tells_that_there_are_several(
    write: Write, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    # `multiprocessing.set_start_method` at the top of a file failed with a traceback that gave no hint why.
    monkeypatch.setattr(sys, "done_by_a_job", True, raising=False)
    del sys.done_by_a_job  # type: ignore[attr-defined]
    once = ONCE if where == "the file" else textwrap.indent(ONCE, "    ")
    head, call = SOURCE.split("    model =")
    source = f"import sys\n{once}{SOURCE}" if where == "the file" else f"import sys{head}{once}    model ={call}"
    spec = write(source)
    load_workload(spec)
    with pytest.raises(RuntimeError, match="done before") as caught:
        load_workload(spec)
    assert fault_of(caught.value).message.endswith(f"RuntimeError: done before\n{LOADED_BEFORE}\n")


def test_an_error_of_other_arguments_does_not(write: Write) -> None:
    load_workload(write())
    with pytest.raises(TypeError) as caught:
        load_workload(write(hidden="3"))
    assert LOADED_BEFORE not in fault_of(caught.value).message


def test_an_error_of_another_function_of_the_file_does_not(write: Write) -> None:
    spec = write(SOURCE + "\n\ndef other():\n    1 / 0\n")
    load_workload(spec)
    other = JobSpec(job={"entry": "job.py:other", "epochs": 1, "batch_size": 1}, directory=spec.directory)
    with pytest.raises(ZeroDivisionError) as caught:
        load_workload(other)
    assert LOADED_BEFORE not in fault_of(caught.value).message


def test_what_a_decorator_takes_is_not_asked_of_the_function_under_it(write: Write) -> None:
    decorated = """
import functools
def unpacked(function):
    @functools.wraps(function)
    def call(model, batch):
        return function(model, *batch)
    return call
@unpacked
def step(model, x, y): ...
"""
    assert load_workload(write(decorated + SOURCE.replace("loss=torch.nn.MSELoss()", "step=step"))).loss is None


def test_an_error_of_an_edit_does_not(write: Write) -> None:
    load_workload(write())
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            load_workload(write(SOURCE + "1 / 0\n"))
        assert LOADED_BEFORE not in fault_of(caught.value).message


@pytest.mark.slow(seconds=5)
def test_what_the_documentation_has_for_that_can_be_run_several_times() -> None:
    page = (Path(__file__).parents[2] / "docs" / "your-model.md").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "set_start_method" in each]
    subprocess.run([sys.executable, "-c", f"for _ in range(3): exec({block!r}, {{}})"], check=True)
