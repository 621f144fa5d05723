"""How many series there are at the size that is promised; benchmarks/scrape.py measures how long they take."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from weft.metrics.prometheus.declared import MAX_SERIES

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["without buckets", "with a sync lane in each worker"])
def test_32_jobs_of_16_stages_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch, clip_norm: float | None) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    scrape = runpy.run_path(str(BENCHMARKS / "scrape.py"))
    exporter = scrape["exporting"](scrape["job_plan"](clip_norm))
    assert scrape["num_series"](exporter) == exporter.num_series
    assert 5_000 < exporter.num_series <= MAX_SERIES
