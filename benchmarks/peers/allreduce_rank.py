"""One of the two processes of a party of benchmarks/allreduce.py: weft, gloo or triad, a core and one thread for each.

Reads "OPERATION NUM_BYTES REPEATS" lines and prints the CLOCK_MONOTONIC nanoseconds at which each repeat began and
ended, as JSON. Before each repeat, untimed, every process fills its gradients anew, as a backward pass would, and meets
the other at the board. After the last one it checks the sum.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from measure import pin

from weft.scheduler.daemon.pool import SPIN_SECONDS
from weft.transport.memory.board import Board
from weft.transport.memory.collectives import Reduction

MEETING, READY, DONE = 0, 2, 4  # words of the board, one for each rank
PATIENCE = datetime.timedelta(seconds=60)
Operation = Callable[[], Any]


class Rank:
    """What the parties share: the meeting before each repeat, the stamps, and this rank's gradients."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.rank: int = config["rank"]
        self.elements: int = config["max_bytes"] // 4
        words = _mapped(config["words"], config["num_words"], torch.int32)
        self._board = Board(words, SPIN_SECONDS)
        self._meetings = 0

    def fill(self, elements: int) -> None:
        """Rank 0 has ones and rank 1 twos, so that the sum is threes."""
        raise NotImplementedError

    def operation(self, name: str, elements: int) -> Operation:
        raise NotImplementedError

    def check(self, elements: int) -> None:
        raise NotImplementedError

    def run(self, name: str, elements: int, repeats: int) -> list[tuple[int, int]]:
        operation = self.operation(name, elements)
        stamps = []
        for _ in range(repeats):
            self.fill(elements)
            self.meet()
            started = time.monotonic_ns()
            operation()
            stamps.append((started, time.monotonic_ns()))
            self.meet()
        self.check(elements)
        return stamps

    def meet(self) -> None:
        self.handshake(MEETING, self._meetings)
        self._meetings += 1

    def handshake(self, word: int, number: int) -> None:
        """Says that this rank is there, and waits until the other is."""
        self._board.post(word + self.rank, number)
        self._board.wait(word + 1 - self.rank, number)


class Weft(Rank):
    """Each rank's gradients in a shared block of its own; each owner's sum in its own block, where all can read it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._blocks = [_mapped(block, self.elements, torch.float32) for block in config["blocks"]]
        self._reductions: dict[int, Reduction] = {}
        self._number = 0

    def fill(self, elements: int) -> None:
        self._blocks[self.rank][:elements].fill_(1.0 + self.rank)

    def operation(self, name: str, elements: int) -> Operation:
        """With name "squares" also the sum of squares of this rank's half, as for clipping; with "sum" without."""
        squares = name == "squares"
        if elements not in self._reductions:
            start, end = halves(elements)[self.rank]
            self._reductions[elements] = Reduction(
                self._blocks[self.rank][start:end], [block[start:end] for block in self._blocks]
            )
        reduction = self._reductions[elements]

        def reduce() -> None:
            self.handshake(READY, self._number)  # both gradients are there
            found = reduction.run(squares=squares)
            self.handshake(DONE, self._number)  # both halves are summed
            self._number += 1
            assert not squares or found == 9.0 * (elements // 2), found

        return reduce

    def check(self, elements: int) -> None:
        for block, (start, end) in zip(self._blocks, halves(elements), strict=True):
            assert (block[start:end] == 3.0).all()


def halves(elements: int) -> list[tuple[int, int]]:
    """Each owner's range; the sizes here divide into whole cache lines."""
    return [(0, elements // 2), (elements // 2, elements)]


class Gloo(Rank):
    """torch.distributed's all_reduce of private gradients, in place."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        dist.init_process_group(
            "gloo", init_method=f"file://{config['rendezvous']}", rank=self.rank, world_size=2, timeout=PATIENCE
        )
        self._gradients = torch.ones(self.elements)

    def fill(self, elements: int) -> None:
        self._gradients[:elements].fill_(1.0 + self.rank)

    def operation(self, name: str, elements: int) -> Operation:
        gradients = self._gradients[:elements]
        return lambda: dist.all_reduce(gradients)

    def check(self, elements: int) -> None:
        assert (self._gradients[:elements] == 3.0).all()


class Triad(Rank):
    """The limit: an addition that streams over as many bytes of private memory, alone in the process."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._halves = [torch.ones(self.elements // 2) for _ in range(2)]

    def fill(self, elements: int) -> None:
        for i, half in enumerate(self._halves):
            half[: elements // 2].fill_(1.0 + i)

    def operation(self, name: str, elements: int) -> Operation:
        first, second = (half[: elements // 2] for half in self._halves)
        return lambda: torch.add(first, second, out=first)

    def check(self, elements: int) -> None:
        assert (self._halves[0][: elements // 2] == 3.0).all()


def _mapped(descriptor: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=dtype)


def main() -> None:
    config = json.loads(sys.argv[1])
    pin(config["rank"])
    torch.set_num_threads(1)
    rank = {"weft": Weft, "gloo": Gloo, "triad": Triad}[config["party"]](config)
    for line in sys.stdin:
        name, num_bytes, repeats = line.split()
        print(json.dumps(rank.run(name, int(num_bytes) // 4, int(repeats))), flush=True)


if __name__ == "__main__":
    main()
