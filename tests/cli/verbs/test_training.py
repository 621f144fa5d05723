"""With how many workers `weft run` and `weft.run` start a daemon of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from weft.cli.verbs.training import _enough
from weft.client.embedded import workers_for
from weft.spec.strategy import Strategy


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no settings of anybody's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("WEFT_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("how", "workers"),
    [
        ({}, 1),
        ({"stages": 3}, 3),
        ({"stages": 2, "replicas": 2}, 4),
        ({"threads": 2}, 2),
        ({"threads": "all"}, None),
        ({"preset": "auto"}, None),
        ({"preset": "zero-offload"}, 1),
    ],
    ids=str,
)
def test_a_daemon_for_one_job_has_what_its_strategy_needs(how: dict[str, Any], workers: int | None) -> None:
    strategy = Strategy(**how)
    assert workers_for(strategy) == workers
    assert _enough(strategy, None, None) == (workers if workers is not None and workers > 2 else None)


def test_threads_and_stand_ins_take_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Strategy(stages=2)
    assert (_enough(two, None, None), _enough(two, 2, None), _enough(two, None, 1)) == (None, 2, 2)
    monkeypatch.setenv("WEFT_WORKERS", "1")
    assert (workers_for(two), _enough(two, 2, None)) == (None, None), "somebody has said how many"
