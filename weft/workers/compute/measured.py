"""What a lane's tasks measure beside time: the loss, metrics, the gradient's norm; sent with the lane's next report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(slots=True)
class Fragment:
    """One lane's part of an iteration's numbers."""

    iteration: int
    means: dict[str, float] = field(default_factory=dict)  # to be summed over fragments
    facts: dict[str, float] = field(default_factory=dict)  # the same wherever known
    complete: bool = False


class Measured:
    """The fragments of one lane; used by the lane's thread alone."""

    def __init__(self) -> None:
        self._fragments: list[Fragment] = []

    def of(self, iteration: int) -> Fragment:
        if not self._fragments or self._fragments[-1].iteration != iteration:
            self._fragments.append(Fragment(iteration))
        return self._fragments[-1]

    def add(self, iteration: int, name: str, value: float, weight: float) -> None:
        means = self.of(iteration).means
        means[name] = means.get(name, 0.0) + value * weight

    def complete(self, iteration: int, facts: Mapping[str, float] = MappingProxyType({})) -> None:
        """Nothing more comes of the lane's part of the iteration; facts: what comes last."""
        fragment = self.of(iteration)
        fragment.facts.update(facts)
        fragment.complete = True

    def take(self) -> list[dict[str, object]]:
        """Those that are complete, as plain data; each once."""
        done = [fragment for fragment in self._fragments if fragment.complete]
        self._fragments = [fragment for fragment in self._fragments if not fragment.complete]
        return [{"iteration": part.iteration, "means": part.means, "facts": part.facts} for part in done]
