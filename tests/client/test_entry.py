"""Where workers find a function that a call gives: its file, one made for it, or a sentence that says why nowhere."""

from __future__ import annotations

import collections
import functools
import importlib
import json
import linecache
import runpy
import subprocess
import sys
import zipapp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.client.entry import check_not_inside_an_entry, entry_of, taken_apart
from weft.spec.job_spec import JobSpec, SpecError
from weft.spec.source import ENTRY_MODULE


def workload() -> None: ...


@functools.wraps(workload)
def decorated() -> None: ...


def outer() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


class Workloads:
    def method(self) -> None: ...


def test_a_function_of_a_module_is_its_file_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wayin_module.py").write_text("def small(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with entry_of(importlib.import_module("wayin_module").small) as found:
        assert found == (str(tmp_path), "wayin_module.py:small")
    del sys.modules["wayin_module"]


def test_a_decorated_function_is_found_by_the_name_of_what_it_wraps() -> None:
    with entry_of(decorated) as (_, entry):
        assert entry.endswith(":workload")
    with entry_of(functools.lru_cache(workload)) as (_, entry):
        assert entry.endswith(":workload")


def test_a_function_of_a_package_is_imported_from_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what it imports by the package's name is found."""
    package = tmp_path / "wayin_package" / "jobs"
    package.mkdir(parents=True)
    for module in (package.parent / "__init__.py", package / "__init__.py", package / "circle.py"):
        module.write_text("def workload(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, file in {"jobs.circle": "jobs/circle.py", "jobs": "jobs/__init__.py"}.items():
        module = importlib.import_module(f"wayin_package.{name}")
        with entry_of(module.workload) as (directory, entry):
            assert (directory, entry) == (str(tmp_path), f"wayin_package/{file}:workload")
    for name in [name for name in sys.modules if name.startswith("wayin_package")]:
        del sys.modules[name]


def test_a_scripts_own_function_is_its_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def workload(): ...\n")
    with entry_of(runpy.run_path(str(script), run_name="__main__")["workload"]) as found:
        assert found == (str(tmp_path), "script.py:workload")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda: None, "workload is a lambda; workers find a function by its name, so define it by def at the top"),
        (outer(), r"workload is outer\.<locals>\.inner; workers import it by its name, so define it at the top"),
        (Workloads().method, r"workload is method; give a function that returns a weft\.Workload"),
        (Workloads.method, r"workload is Workloads\.method; workers import it by its name"),
        (print, r"workload is builtin_function_or_method; give a function that returns a weft\.Workload"),
        (None, r"workload is None; give a function that returns a weft\.Workload"),
        ("train.py:workload", r"workload is str; give a function that returns a weft\.Workload"),
    ],
)
def test_what_workers_could_not_import_is_refused_with_a_remedy(given: object, sentence: str) -> None:
    with pytest.raises(SpecError, match=f"weft.run: {sentence}"), entry_of(given):
        pass


def test_a_workload_in_place_of_its_function_is_refused() -> None:
    from weft.workload.workload import Workload

    made = Workload(model=None, loss=print, train=None, optimizer=print)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="workload is a Workload; give the function that makes it"), entry_of(made):
        pass


def sized(width: int, depth: int = 2, /, *names: str) -> None: ...


def shaped(width: int, depth: int = 2, *, wide: bool = False) -> None: ...


three: Any = shaped


def test_a_partial_is_its_function_and_its_arguments() -> None:
    made = functools.partial(functools.partial(shaped, 3, wide=True), wide=False)
    assert taken_apart(made, {"depth": 4}) == (shaped, {"width": 3, "wide": False, "depth": 4})
    assert taken_apart(shaped, {"width": 3}) == (shaped, {"width": 3})
    assert taken_apart(functools.partial(shaped, depth=5), {"depth": 6}) == (shaped, {"depth": 6})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (functools.partial(sized, 3), r"a partial with values without a name; give them by name, as args=\{"),
        (functools.partial(three, 3, 4, 5), "a partial that cannot be called: too many positional arguments"),
        (functools.partial(shaped, 3), "a partial that has 'width' already; give it once"),
    ],
)
def test_a_partial_whose_arguments_have_no_names_is_refused(given: object, sentence: str) -> None:
    with pytest.raises(SpecError, match=f"weft.run: workload is {sentence}"):
        taken_apart(given, {"width": 3} if "already" in sentence else {})


# --- functions without a file


def typed(cell: str, name: str = "workload", **notebook: Any) -> Any:
    """The function as a notebook has it once the cell has run: its source is in linecache, and in no file."""
    file = f"<cell of {name}>"
    linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
    names = {"__name__": "__main__"} | notebook
    exec(compile(cell, file, "exec", dont_inherit=True), names)
    return names[name]


def test_a_function_of_a_notebook_becomes_a_file_for_as_long_as_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cell = "def workload(place=Path('.'), size: int = 3):\n"
    cell += "    return [json.dumps(n) for n in range(size)], OrderedDict()\n"
    function = typed(cell, Path=Path, json=json, OrderedDict=collections.OrderedDict)
    with entry_of(function) as (directory, entry):
        spec = JobSpec(job={"entry": entry, "steps": 1, "batch_size": 1}, directory=directory)
        spec.check_files()
        assert directory == str(tmp_path)
        assert runpy.run_path(str(spec.entry_file))["workload"]() == (["0", "1", "2"], {})
        assert spec.entry_file.read_text().endswith(cell)
    assert not spec.entry_file.parent.exists()


@pytest.mark.parametrize(
    ("cell", "foreign"),
    [
        ("def workload():\n    return helper()\n", "helper"),
        ("def workload(size=SIZE):\n    return [helper(n) for n in range(size)]\n", "SIZE, helper"),
        ("def workload():\n    class Net(Base): ...\n    return Net()\n", "Base"),
        ("def workload():\n    return lambda: undefined\n", "undefined"),
    ],
)
def test_a_function_that_needs_more_of_its_notebook_is_refused_with_what_it_needs(cell: str, foreign: str) -> None:
    own = typed("class Base: ...\n", "Base")
    function = typed(cell, SIZE=3, Base=own, helper=typed("def helper(n=1): ...\n", "helper"))
    with pytest.raises(SpecError) as refused, entry_of(function):
        pass
    assert f"workload needs {foreign}, defined elsewhere in the notebook; define it inside" in str(refused.value)
    assert "%%writefile train.py" in str(refused.value)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("from body import workload", "workload needs helper of"),
        ("from body import helper\ndef workload():\n    return helper()", "workload needs helper of"),
        ("import body\ndef workload():\n    return body.helper()", "workload needs body of"),
        ("import json\ndef workload():\n    return json.dumps(1)", "made"),
    ],
)
def test_what_a_program_has_in_its_own_archive_is_nothing_that_workers_import(
    program: str, said: str, tmp_path: Path
) -> None:
    """They found no module of that name, in a file that nobody had written."""
    source = tmp_path / "program"
    source.mkdir()
    (source / "body.py").write_text("def helper(): ...\n\ndef workload():\n    return helper()\n")
    ask = "from weft.client.entry import entry_of\nwith entry_of(workload):\n    print('made')\n"
    (source / "__main__.py").write_text(f"{program}\n{ask}")
    zipapp.create_archive(source, tmp_path / "program.pyz")
    done = subprocess.run([sys.executable, "program.pyz"], cwd=tmp_path, capture_output=True, text=True, timeout=180.0)
    assert said in done.stdout + done.stderr
    if said != "made":
        assert "program.pyz, from which workers cannot import; define it inside the function, or" in done.stderr


def test_a_function_whose_source_nobody_has_is_refused() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def workload(): ...", names)
    with pytest.raises(SpecError, match=r"the source of workload is not to be had; put all of it in a file"):
        entry_of(names["workload"]).__enter__()


def test_a_call_from_inside_an_entrys_file_is_refused_with_the_guard_to_write() -> None:
    check_not_inside_an_entry()
    names = {"__name__": f"{ENTRY_MODULE}0123", "check": check_not_inside_an_entry}
    with pytest.raises(SpecError, match='write the call below `if __name__ == "__main__":`'):
        exec(compile("def helper():\n    check()\nhelper()", "train.py", "exec"), names)
