"""Savers: who waits until what is on its way to the disk is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.scheduler.daemon.guard import Guard
from weft.scheduler.daemon.savers import Order, Savers, Writing
from weft.scheduler.runs.run_writer import RunWriter

RUN = Path("/runs/line-1")


async def start(job: str, config: Mapping[str, Any]) -> None:
    """Its process is written with, until the test answers for it."""


@pytest.fixture
async def writer() -> AsyncIterator[RunWriter]:
    writer = RunWriter()
    yield writer
    await writer.close()


def saving(writer: RunWriter, run_dir: Path = RUN) -> Savers:
    def spawn(work: Any, name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)

    savers = Savers(start, writer, spawn, Guard(), lambda run, answer: None, lambda command: None, Writing())
    run: Any = SimpleNamespace(job="line-1", files=SimpleNamespace(path=run_dir, closed=False))
    savers.save(Order(run, {}))
    return savers


@pytest.mark.parametrize("place", [RUN, RUN / "checkpoints" / "latest"])
async def test_who_goes_on_from_a_job_that_is_being_written_waits_for_it(writer: RunWriter, place: Path) -> None:
    """A job that was cancelled a moment ago had no checkpoint for the next one."""
    savers = saving(writer)
    waiting = asyncio.create_task(savers.wait_for(place))
    await asyncio.sleep(0)
    assert not waiting.done()
    savers.answered("line-1", {"path": "somewhere"})
    await waiting
    assert savers.num_active == 0


@pytest.mark.parametrize("place", [RUN.parent, RUN.with_name("line-11"), Path("/elsewhere")])
async def test_who_goes_on_from_another_does_not(writer: RunWriter, place: Path) -> None:
    savers = saving(writer)
    await savers.wait_for(place)
    assert savers.num_active == 1


async def test_what_a_killed_saver_has_left_is_gone_before_the_next_one_begins(
    writer: RunWriter, tmp_path: Path
) -> None:
    """The last one of a job left half a checkpoint for good: nobody wrote there any more, who would have removed it."""
    half, whole = tmp_path / "checkpoints" / ".step-00000080", tmp_path / "checkpoints" / "step-00000060"
    for each in (half, whole):
        each.mkdir(parents=True)
        (each / "model.safetensors").write_bytes(b"0" * 100)
    savers = saving(writer, tmp_path)
    waiting = asyncio.create_task(savers.wait_for(tmp_path))
    await asyncio.sleep(0)
    savers.answered("line-1", {"error": "the process that wrote it ended with exit code -9"})
    assert savers.num_active == 1, "the next one would have the same place"
    await waiting
    assert list((tmp_path / "checkpoints").iterdir()) == [whole]
    assert savers.num_active == 0


async def test_the_log_of_a_job_that_has_ended_is_closed_behind_its_last_checkpoint(writer: RunWriter) -> None:
    """Whoever waited for the job found no best checkpoint, or an older one; and that there is none was told nowhere."""
    savers, ended = saving(writer), list[str]()
    run: Any = SimpleNamespace(job="line-1", files=SimpleNamespace(close=lambda: ended.append("closed")))
    closing = asyncio.create_task(savers.close_files(run))
    await asyncio.sleep(0)
    assert ended == []
    savers.answered("line-1", {"path": "there"})
    await closing
    assert ended == ["closed"]


async def test_a_jobs_end_does_not_wait_for_ever_for_a_checkpoint(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.scheduler.daemon.savers.LAST_SECONDS", 0.0)
    savers, ended = saving(writer), list[str]()
    run: Any = SimpleNamespace(job="line-1", files=SimpleNamespace(close=lambda: ended.append("closed")))
    await savers.close_files(run)
    assert ended == ["closed"]
