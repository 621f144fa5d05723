"""SYNC's reduction between two processes: against Gloo's all_reduce, and against the memory's own speed.

Three parties take turns, two processes each, on the same two cores with one thread each; peers/allreduce_rank.py:

    weft    both ranks' gradients in shared memory; each rank sums its half of both in place, tile by tile, with the
            sum of squares; a handshake of board words before and after. Both then read the whole sum where it lies
    gloo    torch.distributed.all_reduce of each rank's own gradients, in place
    triad   torch.add(a, b, out=a) over private memory, half a bucket each for a and b, in both processes at once: as
            many bytes read and written as weft's, without a handshake, and without squares

A turn's time is the median of its repeats; a repeat lasts from when both have begun until both have ended.
"""

from __future__ import annotations

import functools
import json
import os
import select
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from measure import Result, interleave, main, ratio_result, value_result
from party import party

from weft.transport.memory.board import num_words

NUM_TASKS = 6  # of the board: three words for each rank
TURNS = 11
ANSWER_SECONDS = 60.0  # for one turn; none takes more than two


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    name: str
    num_bytes: int
    repeats: int
    vs_gloo: str | None = None
    vs_triad: str | None = None


SIZES = (
    Size(name="64KiB", num_bytes=64 << 10, repeats=200),
    Size(name="256KiB", num_bytes=256 << 10, repeats=200),
    Size(name="1MiB", num_bytes=1 << 20, repeats=100, vs_gloo=">= 10"),
    Size(name="4MiB", num_bytes=4 << 20, repeats=40),
    Size(name="25MiB", num_bytes=25 << 20, repeats=15, vs_gloo=">= 10", vs_triad=">= 0.7"),
    Size(name="64MiB", num_bytes=64 << 20, repeats=7),
    Size(name="256MiB", num_bytes=256 << 20, repeats=3, vs_triad=">= 0.7"),
)
MAX_BYTES = max(size.num_bytes for size in SIZES)
MOVED = (
    "one bucket of float32 over 2 processes, a core and a thread each. Ours: every element of both ranks' buckets read "
    "once and written once, in place in shared memory that both map, half by each process; the squares of the sum "
    "computed in the same pass; both handshakes timed; nothing is broadcast, as the owners update their own halves and "
    "all read them where they are. Buckets are filled anew before each repeat, untimed"
)


def collect(quick: bool) -> list[Result]:
    turns = 3 if quick else TURNS
    with ExitStack() as stack:
        parties = {name: stack.enter_context(_party(name)) for name in ("weft", "gloo", "triad")}
        results = []
        for size in SIZES:
            results += _measured(parties, size, turns)
        return results + _without_squares(parties, next(size for size in SIZES if size.name == "25MiB"), turns)


def _measured(parties: dict[str, Party], size: Size, turns: int) -> list[Result]:
    measures = [functools.partial(parties[name].seconds, "squares", size) for name in ("weft", "gloo", "triad")]
    ours, gloo, triad = _interleaved(turns, measures)
    return [
        ratio_result(
            f"vs_gloo_{size.name}",
            gloo,
            ours,
            goal=size.vs_gloo,
            how=f"seconds of torch.distributed's Gloo all_reduce in place, without squares, ÷ ours; {MOVED}",
        ),
        ratio_result(
            f"vs_triad_{size.name}",
            triad,
            ours,
            goal=size.vs_triad,
            how="seconds of torch.add(a, b, out=a) on private memory, half a bucket for a and for b in each of two "
            f"processes at once, without squares and without handshakes, ÷ ours; {MOVED}",
        ),
        value_result(
            f"bandwidth_{size.name}",
            [size.num_bytes / seconds for seconds in ours],
            "GB/s",
            scale=1e-9,
            how="bytes of one rank's bucket ÷ our seconds of the rows above; the memory moves three times as many",
        ),
    ]


def _without_squares(parties: dict[str, Party], size: Size, turns: int) -> list[Result]:
    measures = [functools.partial(parties[name].seconds, "sum", size) for name in ("weft", "triad")]
    ours, triad = _interleaved(turns, measures)
    how = f"as vs_triad_{size.name}, but ours computes no squares either, as for a job that does not clip"
    return [ratio_result(f"vs_triad_{size.name}_without_squares", triad, ours, how=how)]


def _interleaved(turns: int, measures: list[functools.partial[float]]) -> list[list[float]]:
    for measure in measures:
        measure()  # pages, connections and caches
    return interleave(turns, *measures)


class Party:
    """Two processes that do one operation together."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def seconds(self, operation: str, size: Size) -> float:
        """Of one operation, the median of the size's repeats."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{operation} {size.num_bytes} {size.repeats}\n")
            process.stdin.flush()
        first, second = (_answer(process) for process in self._processes)
        nanoseconds = [
            max(first_end, second_end) - max(first_start, second_start)
            for (first_start, first_end), (second_start, second_end) in zip(first, second, strict=True)
        ]
        return statistics.median(nanoseconds) / 1e9


def _answer(process: subprocess.Popen[str]) -> list[tuple[int, int]]:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], ANSWER_SECONDS)
    line = process.stdout.readline() if ready else ""
    if not line:
        raise SystemExit(f"process {process.pid} of the benchmark has not answered")
    return [(start, end) for start, end in json.loads(line)]


@contextmanager
def _party(name: str) -> Iterator[Party]:
    """The party's processes, each on a core of its own; they end when their input does, and within seconds."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        words = num_words(NUM_TASKS)
        board = stack.enter_context(_shared(4 * words))
        os.pwrite(board, b"\xff" * (4 * words), 0)  # every word -1, as on the board of a job that begins
        blocks = [stack.enter_context(_shared(MAX_BYTES)) for _ in range(2 if name == "weft" else 0)]
        config = {
            "party": name,
            "max_bytes": MAX_BYTES,
            "words": board,
            "num_words": words,
            "blocks": blocks,
            "rendezvous": str(Path(directory, "rendezvous")),
        }
        configs = [config | {"rank": rank} for rank in range(2)]
        with party("allreduce_rank.py", configs, descriptors=[board, *blocks]) as processes:
            yield Party(processes)


@contextmanager
def _shared(num_bytes: int) -> Iterator[int]:
    """A descriptor of shared memory that is gone with the last process that maps it."""
    descriptor = os.memfd_create("weft-benchmark")
    try:
        os.ftruncate(descriptor, num_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main("allreduce", collect)
