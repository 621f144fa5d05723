"""The soak itself: a seed plays the same cards again, a miss is told and ends with 1, Ctrl-C ends with a table."""

from __future__ import annotations

import _thread
import dataclasses
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import soak
import table
from deck import Card, Row, chosen, dealt, decks

from weft.spec.presets import PRESETS

SOON = 180.0  # for anything that is awaited
ROOT = Path(__file__).resolve().parents[2]


class FakeStage:
    """Lends nothing, and keeps what it is told of misses."""

    def __init__(self, misses: Path, results: Any) -> None:
        self.misses = misses
        self.said: list[str] = []
        self.closed = threading.Event()

    def begin_try(self) -> None:
        self.said.append("begin")

    def end_try(self) -> None:
        self.said.append("end")

    def renew(self) -> None:
        self.said.append("renew")

    def close(self) -> None:
        self.closed.set()

    def keep(self, card: str, error: BaseException, command: str) -> Path:
        (self.misses / card.replace(":", "-")).write_text(f"{error} {command}")
        return self.misses


def holds(stage: Any, chance: random.Random) -> Counter[str]:
    return Counter({"in one way": 2, "in another": 1})


def misses(stage: Any, chance: random.Random) -> Counter[str]:
    raise AssertionError("other bits")


def comes_too_late(stage: Any, chance: random.Random) -> Counter[str]:
    return Counter()


def interrupts(stage: Any, chance: random.Random) -> Counter[str]:
    _thread.interrupt_main()  # as Ctrl-C
    assert stage.closed.wait(SOON)
    raise AssertionError("its daemon is taken away")


def row(id_: str, play: Callable[..., Counter[str]] = holds, **changes: Any) -> Row:
    return Row(
        **{"id": id_, "what": "it is hit", "asked": 7, "each": 2, "longest_seconds": 0.0, "play": play} | changes
    )


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[table.Tallies, FakeStage]]:
    monkeypatch.setattr(soak.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    stages: list[FakeStage] = []

    def make_stage(folder: Path, results: Any) -> FakeStage:
        stages.append(FakeStage(folder, results))
        return stages[-1]

    def play(*rows: Row) -> tuple[table.Tallies, FakeStage]:
        said: list[str] = []
        cards = [Card(each, number) for each in rows for number in range(2)]
        tallies = soak.soaked(
            rows, cards, 1, make_stage, lambda *words, **options: said.append(" ".join(map(str, words)))
        )
        stages[-1].said += said
        return tallies, stages[-1]

    return play


def test_a_deck_is_the_second_column_in_an_order_of_the_seed() -> None:
    rows = [row("F1"), row("F2", asked=3, each=100)]
    first, again, other = (next(decks(rows, seed)) for seed in (1, 1, 2))
    assert [str(card) for card in first] == [str(card) for card in again]
    assert [str(card) for card in first] != [str(card) for card in other]
    assert Counter(card.row.id for card in first) == {"F1": 4, "F2": 1}


def test_decks_go_on_until_the_time_is_over() -> None:
    left = iter([9.0, 9.0] * 9 + [0.0])
    assert len(list(dealt([row("F1")], 1, lambda: next(left)))) == 9


def test_a_card_that_would_take_longer_than_what_is_left_is_passed_over() -> None:
    rows = [row("F1", longest_seconds=60.0), row("F2", longest_seconds=5.0)]
    assert {card.row.id for card in islice(dealt(rows, 1, lambda: 10.0), 30)} == {"F2"}
    assert list(dealt(rows[:1], 1, lambda: 10.0)) == []


def test_rows_are_chosen_by_id_and_by_name_and_one_that_is_unknown_is_told() -> None:
    rows = [row("F1"), row("F1", variant="savers"), row("F4")]
    assert chosen(rows, []) == rows
    assert chosen(rows, ["F1"]) == rows[:2]
    assert chosen(rows, ["F1-savers", "F4"]) == rows[1:]
    with pytest.raises(ValueError, match="ONLY=F9 is no row of the soak; known here: F1, F1-savers, F4"):
        chosen(rows, ["F9"])


def test_what_holds_is_counted_by_kind_and_a_fault_that_came_too_late_is_not(played: Any) -> None:
    tallies, stage = played(row("F1"), row("F2", comes_too_late))
    assert tallies.num_missed == 0
    assert tallies.lines() == [
        ("F1", "it is hit", "7", "6: in another 2, in one way 4", "2", "2", "0"),
        ("F2", "it is hit", "7", "0", "0", "0", "0"),
    ]
    assert not stage.misses.exists(), "nothing is left"


def test_a_miss_is_told_with_its_card_and_kept_and_the_others_are_played(played: Any) -> None:
    tallies, stage = played(row("F1", misses), row("F2"))
    assert [line[-1] for line in tallies.lines()] == ["2 (F1:0, F1:1)", "0"]
    assert "soak.py --card F1:1" in (stage.misses / "F1-1").read_text()
    assert any("MISSED F1:0 (it is hit): other bits" in each for each in stage.said)


def test_ctrl_c_ends_with_what_there_is_and_closes_the_stage(played: Any) -> None:
    tallies, stage = played(row("F1"), row("F2", interrupts), row("F3"))
    assert [line[4] for line in tallies.lines()] == ["2", "0", "0"]
    assert tallies.num_missed == 0
    assert "interrupted" in stage.said
    assert "renew" not in stage.said


@pytest.mark.parametrize(("play", "code"), [(holds, 0), (misses, 1)])
def test_a_miss_ends_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, play: Any, code: int) -> None:
    monkeypatch.setattr(soak, "ROWS", [row("F1", play)])
    monkeypatch.setattr(soak, "dealt", lambda rows, seed, left: islice(dealt(rows, seed, lambda: 1.0), 5))
    monkeypatch.setattr(soak.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(soak, "MAX_MISSES", 3)
    monkeypatch.setattr(soak.soaked, "__defaults__", (1, FakeStage, print))
    monkeypatch.setattr(soak.signal, "signal", lambda *_: None)
    assert soak.main(["--seed", "5"]) == code
    told = capsys.readouterr().out
    assert told.startswith("seed 5, ")
    assert "row  what" in told


def test_an_unknown_row_ends_with_2(capsys: Any) -> None:
    assert soak.main(["--only", "F99"]) == 2
    assert "ONLY=F99 is no row" in capsys.readouterr().err


def test_a_card_that_a_miss_names_is_found() -> None:
    (card,) = soak._cards(soak.ROWS, "F4-fork-server:12")
    assert (card.row.name, card.number) == ("F4-fork-server", 12)
    assert len({each.name for each in soak.ROWS}) == len(soak.ROWS)


@pytest.fixture
def tallies() -> table.Tallies:
    """Of two rows of which one was played."""
    found = table.Tallies([row("F1"), row("F2")])
    found.passed(Card(found.rows[0], 0), Counter({"": 3}))
    return found


def test_a_page_gets_the_table_between_its_marks_and_keeps_the_rest(tmp_path: Path, tallies: table.Tallies) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    run = table.Run("abc, seed 5", "today")
    table.write(page, tallies, run)
    assert page.read_text() == f"before\n{table.BEGIN}\n\n{table.section(tallies, run)}\n\n{table.END}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no place for a table"):
        table.write(page, tallies, run)


def test_the_table_of_a_run_is_markdown_with_a_line_for_each_row(tallies: table.Tallies) -> None:
    run = table.Run.of(tallies, 5, 7200.0)
    assert "2.0 hours" in run.told
    first, blank, *lines = table.section(tallies, run).splitlines()
    assert (first, blank) == (f"- {run.name}: {run.told}", "")
    assert [line.split(" | ")[0] for line in lines] == ["| row", "| ---", "| F1", "| F2"]
    assert [line[2:-2].split(" | ")[-1] for line in lines] == ["run", "---", run.name, ""]


def test_a_row_that_a_run_has_not_played_stays_with_the_run_that_it_is_from(tallies: table.Tallies) -> None:
    first, second = table.Run("abc, seed 5", "first: a day"), table.Run("def, seed 6", "second")
    before = table.section(tallies, first)
    others = table.Tallies(tallies.rows)
    others.missed(Card(others.rows[1], 7))
    after = table.section(others, second, before)
    assert before.splitlines()[-2] in after, "F1's"
    assert "1 (F2:7) | def, seed 6 |" in after.splitlines()[-1]
    assert after.splitlines()[:2] == ["- abc, seed 5: first: a day", "- def, seed 6: second"]
    third = table.Tallies(tallies.rows)
    for each in third.rows:
        third.passed(Card(each, 1), Counter({"": 1}))
    assert "seed 5" not in table.section(third, second, after), "nothing is left of it"
    third.rows[0] = dataclasses.replace(third.rows[0], asked=third.rows[0].asked + 1)
    third.of[id(third.rows[0])] = table.Tally()
    assert "seed 5" not in table.section(third, second, after), "it is asked for in another number now"


def test_runs_of_one_row_add_up_and_each_is_named(tallies: table.Tallies) -> None:
    """Ten million frames take longer than anybody had: a run of some took the place of those that were there."""
    kinds = {"a worker, for 5 s": 1_200, "_exit(17)": 3}
    first, second = table.Tallies(tallies.rows), table.Tallies(tallies.rows)
    first.passed(Card(first.rows[0], 1), Counter(kinds))
    first.missed(Card(first.rows[0], 2))
    second.passed(Card(second.rows[0], 3), Counter(kinds | {"the daemon": 5}))
    second.missed(Card(second.rows[0], 4))
    before = table.section(first, table.Run("abc, seed 5", "a day"))
    added = table.section(second, table.Run("def, seed 6", "another"), before, adds=True)
    assert added.splitlines()[:2] == ["- abc, seed 5: a day", "- def, seed 6: another"]
    assert added.splitlines()[-2].split(" | ")[3:] == [
        "2,411: _exit(17) 6, a worker, for 5 s 2,400, the daemon 5",
        "4",
        "2",
        "2 (F1:2, F1:4)",
        "abc, seed 5 + def, seed 6 |",
    ]
    with pytest.raises(ValueError, match="the tries of def, seed 6 are counted already"):
        table.section(second, table.Run("def, seed 6", "another"), added, adds=True)
    sums = table.section(
        tallies, table.Run("def, seed 6", "another"), table.section(tallies, table.Run("abc", "")), adds=True
    )
    assert "| 6 | 2 | 2 | 0 | abc + def, seed 6 |" in sums
    assert "| 3 | 1 | 1 | 0 | ghi |" in table.section(tallies, table.Run("ghi", ""), added), (
        "without it, in their place"
    )


def test_how_long_a_whole_soak_takes_follows_from_what_was_done_and_by_how_many() -> None:
    rows = [row("F1", asked=8), row("F2", asked=1), row("F3", asked=9)]
    tallies = table.Tallies(rows, num_stages=2)
    for each, faults, seconds in ((rows[0], 2, 900.0), (rows[1], 27, 3600.0)):
        tallies.passed(Card(each, 0), Counter({"": faults}))
        tallies.took(Card(each, 0), seconds)
    tallies.took(Card(rows[2], 0), 5.0)  # whose fault came too late
    assert tallies.whole_hours == 1.0  # (4 times 900 s and once 3600 s) by two
    assert table.pace(tallies).endswith("takes 1.0 hours, 2 tries beside each other.")


def test_every_preset_is_among_the_jobs() -> None:
    assert set(PRESETS) <= set(soak.worker_faults.JOBS)


def test_every_file_with_a_test_for_the_soak_has_a_row() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^@pytest\.mark\.soak|marks=.*mark\.soak", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    played = " ".join(each.what for each in soak.suite_rows.ROWS)
    assert {path for path in marked if path not in played} == set()
