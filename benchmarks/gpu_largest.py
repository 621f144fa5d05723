"""The largest GPT that trains on one GPU, with the preset stronghold and with plain PyTorch, and how fast.

    plain         everything on the GPU: 16 bytes of state for each parameter, and activations    peers/gpu_loop.py
    stronghold    a working window of layers on the GPU, state on the host

Models differ in their number of layers. Each side's largest is searched by doubling, then bisection, between bounds of
memory: no more state than there is memory, on the GPU or on GPU and host. A try is a whole run of a few iterations; one
that fails for want of memory is too large, on the GPU, in what workers share, or since it left the host none. Any
other failure ends the benchmark. Stronghold begins where plain ended, so that both rates of that size are known.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_contenders import Failed, Length, Run, TooLarge, job_spec, run_job, run_peer
from gpu_models import TINY, Gpt
from gpu_session import GIB, Session, main
from measure import Result, value_result
from size_search import Found, largest

from weft.client.client import Client

MODEL = Gpt(layers=1, dim=3072, heads=24)  # 113 million parameters for each layer
STEP = 2  # layers
BATCH_SIZE = 2  # 2 k tokens: activations are small beside the state
CLIP_NORM = 1.0
MAX_TRIES = 8
LENGTH = Length(warm=2, measured=4)
STAND_IN_LIMIT = 6  # layers; nothing is too large for the host there
PLAIN_SHARE = 0.35  # of the time, at most, for the search of plain


@dataclass(slots=True, kw_only=True)
class Side:
    """One way to train: how it is tried, the layers that memory could hold at best, and what came out."""

    name: str
    limit: int
    attempt: Callable[[Gpt], Run]
    runs: dict[int, Run] = field(default_factory=dict)
    found: Found = field(default_factory=lambda: Found(0, 0, is_settled=False))


def collect(session: Session) -> list[Result]:
    model = TINY if session.stand_in else MODEL
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as runs_dir, session.daemon(runs_dir) as client:
        plain, stronghold = sides(session, client, model)
        search(session, plain, model, first=plain.limit // 2, share=PLAIN_SHARE)
        first = plain.found.size or plain.limit // 2
        search(session, stronghold, model, first=first, share=1.0)
    return results(session, model, plain, stronghold)


def sides(session: Session, client: Client, model: Gpt) -> tuple[Side, Side]:
    def job(gpt: Gpt) -> Run:
        axes = {"preset": "stronghold", "precision": "bf16", "clip_norm": CLIP_NORM}
        return run_job(session, client, job_spec(gpt.args(samples=8), axes, BATCH_SIZE), LENGTH)

    def peer(gpt: Gpt) -> Run:
        axes = {"precision": "bf16", "clip_norm": CLIP_NORM}
        return run_peer(session, "plain", job_spec(gpt.args(samples=8), axes, BATCH_SIZE), LENGTH)

    both = session.gpu_bytes + session.host_bytes
    limits = [STAND_IN_LIMIT] * 2 if session.stand_in else [most_layers(model, n) for n in (session.gpu_bytes, both)]
    return Side(name="plain", limit=limits[0], attempt=peer), Side(name="stronghold", limit=limits[1], attempt=job)


def most_layers(model: Gpt, num_bytes: int) -> int:
    """Whose state alone is no larger."""
    none = model.with_layers(0).state_bytes()
    return max(0, (num_bytes - none) // (model.with_layers(1).state_bytes() - none))


def search(session: Session, side: Side, model: Gpt, *, first: int, share: float) -> None:
    """share: of the time that is left."""
    leave = session.seconds_left * (1 - share)
    longest = 0.0

    def fits(layers: int) -> bool:
        nonlocal longest
        before, gpt = session.seconds_left, model.with_layers(layers)
        what = f"{side.name}, {layers} layers, {gpt.num_parameters() / 1e9:.3g} B"
        try:
            side.runs[layers] = side.attempt(gpt)
        except TooLarge as error:
            session.say(f"{what}: too large: {error}")
        except Failed as error:
            raise SystemExit(f"{what}: {error}") from None
        else:
            session.say(f"{what}: {1e3 * side.runs[layers].seconds:.0f} ms")
        longest = max(longest, before - session.seconds_left)
        return layers in side.runs

    side.found = largest(
        fits,
        first=max(STEP, first),
        step=STEP,
        limit=side.limit,
        max_tries=3 if session.quick else MAX_TRIES,
        may_go_on=lambda: session.seconds_left - longest > leave,
    )
    if not side.found.is_settled:
        session.note(f"{side.name}: not settled, the largest lies between {side.found.size} and {side.found.too_large}")


def results(session: Session, model: Gpt, plain: Side, stronghold: Side) -> list[Result]:
    rows = [row for side in (plain, stronghold) for row in size_rows(session, model, side)]
    sizes = [model.with_layers(side.found.size).num_parameters() for side in (stronghold, plain) if side.found.size]
    if len(sizes) == 2:
        how = "parameters of the largest GPT with stronghold ÷ with plain PyTorch, all on the GPU"
        rows.append(value_result("largest_vs_plain", [sizes[0] / sizes[1]], "x", how=how))
    common = max(set(plain.runs) & set(stronghold.runs), default=None)
    if common is not None:
        how = f"iteration of plain PyTorch ÷ ours with stronghold; {model.with_layers(common)}, {BATCH_SIZE} samples"
        ratio = plain.runs[common].seconds / stronghold.runs[common].seconds
        rows.append(value_result("throughput_vs_no_offload", [ratio], "x", how=how))
    return rows


def size_rows(session: Session, model: Gpt, side: Side) -> list[Result]:
    if not side.found.size:
        session.note(f"{side.name}: no size was seen to fit")
        return []
    gpt, run = model.with_layers(side.found.size), side.runs[side.found.size]
    memory = f"{session.gpu_bytes / GIB:.0f} GiB of the GPU and {session.host_bytes / GIB:.0f} GiB of the host"
    share = gpt.state_bytes() / (session.gpu_bytes + session.host_bytes)
    size, rate = gpt.num_parameters() / 1e9, BATCH_SIZE * gpt.context / run.seconds
    return [
        value_result(
            f"largest_{side.name}", [size], "B", how=f"parameters; {gpt}, {BATCH_SIZE} samples, bf16, clipped"
        ),
        value_result(
            f"memory_share_{side.name}", [share], "%", scale=100, how=f"16 bytes of a parameter, of {memory} together"
        ),
        value_result(f"tokens_per_second_{side.name}", [rate], "1/s", how="of that model"),
    ]


if __name__ == "__main__":
    main("gpu_largest", collect, parts=())
