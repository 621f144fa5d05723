"""Changes: parameters that the user's own step changes, which a job can keep only where it knows of them.

A teacher's mean, a statistic kept as a frozen parameter, rows that are normalised before each forward: the plain loop
has one tensor, and whatever is written there stays. A job keeps copies (of a replica, of a device, of a snapshot) and
brings up to date what updates change.
"""

from __future__ import annotations

from torch import nn

from weft.workload.building import digest_of


class ParameterChanges:
    """Which of a model's parameters a run changes, from here on."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {name: (each, each._version, digest_of(each)) for name, each in model.named_parameters()}

    def names(self) -> list[str]:
        """By autograd's count of changes, which a step towards the same value moves, too; or, where that was gone past
        (`.data`), by their values."""
        return [
            name
            for name, (each, version, digest) in self._before.items()
            if each._version != version or digest_of(each) != digest
        ]
