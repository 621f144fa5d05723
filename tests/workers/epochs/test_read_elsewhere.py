"""What a function that is asked after each epoch changes, and other processes read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from weft.workers.epochs.read_elsewhere import ReadElsewhere
from weft.workload.workload import Workload

BESIDE = {"weight": 1.0, "least": math.nan}
UNREAD = {"best": 0.0}


class Levels(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.level, self.read = 0, 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        self.read += 1
        return torch.full((2,), float(self.level))

    def harder(self) -> None:
        self.level += 1


def collate(items: list[torch.Tensor]) -> torch.Tensor:
    return BESIDE["weight"] * torch.stack(items)


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: DataLoader(Subset(data, [0, 1]))])
@pytest.mark.parametrize("act", ["weight", "level", "method", "best", "reads"])
def test_what_other_processes_read_is_told_and_nothing_else(act: str, wrap: Any) -> None:
    data = Levels()

    def on_epoch(values: Any) -> None:
        match act:
            case "weight":
                BESIDE["weight"] *= 0.5
            case "level":
                data.level = 7
            case "method":
                data.harder()
            case "best":
                UNREAD["best"] += 1.0
            case "reads":
                assert len(list(DataLoader(data))) == 4

    given = {"step": lambda model, batch: model(batch).sum(), "collate": collate, "on_epoch": on_epoch}
    watched = ReadElsewhere(Workload(nn.Linear(2, 2), wrap(data), optimizer=torch.optim.SGD, **given))
    before = watched.values()
    on_epoch({})
    changed = watched.changed(before)
    told = {
        "level": ["Workload.train.level"],
        "method": ["Workload.train.level"],
        "weight": ["Workload.collate.BESIDE"],
    }
    assert changed == told.get(act, [])
