"""Which files are told, before a line of them runs, that they have no such function."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from weft.workload.entry_names import check_named
from weft.workload.workload import WorkloadError

LOOP = "for epoch in range(40):\n    loss = net(x).sum()\n    loss.backward()\n"
GUARDED = 'if __name__ == "__main__":\n    ' + LOOP.replace("\n", "\n    ")


def written(directory: Path, source: str | bytes) -> Path:
    path = directory / "job.py"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return path


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def workload(): pass\n", r"has no 'made'; it defines: workload$"),
        ("def make(): pass\n", r"has no 'made'; did you mean make\?$"),
        ("import torch\n", "it defines: no function$"),
        (GUARDED, "it defines: no function$"),
        (LOOP, "no function; what calls backward.. at line 3 would run as the file is imported.*function made return"),
        ("from base import *\n" + LOOP, "at line 4 would run as"),
        ("globals().update(config)\ndef main():\n    loss.backward()\nmain()\n", "it defines: main; .* at line 3 "),
        ("exec('')\nclass A:\n    loss.backward()\n", "at line 3 would run as"),
        (GUARDED.replace('"__main__"', "'x'") + "\nelse:\n    loss.backward()\nexec('')\n", "at line 7 would run as"),
    ],
)
def test_a_file_that_does_not_mention_its_function_is_refused(tmp_path: Path, source: str, text: str) -> None:
    with pytest.raises(WorkloadError, match=rf"job\.entry: .*job\.py .*{text}"):
        check_named(written(tmp_path, source), "made")


@pytest.mark.parametrize(
    "source",
    [
        "def made(): pass\n" + LOOP,
        "async def made(): pass\n",
        "class made: pass\n",
        "made = lambda: None\n",
        "try:\n    from jobs import made\nexcept ImportError:\n    made = None\n",
        "from jobs import small as made\n",
        "def give():\n    global made\n    made = 3\ngive()\n",
        "give(made=3)\n",
        "give('made')\n",
        "from jobs import *\n" + GUARDED,
        "for size in (1, 2):\n    globals()[f'ma{size}'] = size\n",
        "exec(open('jobs.py').read())\n",
        "def __getattr__(name):\n    loss.backward()\n",
        "setattr(here, name, lambda: loss.backward())\n",
    ],
)
def test_one_that_may_have_it_is_not(tmp_path: Path, source: str) -> None:
    check_named(written(tmp_path, source), "made")


@pytest.mark.parametrize("source", ["def workload(:\n", b"name = '\xff'\n", b"\0"])
def test_source_that_cannot_be_read_is_left_to_its_import(tmp_path: Path, source: str | bytes) -> None:
    check_named(written(tmp_path, source), "made")


def test_what_every_module_has_is_left_to_its_import_and_the_source_warns_only_there(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="error"):
        check_named(written(tmp_path, "text = '\\d'\n"), "__name__")
