"""A finding of `weft doctor`: one check, how it went, what it costs and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    level: Level  # note: works, for a price or with a surprise; problem: something will not work
    sentence: str
    remedy: str = ""  # empty where all is ok


def ok(check: str, sentence: str) -> Finding:
    return Finding(check=check, level="ok", sentence=sentence)


def note(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(check=check, level="note", sentence=sentence, remedy=remedy)


def problem(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(check=check, level="problem", sentence=sentence, remedy=remedy)


def counted(number: int, noun: str) -> str:
    """1 socket, 2 sockets, 3 processes."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def mebibytes(num_bytes: int) -> str:
    """For sentences: 512 MiB, 23.5 GiB. `weft.cli.screens.display.size` would bring rich along."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
