"""Options: what a function of the user's that is asked after an epoch has changed in the optimizer's groups.

    for group in optimizer.param_groups: group["lr"] *= 0.1

Each process that updates has an optimizer from the user's function, with all groups, of which it steps its own part:
what was changed in one they are all told, by the group's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.workers.epochs.changes import ToldChanges
from weft.workers.snapshots.remembered import BuiltObjects, RestoredValues, are_equal, written_alone
from weft.workload.optimizer import made_optimizers


class OptionChanges:
    """From where it was made."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._before = {id(each): (each, _written(each)) for each in optimizers}

    def find(self, found: ToldChanges) -> None:
        """Refused is what was changed in one that this process does not step: it does not know what others have come
        to."""
        made = set(map(id, made_optimizers()))
        for optimizer, before in self._before.values():
            now = _written(optimizer)
            if len(now) != len(before):
                found.refused.append("the number of the optimizer's param_groups")
            for number, (old, new) in enumerate(zip(before, now, strict=False)):
                for key in [key for key in new if key not in old or not are_equal(old[key], new[key])]:
                    if id(optimizer) in made and new[key] is not None:
                        found.options.append((number, key, new[key]))
                    else:
                        found.refused.append(f"param_groups[{number}][{key!r}] of the optimizer")


def take_options(told: Sequence[tuple[int, str, Any]]) -> None:
    """In every optimizer of this process; what an inspection has made there may be some, too."""
    for optimizer in made_optimizers() if told else ():
        for number, key, written in told:
            if number >= len(optimizer.param_groups):
                continue
            group = optimizer.param_groups[number]
            value = RestoredValues(BuiltObjects()).restored(written, None, ("", ""))
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)  # who has made a graph of a step has hold of it
            else:
                group[key] = value


def _written(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """By group."""
    return [
        {key: written_alone(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
