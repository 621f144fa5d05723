"""Whether a run has drawn from torch's generator."""

from __future__ import annotations

import torch

from weft.workers.devices.host import HostDevice
from weft.workload.randomness import Movements, seed_all, seed_unit


def test_a_run_that_draws_is_seen_and_one_behind_a_seed_is_none() -> None:
    device = HostDevice()
    device.seed(1)
    seen = []
    for draws, seeds in ((False, True), (False, False), (True, False), (False, False), (False, True), (True, True)):
        movements = Movements()
        if draws:
            torch.rand(1)
        seen.append(movements.are_there())
        if seeds:
            device.seed(2)
    assert seen == [False, False, True, False, False, True]


def test_what_was_drawn_between_two_runs_is_the_second_ones_no_more_than_a_seed_is() -> None:
    device, seen = HostDevice(), []
    for between in (
        lambda: None,
        lambda: torch.rand(1),
        lambda: device.seed(2),
        lambda: seed_all(3),
        lambda: seed_unit(1, 2, 3, 4),
        lambda: None,
    ):
        Movements().are_there()
        between()
        movements = Movements()
        seen.append((movements.were_before, movements.are_there()))
    assert seen == [(False, False), (True, False), *[(False, False)] * 4]
