"""What is told while a job runs: durations, sizes, lines of progress, how it ended."""

from __future__ import annotations

from typing import Any

import pytest

from weft.client.console import ended_sentence, metrics, progress_line
from weft.quantities import duration, number, percent, size

PROGRESS = {
    "step": 120,
    "steps": 480,
    "epoch": 2,
    "loss": 0.4312,
    "lr": 0.001,
    "grad_norm": 1.5,
    "samples_per_second": 8123.0,
    "data_percent": 0.3,
    "stall_percent": 4.1,
    "overlap_percent": 87.0,
    "eta_seconds": 75.0,
    "validation": None,
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0.0, "0 µs"),
        (12e-6, "12 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1 ms"),
        (0.0045, "4.5 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (245.0, "4 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7380.0, "2 h 03 min"),
        (86400.0 * 3 + 3600.0 * 4, "3 d 04 h"),
    ],
)
def test_a_duration_is_told_in_the_unit_that_people_would_use(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "-"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (24 << 20, "24.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (2 << 40, "2.0 TiB"),
    ],
)
def test_a_size_is_told_in_binary_units(num_bytes: int | None, text: str) -> None:
    assert size(num_bytes) == text


def test_what_is_not_known_is_a_dash() -> None:
    assert (number(None), percent(None), metrics(None)) == ("-", "-", "")
    numbers = 0.00012345, -3.14159, 9999.4, 56560.0, -123456.7, 2e12, float("inf")
    assert [number(each) for each in numbers] == ["0.0001234", "-3.142", "9999", "56560", "-123457", "2e+12", "inf"]


def test_a_line_of_progress_tells_all_of_an_interval() -> None:
    assert progress_line(PROGRESS) == (
        "step 120/480  epoch 3  loss 0.4312  lr 0.001  grad norm 1.5  8123 samples/s  data 0.3 %  stall 4.1 %  "
        "overlap 87.0 %  ETA 1 min 15 s"
    )
    assert progress_line(PROGRESS | {"validation": {"accuracy": 0.9}}).endswith("  validation accuracy 0.9")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"state": "completed", "reason": None}, "digits-1 completed after 12.0 s"),
        ({"state": "cancelled", "reason": "cancelled"}, "digits-1 cancelled after 12.0 s"),
        ({"exception": "ValueError"}, "digits-1 failed (user-error ValueError) after 12.0 s"),
    ],
)
def test_how_a_job_ended_is_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    failed = {"job": "digits-1", "state": "failed", "reason": "user-error", "seconds": 12.0}
    assert ended_sentence(failed | changes) == sentence


def test_what_a_step_tells_beside_the_loss_stands_behind_it() -> None:
    line = progress_line(PROGRESS | {"measured": {"right": 0.75, "recall": float("nan")}})
    assert "loss 0.4312  right 0.75  recall nan  lr 0.001" in line
