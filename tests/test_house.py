"""The house: what the import contracts cannot say of its folders, files and names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

import weft

PACKAGE = Path(weft.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({module.parent for module in MODULES})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_a_folder_has_at_most_15_files_and_stands_on_the_page(folder: Path) -> None:
    assert len([module for module in folder.glob("*.py") if module.name != "__init__.py"]) <= 15
    assert f"{folder.name}/" in PAGE


def test_no_file_has_more_than_400_lines() -> None:
    long = {module.name for module in MODULES if len(module.read_text(encoding="utf-8").splitlines()) > 400}
    assert long == set()


def test_no_two_public_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for module in MODULES:
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(module.relative_to(PACKAGE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


USERS_PAGES = {"Workload"}  # help(Workload) is what its users read: there the fields are arguments


def test_a_field_is_explained_at_the_field() -> None:
    over_the_class = []
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name not in USERS_PAGES:
                fields = {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
                named = re.findall(r"(?:^|\.\s+)(\w+)(?:, \w+)*: ", ast.get_docstring(node) or "", re.MULTILINE)
                over_the_class += [f"{node.name}.{field}" for field in named if field in fields]
    assert over_the_class == []
