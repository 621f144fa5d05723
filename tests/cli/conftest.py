"""What tests of the command need a job file for."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "digits.py").write_text("def workload(): ...\n")
    path = tmp_path / "digits.toml"
    path.write_text('[job]\nentry = "digits.py:workload"\nsteps = 3\nbatch_size = 4\n')
    return path
