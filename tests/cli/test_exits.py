"""Signals that end a verb, on a way out on which it tidies up."""

from __future__ import annotations

import signal

import pytest

from weft.cli.exits import Terminated, termination_raises


@pytest.mark.usefixtures("hangup")
def test_a_terminal_that_closes_does_not_disturb_the_way_out() -> None:
    """It sends SIGHUP, and so does the shell that it ends."""
    before, tidied = list[int](), []
    signal.signal(signal.SIGHUP, lambda number, frame: before.append(number))

    def hang_up() -> None:
        with termination_raises():
            try:
                signal.raise_signal(signal.SIGHUP)
            finally:
                signal.raise_signal(signal.SIGHUP)
                tidied.append("all")

    with pytest.raises(Terminated):
        hang_up()
    assert (tidied, before) == (["all"], [])
    signal.raise_signal(signal.SIGHUP)
    assert before == [signal.SIGHUP], "as it was"


@pytest.mark.usefixtures("hangup")
def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As whoever starts it with nohup wants it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with termination_raises():
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
