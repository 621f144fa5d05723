"""Which workers a strategy needs, and which of them inspects."""

from __future__ import annotations

from typing import Any

import pytest

from weft.spec.strategy import Strategy
from weft.spec.workers_needed import inspecting_worker, worker_counts, workers_needed

CPU, GPU = {"device": "cpu"}, {"device": "gpu"}


@pytest.mark.parametrize(
    ("strategy", "counts"),
    [
        ({"stages": 4}, [4]),
        ({"stages": 4, "schedule": "interleaved"}, [2]),
        ({"stages": 6, "schedule": "interleaved", "stages_per_worker": 3, "replicas": 2}, [2, 2]),
        ({"replicas": [CPU | {"stages": 4}, GPU | {"stages": 4, "gpus": 1}], "schedule": "zero-bubble-v"}, [2, 1]),
        ({"stages": 3, "schedule": "# two lines\n\n0F0 2F0 2B0 0B0\n1F0 1B0 # the second\n"}, [2]),
    ],
)
def test_workers_follow_from_the_schedule(strategy: dict[str, Any], counts: list[int]) -> None:
    resolved = Strategy.model_validate(strategy)
    assert worker_counts(resolved) == counts
    needed = workers_needed(resolved)
    assert needed.get("cpu", 0) + needed.get("gpu", 0) == sum(counts)


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
