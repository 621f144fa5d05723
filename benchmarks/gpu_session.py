"""Where a GPU benchmark runs, for how long, and the body of its script.

    python benchmarks/gpu_NAME.py               on GPU 0; exit code 69 and a sentence where there is none
    python benchmarks/gpu_NAME.py --stand-in    tiny, on the CPU: every step but no GPU figure; the JSON says "stand-in"

What could not be measured is told in `notes`, on stderr and in the JSON: a peer that is not installed, a model that did
not fit, a contender that failed. After a failure the exit code is 1; the numbers that are there stand.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import psutil
import torch
from measure import CANNOT_RUN_HERE, STAND_IN, Result, make_parser, report, text_table
from party import party

import weft.client.embedded
from weft.machine.gpus import read_inventory

SECONDS = 500.0  # under ten minutes with a last run that ends late: what people wait for
GIB = 1 << 30
START_SECONDS = 180.0  # of a daemon with a GPU: torch with CUDA is slow to import from a cold disk
BALLAST_SECONDS = 120.0


@dataclass(slots=True, kw_only=True)
class Session:
    """only: the parts that were asked for, all by default. threads: of the host's worker; a peer has `cores`.

    gpu_bytes, host_bytes: the memory there is. ends: on time.monotonic(), when nothing new is begun.
    """

    quick: bool
    stand_in: bool
    only: tuple[str, ...]
    threads: int
    gpu_bytes: int
    host_bytes: int
    ends: float
    notes: list[str] = field(default_factory=list)
    has_failed: bool = False

    @property
    def cores(self) -> int:
        """The threads of a peer: one on a stand-in, where other processes may want the cores."""
        return 1 if self.stand_in else len(os.sched_getaffinity(0))

    @property
    def device(self) -> str:
        """Of a plain loop."""
        return "cpu" if self.stand_in else "cuda:0"

    @property
    def device_name(self) -> str:
        return STAND_IN if self.stand_in else torch.cuda.get_device_name(0)

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def daemon(self, runs_dir: str) -> weft.client.embedded.Daemon:
        """With the one GPU, or its stand-in, and one CPU worker, which is the host or a replica."""
        return weft.client.embedded.Daemon(
            workers=1,
            threads=self.threads,
            stand_ins=1 if self.stand_in else None,
            gpus=None if self.stand_in else 1,
            runs_dir=runs_dir,
            start_seconds=START_SECONDS,
        )

    def say(self, text: str) -> None:
        """Progress, so that numbers are not lost with a command that is stopped."""
        print(text, file=sys.stderr, flush=True)

    def note(self, text: str, *, failed: bool = False) -> None:
        self.notes.append(text)
        self.has_failed |= failed
        self.say(text)


def main(name: str, collect: Callable[[Session], list[Result]], *, parts: Sequence[str]) -> None:
    """The body of a script. parts: what `--only` may name."""
    arguments = _parser(name, parts).parse_args()
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # so that Weft's first GPU is every peer's
    if not arguments.stand_in and (reason := missing()):
        print(f"{name}: {reason}; --stand-in runs it on the CPU, without a figure", file=sys.stderr)
        raise SystemExit(CANNOT_RUN_HERE)
    with _card_of(arguments) as gpu_bytes:
        session = Session(
            quick=arguments.quick,
            stand_in=arguments.stand_in,
            only=tuple(arguments.only or parts),
            threads=arguments.threads,
            gpu_bytes=gpu_bytes,
            host_bytes=round(arguments.host_gib * GIB),
            ends=time.monotonic() + arguments.seconds,
        )
        results = [replace(result, goal=None) if session.stand_in else result for result in collect(session)]
    told = report(
        name, results, device=session.device_name, gpu_gib=round(gpu_bytes / GIB, 1), notes=list(session.notes)
    )
    if arguments.json:
        print(json.dumps(told, indent=1))
    else:
        print(f"device: {session.device_name}\n{text_table(results)}", *session.notes, sep="\n")
    raise SystemExit(1 if session.has_failed else 0)


def missing() -> str | None:
    """Why a GPU cannot be used here; None where it can."""
    if not torch.cuda.is_available():
        return f"there is no GPU that torch {torch.__version__} can use"
    inventory = read_inventory()
    return None if inventory.gpus else f"Weft finds no GPU: {inventory.reason}"


def _parser(name: str, parts: Sequence[str]) -> argparse.ArgumentParser:
    parser = make_parser(name)
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / GIB
    parser.add_argument("--stand-in", action="store_true", help="tiny, on the CPU: to see that it works, no GPU figure")
    parser.set_defaults(only=None)
    if parts:
        parser.add_argument("--only", action="append", choices=parts, help="one part; may be given again; default: all")
    parser.add_argument(
        "--threads", type=int, default=max(1, cores // 2), help="of Weft's host worker; default %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin nothing after; default %(default)s")
    parser.add_argument("--host-gib", type=float, default=memory, help="memory to use; default all, %(default).1f")
    parser.add_argument("--gpu-gib", type=float, help="leave the GPU no more than this, like a smaller card")
    return parser


@contextmanager
def _card_of(arguments: argparse.Namespace) -> Iterator[int]:
    """Its bytes, of which --gpu-gib has the rest taken meanwhile: what is free is then what a smaller card has."""
    if arguments.stand_in:
        yield psutil.virtual_memory().total
    elif arguments.gpu_gib is None:
        yield torch.cuda.get_device_properties(0).total_memory
    else:
        with party("gpu_ballast.py", [{"free_bytes": round(arguments.gpu_gib * GIB)}]) as (process,):
            yield json.loads(answer(process, BALLAST_SECONDS))["free_bytes"]


def answer(process: subprocess.Popen[str], seconds: float) -> str:
    """The next line of a party's process. Errors: TimeoutError."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    if not ready:
        raise TimeoutError(f"process {process.pid} has said nothing for {seconds:.0f} s")
    return process.stdout.readline()
