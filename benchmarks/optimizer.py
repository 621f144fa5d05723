"""AdamW over 50 million parameters: ours, an owner for each core, against torch's fused kernel on the same cores.

    ours     owner 0 on core 0 │ its half of each bucket of 25 MiB, in shared memory │ sums of squares meet in a board
             owner 1 on core 1 │ the other half                                      │
    theirs   one process, a thread for each core: clip_grad_norm_, then torch.optim.AdamW(fused=True)

Both take turns, with the allocator settings of Weft's workers. Our ways to clip:

    wait         the norm of the whole gradient, then the step, scaled
    speculate    the step along with the norm; where that clips, undone and taken again, scaled
"""

from __future__ import annotations

import functools
import importlib.util
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from measure import Result, interleave, main, ratio_result, value_result
from party import Party, ask, party

LAYERS, WIDTH = 3, 4096
STEPS = 5  # of one turn, whose median counts
WAYS = ("wait", "wait_clipped", "speculate", "speculate_clipped", "unclipped")


def collect(quick: bool) -> list[Result]:
    runs = 2 if quick else 15
    cores = sorted(os.sched_getaffinity(0))[:2]
    results = _on(cores, "", runs)
    return results + (_on(cores[:1], "one_core_", runs) if len(cores) > 1 else [])


def _on(cores: list[int], prefix: str, runs: int) -> list[Result]:
    with ExitStack() as stack:
        owners = stack.enter_context(_owners(cores))
        torch_peer = stack.enter_context(party("fused_adamw.py", [_peer(cores, "torch")], threads=len(cores)))
        measures: dict[str, Callable[[], float]] = {way: functools.partial(_seconds, owners, way) for way in WAYS}
        measures["torch_clipping"] = functools.partial(_seconds, torch_peer, "1")
        measures["torch"] = functools.partial(_seconds, torch_peer, "0")
        if importlib.util.find_spec("deepspeed") is not None:
            deepspeed = stack.enter_context(party("fused_adamw.py", [_peer(cores, "deepspeed")], threads=len(cores)))
            measures["deepspeed"] = functools.partial(_seconds, deepspeed, "0")
        for measure in measures.values():
            measure()
        values = interleave(runs, *measures.values())
    return _results(prefix, len(cores), dict(zip(measures, values, strict=True)))


def _results(prefix: str, num_cores: int, seconds: dict[str, list[float]]) -> list[Result]:
    peer, plain = seconds["torch_clipping"], seconds["torch"]
    where = f"{LAYERS} x {WIDTH} x {WIDTH} float32, cores {num_cores}"
    clipping = "clip_grad_norm_ (foreach) and AdamW(fused=True) ÷ ours"
    goal = None if prefix else ">= 0.95"
    rows = [
        ("adamw_vs_fused", peer, "wait", goal, f"{clipping}, which waits for the norm; no gradient clipped"),
        ("adamw_clipped_vs_fused", peer, "wait_clipped", None, f"{clipping}, which waits; every gradient clipped"),
        ("adamw_speculative_vs_fused", peer, "speculate", None, f"{clipping}, which speculates; none clipped"),
        (
            "adamw_undone_vs_fused",
            peer,
            "speculate_clipped",
            None,
            f"{clipping}: every step speculated, undone, redone",
        ),
        ("adamw_unclipped_vs_fused", plain, "unclipped", None, "AdamW(fused=True) ÷ ours, neither clips"),
    ]
    results = [
        ratio_result(prefix + name, theirs, seconds[way], goal=goal_of, how=f"{how}; {where}")
        for name, theirs, way, goal_of, how in rows
    ]
    if "deepspeed" in seconds:
        how = f"DeepSpeedCPUAdam ÷ ours, neither clips; {where}"
        results.append(ratio_result(f"{prefix}adamw_vs_deepspeed", seconds["deepspeed"], seconds["unclipped"], how=how))
    results.append(
        value_result(f"{prefix}adamw", seconds["wait"], "ms", scale=1e3, how=f"ours of {prefix}adamw_vs_fused")
    )
    results.append(value_result(f"{prefix}adamw_fused", peer, "ms", scale=1e3, how=f"theirs of {prefix}adamw_vs_fused"))
    return results


def _peer(cores: list[int], optimizer: str) -> dict[str, Any]:
    return {"cores": cores, "layers": LAYERS, "width": WIDTH, "optimizer": optimizer}


@contextmanager
def _owners(cores: list[int]) -> Iterator[Party]:
    """One process for each core, over shared memory that has no name."""
    memory = [os.memfd_create(name) for name in ("values", "gradients", "board")]
    try:
        for each, deviation in zip(memory[:2], (WIDTH**-0.5, 1 / WIDTH), strict=True):
            with open(os.dup(each), "wb") as file:
                (torch.randn(LAYERS * WIDTH * WIDTH) * deviation).numpy().tofile(file)
        os.write(memory[2], b"\xff" * 4096)  # a board's words begin at -1
        config = {"cores": cores, "layers": LAYERS, "width": WIDTH, "memory": memory}
        configs = [config | {"rank": rank} for rank in range(len(cores))]
        with party("optimizer_owner.py", configs, descriptors=memory) as processes:
            yield processes
    finally:
        for each in memory:
            os.close(each)


def _seconds(processes: Party, way: str) -> float:
    """Median step of a turn. Every process of the party measures the same steps; the slowest's count."""
    answers = ask(processes, f"{way} {STEPS}")
    slowest: list[float] = [max(seconds) for seconds in zip(*answers, strict=True)]
    return statistics.median(slowest)


if __name__ == "__main__":
    main("optimizer", collect)
