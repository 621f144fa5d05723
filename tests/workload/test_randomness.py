"""Whether a run has drawn from torch's generator."""

from __future__ import annotations

import torch

from weft.workers.devices.host import HostDevice
from weft.workload.randomness import Movements


def test_a_run_that_draws_is_seen_and_one_behind_a_seed_is_none() -> None:
    """What was seen at the last look serves the next one, unless the generator was seeded in between."""
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
