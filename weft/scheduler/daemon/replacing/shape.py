"""The shape of what a daemon leaves: whether another Weft would understand it. Of the source, so nobody can forget it.

    classes that are pickled    the names and types of their fields
    what workers are told       the code that writes it down, and that reads it

Two of one shape take over from each other, whatever their methods do. Where shapes differ a restart is the way.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import weft

MEANING: Final = 1  # one more where a field comes to mean something else, and its name stays
CLASSES: Final = (
    *("machine", "metrics/accounts", "metrics/prometheus", "metrics/recording", "plan", "spec", "transport/wire"),
    *("scheduler/adapting", "scheduler/core", "scheduler/daemon", "scheduler/daemon/replacing", "scheduler/runs"),
    *(
        "scheduler/core/copying",
        "scheduler/core/replaying",
        "scheduler/core/replanning",
        "scheduler/planning/choosing",
        "workers/process",
    ),
)
MESSAGES: Final = ("plan/worker_view.py", "scheduler/daemon/orders.py", "transport/wire/worker_messages.py")


def stamp() -> str:
    """Of the files themselves: another one after every installation, and for every place."""
    files = [path for path in sorted(Path(weft.__file__).parent.rglob("*.py")) if path.is_file()]
    told = [(str(path), (about := path.stat()).st_size, about.st_mtime_ns) for path in files]
    return hashlib.sha256(repr((sys.executable, told)).encode()).hexdigest()[:16]


def shape(package: Path = Path(weft.__file__).parent) -> str:
    """Equal where one could take over from the other. Reads some hundred files: half a second."""
    told = hashlib.sha256(str(MEANING).encode())
    for line in lines(package):
        told.update(line.encode())
    return told.hexdigest()[:16]


def lines(package: Path) -> Iterator[str]:
    """What counts."""
    for folder in CLASSES:
        for module in sorted((package / folder).glob("*.py")):
            yield from _classes(f"{folder}/{module.name}", ast.parse(module.read_text(encoding="utf-8")))
    for name in MESSAGES:
        yield f"{name}: {ast.unparse(ast.parse((package / name).read_text(encoding='utf-8')))}"


def _classes(module: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield f"{module}: {node.name}({', '.join(map(ast.unparse, node.bases))}): {', '.join(_fields(node))}"


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """In the class, and those that its methods give it."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign):
            yield f"{ast.unparse(part.target)}: {ast.unparse(part.annotation)}"
        elif isinstance(part, ast.Assign):  # of an enum
            yield ast.unparse(part)
    given = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }
    yield from sorted(given)
