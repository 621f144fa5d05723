"""Versions are those that are installed, and nothing is imported to find them."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from weft.machine.versions import EXTRAS, PACKAGES, constant, read_software

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    return requirement.partition(">")[0]


def test_the_extras_are_those_that_users_may_ask_for() -> None:
    declared = {extra: [name_of(each) for each in needed] for extra, needed in PROJECT["optional-dependencies"].items()}
    del declared["dev"]
    assert declared == {extra: [package] for extra, package in EXTRAS.items()}


def test_the_packages_are_among_those_that_weft_requires() -> None:
    assert set(PACKAGES) <= {name_of(each) for each in PROJECT["dependencies"]}


def test_what_is_installed_has_a_version() -> None:
    software = read_software()
    assert software.packages == {name: version(name) for name in PACKAGES}
    assert software.python == ".".join(map(str, sys.version_info[:3]))


def test_the_cuda_version_of_torch_is_read_without_importing_it() -> None:
    assert read_software().torch_cuda == torch.version.cuda


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'", "12.8"),
        ("cuda = '13.0'", "13.0"),
        ("cuda: Optional[str] = None", None),
        ("hip = '6'", None),
        ("cuda: str", None),
    ],
)
def test_a_constant_is_read_from_a_modules_text(text: str, cuda: str | None) -> None:
    assert constant(ast.parse(text).body, "cuda") == cuda
