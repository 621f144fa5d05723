"""The board between real processes: a word that one posts ends the wait of another, and an abort ends every wait.

Waiters are forked: the page of the board is shared, and so is nothing else. They say that they are about to wait over a
pipe, and a futex that has come too late for its word does not sleep: no test has to sleep to be sure.
"""

from __future__ import annotations

import mmap
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from weft.transport.memory import board as board_module
from weft.transport.memory.board import Aborted, Board, futex_wait, futex_wake, num_words

NUM_TASKS = 4
SOON = 180.0  # for anything that is awaited
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def words() -> torch.Tensor:
    """Words that forked processes share, every one -1."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    words = torch.frombuffer(page, dtype=torch.int32)[: num_words(NUM_TASKS)]
    words.fill_(-1)
    return words


Waiter = Callable[[Connection], str]


@pytest.fixture
def begin() -> Iterator[Callable[[Waiter], Connection]]:
    """Forks a process that runs a function and sends what it returns; after the test none is left."""
    processes = []

    def start(body: Waiter) -> Connection:
        ours, theirs = FORK.Pipe()

        def run() -> None:
            theirs.send(body(theirs))

        process = FORK.Process(target=run)
        process.start()
        theirs.close()
        processes.append(process)
        return ours

    yield start
    for process in processes:
        process.join(SOON)
        assert process.exitcode == 0
        process.close()


def hear(connection: Connection) -> str:
    assert connection.poll(SOON), "the other process has said nothing"
    told: str = connection.recv()
    return told


def waits(board: Board, task: int, iteration: int) -> Waiter:
    def body(connection: Connection) -> str:
        connection.send("about to wait")
        try:
            board.wait(task, iteration)
        except Aborted:
            return "aborted"
        return f"task {task} is at {board.words[1 + task]}"

    return body


@pytest.mark.parametrize("spin_seconds", [0.0, 1e-3, 30.0], ids=["sleeps", "spins, then sleeps", "spins"])
def test_a_post_ends_the_wait_of_another_process(
    words: torch.Tensor, begin: Callable[[Waiter], Connection], spin_seconds: float
) -> None:
    board = Board(words, spin_seconds)
    other = begin(waits(board, 2, 3))
    assert hear(other) == "about to wait"
    board.post(1, 3)
    board.post(2, 2)
    assert not other.poll(0.01), "neither another task nor an earlier iteration is what it waits for"
    board.post(2, 3)
    assert hear(other) == "task 2 is at 3"


def test_a_wake_ends_a_sleep_that_is_far_from_its_end(
    words: torch.Tensor, begin: Callable[[Waiter], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "SLEEP_SECONDS", 10 * SOON)
    board = Board(words)
    others = [begin(waits(board, 0, 0)) for _ in range(3)]
    for other in others:
        assert hear(other) == "about to wait"
    board.post(0, 0)
    assert [hear(other) for other in others] == ["task 0 is at 0"] * 3


@pytest.mark.parametrize("spin_seconds", [0.0, 0.02], ids=["sleeps", "spins, then sleeps"])
def test_an_abort_ends_every_wait_in_every_process(
    words: torch.Tensor, begin: Callable[[Waiter], Connection], spin_seconds: float
) -> None:
    board = Board(words, spin_seconds)
    others = [begin(waits(board, task, 0)) for task in range(2)]
    for other in others:
        assert hear(other) == "about to wait"
    board.abort()
    assert [hear(other) for other in others] == ["aborted", "aborted"]
    with pytest.raises(Aborted):
        board.wait(3, 0)
    assert board.aborted


def test_an_abort_by_another_process_is_seen_here(words: torch.Tensor, begin: Callable[[Waiter], Connection]) -> None:
    board = Board(words)

    def abort(connection: Connection) -> str:
        board.abort()
        return "done"

    assert not board.aborted
    other = begin(abort)
    with pytest.raises(Aborted):
        board.wait(0, 0)
    assert hear(other) == "done"


def test_two_processes_that_take_turns_never_miss_each_other(
    words: torch.Tensor, begin: Callable[[Waiter], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One missed wake-up in these two thousand would last longer than the test may."""
    monkeypatch.setattr(board_module, "SLEEP_SECONDS", 10 * SOON)
    board = Board(words)
    turns = 1000

    def answer(connection: Connection) -> str:
        for turn in range(turns):
            board.wait(0, turn)
            board.post(1, turn)
        return "done"

    other = begin(answer)
    for turn in range(turns):
        board.post(0, turn)
        board.wait(1, turn)
    assert hear(other) == "done"


def test_what_is_there_already_is_not_waited_for(words: torch.Tensor) -> None:
    board = Board(words)
    board.post_quietly(0, 5)
    for iteration in (-1, 0, 5):
        board.wait(0, iteration)
    board.wait(1, -1)
    board.wait(1, -2)


def test_who_waits_for_one_that_wants_a_core_does_not_spin(
    words: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, spun = Board(words, spin_seconds=30.0), list[int]()
    monkeypatch.setattr(Board, "_spin", lambda _, word, iteration: spun.append(word) or True)
    board.post(0, 3)
    board.wait(0, 3, spins=False)
    assert spun == []
    board.wait(0, 3)
    assert spun == [1]


@pytest.mark.parametrize("spin_seconds", [0.0, 1e-3, 30.0], ids=["sleeps", "spins, then sleeps", "spins"])
@pytest.mark.parametrize("can_wait_for_several", [True, False])
def test_of_several_words_the_one_that_comes_ends_the_wait(
    words: torch.Tensor,
    begin: Callable[[Waiter], Connection],
    monkeypatch: pytest.MonkeyPatch,
    spin_seconds: float,
    can_wait_for_several: bool,
) -> None:
    if not can_wait_for_several:  # as before Linux 5.16
        monkeypatch.setattr(board_module, "_FUTEX_WAITV_SYSCALL", 0xFFFF)
    board = Board(words, spin_seconds)

    def wait_for_any(connection: Connection) -> str:
        connection.send("about to wait")
        while (came := board.wait_any([(0, 3), (2, 1)])) is None:
            pass
        return f"number {came}"

    other = begin(wait_for_any)
    assert hear(other) == "about to wait"
    board.post(0, 2)
    board.post(1, 5)
    assert not other.poll(0.01)
    board.post(2, 1)
    assert hear(other) == "number 1"
    assert board.wait_any([(0, 2), (2, 1)]) == 0, "the first, where both are there"
    board.abort()
    with pytest.raises(Aborted):
        board.wait_any([(0, 9), (1, 9)])


def test_what_was_done_before_an_abort_is_still_done(words: torch.Tensor) -> None:
    board = Board(words)
    board.post(0, 5)
    board.abort()
    board.wait(0, 5)


def test_a_lane_that_waits_lets_the_other_threads_run(words: torch.Tensor) -> None:
    board = Board(words)
    thread = threading.Thread(target=lambda: board.post(0, 0))
    thread.start()
    board.wait(0, 0)
    thread.join(SOON)


def test_a_futex_does_not_sleep_for_a_word_that_has_changed(words: torch.Tensor) -> None:
    began = time.monotonic()
    futex_wait(words.data_ptr(), 7, 10 * SOON)
    assert time.monotonic() - began < SOON
    futex_wake(words.data_ptr())


def test_a_board_of_other_numbers_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError):
        Board(torch.zeros(3, dtype=torch.int64))


def test_a_new_board_runs_and_no_task_has_finished(words: torch.Tensor) -> None:
    board = Board(words)
    assert not board.aborted
    assert list(board.words) == [-1] * (1 + NUM_TASKS)
