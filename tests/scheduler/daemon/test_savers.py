"""Savers: who waits until what is on its way to the disk is there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.scheduler.daemon.guard import Guard
from weft.scheduler.daemon.savers import Order, Savers, Writing

RUN = Path("/runs/line-1")


async def start(job: str, config: Mapping[str, Any]) -> None:
    """Its process is written with, until the test answers for it."""


def saving() -> Savers:
    def spawn(work: Any, name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)

    savers = Savers(start, spawn, Guard(), lambda run, answer: None, lambda command: None, Writing())
    run: Any = SimpleNamespace(job="line-1", files=SimpleNamespace(path=RUN))
    savers.save(Order(run, {}))
    return savers


@pytest.mark.parametrize("place", [RUN, RUN / "checkpoints" / "latest"])
async def test_who_goes_on_from_a_job_that_is_being_written_waits_for_it(place: Path) -> None:
    """A job that was cancelled a moment ago had no checkpoint for the next one."""
    savers = saving()
    waiting = asyncio.create_task(savers.wait_for(place))
    await asyncio.sleep(0)
    assert not waiting.done()
    savers.answered("line-1", {"path": "somewhere"})
    await waiting
    assert savers.num_active == 0


@pytest.mark.parametrize("place", [RUN.parent, RUN.with_name("line-11"), Path("/elsewhere")])
async def test_who_goes_on_from_another_does_not(place: Path) -> None:
    savers = saving()
    await savers.wait_for(place)
    assert savers.num_active == 1
