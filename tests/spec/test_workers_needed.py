"""Which workers a strategy needs, and which of them inspects."""

from __future__ import annotations

from typing import Any

import pytest

from weft.spec.strategy import Strategy
from weft.spec.workers_needed import inspecting_worker, workers_needed

CPU, GPU = {"device": "cpu"}, {"device": "gpu"}


@pytest.mark.parametrize(
    ("strategy", "inspects"),
    [
        ({"replicas": 2, "stages": 2}, "cpu"),
        ({"replicas": [GPU], "update": "local"}, "gpu"),
        ({"replicas": [GPU], "update": "cpu"}, "gpu"),
        ({"replicas": [CPU, GPU | {"stages": 2}]}, "gpu"),
    ],
)
def test_a_worker_with_a_device_inspects_where_there_is_one(strategy: dict[str, Any], inspects: str) -> None:
    resolved = Strategy.model_validate(strategy)
    kinds = [kind for kind, count in workers_needed(resolved).items() for _ in range(count)]
    position = inspecting_worker(resolved)
    assert kinds[position] == inspects
    assert inspects not in kinds[:position]
