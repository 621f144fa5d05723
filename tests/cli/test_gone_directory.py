"""The command in a working directory that has been removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.weighs(tests=7)

SECONDS = 180.0
GONE = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "SPEC"],
        ["run", "SPEC", "--reference"],
        ["run", "SPEC", "--resume", "runs/digits-1"],
        ["init", "digits.py"],
        ["init", "SPEC", "--print"],
        ["schedule", "my.grid"],
    ],
    ids=" ".join,
)
def test_a_verb_that_needs_one_says_that_it_is_gone(tmp_path: Path, spec: Path, arguments: list[str]) -> None:
    """It told to look for a full disk, or was ended by the library that torch computes with."""
    source = spec.with_suffix(".py") if arguments[0] == "init" else spec
    arguments = [str(source) if each == "SPEC" else each for each in arguments]
    done = subprocess.run(
        ["sh", "-c", GONE, "sh", sys.executable, "-P", "-m", "weft", *arguments],
        cwd=tmp_path,
        env=os.environ | {"WEFT_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    told = "weft: the working directory is gone; change to one that is there\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
