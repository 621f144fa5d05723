"""What only a GPU can show. Every test here has the mark `gpu`, and is skipped where there is none."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_REAL = runpy.run_path(str(Path(__file__).parents[1] / "integration" / "real_daemon.py"))
SKIPPED = pytest.mark.skip(reason="there is no GPU here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # where a thread's first CUDA operator is a product; it goes on with the device's context
            item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"))
            if not torch.cuda.is_available():
                item.add_marker(SKIPPED)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Any]:
    """With one GPU and two CPU workers."""
    daemon = _REAL["RealDaemon"](workers=2, gpus=1)
    try:
        yield daemon.start(seconds=120.0)
    finally:
        daemon.close()
