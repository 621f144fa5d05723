from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from weft.spec.job_spec import JobSpec
from weft.workload.code.version import CodeChanged, CodeVersion
from weft.workload.entry import unload

SOURCE = """
import torch, weft, weft_test_layers

def workload(hidden: int = 3) -> weft.Workload:
    return weft.Workload(model=weft_test_layers.layer(hidden), loss=torch.nn.MSELoss(),
                         train=(torch.zeros(4, hidden), torch.zeros(4, 1)),
                         optimizer=lambda parameters: torch.optim.SGD(parameters))
"""
LAYERS = """
import torch

def layer(width):
    return torch.nn.Linear(width, 1, bias={bias})
"""
Write = Callable[..., JobSpec]


def let_pass(beside: Path) -> None:
    """Until files have later times than now: many kernels take the last tick of a clock for them."""
    import time  # a job's code has this function, too

    now, tick = time.time_ns(), beside.with_name("tick")
    tick.touch()
    while tick.stat().st_ctime_ns < now:
        tick.touch()


LET_PASS = f"""
from pathlib import Path

{inspect.getsource(let_pass)}
let_pass(Path(__file__))
"""


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes the two files of a job; what it imported is unloaded after the test."""
    before = set(sys.modules)

    def spec(source: str = SOURCE, layers: str = LAYERS.format(bias=True)) -> JobSpec:
        (tmp_path / "job.py").write_text(source)
        (tmp_path / "weft_test_layers.py").write_text(layers)
        return JobSpec(job={"entry": "job.py:workload", "epochs": 1, "batch_size": 1}, directory=str(tmp_path))

    yield spec
    unload(spec(), before)


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def noted(spec: JobSpec) -> CodeVersion:
    """By a first load."""
    before, version = set(sys.modules), CodeVersion("digits-1", {})
    version.load(before, spec)
    unload(spec, before)
    return version


def later(version: CodeVersion) -> CodeVersion:
    """As another worker is told it."""
    return CodeVersion("digits-1", version.digests)


def names(version: CodeVersion) -> list[str]:
    return sorted(Path(path).name for path in version.digests)


def changed(version: CodeVersion) -> Sequence[str]:
    """The names of the files that a later load would refuse."""
    try:
        later(version).check()
    except CodeChanged as error:
        return [Path(path).name for path in error.files]
    return []


def test_the_entry_and_what_it_imports_are_noted_and_nothing_that_is_installed(write: Write) -> None:
    version = noted(write())
    assert names(version) == ["job.py", "weft_test_layers.py"]
    assert changed(version) == []


@pytest.mark.parametrize("name", ["job.py", "weft_test_layers.py"])
def test_a_file_that_was_edited_is_named_until_it_is_put_back(write: Write, tmp_path: Path, name: str) -> None:
    version, file = noted(write()), tmp_path / name
    text = file.read_text()
    file.write_text(text.replace("1", "2"))
    assert changed(version) == [name]
    with pytest.raises(CodeChanged, match=r"^\S+\.py has changed since digits-1 first loaded it, "):
        later(version).load(set(sys.modules), _spec(tmp_path))
    file.unlink()
    assert changed(version) == [name]
    file.write_text(text)
    assert changed(version) == []


def _spec(directory: Path) -> JobSpec:
    return JobSpec(job={"entry": "job.py:workload", "epochs": 1, "batch_size": 1}, directory=str(directory))


def test_a_link_that_leads_to_another_file_is_a_change(write: Write, tmp_path: Path) -> None:
    spec = write()
    for number in (1, 2):
        (tmp_path / f"layers-{number}.py").write_text(LAYERS.format(bias=number == 1))
    link = tmp_path / "weft_test_layers.py"
    link.unlink()
    link.symlink_to("layers-1.py")
    version = noted(spec)
    link.unlink()
    link.symlink_to("layers-2.py")
    assert changed(version) == ["weft_test_layers.py"]


def test_a_file_that_is_saved_again_as_it_was_has_not_changed(write: Write) -> None:
    version = noted(write())
    write()
    assert changed(version) == []


def test_what_no_worker_had_loaded_may_change(write: Write, tmp_path: Path) -> None:
    """Another worker alone has come to import it: nobody knows of which version."""
    write()
    (tmp_path / "weft_test_late.py").touch()
    version = noted(_spec(tmp_path))
    (tmp_path / "weft_test_late.py").write_text("edited = True")
    assert changed(version) == []


def test_what_a_forward_imports_in_an_inspection_is_noted_then(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, before = write(), set(sys.modules)
    late = written(tmp_path / "weft_test_late.py", "")
    version = CodeVersion("digits-1", {})
    version.load(before, spec)
    assert names(version) == ["job.py", "weft_test_layers.py"]
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("weft_test_late")
    version.note_late(before, spec)
    assert names(version) == ["job.py", "weft_test_late.py", "weft_test_layers.py"]
    late.write_text("edited = True")
    assert changed(version) == ["weft_test_late.py"]


def test_but_not_where_it_may_have_changed_meanwhile(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, before = write(), set(sys.modules)
    version = CodeVersion("digits-1", {})
    version.load(before, spec)
    let_pass(tmp_path / "job.py")
    (tmp_path / "weft_test_late.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("weft_test_late")
    version.note_late(before, spec)
    assert names(version) == ["job.py", "weft_test_layers.py"]


def test_a_file_that_is_edited_while_it_is_loaded_is_noted_as_it_was_loaded(write: Write, tmp_path: Path) -> None:
    """A digest that was taken behind the load would have been of the edited file, and the model of the other."""
    edits = f"""{LET_PASS}
file = Path(weft_test_layers.__file__)
if "bias=True" in file.read_text():
    file.write_text({LAYERS.format(bias=False)!r})
"""
    version = CodeVersion("digits-1", {})
    workload = version.load(set(sys.modules), write(SOURCE + edits))
    assert workload.model.bias is None, "of the edited file"
    assert names(version) == ["job.py", "weft_test_layers.py"]
    assert changed(version) == []


def test_what_a_job_writes_anew_at_each_load_is_its_own_affair(write: Write, tmp_path: Path) -> None:
    writes = (
        LET_PASS
        + """
import time
Path(__file__).with_name("weft_test_layers.py").write_text(f"{LAYERS}# {time.time_ns()}")
"""
    )
    writes = writes.replace("{LAYERS}", LAYERS.format(bias=True).replace("\n", "\\n"))
    version = noted(write(writes + SOURCE))
    assert names(version) == ["job.py"]
    later(version).load(set(sys.modules), _spec(tmp_path))


def test_later_loads_of_an_inspection_note_nothing_and_are_compared(write: Write, tmp_path: Path) -> None:
    spec, before = write(), set(sys.modules)
    version = CodeVersion("digits-1", {})
    version.load(before, spec)
    known = dict(version.digests)
    version.load(before, spec)
    assert version.digests == known
    (tmp_path / "job.py").write_text("edited = True")
    with pytest.raises(CodeChanged):
        version.load(before, spec)


def test_what_was_noted_before_stands(write: Write, tmp_path: Path) -> None:
    """By an inspection in a later attempt, which finds more."""
    spec = write()
    known = {path: digest for path, digest in noted(spec).digests.items() if path.endswith("job.py")}
    version = CodeVersion("digits-1", known)
    version.load(set(sys.modules), spec)
    assert names(version) == ["job.py", "weft_test_layers.py"]
    assert known.items() < version.digests.items()


def test_many_files_are_counted_and_the_error_crosses_processes() -> None:
    error = CodeChanged("digits-1", [f"/jobs/{number}.py" for number in range(5)])
    told = str(pickle.loads(pickle.dumps(error)))
    assert told.startswith(
        "/jobs/0.py, /jobs/1.py, /jobs/2.py and 2 more have changed since digits-1 first loaded them"
    )
    assert "Put them back, then `weft resume digits-1` goes on as it was" in told
    assert "as they are, `weft resume digits-1` goes on with the new code" in told
