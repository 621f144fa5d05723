"""Lines of metrics.jsonl, as a job writes them, of the plain loop: so the two files are compared as they are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from weft.reference.update import UpdateRecord

LineFunction = Callable[[dict[str, Any]], object]


class ReferenceLines:
    """Hands each line on. A number that is not finite is None there, since JSON has no word for it."""

    def __init__(self, take: LineFunction | None) -> None:
        self._take = take
        self._ended: float | None = None  # what was before: a step, or a validation

    def step(
        self, step: int, epoch: int, samples: int, means: Mapping[str, float], record: UpdateRecord | None
    ) -> None:
        """means: the loss, and what else the step tells. record: of the updates, where there are any."""
        before, self._ended = self._ended, time.monotonic()
        measured = dict(means) if record is None else {name: means[name] for name in means if name != "loss"}
        norm = record.grad_norms[-1] if record is not None and record.grad_norms else None
        line = {
            "step": step,
            "epoch": epoch,
            "loss": means["loss"],
            "lr": None if record is None else record.learning_rates[-1],
            "grad_norm": norm,
            "skipped": record is not None and step - 1 in record.skipped[-1:],
            "samples": samples,
            "seconds": None if before is None else self._ended - before,
        }
        self._hand_on(line | ({"measured": measured} if measured else {}))

    def epoch(self, step: int, epoch: int, validation: Mapping[str, float], own: Mapping[str, float]) -> None:
        """own: what the user's own function says of it."""
        for name, values in (("validation", validation), ("on_epoch", own)):
            if values:
                self._hand_on({"step": step, "epoch": epoch, name: dict(values)})
        self._ended = time.monotonic()

    def _hand_on(self, line: dict[str, Any]) -> None:
        if self._take is not None:
            self._take(_finite(line))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
