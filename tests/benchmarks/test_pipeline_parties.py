from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pipeline
import pytest
from party import ask
from pipeline import TORCH_SCHEDULES, Case

SMALL = Case(
    prefix="small_",
    args={"layers": 4, "dim": 16, "heads": 1, "context": 8, "vocabulary": 256, "samples": 64},
    seconds=0.1,
)
ALONE = "each stage alone"


@contextmanager
def party_of(name: str) -> Iterator[Any]:
    stages = pipeline.stages_of(SMALL, "zero-bubble")
    if name == ALONE:
        form = pipeline._form(SMALL, "measured", stages)
        with pipeline._stage_peers(SMALL, form, pipeline._split(stages)) as peers:
            yield peers
    else:
        with pipeline.torch_peers(SMALL, name, pipeline._chunks(stages, TORCH_SCHEDULES[name])) as peers:
            yield peers


@pytest.mark.days(3)
@pytest.mark.slow(seconds=6)
@pytest.mark.pairs(name=(ALONE, *TORCH_SCHEDULES))  # one a day
def test_a_party_of_the_pipelines_makes_iterations_and_tells_what_they_took(name: str) -> None:
    """Two of them were broken by changes elsewhere, which nobody saw until the next full run."""
    with party_of(name) as peers:
        answers = ask(peers, 3)
    assert len(answers) == 2
    for answer in answers:
        times = list(answer.values()) if name == ALONE else [answer]
        assert all(len(each) == 3 and min(each) > 0 for each in times)
        assert times


def test_the_limit_is_of_whole_iterations_of_both_stages_without_a_slice_s_first_ones() -> None:
    plan: Any = SimpleNamespace(graph=SimpleNamespace(tasks=[SimpleNamespace(id=number) for number in range(3)]))
    answers = [{"0": [9.0, 1.0, 2.0], "2": [9.0, 5.0, 6.0]}, {"1": [9.0, 3.0, 4.0]}]  # as two processes tell
    assert pipeline._iterations(plan, answers, uncounted=1) == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
