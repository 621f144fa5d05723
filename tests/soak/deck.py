"""The deck: a row of the promises is so many cards, and a card is one try, which follows from its number.

A whole deck is the second column of the promises. It is shuffled by the seed and dealt until the time is over; when it
is empty, there is another one.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

BITS = 32  # of a card's number


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A fault of the promises, and how it is tried."""

    id: str  # as the promises have it
    variant: str = ""  # one word, where there are several of the id
    what: str  # is done, in the table's words
    asked: int  # how many of `unit` the second column asks for
    unit: str = ""  # what is counted
    each: int = 1  # that a card has of them, about
    longest_seconds: float = 30.0  # where less time is left, a card waits for the next soak
    play: Callable[[Any, random.Random], Counter[str]]  # on a stage, by chance: the faults that fired, by kind

    @property
    def name(self) -> str:
        return f"{self.id}-{self.variant}" if self.variant else self.id

    @property
    def num_cards(self) -> int:
        return max(1, -(-self.asked // self.each))


@dataclass(frozen=True, slots=True)
class Card:
    row: Row
    number: int

    def __str__(self) -> str:
        return f"{self.row.name}:{self.number}"


def decks(rows: Sequence[Row], seed: int) -> Iterator[list[Card]]:
    """One after another, each shuffled. The same seed and rows: the same cards."""
    chance = random.Random(seed)
    for _ in itertools.count():
        deck = [Card(row, chance.getrandbits(BITS)) for row in rows for _ in range(row.num_cards)]
        chance.shuffle(deck)
        yield deck


def dealt(rows: Sequence[Row], seed: int, seconds_left: Callable[[], float]) -> Iterator[Card]:
    """Cards until no time is left; those that would take longer than that are passed over."""
    for deck in decks(rows, seed):
        fitting = False
        for card in deck:
            if seconds_left() <= 0:
                return
            if card.row.longest_seconds <= seconds_left():
                fitting = True
                yield card
        if not fitting:
            return


def chosen(rows: Sequence[Row], ids: Sequence[str]) -> list[Row]:
    """Those of these ids, such as F1, or names, such as F1-savers, in the table's order. Errors: ValueError."""
    known = list(dict.fromkeys(name for row in rows for name in (row.id, row.name)))
    for each in ids:
        if each not in known:
            raise ValueError(f"ONLY={each} is no row of the soak; known here: {', '.join(known)}")
    return [row for row in rows if not ids or {row.id, row.name} & set(ids)]
