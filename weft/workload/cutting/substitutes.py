"""Substitutes: what stands for a value that a run has not made, since it has left out the call that makes it.

    recorded    a ──▶ b ──▶ c ──▶ d         d reads c:0
    a run       a ──▶ b ─────────▶ d        what c would have got stands for c:0: it crosses under that name as b:0

The chain of a value names what stands for it: what its call was given when it was recorded, then what stands for that.
Sender and reader see the same calls in a run, so they find the same one, and nothing has to be said of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch


class Substitutes:
    def __init__(self, instead: Iterable[tuple[str, str]], values: Collection[str]) -> None:
        """instead: as in Border. values: names of those that may need one."""
        links = dict(instead)
        self.are_known = bool(links)
        self._chains = {name: _chain(links, name) for name in values if name in links}
        self.names = frozenset(name for chain in self._chains.values() for name in chain)
        self._seen: dict[str, torch.Tensor] = {}  # in this run, of these

    def begin(self) -> None:
        self._seen.clear()

    def see(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.names:
            self._seen[name] = tensor

    def of(self, name: str) -> torch.Tensor | None:
        """What stands for the value, which this run has not made."""
        return next((self._seen[each] for each in self._chains.get(name, ()) if each in self._seen), None)


def _chain(links: dict[str, str], name: str) -> tuple[str, ...]:
    found: list[str] = []
    while (other := links.get(name)) is not None and other not in found:
        found.append(other)
        name = other
    return tuple(found)
