"""The limit of descriptors, in processes of their own: it is the whole process's."""

from __future__ import annotations

import subprocess
import sys

import pytest

RAISE = """
import resource, sys
from weft.machine import descriptors
soft, hard, descriptors.MOST = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(descriptors.raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
FILL = """
import os, resource
from weft.machine.descriptors import are_short, is_among_the_last
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
opened = []
while not are_short():
    opened.append(os.dup(0))
print(max(opened), is_among_the_last(135), is_among_the_last(136))
while True:
    try:
        os.dup(0)
    except OSError:
        break
print(are_short())
"""


def said(source: str, *arguments: int) -> list[str]:
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=180.0).stdout.split()


@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(64, 100, 100), (100, 100, 100), (64, 1000, 300), (500, 1000, 500)]
)
def test_the_soft_limit_is_raised_and_never_lowered(soft: int, hard: int, raised: int) -> None:
    assert said(RAISE, soft, hard, 300) == [str(raised), str(raised), str(hard)]


def test_the_last_descriptors_are_kept() -> None:
    assert said(FILL) == ["135", "False", "True", "True"]
