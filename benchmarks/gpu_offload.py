"""Offload: how much of the speed of training all on the GPU is left when the optimizer's state is on the host.

    practicality = iteration of the plain loop, all on the GPU ÷ ours with offload

GPTs of 0.1, 1 and 4 billion parameters, bf16 with fp32 state, AdamW, gradients clipped, 2 k and 16 k tokens in an
iteration. Whatever counts as ours is exact: it computes what the plain loop computes, with no update delayed; the first
losses of all are compared. Contenders take turns, each a run of its own:

    plain                the plain loop on the GPU                                        peers/gpu_loop.py
    zero-offload         state and updates on the host; updates are speculative          presets of Weft
    zero-offload coarse  the same, updates wait for the gradient's norm: less memory
    zero-offload by stage, by layer      where the next forward waits for what the host has updated
    cotrain              updates divided between GPU and host
    fsdp2                fully_shard of one process with CPUOffloadPolicy                 peers/gpu_loop.py
    deepspeed            ZeRO-Offload, where DeepSpeed is installed                       peers/gpu_loop.py
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_contenders import Length, Run, job_spec, run_job, run_peer, seconds_of, take_turns
from gpu_models import SIZES, TINY, Gpt
from gpu_session import GIB, Session, main
from measure import Result, ratio_result, value_result

from weft.client.client import Client

OURS: Mapping[str, Mapping[str, Any]] = {
    "zero-offload": {"preset": "zero-offload"},
    "zero-offload by layer": {"preset": "zero-offload", "waits": "layer"},
    "zero-offload by stage": {"preset": "zero-offload", "waits": "stage"},
    "zero-offload coarse": {"preset": "zero-offload", "sync": "coarse"},
    "cotrain": {"preset": "cotrain"},
}
PEERS = ("plain", "fsdp2", "deepspeed")
ORDER = (  # should time run out
    "zero-offload",
    "plain",
    "zero-offload by stage",
    "zero-offload by layer",
    "fsdp2",
    "cotrain",
    "zero-offload coarse",
    "deepspeed",
)
LAYERED_VS_STAGE = ">= 0.98"
CLIP_NORM = 1.0
BATCHES = {"2k": 2, "16k": 16}  # samples of 1024 tokens
GOALS = {"2k": ">= 0.6", "16k": ">= 0.9"}
VS_FSDP2 = ">= 2.0"
SAMPLES = 64
TOLERANCE = 1e-2  # relative, of losses: bf16 rounds at 4e-3, and FSDP2 has more of the model in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the tokens of an iteration. microbatches: what the activations of the plain loop leave room for."""

    size: str
    tokens: str
    model: Gpt
    batch_size: int
    microbatches: int
    length: Length
    turns: int

    @property
    def name(self) -> str:
        return f"{self.tokens}_{self.size}"

    def spec(self, strategy: Mapping[str, Any]) -> Any:
        axes = {"precision": "bf16", "clip_norm": CLIP_NORM, "microbatches": self.microbatches} | dict(strategy)
        return job_spec(self.model.args(samples=SAMPLES), axes, self.batch_size)


def cases(session: Session) -> list[Case]:
    found = []
    for size in session.only:
        for tokens, batch_size in BATCHES.items():
            is_large = size == "4b"
            found.append(
                Case(
                    size=size,
                    tokens=tokens,
                    model=TINY if session.stand_in else SIZES[size],
                    batch_size=batch_size,
                    microbatches=2 if is_large and tokens == "16k" else 1,
                    length=Length(warm=2, measured=3)
                    if session.quick
                    else Length(warm=5, measured=5 if is_large else 15),
                    turns=1 if session.quick else 2 if is_large else 3,
                )
            )
    return found


def collect(session: Session) -> list[Result]:
    results = []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as runs_dir, session.daemon(runs_dir) as client:
        todo = cases(session)
        for number, case in enumerate(todo):
            parts_left = len(todo) - number
            found = contenders(session, client, case)
            runs = take_turns(session, case.name, found, case.turns, parts_left=parts_left)
            check_same(session, case.name, runs)
            results += case_results(session, case, runs)
    return results


def contenders(session: Session, client: Client, case: Case) -> dict[str, Callable[[], Run]]:
    def contender(name: str) -> Callable[[], Run]:
        if name in OURS:
            return functools.partial(run_job, session, client, case.spec(OURS[name]), case.length)
        return functools.partial(run_peer, session, name, case.spec({}), case.length)

    return {name: contender(name) for name in ORDER}


def check_same(session: Session, name: str, runs: Mapping[str, Sequence[Run]]) -> None:
    """A failure unless all contenders' first losses are the same but for rounding."""
    first = {contender: each[0].losses for contender, each in runs.items() if each}
    for losses in zip(*first.values(), strict=False):  # a job has taken some more before it was cancelled
        if not all(math.isclose(loss, losses[0], rel_tol=TOLERANCE) for loss in losses):  # a nan is close to nothing
            session.note(f"{name}: FAILED: contenders do not train the same: {first}", failed=True)
            return


def case_results(session: Session, case: Case, runs: Mapping[str, Sequence[Run]]) -> list[Result]:
    seconds = {contender: seconds_of(each) for contender, each in runs.items()}
    ours = {name: seconds[name] for name in OURS if name in seconds}
    if not ours:
        return []
    best = min(ours, key=lambda name: statistics.median(ours[name]))
    what = (
        f"{case.model}; {case.batch_size} samples in {case.microbatches} microbatches, clipped to {CLIP_NORM:g}, bf16"
    )
    results = []
    if "plain" in seconds:
        results += practicality(case, seconds["plain"], ours, best, what)
    if {"zero-offload by stage", "zero-offload by layer"} <= seconds.keys():
        by_stage, by_layer = seconds["zero-offload by stage"], seconds["zero-offload by layer"]
        how = f"iteration by stage ÷ by layer, zero-offload; {what}"
        results.append(
            ratio_result(f"layered_vs_stage_{case.name}", by_stage, by_layer, goal=LAYERED_VS_STAGE, how=how)
        )
    for peer in PEERS[1:]:
        if peer in seconds:
            goal = VS_FSDP2 if peer == "fsdp2" else None
            how = f"iteration of {peer} with offload, {session.cores} threads, ÷ ours ({best}); {what}"
            results.append(
                ratio_result(f"vs_{peer}_offload_{case.name}", seconds[peer], ours[best], goal=goal, how=how)
            )
    results.append(
        value_result(
            f"ours_{case.name}",
            ours[best],
            "ms",
            scale=1e3,
            how=f"ours of these rows: {best}, a host of {session.threads} threads",
        )
    )
    return [*results, *memory(case, runs, best)]


def practicality(
    case: Case, plain: Sequence[float], ours: Mapping[str, Sequence[float]], best: str, what: str
) -> list[Result]:
    """Of the best of ours, which counts, and of each."""
    how = "iteration of the plain loop all on the GPU ÷ ours"
    goal = GOALS[case.tokens]
    rows = [ratio_result(f"practicality_{case.name}", plain, ours[best], goal=goal, how=f"{how}, {best}; {what}")]
    for name, seconds in ours.items():
        row = f"practicality_{case.name}_{name.replace('-', '_').replace(' ', '_')}"
        rows.append(ratio_result(row, plain, seconds, how=f"{how}, {name}; {what}"))
    return rows


def memory(case: Case, runs: Mapping[str, Sequence[Run]], best: str) -> list[Result]:
    """What offload is for: the GPU's memory, of ours and of the plain loop."""
    rows = []
    for name, contender in (("ours", best), ("plain", "plain")):
        peaks = [run.gpu_bytes for run in runs.get(contender, ()) if run.gpu_bytes]
        if peaks:
            how = f"the most that torch has allocated on the GPU, {contender}"
            rows.append(value_result(f"gpu_memory_{case.name}_{name}", peaks, "GiB", scale=1 / GIB, how=how))
    return rows


if __name__ == "__main__":
    main("gpu_offload", collect, parts=tuple(SIZES))
