"""Which strategy a job goes on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weft.scheduler.daemon.plans import with_chosen
from weft.scheduler.runs.run import CHOSEN
from weft.spec.job_spec import JobSpec

SpecOf = Callable[..., JobSpec]


def test_another_daemon_goes_on_with_what_was_chosen(spec_of: SpecOf, tmp_path: Path) -> None:
    auto = spec_of(preset="auto", clip_norm=1.0)
    assert with_chosen(auto, tmp_path) == auto, "nothing was"
    (tmp_path / CHOSEN).write_text('{"stages": 2, "microbatches": 4, "clip_norm": 1.0}')
    assert with_chosen(auto, tmp_path) == spec_of(stages=2, microbatches=4, clip_norm=1.0)
    assert with_chosen(spec_of(replicas=2), tmp_path) == spec_of(replicas=2), "a user's own strategy stays"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"stages": "two"}', '{"no": 1}'])
def test_what_is_no_strategy_is_chosen_anew(spec_of: SpecOf, tmp_path: Path, text: str) -> None:
    (tmp_path / CHOSEN).write_text(text)
    assert with_chosen(spec_of(preset="auto"), tmp_path).strategy.is_auto
