"""The directory as a real process, with real processes and threads that ask it for blocks.

Server and clients are forked from the test: they start at once, and what a client changes in its process (the key, the
place of its sockets) does not stay in the tests'.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.transport.memory import blocks as blocks_module
from weft.transport.memory import directory as directory_module
from weft.transport.memory.arena import Layout
from weft.transport.memory.blocks import BlockDescriptor, Blocks, Wanted
from weft.transport.memory.directory import Directory, DirectoryServer, SharedMemoryGone

FORK = multiprocessing.get_context("fork")
KEY = b"a key of 32 bytes, known to both"
SOON = 180.0  # for anything that is awaited


class Serving:
    """A directory's process, and clients beside it."""

    def __init__(self, address: Path) -> None:
        self.address = address
        self._processes: list[Any] = []
        self._control, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_serve, args=(address, theirs))
        self.process.start()
        assert self._control.poll(SOON)
        assert self._control.recv() == "ready"

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def listen_again(self) -> None:
        self._control.send(None)
        assert self._control.poll(SOON)
        assert self._control.recv() is None

    def drop(self, job: str) -> int:
        self._control.send(job)
        assert self._control.poll(SOON)
        num_bytes: int = self._control.recv()
        return num_bytes

    def mapped(self) -> int:
        """Blocks that the directory's process has mapped."""
        return num_mapped(self.pid, self.pid)

    def descriptors(self) -> int:
        """Of blocks, that are open there."""
        found = (os.readlink(each) for each in Path(f"/proc/{self.pid}/fd").iterdir())
        return sum(f"torch_{self.pid}_" in each for each in found)

    def begin(self, body: Callable[[Directory], Any], job: str = "a", key: bytes = KEY) -> Callable[[], Any]:
        """Starts a client that runs `body`; the function that is returned waits for its result."""
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=_client, args=(self.address, key, job, body, theirs))
        process.start()
        theirs.close()
        self._processes.append(process)

        def result() -> Any:
            assert ours.poll(SOON), "the client has said nothing"
            told = ours.recv()
            process.join(SOON)
            return told

        return result

    def until_the_last_has_ended(self) -> None:
        self._processes[-1].join(SOON)
        assert self._processes[-1].exitcode == -signal.SIGKILL

    def ask(self, body: Callable[[Directory], Any], job: str = "a") -> Any:
        return self.begin(body, job)()

    def end(self) -> None:
        for process in [*self._processes, self.process]:
            if process.is_alive() and process is not self.process:
                process.join(SOON)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(SOON)
            process.close()
        self._control.close()


def num_mapped(directory: int, process: int | None = None) -> int:
    """Blocks of the directory, by its pid, that a process has mapped; None: this one."""
    maps = Path(f"/proc/{process or 'self'}/maps").read_text()
    return sum(f"torch_{directory}_" in line for line in maps.splitlines())


def _serve(address: Path, control: Connection) -> None:
    server = DirectoryServer(address, KEY)

    def obey() -> None:
        while True:
            try:
                job = control.recv()
                control.send(server.listen_again() if job is None else server.drop(job))
            except EOFError:
                os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    server.serve(lambda: control.send("ready"))


def _client(address: Path, key: bytes, job: str, body: Callable[[Directory], Any], connection: Connection) -> None:
    try:
        connection.send(body(Directory(address, key, job)))
    except Exception as error:  # whatever it is, the test is told
        connection.send((type(error).__name__, str(error)))


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path / "directory.sock")
    yield serving
    pid = serving.pid
    serving.end()
    assert [name for name in os.listdir("/dev/shm") if f"_{pid}_" in name] == [], "what stays when everybody has gone"


def write_byte(place: int) -> Callable[[Directory], int]:
    def body(directory: Directory) -> int:
        block = directory.block("board", 64, -1)
        block[place] = place
        return int(block.numel())

    return body


def read(name: str = "board", num_bytes: int = 64, word: int = -1) -> Callable[[Directory], list[int]]:
    return lambda directory: directory.block(name, num_bytes, word).tolist()


def test_a_directory_whose_sockets_are_gone_listens_again_with_all_that_it_has(serving: Serving) -> None:
    assert serving.ask(write_byte(3)) == 64
    gone = sorted(serving.address.parent.iterdir())
    for each in gone:
        each.unlink()
    for _ in range(2):  # where they are there they stay
        serving.listen_again()
        assert sorted(serving.address.parent.iterdir()) == gone
        assert serving.ask(read()) == [0xFF] * 3 + [3] + [0xFF] * 60


def test_what_one_process_writes_another_reads_after_it_has_gone(serving: Serving) -> None:
    assert serving.ask(write_byte(3)) == 64
    assert serving.ask(read()) == [0xFF] * 3 + [3] + [0xFF] * 60


def test_processes_that_ask_for_a_block_at_the_same_time_get_the_same_memory(serving: Serving) -> None:
    """Two workers of a job once got two boards, each its own, and waited for each other for ever."""
    start = FORK.Barrier(8)

    def body(place: int) -> Callable[[Directory], int]:
        def write(directory: Directory) -> int:
            start.wait(SOON)
            block = directory.block("board", 64, -1)
            block[place] = place
            start.wait(SOON)
            return int((block != 0xFF).sum())

        return write

    results = [serving.begin(body(place)) for place in range(8)]
    assert [result() for result in results] == [8] * 8, "each sees what all the others wrote"


def test_threads_that_ask_for_a_block_at_the_same_time_get_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same story where it happened: the manager has a thread for each client, and two could make the block."""
    blocks = Blocks()
    made = []
    both = threading.Barrier(2)
    make = blocks_module._shared_block

    def make_slowly(num_bytes: int, word: int) -> torch.Tensor:
        made.append(num_bytes)
        try:
            both.wait(0.1)  # only a second thread that makes the block, too, ends this early
        except threading.BrokenBarrierError:
            pass
        return make(num_bytes, word)

    monkeypatch.setattr(blocks_module, "_shared_block", make_slowly)
    opened: list[BlockDescriptor] = []
    threads = [
        threading.Thread(target=lambda: opened.extend(blocks.open("a", Wanted("board", 64, -1)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert made == [64]
    assert opened == [opened[0]] * 8


def test_a_block_is_zero_or_of_the_word_that_the_first_to_ask_says(serving: Serving) -> None:
    """A board begins with the iteration before its first one, in every word."""
    assert serving.ask(read("zero", 128, 0)) == [0] * 128
    assert serving.ask(read("ones", 128, 1)) == [1, 0, 0, 0] * 32
    assert serving.ask(read("ones", 128, 2)) == [1, 0, 0, 0] * 32
    assert serving.ask(read("many", 8, 0x01020304)) == [4, 3, 2, 1] * 2


def test_a_block_of_another_size_than_it_has_is_refused(serving: Serving) -> None:
    serving.ask(write_byte(0))
    kind, text = serving.ask(lambda directory: directory.block("board", 128).tolist())
    assert kind == "ValueError"
    assert "a/board has 64 bytes, not 128" in text


def test_jobs_have_blocks_of_their_own(serving: Serving) -> None:
    serving.ask(write_byte(5), job="a")
    assert serving.ask(read(), job="b") == [0xFF] * 64


def test_an_arena_is_found_with_its_layout(serving: Serving) -> None:
    tensors = [("weight", torch.empty(3, 4).t()), ("bias", torch.empty(4, dtype=torch.float64))]

    def create(directory: Directory) -> None:
        arena = directory.create("state-0", Layout.of(tensors))
        arena["weight"].fill_(2.0)
        arena["bias"].copy_(torch.arange(4))

    def find(directory: Directory) -> tuple[Any, ...]:
        arena = directory.find("state-0")
        weight = arena["weight"]
        return weight.tolist(), weight.stride(), arena["bias"].tolist(), list(arena.items())

    serving.ask(create)
    assert serving.ask(find) == ([[2.0] * 3] * 4, (1, 4), [0.0, 1.0, 2.0, 3.0], ["weight", "bias"])


def test_an_arena_that_nobody_has_made_is_missed_by_name(serving: Serving) -> None:
    kind, text = serving.ask(lambda directory: directory.find("state-7"))
    assert kind == "SharedMemoryGone"
    assert text == "the directory process does not have state-7 (KeyError: 'a/state-7')"


def test_dropping_a_job_frees_its_memory_and_leaves_the_others(serving: Serving) -> None:
    layout = Layout.of([("t", torch.empty(1000))])
    for job in ("a", "ab"):
        serving.ask(lambda directory: directory.create("state-0", layout).block.fill_(1).numel(), job=job)
    serving.ask(write_byte(0), job="a")
    assert serving.mapped() == 3
    assert serving.ask(lambda directory: directory.num_bytes()) == {"a": 4032 + 64, "ab": 4032}
    assert serving.drop("a") == 4032 + 64
    assert serving.mapped() == 1
    assert serving.ask(lambda directory: directory.num_bytes()) == {"ab": 4032}
    assert serving.ask(lambda directory: directory.find("state-0"))[0] == "SharedMemoryGone"
    assert serving.ask(lambda directory: directory.find("state-0")["t"].numel(), job="ab") == 1000
    assert serving.ask(read()) == [0xFF] * 64, "a block of the same name is a new one"
    assert serving.drop("never heard of") == 0


def die_instead_of_mapping(directory: Directory) -> None:
    BlockDescriptor.mapped = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]  # of this process alone
    directory.block("board", 64, -1)


def test_a_worker_that_is_killed_as_it_maps_a_block_leaves_nothing_behind(serving: Serving) -> None:
    """Each worker that was killed in its preparation might leave the directory a block's descriptor, and so its memory,
    for as long as the daemon lived."""
    serving.ask(write_byte(0), job="b")
    serving.begin(die_instead_of_mapping)
    serving.until_the_last_has_ended()
    assert serving.drop("a") == 64
    assert serving.mapped() == serving.descriptors() == 1
    assert serving.ask(read()) == [0xFF] * 64, "the next one is a new one"


def test_a_block_that_is_asked_for_again_is_mapped_once(serving: Serving) -> None:
    def ask_twice(directory: Directory) -> tuple[bool, int]:
        first, again = directory.block("board", 64, -1), directory.made("board")
        return first.data_ptr() == again.data_ptr(), num_mapped(serving.pid)

    assert serving.ask(ask_twice) == (True, 1)


def test_memory_outlives_the_directory_in_those_who_use_it(serving: Serving) -> None:
    """It is the kernel's, held by whoever maps it; and no name of it stands in /dev/shm, from the beginning."""
    told, tell = FORK.Pipe()

    def hold(directory: Directory) -> int:
        block = directory.block("board", 64, -1)
        tell.send("mapped")
        assert tell.poll(SOON)
        block[0] = 7
        return int(block[0]) + int(block[1])

    result = serving.begin(hold)
    assert told.poll(SOON)
    assert told.recv() == "mapped"
    assert [name for name in os.listdir("/dev/shm") if f"_{serving.pid}_" in name] == []
    os.kill(serving.pid, signal.SIGKILL)
    serving.process.join(SOON)
    told.send("go on")
    assert result() == 7 + 0xFF


def test_a_block_that_is_forgotten_leaves_the_others_and_may_be_made_anew(serving: Serving) -> None:
    serving.ask(write_byte(3))
    serving.ask(lambda directory: directory.block("larger", 128).numel())
    serving.ask(lambda directory: directory.publish("larger", 7))
    assert serving.ask(lambda directory: directory.forget("larger")) is None
    assert serving.ask(lambda directory: directory.forget("never heard of")) is None
    assert serving.ask(lambda directory: directory.num_bytes()) == {"a": 64}
    assert serving.ask(lambda directory: directory.published("larger"))[0] == "SharedMemoryGone"
    assert serving.ask(lambda directory: directory.block("larger", 256).numel()) == 256


def test_threads_of_one_client_ask_beside_each_other(serving: Serving) -> None:
    """Lanes whose slots grow: each has a connection of its own."""

    def body(directory: Directory) -> list[int]:
        sizes: list[int] = []

        def ask(number: int) -> None:
            for generation in range(1, 9):
                sizes.append(directory.block(f"{number}-{generation}", 64 * generation).numel())
                directory.forget(f"{number}-{generation - 1}")

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        return sorted(sizes)

    assert serving.ask(body) == sorted(64 * generation for generation in range(1, 9) for _ in range(4))
    assert serving.ask(lambda directory: directory.num_bytes()) == {"a": 4 * 64 * 8}


def test_blocks_that_are_asked_for_together_take_one_call_and_are_the_ones_that_others_have(serving: Serving) -> None:
    def body(directory: Directory) -> tuple[list[int], int]:
        wanted = [Wanted("board", 64, -1), Wanted("rows", 128), Wanted("never mapped", 32)]
        directory.ask_for(wanted)
        blocks = [directory.block(*each) for each in wanted[:2]]
        calls = directory.num_calls()["a"]
        assert directory.block("board", 64, -1).data_ptr() == blocks[0].data_ptr(), "mapped once"
        directory.forget("never mapped")
        assert directory.block("never mapped", 96).numel() == 96, "another one by now"
        blocks[0].view(torch.int32)[3] = 7
        return [block.numel() for block in blocks], calls

    assert serving.ask(body) == ([64, 128], 1)
    assert serving.ask(lambda directory: directory.block("board", 64, -1).view(torch.int32)[2:5].tolist()) == [
        -1,
        7,
        -1,
    ]
    kind, text = serving.ask(lambda directory: directory.ask_for([Wanted("rows", 128), Wanted("board", 68)]))
    assert (kind, "board has 64 bytes, not 68" in text) == ("ValueError", True)
    assert serving.ask(lambda directory: directory.of("b").block("board", 64).view(torch.int32)[3].item()) == 0


def test_calls_are_counted_by_job(serving: Serving) -> None:
    """A hot path that asked the directory would show here."""
    serving.ask(lambda directory: [directory.block("board", 64).numel() for _ in range(3)], job="a")
    serving.ask(write_byte(0), job="b")
    assert serving.ask(lambda directory: directory.num_calls()) == {"a": 3, "b": 1}
    serving.drop("a")
    assert serving.ask(lambda directory: directory.num_calls()) == {"b": 1}


def test_the_client_of_a_later_job_asks_by_the_connection_that_is_there(serving: Serving) -> None:
    def connections() -> int:
        opened = [Path("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
        return sum(each.is_socket() for each in opened)

    def body(directory: Directory) -> tuple[int, dict[str, int]]:
        directory.block("board", 64, -1)
        before = connections()
        later = Directory(serving.address, KEY, "b", after=directory)
        later.block("board", 128)
        return connections() - before, later.num_bytes()

    assert serving.ask(body) == (0, {"a": 64, "b": 128})


def test_the_client_of_a_later_job_finds_the_directory_that_there_is_by_then(serving: Serving) -> None:
    again: list[Serving] = []

    def ask(directory: Directory) -> int:
        return Directory(serving.address, KEY, "b", after=directory).block("new", 64).numel()

    def happens() -> None:
        kill(serving)
        again.append(Serving(serving.address))

    try:
        assert begin_after(serving, ask)(happens) == 64
        assert again[0].ask(lambda directory: directory.num_bytes()) == {"b": 64}
    finally:
        again[0].end()


def test_a_client_with_another_key_is_refused(serving: Serving) -> None:
    result = serving.begin(lambda directory: "let in", key=b"some other key of the same length")
    kind, text = result()
    assert kind == "SharedMemoryGone"
    assert "AuthenticationError" in text
    assert serving.ask(write_byte(0)) == 64, "and the directory goes on"


def test_a_socket_that_a_killed_directory_left_is_taken_over(serving: Serving) -> None:
    os.kill(serving.pid, signal.SIGKILL)
    serving.process.join(SOON)
    assert serving.address.exists()
    again = Serving(serving.address)
    try:
        assert again.ask(write_byte(0)) == 64
    finally:
        again.end()


def test_a_client_waits_for_a_directory_that_is_on_its_way_up(tmp_path: Path) -> None:
    waiting = Serving.__new__(Serving)
    waiting.address = tmp_path / "late.sock"
    waiting._processes = []
    result = waiting.begin(write_byte(0))
    serving = Serving(waiting.address)
    try:
        assert result() == 64
    finally:
        serving.end()


def test_what_a_worker_publishes_every_worker_of_the_job_finds_until_the_job_is_dropped(serving: Serving) -> None:
    """As long as the job: the worker that has published it may have gone."""
    handle = (0, b"\x00handle", 64, True)
    name = "activation-0-0"
    assert serving.ask(lambda directory: directory.publish(name, handle)) is None
    assert serving.ask(lambda directory: directory.published(name)) == handle
    assert serving.ask(lambda directory: directory.published(name), job="b")[0] == "SharedMemoryGone"
    serving.drop("a")
    assert serving.ask(lambda directory: directory.published(name))[0] == "SharedMemoryGone"


# --- a directory that dies

LAYOUT = Layout.of([("t", torch.empty(10))])
CALLS: dict[str, Callable[[Directory], Any]] = {
    "block": lambda directory: directory.block("new", 64).numel(),
    "known block": lambda directory: directory.block("board", 64, -1).numel(),
    "create": lambda directory: directory.create("state-0", LAYOUT).block.numel(),
    "find": lambda directory: directory.find("state-1").block.numel(),
    "publish": lambda directory: directory.publish("activation-0", 7),
    "published": lambda directory: directory.published("activation-1"),
    "forget": lambda directory: directory.forget("board"),
}


def fill(directory: Directory) -> None:
    """What the calls above ask for."""
    directory.block("board", 64, -1)
    directory.create("state-1", LAYOUT)
    directory.publish("activation-1", 7)


def begin_after(serving: Serving, call: Callable[[Directory], Any]) -> Callable[[Callable[[], None]], Any]:
    """A client that has found the directory, and calls it once something else has happened."""
    told, tell = FORK.Pipe()

    def body(directory: Directory) -> Any:
        fill(directory)
        tell.send("connected")
        assert tell.poll(SOON)
        return call(directory)

    result = serving.begin(body)

    def after(happens: Callable[[], None]) -> Any:
        assert told.poll(SOON)
        happens()
        told.send("go on")
        return result()

    return after


def kill(serving: Serving) -> None:
    os.kill(serving.pid, signal.SIGKILL)
    serving.process.join(SOON)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_to_a_directory_that_was_killed_says_the_same(serving: Serving, call: str) -> None:
    """Each broke in its own way, and the job whose worker it was failed as if its own code had raised it."""
    kind, text = begin_after(serving, CALLS[call])(lambda: kill(serving))
    assert kind == "SharedMemoryGone"
    assert text.startswith("the directory process does not have ")


@pytest.mark.parametrize("call", CALLS)
def test_no_call_to_another_directory_since_finds_what_the_first_had(serving: Serving, call: str) -> None:
    again: list[Serving] = []

    def happens() -> None:
        kill(serving)
        again.append(Serving(serving.address))

    try:
        assert begin_after(serving, CALLS[call])(happens)[0] == "SharedMemoryGone"
        if call in ("find", "published"):
            assert again[0].ask(CALLS[call])[0] == "SharedMemoryGone", "nor does a client that never met the first"
    finally:
        again[0].end()


def test_a_block_that_goes_before_it_is_mapped_is_memory_that_is_gone(serving: Serving) -> None:
    """The directory answers, and the block is dropped before its descriptor is opened."""

    def body(directory: Directory) -> None:
        mapped = BlockDescriptor.mapped

        def mapped_late(held: BlockDescriptor) -> torch.Tensor:
            serving.drop("a")
            return mapped(held)

        BlockDescriptor.mapped = mapped_late  # type: ignore[method-assign]  # of this process alone
        directory.block("board", 64, -1)

    kind, text = serving.ask(body)
    assert kind == "SharedMemoryGone"
    assert "board (FileNotFoundError" in text


def test_a_descriptor_that_is_another_ones_by_now_is_not_mapped() -> None:
    (held,) = Blocks().open("a", Wanted("board", 64))
    with pytest.raises(FileNotFoundError):  # it went with the blocks
        held.mapped()
    blocks = Blocks()
    (now,) = blocks.open("a", Wanted("other", 64))
    with pytest.raises(FileNotFoundError, match="is another one by now"):
        dataclasses.replace(held, descriptor=now.descriptor).mapped()
    assert now.mapped().numel() == 64


def test_a_directory_that_never_comes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "CONNECT_SECONDS", 0.1)
    waiting = Serving.__new__(Serving)
    waiting.address = tmp_path / "never.sock"
    waiting._processes = []
    assert waiting.begin(read())()[0] == "SharedMemoryGone"


def test_a_directory_takes_away_the_sockets_of_those_that_were_killed_before_it(serving: Serving) -> None:
    """Each left one beside its address, as long as the daemon lived."""
    folder = serving.address.parent
    serving.ask(write_byte(0))
    left = {serving.address, serving.address.resolve()}
    assert set(folder.iterdir()) == left
    kill(serving)
    again = Serving(serving.address)
    try:
        assert again.ask(write_byte(0)) == 64
        assert set(folder.iterdir()) == {again.address, again.address.resolve()} != left
    finally:
        again.end()


# --- a directory that takes the place of one that died


@pytest.fixture
def successor(serving: Serving) -> Iterator[Callable[[], Serving]]:
    """Kills the directory, and starts another."""
    started: list[Serving] = []

    def succeed() -> Serving:
        kill(serving)
        started.append(Serving(serving.address))
        return started[0]

    yield succeed
    for each in started:
        each.end()


class Holder:
    """A client that maps what `body` gives it, and hands it on when told; then it does `and_then`, and waits."""

    def __init__(
        self,
        serving: Serving,
        body: Callable[[Directory], Any],
        and_then: Callable[[Directory, Any], Any] = lambda directory, held: None,
    ) -> None:
        self._ours, theirs = FORK.Pipe()

        def hold(directory: Directory) -> Any:
            held = body(directory)
            theirs.send("holds it")
            assert theirs.poll(SOON)
            theirs.recv()
            directory.hand_on()
            told = and_then(directory, held)
            theirs.send("handed on")
            assert theirs.poll(SOON)
            return told

        self._result = serving.begin(hold)
        assert self._ours.poll(SOON)
        assert self._ours.recv() == "holds it"

    def hand_on(self) -> None:
        self._ours.send("hand it on")
        assert self._ours.poll(SOON)
        assert self._ours.recv() == "handed on"

    def hand_on_in_vain(self) -> Any:
        self._ours.send("hand it on")
        return self._result()

    def end(self) -> Any:
        self._ours.send("end")
        return self._result()


def hold_all(directory: Directory) -> Any:
    block = directory.block("board", 64, -1)
    arena = directory.of("a@snapshots").create("state-1", LAYOUT)
    arena["t"].fill_(3.0)
    directory.publish("activation-1", 7)
    return block, arena


def test_what_a_process_maps_and_has_published_it_hands_on(serving: Serving, successor: Callable[[], Serving]) -> None:
    """Of whatever name it goes by: a job's snapshots have one of their own."""
    holder = Holder(serving, hold_all, lambda directory, held: held[0].__setitem__(5, 9))
    again = successor()
    assert again.ask(lambda directory: directory.made("board"))[0] == "SharedMemoryGone"
    holder.hand_on()
    assert again.ask(lambda directory: directory.made("board").tolist()) == [0xFF] * 5 + [9] + [0xFF] * 58
    assert again.ask(lambda directory: directory.block("board", 64).numel()) == 64
    assert again.ask(lambda directory: directory.find("state-1")["t"].tolist(), job="a@snapshots") == [3.0] * 10
    assert again.ask(lambda directory: directory.published("activation-1")) == 7
    assert again.ask(lambda directory: directory.num_bytes()) == {"a": 64, "a@snapshots": 64}
    assert holder.end() is None
    assert again.ask(lambda directory: directory.made("board")[5].item()) == 9, "now the directory holds it"
    assert again.drop("a") == again.drop("a@snapshots") == 64


def test_every_process_that_maps_a_block_hands_the_same_one_on(
    serving: Serving, successor: Callable[[], Serving]
) -> None:
    def write(place: int) -> Callable[[Directory, Any], None]:
        return lambda directory, held: held.__setitem__(place, place)

    holders = [Holder(serving, lambda directory: directory.block("board", 64), write(place)) for place in (1, 2, 3)]
    again = successor()
    for holder in holders:
        holder.hand_on()
    assert again.ask(lambda directory: directory.made("board")[:5].tolist()) == [0, 1, 2, 3, 0]
    for holder in holders:
        holder.end()
    assert again.drop("a") == 64


def test_a_block_that_another_has_made_anew_meanwhile_is_told(
    serving: Serving, successor: Callable[[], Serving]
) -> None:
    """Two would hold memory of one name, each its own, and wait for each other for ever."""
    holder = Holder(serving, lambda directory: directory.block("board", 64))
    again = successor()
    again.ask(write_byte(0))
    assert holder.hand_on_in_vain() == ("SharedMemoryGone", "a/board is another block here")


def test_all_else_is_handed_on_beside_such_a_block(serving: Serving, successor: Callable[[], Serving]) -> None:
    """Behind a name that was taken a worker had told nothing more, so there was no snapshot to go on from."""

    def hold(directory: Directory) -> Any:
        return [directory.block(name, 64, word) for name, word in (("one", 1), ("board", 2), ("two", 3))]

    holder = Holder(serving, hold)
    again = successor()
    again.ask(write_byte(0))
    assert holder.hand_on_in_vain() == ("SharedMemoryGone", "a/board is another block here")
    assert again.ask(lambda directory: [directory.made(name)[0].item() for name in ("one", "two")]) == [1, 3]


FAILING: Mapping[str, Callable[[Directory], Any]] = {
    "another size": lambda directory: directory.block("board", 128),
    "nobody's": lambda directory: directory.made("none"),
    "another one": lambda directory: directory._server.blocks.take(
        "a", "board", BlockDescriptor.of(directory.block("other", 64))
    ),
}


@pytest.mark.parametrize("call", FAILING)
def test_a_call_that_failed_keeps_nothing_of_a_job_that_has_ended(serving: Serving, call: str) -> None:
    """Its connection remembers the error until it is asked for something else, and with the error all that the call had
    in hand."""
    before = serving.mapped()
    ours, theirs = FORK.Pipe()

    def fail_and_stay(directory: Directory) -> None:
        directory.block("board", 64)
        with pytest.raises((ValueError, SharedMemoryGone)):
            FAILING[call](directory)
        theirs.send("failed")
        assert theirs.poll(SOON)
        theirs.recv()

    result = serving.begin(fail_and_stay)
    assert ours.poll(SOON)
    assert ours.recv() == "failed"
    assert serving.mapped() > before
    assert serving.drop("a")
    assert serving.mapped() == before
    ours.send("end")
    assert result() is None


def test_a_later_job_hands_nothing_on_of_an_earlier_one(serving: Serving) -> None:
    again: list[Serving] = []

    def happens() -> None:
        kill(serving)
        again.append(Serving(serving.address))

    def hand_on(directory: Directory) -> Any:
        later = Directory(serving.address, KEY, "b", after=directory)
        later.hand_on()
        return later.of("a").published("activation-1")

    try:
        assert begin_after(serving, hand_on)(happens)[0] == "SharedMemoryGone"
    finally:
        again[0].end()


@pytest.mark.parametrize("gone", ["unmapped", "forgotten"])
def test_what_nobody_wants_any_more_is_not_handed_on(
    serving: Serving, successor: Callable[[], Serving], gone: str
) -> None:
    def hold(directory: Directory) -> Any:
        old = directory.block("old", 64)
        view = directory.block("kept", 64)[:8].view(torch.float32)
        if gone == "forgotten":
            directory.forget("old")
        return (view, old) if gone == "forgotten" else view

    holder = Holder(serving, hold)
    again = successor()
    holder.hand_on()
    assert again.ask(lambda directory: directory.num_bytes()) == {"a": 64}, "a view is enough"
    holder.end()


def test_a_client_goes_on_with_the_directory_that_it_has_handed_its_memory_to(
    serving: Serving, successor: Callable[[], Serving]
) -> None:
    """From every thread: each had a connection to the one that died."""

    def go_on(directory: Directory, held: Any) -> list[int]:
        sizes: list[int] = []

        def ask(number: int) -> None:
            sizes.append(directory.block(f"new-{number}", 64 * number).numel())

        threads = [threading.Thread(target=ask, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        directory.forget("board")
        return sorted(sizes)

    holder = Holder(serving, hold_all, go_on)
    again = successor()
    holder.hand_on()
    assert again.ask(lambda directory: directory.num_bytes()) == {"a": 64 + 128, "a@snapshots": 64}
    assert holder.end() == [64, 128]


def test_a_directory_that_has_not_died_is_told_nothing_new(serving: Serving) -> None:
    """A worker may miss something of one that lives."""
    holder = Holder(serving, hold_all)
    before = serving.mapped()
    holder.hand_on()
    assert serving.mapped() == before
    assert serving.ask(lambda directory: directory.num_bytes()) == {"a": 64, "a@snapshots": 64}
    holder.end()


def test_clients_of_a_directory_that_died_let_go_of_nothing_of_the_next(
    serving: Serving, successor: Callable[[], Serving]
) -> None:
    """Both are forked from one process, so their objects may have the same numbers: a late client's farewell to the
    first took a reference of the second's, whose own clients then found nothing."""
    leavers = [Holder(serving, lambda directory: directory.block("board", 64)) for _ in range(3)]
    again = successor()
    stays = Holder(again, lambda directory: directory.block("board", 64), lambda directory, held: directory.num_bytes())
    for leaver in leavers:
        leaver.hand_on_in_vain()
    stays.hand_on()
    assert stays.end() == {"a": 64}
