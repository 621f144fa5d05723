"""Device facts: what workers have told of their devices, and what of it a job on several of them is planned with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_FACTS = ("link_bytes_per_second", "device_bytes")  # of several devices the least counts


class DeviceFacts:
    def __init__(self) -> None:
        self._told: dict[str, Mapping[str, float | None]] = {}

    def add(self, worker: str, message: Mapping[str, Any]) -> None:
        """message: by which it has joined."""
        self._told[worker] = {fact: message[fact] for fact in _FACTS}

    def of(self, workers: Sequence[str]) -> dict[str, float | None]:
        """None for what none of these has told."""
        return {fact: self._least(fact, workers) for fact in _FACTS}

    def _least(self, fact: str, workers: Sequence[str]) -> float | None:
        told = [self._told[worker][fact] for worker in workers if worker in self._told]
        return min((each for each in told if each is not None), default=None)
