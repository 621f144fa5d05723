"""`weft whatif`: the doubt stands in the headline, and where there is no prediction no number looks like one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.cli.verbs.whatif import _print, headline
from weft.scheduler.planning.outlook import Outlook
from weft.scheduler.whatif.answer import Answer

BEFORE = Outlook(
    iteration_seconds=0.05,
    limit_seconds=0.04,
    critical_cycle="F → B",
    critical_lanes=("cpu-0/compute",),
    bubble_ratio=0.1,
    bottleneck="cpu-0/compute",
    bottleneck_busy=0.9,
    workers=("cpu-0",),
)
AFTER = replace(BEFORE, iteration_seconds=0.025)
SURE = Answer(
    job="digits-1",
    settings=("workers.cpu-0.speed=2",),
    iterations=9,
    measured_seconds=0.05,
    predicted_seconds=0.025,
    predicted_low_seconds=0.025,
    predicted_high_seconds=0.025,
    ratio=0.5,
    doubt=None,
    baseline_error=0.0,
    wake_seconds=0.0,
    dispatch_seconds=0.0,
    before=BEFORE,
    after=AFTER,
    notes=(),
)
DOUBTFUL = replace(SURE, predicted_low_seconds=0.02, doubt="simulated, it takes 0.8 times", baseline_error=-0.2)
NONE: dict[str, Any] = dict.fromkeys(("predicted_seconds", "predicted_low_seconds", "predicted_high_seconds", "ratio"))
REFUSED = replace(SURE, **NONE, after=None, doubt="it takes 0.35 times: it cannot be told", baseline_error=-0.65)


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (SURE, "predicted: 25 ms an iteration, 50 ms as it ran"),
        (DOUBTFUL, "predicted: 20 ms to 25 ms an iteration, 50 ms as it ran: simulated, it takes 0.8 times"),
        (REFUSED, "no prediction: it takes 0.35 times: it cannot be told"),
        (replace(SURE, settings=()), "the simulation is off by +0.0 %, and so explains the job"),
    ],
)
def test_the_headline_is_as_sure_as_the_simulation(
    answer: Answer, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headline(answer) == line
    _print(answer)
    assert capsys.readouterr().out.splitlines()[1] == line


def test_nothing_of_the_changed_job_is_printed_where_there_is_no_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    _print(REFUSED)
    page = capsys.readouterr().out
    assert "what if" not in page
    assert "predicted" not in page.replace("no prediction", "")
    assert not any(line.startswith("ratio") for line in page.splitlines())
