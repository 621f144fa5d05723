"""The shape: what changes it is what another Weft would not understand, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import weft
from weft.scheduler.daemon.replacing.shape import shape

pytestmark = pytest.mark.weighs(tests=20)

JOB, ORDERS = "scheduler/core/job.py", "scheduler/daemon/orders.py"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    copy = tmp_path / "weft"
    shutil.copytree(Path(weft.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "page"))
    return copy


def changed(package: Path, name: str, before: str, after: str) -> str:
    path = package / name
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    return shape(package)


def test_a_copy_has_the_same_and_so_has_one_with_other_comments_and_methods(package: Path) -> None:
    assert shape(package) == shape()
    assert changed(package, JOB, "No behaviour.", "None.") == shape()
    assert changed(package, ORDERS, "of a job whose spec does not say", "of others") == shape()
    assert changed(package, "scheduler/core/core.py", "return commands", "return list(commands)") == shape()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (JOB, "    gate: int | None = None", "    gate: float | None = None"),
        (JOB, "    replays: int = 0", "    again: int = 0"),
        ("scheduler/runs/books.py", "self.peak_bytes: dict[str, int] = {}", "self.peaks: dict[str, int] = {}"),
        (ORDERS, '"type": "release"', '"type": "let-go"'),
        ("workers/process/worker_config.py", "    threads: int\n", ""),
    ],
)
def test_another_field_or_message_is_another_shape(package: Path, name: str, before: str, after: str) -> None:
    assert changed(package, name, before, after) != shape()
