"""Course: what each iteration of an attempt is, and who has which part of its batch; from numbers alone.

Also which version of the parameters a stale replica computes with: version v is after v updates. With staleness k,
step i runs on version i - k; during warm-up (and right after, until it has fallen behind) on the newest it may have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.division import Part, divide
from weft.itinerary import Iteration, Itinerary

_KEPT = 64  # answers of each kind; a lane asks for few different ones in a row


class Course:
    """replicas: as in the plan's worker view. shares: of a batch, by replica."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.itinerary = Itinerary(**plan["itinerary"])
        self.microbatches: list[int] = [replica["microbatches"] for replica in plan["replicas"]]
        self._staleness: list[int] = [replica["staleness"] for replica in plan["replicas"]]
        self._warmup: int = (plan["synchronisation"] or {}).get("warmup", 0)
        self._shares: Sequence[float] = plan["shares"]
        self._iterations: dict[int, Iteration] = {}
        self._parts: dict[int, list[list[Part]]] = {}

    def iteration(self, index: int) -> Iteration:
        if index not in self._iterations:
            if len(self._iterations) >= _KEPT:
                self._iterations.clear()
            self._iterations[index] = self.itinerary.at(index)
        return self._iterations[index]

    def parts(self, iteration: Iteration) -> list[list[Part]]:
        """The microbatches of each replica."""
        if iteration.size not in self._parts:
            if len(self._parts) >= _KEPT:
                self._parts.clear()
            self._parts[iteration.size] = divide(iteration.size, self._shares, self.microbatches)
        return self._parts[iteration.size]

    def part(self, iteration: Iteration, replica: int, microbatch: int) -> Part:
        return self.parts(iteration)[replica][microbatch]

    def contributes(self, iteration: Iteration, replica: int) -> bool:
        """Whether the replica has any samples of the batch."""
        return any(part.size for part in self.parts(iteration)[replica])

    def version(self, index: int, replica: int) -> int:
        """Updates that the replica's parameters have at iteration `index`; validation has them all."""
        iteration = self.iteration(index)
        step = iteration.step
        if not iteration.learns or step < self._warmup:
            return step
        return max(min(step, self._warmup), step - self._staleness[replica])

    def update_of(self, version: int) -> int:
        """The iteration whose update makes the version; -1 for the first one."""
        if version == 0:
            return -1
        epoch, within = divmod(version - 1, self.itinerary.steps_per_epoch)
        return epoch * (self.itinerary.steps_per_epoch + self.itinerary.validations_per_epoch) + within
