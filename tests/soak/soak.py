"""The soak: the rows of what Weft promises, tried in a random order for as long as it is given.

make soak SECONDS=600                       with a seed of its own, which it prints
make soak HOURS=8 SEED=7 ONLY=F1,F4         the same tries in the same order, of these rows
make soak HOURS=8 WRITE=1                   its table goes into docs/reliability.md
python tests/soak/soak.py --card F1:123     one try once more

It ends with a table, and with exit code 1 where anything missed. Ctrl-C ends it earlier, with the table. Of a try that
missed, all that tells of it stays in a folder that is printed; nothing else does.
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import checkpoint_faults
import client_faults
import daemon_faults
import suite_rows
import table
import worker_faults
from deck import BITS, Card, Row, chosen, dealt
from stage import Stage

ROWS: Sequence[Row] = sorted(
    (
        *worker_faults.ROWS,
        *daemon_faults.ROWS,
        *client_faults.ROWS,
        *checkpoint_faults.ROWS,
        *suite_rows.ROWS,
    ),
    key=lambda row: ("FBb".index(row.id[0]), int(row.id[1:]) if row.id[1:].isdigit() else 0),
)
DEFAULT_SECONDS = 1800.0
MAX_MISSES = 25  # then something is wrong that more tries tell nothing of


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        rows = chosen(ROWS, [each for each in options.only.split(",") if each])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    began = time.monotonic()
    seconds = options.seconds or 3600 * options.hours or DEFAULT_SECONDS
    print(f"seed {options.seed}, {seconds:.0f} s", flush=True)
    cards = dealt(rows, options.seed, lambda: seconds - (time.monotonic() - began))
    if options.card:
        cards = iter(_cards(rows, options.card))
    tallies = soaked(rows, cards)
    print(f"\n{table.as_text(tallies)}\n\nseed {options.seed}, {time.monotonic() - began:.0f} s")
    if options.write:
        table.write(options.write, table.section(tallies, options.seed, time.monotonic() - began))
    return 1 if tallies.num_missed else 0


def soaked(
    rows: Sequence[Row], cards: Iterable[Card], make_stage: Callable[[Path], Any] = Stage, say: Any = print
) -> table.Tallies:
    """Plays the cards, until they are over or Ctrl-C. What the misses have left stays; nothing else."""
    tallies = table.Tallies(rows)
    misses = Path(tempfile.mkdtemp(prefix="weft-soak-"))
    stage = make_stage(misses)
    try:
        for card in cards:
            began = time.monotonic()
            _play(card, stage, tallies, say)
            say(f"{card} {time.monotonic() - began:.1f} s", flush=True)
            if tallies.num_missed >= MAX_MISSES:
                say(f"{MAX_MISSES} misses: no more is tried")
                break
        stage.renew()
    except KeyboardInterrupt:
        say("interrupted")
    finally:
        stage.close()
        if not tallies.num_missed:
            shutil.rmtree(misses, ignore_errors=True)
    return tallies


def _play(card: Card, stage: Any, tallies: table.Tallies, say: Any) -> None:
    """A try counts as passed once its fault fired, all held, and nothing is left of it."""
    try:
        stage.begin_try()
        fired = card.row.play(stage, random.Random(card.number))
        stage.end_try()
    except Exception as error:  # whatever it is, this try has not shown what it is for
        tallies.missed(card)
        kept = stage.keep(str(card), error, f"{sys.executable} tests/soak/soak.py --card {card}")
        say(f"MISSED {card} ({card.row.what}): {str(error)[:2000] or type(error).__name__}\nkept in {kept}", flush=True)
    else:
        tallies.passed(card, fired)


def _cards(rows: Sequence[Row], told: str) -> list[Card]:
    """Of `F1:123`, as a miss names it."""
    name, _, number = told.partition(":")
    return [Card(row, int(number)) for row in rows if row.name == name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="how long tries are begun")
    parser.add_argument("--hours", type=float, default=0.0, help="the same")
    parser.add_argument("--seed", type=int, default=secrets.randbits(BITS), help="of the order and of every try")
    parser.add_argument("--only", default="", help="rows, such as F1,F4")
    parser.add_argument("--card", help="one try once more, such as F1:123, as a miss names it")
    parser.add_argument("--write", type=Path, help="a page that has the markers for a table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
