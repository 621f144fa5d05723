"""Draws: of a step that leaves out blocks at random, the runs with which its cuts are proven. Pure."""

from __future__ import annotations

from collections.abc import Mapping

MAX_TRIES = 12  # arbitrary: to find a run that calls all, and others that together leave out each
MAX_PROVEN = 4  # of them, behind the first: each takes as long as the proof of a step that draws nothing


def telling(called: Mapping[int, frozenset[int]]) -> list[int]:
    """Of runs, by what each has called, the one that calls most, then few others which leave out what can be."""
    fullest = max(called, key=lambda run: len(called[run]))
    found, everything = [fullest], frozenset[int]().union(*called.values())
    unseen = everything - frozenset.intersection(*called.values())  # left out by some run, and by none that was taken
    unseen -= everything - called[fullest]
    while unseen and len(found) <= MAX_PROVEN:
        run = max(called, key=lambda run: len(unseen - called[run]))
        found.append(run)
        unseen &= called[run]
    return found
