"""Ours in benchmarks/optimizer.py: one owner, which updates its range of every bucket in shared memory.

Reads "run WAY K" lines, takes K steps together with the other owners, and prints their seconds as a JSON list; a step
ends when all have ended theirs. Config: rank, cores (one owner on each), layers, width, memory (the file descriptors of
values, gradients and board).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.transport.memory.board import Board
from weft.workers.updates.sharded_optimizer import Segment, Shard, ShardedOptimizer
from weft.workload.optimizer import make_optimizer

BUCKET_ELEMENTS = 25 * 2**20 // 4
SPIN_SECONDS = 4e-3  # as in Weft's workers
WORDS, SUMS_AT = 16, 64  # of the board's memory: int32 words, then a float64 sum for each owner


class Owner:
    """Adam's update of one owner, in the ways that the benchmark compares."""

    def __init__(self, config: dict[str, int | list[int]], values: Tensor, gradients: Tensor, memory: Tensor) -> None:
        self._rank = int(str(config["rank"]))
        cores = config["cores"]
        assert isinstance(cores, list)
        self._num_owners = len(cores)
        self._board = Board(memory[: 4 * WORDS].view(torch.int32), SPIN_SECONDS)
        self._sums = memory[SUMS_AT : SUMS_AT + 8 * self._num_owners].view(torch.float64)
        self._meetings = 0
        width = int(str(config["width"]))
        parameters = [nn.Parameter(each.view(width, width)) for each in values.view(-1, width * width)]
        template = make_optimizer(lambda given: torch.optim.AdamW(given, lr=1e-4), parameters)
        assert template is not None
        shards = dict(enumerate(self._shards(values, gradients, width * width)))
        self._buckets = list(shards)
        self._optimizer = ShardedOptimizer(template, shards, parameters=parameters, speculative=True)
        self.ways: dict[str, Callable[[], None]] = {
            "unclipped": self._unclipped,
            "wait": self._wait,
            "wait_clipped": lambda: self._wait(clip=True),
            "speculate": self._speculate,
            "speculate_clipped": lambda: self._speculate(clip=True),
        }

    def meet(self) -> None:
        """Returns when every owner has called it as often."""
        self._board.post(self._rank, self._meetings)
        for other in range(self._num_owners):
            self._board.wait(other, self._meetings)
        self._meetings += 1

    def _unclipped(self) -> None:
        for bucket in self._buckets:
            self._optimizer.step(bucket)

    def _wait(self, clip: bool = False) -> None:
        scale = self._scale(sum(self._optimizer.sum_of_squares(bucket) for bucket in self._buckets), clip)
        for bucket in reversed(self._buckets):  # what was read last is still in the cache
            self._optimizer.step(bucket, scale=scale)

    def _speculate(self, clip: bool = False) -> None:
        scale = self._scale(sum(self._optimizer.speculate(bucket) for bucket in self._buckets), clip)
        for bucket in reversed(self._buckets):
            if scale == 1.0:
                self._optimizer.confirm(bucket)
            else:
                self._optimizer.undo(bucket)
                self._optimizer.step(bucket, scale=scale)

    def _scale(self, squares: float, clip: bool) -> float:
        """As clip_grad_norm_ works it out, of every owner's sum; the greatest norm is a half of it where we clip."""
        self._sums[self._rank] = squares
        self.meet()
        norm = math.sqrt(self._sums.sum().item())
        return min(1.0, norm * (0.5 if clip else 2.0) / (norm + 1e-6))

    def _shards(self, values: Tensor, gradients: Tensor, size: int) -> list[Shard]:
        """Bucket by bucket this owner's share of it, equal to the others'."""
        shards = []
        for begin in range(0, values.numel(), BUCKET_ELEMENTS):
            share = min(BUCKET_ELEMENTS, values.numel() - begin) // self._num_owners
            start = begin + self._rank * share
            stop = start + share
            segments = []
            for number in range(start // size, -(-stop // size)):
                first, last = max(start, number * size), min(stop, (number + 1) * size)
                segments.append(Segment(number, 0, first - start, last - start, first - number * size))
            shards.append(Shard(values[start:stop], gradients[start:stop], tuple(segments)))
        return shards


def main() -> None:
    config = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {config["cores"][config["rank"]]})
    torch.set_num_threads(1)
    values, gradients, board = (torch.frombuffer(mmap.mmap(each, 0), dtype=torch.uint8) for each in config["memory"])
    owner = Owner(config, values.view(torch.float32), gradients.view(torch.float32), board)
    for line in sys.stdin:
        _, way, count = line.split()
        step, seconds = owner.ways[way], []
        for _ in range(int(count)):
            owner.meet()
            started = time.perf_counter()
            step()
            owner.meet()
            seconds.append(time.perf_counter() - started)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
