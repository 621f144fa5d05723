"""Which workers a strategy needs, and which of them inspects."""

from __future__ import annotations

from typing import Any

import pytest

from weft.spec.strategy import Strategy
from weft.spec.workers_needed import Host, cores_lent, inspecting_worker, threads_of, worker_counts, workers_needed

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
    position = inspecting_worker(workers_needed(resolved))
    assert kinds[position] == inspects
    assert inspects not in kinds[:position]


@pytest.mark.parametrize(
    ("strategy", "host", "threads", "lent"),
    [
        ({}, Host(workers=4), 1, [[]]),
        ({"threads": "all"}, Host(workers=4), 4, [[0, 1, 2, 3]]),
        ({"threads": "all", "stages": 2}, Host(workers=5, threads=2), 4, [[0, 2], [1, 3]]),
        ({"threads": 3, "replicas": 2}, Host(workers=6), 3, [[0, 2, 3], [1, 4, 5]]),
        ({"threads": 2}, Host(workers=4, threads=4), 2, [[0]]),
        ({"threads": "all", "replicas": [GPU], "update": "cpu"}, Host(workers=2, gpus=1), 2, [[0, 1]]),
    ],
)
def test_a_worker_with_more_threads_takes_the_cores_of_others(
    strategy: dict[str, Any], host: Host, threads: int, lent: list[list[int]]
) -> None:
    resolved = Strategy.model_validate(strategy)
    assert threads_of(resolved, host) == threads
    assert [cores_lent(resolved, host, position) for position in range(len(lent))] == lent
    assert workers_needed(resolved, host)["cpu"] == max(1, sum(map(len, lent)))
    assert not cores_lent(resolved, host, len(lent)), "a lender computes nothing"
