from __future__ import annotations

import math

import pytest
from gpu_contenders import Run
from gpu_offload import GOALS, VS_FSDP2, case_results, cases, check_same
from gpu_session import Session


def session() -> Session:
    return Session(quick=True, stand_in=True, only=("1b",), threads=1, gpu_bytes=1, host_bytes=1, ends=math.inf)


def runs(**seconds: float) -> dict[str, list[Run]]:
    return {name.replace("_", "-"): [Run(seconds=each, losses=(1.0,))] for name, each in seconds.items()}


def test_the_figure_is_the_best_of_ours_and_says_which() -> None:
    case = cases(session())[1]
    rows = {row.name: row for row in case_results(session(), case, runs(zero_offload=2.0, cotrain=1.6, plain=1.2))}
    assert rows["practicality_16k_1b"].value == pytest.approx(0.75)
    assert rows["practicality_16k_1b"].goal == GOALS["16k"]
    assert "cotrain" in rows["practicality_16k_1b"].how
    assert rows["practicality_16k_1b_zero_offload"].value == pytest.approx(0.6)


def test_a_peer_that_did_not_run_has_no_row() -> None:
    case = cases(session())[0]
    rows = {row.name: row for row in case_results(session(), case, runs(zero_offload=2.0, fsdp2=5.0))}
    assert (rows["vs_fsdp2_offload_2k_1b"].value, rows["vs_fsdp2_offload_2k_1b"].goal) == (2.5, VS_FSDP2)
    assert not any("practicality" in name or "deepspeed" in name for name in rows)


@pytest.mark.parametrize("loss", [2.0, math.nan])
def test_contenders_that_do_not_train_the_same_are_a_failure(loss: float) -> None:
    given = session()
    check_same(given, "case", {"a": [Run(seconds=1.0, losses=(1.0,))], "b": [Run(seconds=1.0, losses=(1.001,))]})
    assert not given.has_failed
    check_same(given, "case", {"a": [Run(seconds=1.0, losses=(1.0,))], "b": [Run(seconds=1.0, losses=(loss,))]})
    assert given.has_failed
