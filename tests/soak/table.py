"""The table of a soak: what was tried of each row, what held, and the cards that missed."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deck import Card, Row

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- written by tests/soak/soak.py -->", "<!-- end of what the run wrote -->"
HEADINGS = ("row", "what", "asked for", "done", "tries", "passed", "missed")
NUM_NAMING = 3  # headings that say which row it is
MAX_KINDS = 10  # of faults that are told apart in a row; more are a sum
AND = " + "  # between the runs of a row whose counts are of several
_KIND = re.compile(r"(.+?) ([\d,]*\d)(?:, |$)")  # a kind may have commas and numbers of its own


@dataclass(slots=True)
class Tally:
    """Of one row."""

    faults: Counter[str] = field(default_factory=Counter)  # that fired in tries that passed, by kind
    passed: int = 0
    idle: int = 0  # tries whose fault came too late: they count as none
    missed: list[str] = field(default_factory=list)  # the cards
    seconds: float = 0.0  # of all its tries


class Tallies:
    """num_stages: tries that are played beside each other."""

    def __init__(self, rows: Sequence[Row], num_stages: int = 1) -> None:
        self.rows = list(rows)
        self.num_stages = num_stages
        self.of = {id(row): Tally() for row in rows}

    def passed(self, card: Card, faults: Counter[str]) -> None:
        tally = self.of[id(card.row)]
        if not faults.total():
            tally.idle += 1
            return
        tally.faults += faults
        tally.passed += 1

    def missed(self, card: Card) -> None:
        self.of[id(card.row)].missed.append(str(card))

    def took(self, card: Card, seconds: float) -> None:
        self.of[id(card.row)].seconds += seconds

    @property
    def whole_hours(self) -> float:
        """That all which is asked for takes at the pace of what was done, of the rows that have any."""
        tallies = [(row, self.of[id(row)]) for row in self.rows]
        seconds = sum(
            tally.seconds * (row.asked if row.asked > 1 else tally.faults.total()) / tally.faults.total()
            for row, tally in tallies
            if tally.passed
        )
        return seconds / 3600 / self.num_stages

    @property
    def num_missed(self) -> int:
        return sum(len(tally.missed) for tally in self.of.values())

    def lines(self) -> list[tuple[str, ...]]:
        return [_line(row, self.of[id(row)]) for row in self.rows]


def _line(row: Row, tally: Tally) -> tuple[str, ...]:
    asked = f"{row.asked:,} {row.unit}".strip()
    tries = tally.passed + len(tally.missed)
    missed = f"{len(tally.missed)}" + (f" ({', '.join(tally.missed)})" if tally.missed else "")
    return row.id, row.what, asked, _done(tally.faults), str(tries), str(tally.passed), missed


def _done(faults: Counter[str]) -> str:
    total = f"{faults.total():,}"
    kinds = [f"{kind} {count:,}" for kind, count in sorted(faults.items()) if kind]
    return f"{total}: {', '.join(kinds)}" if 1 < len(kinds) <= MAX_KINDS else total


def as_text(tallies: Tallies) -> str:
    lines = [HEADINGS, *tallies.lines()]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


@dataclass(frozen=True, slots=True)
class Run:
    """name: what a page's rows call it. told: when, where, how long."""

    name: str
    told: str

    @classmethod
    def of(cls, tallies: Tallies, seed: int, seconds: float) -> Run:
        today = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y").lstrip("0")
        where = f"{os.cpu_count()} cores of {_processor()}, Linux {platform.release().partition('-')[0]}"
        took = f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"
        told = f"{today}, {where}, Python {platform.python_version()}, {took}. {pace(tallies)}"
        return cls(f"{_commit()}, seed {seed}", told)


def section(tallies: Tallies, run: Run, before: str = "", *, adds: bool = False) -> str:
    """What a page has of runs, and the table. before: what it had: a row that this run has not played stays as it was,
    with the run that it is from. adds: one that it has played is of both, and names both."""
    stood = {tuple(cells[:NUM_NAMING]): tuple(cells) for cells in map(_cells, before.splitlines())}
    lines = []
    for row, line in zip(tallies.rows, tallies.lines(), strict=True):
        tally = tallies.of[id(row)]
        there = stood.get(line[:NUM_NAMING], (*line, ""))
        if not (tally.passed or tally.missed):
            lines.append(there)
        elif adds and there[-1]:
            lines.append(_added(there, (*line, run.name)))
        else:
            lines.append((*line, run.name))
    runs = dict(line[2:].split(": ", 1) for line in before.splitlines() if line.startswith("- ")) | {run.name: run.told}
    named = {name for line in lines for name in line[-1].split(AND)}
    told = "\n".join(f"- {name}: {of}" for name, of in runs.items() if name in named)
    headings = (*HEADINGS, "run")
    table = "\n".join(f"| {' | '.join(line)} |" for line in [headings, ("---",) * len(headings), *lines])
    return f"{told}\n\n{table}"


def _added(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Two lines of one row. Errors: ValueError where they are of the same tries."""
    if other[-1] in one[-1].split(AND):
        raise ValueError(f"the tries of {other[-1]} are counted already; give another SEED, or leave out ADD")
    done = _done(_counted(one[3]) + _counted(other[3]))
    tries, passed = (f"{int(one[column]) + int(other[column])}" for column in (4, 5))
    missed = [each.partition(" ") for each in (one[6], other[6])]
    cards = ", ".join(cards[1:-1] for _, _, cards in missed if cards)
    count = sum(int(number) for number, _, _ in missed)
    return (
        *one[:NUM_NAMING],
        done,
        tries,
        passed,
        f"{count}" + (f" ({cards})" if cards else ""),
        one[-1] + AND + other[-1],
    )


def _counted(done: str) -> Counter[str]:
    """What `_done` has told."""
    total, _, kinds = done.partition(": ")
    told = {kind: int(count.replace(",", "")) for kind, count in _KIND.findall(kinds)}
    return Counter(told or {"": int(total.replace(",", ""))})


def _cells(line: str) -> list[str]:
    return line[2:-2].split(" | ") if line.startswith("| ") else []


def pace(tallies: Tallies) -> str:
    """In a sentence, how long a whole soak takes."""
    beside = f", {tallies.num_stages} tries beside each other" if tallies.num_stages > 1 else ""
    hours = f"{tallies.whole_hours:.1f} hours{beside}"
    return f"At its pace all that is asked for of the rows that it has played takes {hours}."


def write(page: Path, tallies: Tallies, run: Run, *, adds: bool = False) -> None:
    """Into what runs before it wrote there. Errors: ValueError where the page has no place for it, or has it."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for a table; write the lines {BEGIN} and {END} where it is to stand")
    page.write_text(f"{before}{BEGIN}\n\n{section(tallies, run, old, adds=adds)}\n\n{END}{after}", encoding="utf-8")


def _commit() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
