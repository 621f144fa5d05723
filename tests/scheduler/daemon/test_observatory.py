"""What the page is told of a job that is just ending."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.metrics.recording.recording import FILE
from weft.scheduler.daemon import observatory
from weft.scheduler.daemon.observatory import Observatory
from weft.spec.job_state import JobState


class Ledger:
    def __init__(self, row: Any) -> None:
        self._row = row

    async def run(self, *_: Any) -> Any:
        return self._row


async def test_an_answer_stands_for_good_only_once_the_recording_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ledger has the job's end a moment before its run is gone: an answer from between stayed for ever."""
    monkeypatch.setattr(observatory, "FRESH_SECONDS", 0.0)
    row = SimpleNamespace(seq=1, job="line-1", state=JobState.COMPLETED, run_dir=str(tmp_path))
    driver: Any = SimpleNamespace(runs={"line-1": SimpleNamespace(attempt=None)})
    source = Observatory(driver, Ledger(row))  # type: ignore[arg-type]
    (tmp_path / FILE).write_bytes(b"no recording, which is told")
    between = await source.timeline("line-1", 4)
    assert between is not None
    assert b'"error"' not in between
    driver.runs.clear()
    after = await source.timeline("line-1", 4)
    assert after is not None
    assert b'"error"' in after
    (tmp_path / FILE).unlink()
    assert await source.timeline("line-1", 4) == after
