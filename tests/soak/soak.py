"""The soak: the rows of what Weft promises, tried in a random order for as long as it is given.

make soak SECONDS=600                       with a seed of its own, which it prints
make soak HOURS=8 SEED=7 ONLY=F1,F4         the same tries in the same order, of these rows
make soak HOURS=8 WRITE=1                   its rows go into docs/reliability.md, the others stay
make soak HOURS=8 WRITE=1 ADD=1             its counts are added to those that stand there of the same rows
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import checkpoint_faults
import client_faults
import daemon_faults
import hang_faults
import memory_faults
import plan_faults
import replace_faults
import share_faults
import stop_faults
import suite_rows
import table
import worker_faults
from deck import BITS, Card, Row, chosen, dealt
from stage import Results, Stage

ROWS: Sequence[Row] = sorted(
    (
        *worker_faults.ROWS,
        *share_faults.ROWS,
        *stop_faults.ROWS,
        *plan_faults.ROWS,
        *replace_faults.ROWS,
        *daemon_faults.ROWS,
        *client_faults.ROWS,
        *hang_faults.ROWS,
        *memory_faults.ROWS,
        *checkpoint_faults.ROWS,
        *suite_rows.ROWS,
    ),
    key=lambda row: ("FBbpsr".index(row.id[0]), int(row.id[1:]) if row.id[1:].isdigit() else 0),
)
DEFAULT_SECONDS = 1800.0
DEFAULT_DAEMONS = 4  # on two cores: a try mostly waits, for its job's pauses and for the moment of its fault
MAX_CHARS = 2000  # of a miss that are printed; all of it is kept
MAX_MISSES = 25  # then something is wrong that more tries tell nothing of


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        rows = chosen(ROWS, [each for each in options.only.split(",") if each])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell that starts it in the background ignores Ctrl-C
        signal.signal(number, signal.default_int_handler)
    began = time.monotonic()
    seconds = options.seconds or 3600 * options.hours or DEFAULT_SECONDS
    print(f"seed {options.seed}, {seconds:.0f} s", flush=True)
    cards = dealt(rows, options.seed, lambda: seconds - (time.monotonic() - began))
    if options.card:
        played = _cards(rows, options.card)
        rows, cards = [card.row for card in played], iter(played)
    shown = ROWS if options.write else rows  # a page is to say what has not been tried, too
    tallies = soaked(shown, cards, options.daemons)
    print(f"\n{table.as_text(tallies)}\n\nseed {options.seed}, {time.monotonic() - began:.0f} s. {table.pace(tallies)}")
    if options.write:
        run = table.Run.of(tallies, options.seed, time.monotonic() - began)
        table.write(options.write, tallies, run, adds=options.add)
    return 1 if tallies.num_missed else 0


def soaked(
    rows: Sequence[Row],
    cards: Iterable[Card],
    num_stages: int = 1,
    make_stage: Callable[[Path, Results], Any] = Stage,
    say: Any = print,
) -> table.Tallies:
    """Plays the cards until they are over, or Ctrl-C. What the misses have left stays; nothing else.

    num_stages: tries that are played beside each other, each with a daemon of its own.
    """
    tallies = table.Tallies(rows, num_stages)
    misses = Path(tempfile.mkdtemp(prefix="weft-soak-"))
    results = Results()
    stages = [make_stage(misses, results) for _ in range(num_stages)]
    company = Company(iter(cards), tallies, say)
    threads = [threading.Thread(target=company.play_on, args=(stage,), name="stage") for stage in stages]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        say("interrupted", flush=True)
    finally:
        company.is_over = True
        for stage in stages:
            stage.close()
        for thread, stage in zip(threads, stages, strict=True):
            thread.join()
            stage.close()  # it may just have started another daemon
        shutil.rmtree(misses / "undisturbed", ignore_errors=True)
        if not tallies.num_missed:
            shutil.rmtree(misses, ignore_errors=True)
    return tallies


class Company:
    """Those who play: a thread for each stage, with one deck."""

    def __init__(self, cards: Iterator[Card], tallies: table.Tallies, say: Any) -> None:
        self.is_over = False  # Ctrl-C: what is played now counts for nothing, its daemon is taken away
        self._cards = cards
        self._tallies = tallies
        self._say = say
        self._lock = threading.Lock()

    def play_on(self, stage: Any) -> None:
        last = None
        while (card := self._next()) is not None:
            began, last = time.monotonic(), card
            self._play(card, stage)
            seconds = time.monotonic() - began
            with self._lock:
                self._tallies.took(card, seconds)
            self._say(f"{card} {seconds:.1f} s", flush=True)
        if last is not None and not self.is_over:
            self._end(last, stage)

    def _next(self) -> Card | None:
        with self._lock:
            if self.is_over or self._tallies.num_missed >= MAX_MISSES:
                return None
            return next(self._cards, None)

    def _play(self, card: Card, stage: Any) -> None:
        """A try counts as passed once its fault fired, all held, and nothing is left of it."""
        try:
            stage.begin_try()
            fired = card.row.play(stage, random.Random(card.number))
            stage.end_try()
        except Exception as error:  # whatever it is, this try has not shown what it is for
            self._missed(card, error, stage)
        else:
            with self._lock:
                self._tallies.passed(card, fired)

    def _end(self, last: Card, stage: Any) -> None:
        """Of the stage's daemon, of which nothing may be left."""
        try:
            stage.renew()
        except Exception as error:
            self._missed(last, error, stage)

    def _missed(self, card: Card, error: Exception, stage: Any) -> None:
        if self.is_over:
            return
        with self._lock:
            self._tallies.missed(card)
        kept = stage.keep(str(card), error, f"{sys.executable} tests/soak/soak.py --card {card}")
        told = str(error)[:MAX_CHARS] or type(error).__name__
        self._say(f"MISSED {card} ({card.row.what}): {told}\nkept in {kept}", flush=True)


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
    parser.add_argument(
        "--daemons", type=int, default=DEFAULT_DAEMONS, help="so many tries are played beside each other"
    )
    parser.add_argument("--write", type=Path, help="a page that has the markers for a table")
    parser.add_argument("--add", action="store_true", help="to the counts that the page has, instead of in their place")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
