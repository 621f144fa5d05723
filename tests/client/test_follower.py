"""The follower of a job: the log as it is, lines of progress in a pipe, a bar on a terminal."""

from __future__ import annotations

import io
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.client.console import progress_line
from weft.client.follower import MAX_PARTIAL_CHARS, MIN_BAR_CELLS, NOTEBOOK_CELLS, bar_text, follow

PROGRESS = runpy.run_path(str(Path(__file__).with_name("test_console.py")))["PROGRESS"]
RESULT = runpy.run_path(str(Path(__file__).parents[1] / "cli" / "screens" / "test_display.py"))["RESULT"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def events(*shown: dict[str, Any]) -> list[dict[str, Any]]:
    return [*shown, {"result": RESULT}]


def test_a_follower_in_a_pipe_writes_lines_and_leaves_the_log_unchanged() -> None:
    log, progress = io.StringIO(), io.StringIO()
    shown = events({"log": "a\nb", "offset": 3}, {"progress": PROGRESS}, {"log": "c", "offset": 4})
    assert follow(shown, log, progress) == RESULT
    assert log.getvalue() == "a\nbc"
    assert progress.getvalue() == progress_line(PROGRESS) + "\n"


class Tee:
    """As scripts have it in the place of a stream."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_a_follower_takes_a_stream_that_has_no_more_than_a_write() -> None:
    """weft.run raised AttributeError in a script whose sys.stderr was such a one, and cancelled the job."""
    tee: Any = Tee()
    assert follow(events({"log": "a\n", "offset": 2}, {"progress": PROGRESS}), tee, tee) == RESULT
    assert tee.text == f"a\n{progress_line(PROGRESS)}\n"


@pytest.fixture
def _on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def test_a_follower_tells_each_validation_once_though_every_event_carries_the_newest() -> None:
    progress = io.StringIO()
    first, second = {"validation": {"accuracy": 0.9}}, {"validation": {"accuracy": 0.95}}
    told = [{"progress": PROGRESS | each} for each in ({}, first, first, second, second)]
    follow(events(*told), io.StringIO(), progress)
    validations = [line.partition("validation ")[2] for line in progress.getvalue().splitlines()]
    assert validations == ["", "accuracy 0.9", "", "accuracy 0.95", ""]


@pytest.mark.usefixtures("_on_a_terminal")
def test_the_cursor_is_there_beside_the_bar() -> None:
    """It was hidden, and stayed so in the shell where the command was stopped by Ctrl-Z, or ended by SIGQUIT."""
    terminal = Terminal()

    def shown() -> Iterator[dict[str, Any]]:
        yield {"progress": PROGRESS}
        written = terminal.getvalue()
        assert written.rfind("\x1b[?25h") >= written.rfind("\x1b[?25l") >= 0
        yield {"result": RESULT}

    follow(shown(), terminal, terminal)


@pytest.mark.usefixtures("_on_a_terminal")
def test_a_follower_on_a_terminal_draws_a_bar() -> None:
    terminal = Terminal()
    shown = events({"progress": PROGRESS}, {"progress": PROGRESS | {"step": 240, "validation": {"accuracy": 0.9}}})
    assert follow(shown, terminal, terminal) == RESULT
    assert "step 240/480" in terminal.getvalue()
    assert bar_text(PROGRESS, 120 - len("step 120/480") - MIN_BAR_CELLS - 2) in terminal.getvalue()
    assert "validation" not in terminal.getvalue()
    last = terminal.getvalue().rpartition("step ")[2]
    assert last.startswith("480/480")
    assert "loss 0.25" in last
    assert "ETA" not in last, "the job is over"


@pytest.mark.usefixtures("_on_a_terminal")
def test_a_validation_stands_above_the_bar_where_the_log_goes_elsewhere() -> None:
    terminal = Terminal()
    follow(events({"progress": PROGRESS | {"validation": {"accuracy": 0.9}}}), io.StringIO(), terminal)
    assert terminal.getvalue().count("validation accuracy 0.9") == 1


@pytest.mark.parametrize("cells", [10, 40, 60, 80, 200])
def test_what_stands_beside_a_bar_fits_and_begins_with_when_it_ends(cells: int) -> None:
    text = bar_text(PROGRESS, cells)
    assert text.startswith("ETA 1 min 15 s")
    assert len(text) <= max(cells, len("ETA 1 min 15 s"))
    assert (text.split("  ")[-1] == "grad norm 1.5") == (cells == 200)


@pytest.mark.usefixtures("_on_a_terminal")
def test_beside_a_bar_only_whole_lines_of_the_log_are_drawn_until_the_end() -> None:
    terminal = Terminal()
    shown = events({"log": "one\ntw", "offset": 6}, {"progress": PROGRESS}, {"log": "o\nthree", "offset": 13})
    follow(shown, terminal, terminal)
    assert "two" in terminal.getvalue()
    assert terminal.getvalue().endswith("three")


@pytest.mark.usefixtures("_on_a_terminal")
def test_a_line_that_never_ends_is_not_kept_for_ever() -> None:
    terminal = Terminal()
    follow(events({"log": "x" * (MAX_PARTIAL_CHARS + 1), "offset": 1}), terminal, terminal)
    assert terminal.getvalue().count("x") == MAX_PARTIAL_CHARS + 1


@pytest.mark.usefixtures("_on_a_terminal")
def test_a_log_that_is_no_terminal_is_left_unchanged_beside_a_bar() -> None:
    log = io.StringIO()
    follow(events({"log": "a\nb", "offset": 3}, {"progress": PROGRESS}), log, Terminal())
    assert log.getvalue() == "a\nb"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    follow(events({"progress": PROGRESS}), io.StringIO(), terminal)
    assert terminal.getvalue() == progress_line(PROGRESS) + "\n"


def test_an_error_that_the_log_has_told_is_not_told_again() -> None:
    error = "Traceback (most recent call last):\n  line 3\nValueError: no"
    log = [{"log": "".join(f"12:00:00 {line}\n" for line in error.splitlines()), "offset": 9}]
    ended = {"result": RESULT | {"state": "failed", "error": error}}
    told = follow([*log, ended], io.StringIO(), io.StringIO())
    assert (told["error"], told["error_told"]) == (error, True)
    untold = follow([{"log": "12:00:00 failed\n", "offset": 3}, ended], io.StringIO(), io.StringIO())
    assert untold["error"] == error
    assert "error_told" not in untold


# the class of a notebook's streams, as ipykernel has it
OutStream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})


def test_a_follower_in_a_notebook_writes_one_line_over_with_the_log_above_it() -> None:
    """A line for each second of a long job filled the notebook."""
    notebook = OutStream()
    shown = [
        {"log": "hello\n", "offset": 6},
        {"progress": PROGRESS},
        {"progress": PROGRESS | {"step": 240}},
        {"log": "epoch 3\n", "offset": 14},
        {"notice": "a notice"},
        {"progress": PROGRESS | {"step": 470}},
    ]
    assert follow(events(*shown), notebook, notebook) == RESULT
    lines = [line.split("\r")[-1] for line in notebook.getvalue().split("\n")]
    assert (lines[0], lines[1], lines[2], lines[4]) == ("hello", "epoch 3", "weft: a notice", "")
    assert lines[3] == "step 480/480 ━━━━━━━━━━━━━━━━━━━━━━━━ loss 0.25"
    assert "step 470/480 ━━━━━━━━━━━━━━━━━━━━━━━━ ETA 1 min 15 s  loss 0.4312" in notebook.getvalue()
    assert "step 240/480 ━━━━━━━━━━━━             ETA" in notebook.getvalue()
    assert all(len(part) <= NOTEBOOK_CELLS for part in notebook.getvalue().replace("\n", "\r").split("\r"))
