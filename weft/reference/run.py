"""Reference run: `weft run --reference`, the plain PyTorch loop of `weft.reference.loop` as a run of its own.

It trains in this process, without a daemon, and leaves what a job leaves: model.safetensors, metrics.jsonl, a result.
The only part of the command line that imports torch, and only when it is asked for.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from weft.spec.job_spec import JobSpec
from weft.spec.presets import AUTO
from weft.transport.wire.frames import Message

if TYPE_CHECKING:
    import torch

    from weft.reference.loop import ReferenceResult

MAX_RUNS_OF_ONE_NAME = 10_000
REPORT_SECONDS = 1.0
STEPS_OF_MEDIAN = 127  # the newest: as of a job that Weft runs, with which it is compared

_NOTHING_MEASURED = (
    "weft: strategy.compile = 'auto': nothing is measured here, and units run eager; for the bits of a job give the "
    "`compile` of its strategy.json"
)


def run_reference(spec: JobSpec, *, threads: int, runs_dir: Path, compiled: Path | None = None) -> Message:
    """Trains the job here and returns its result. A fault of the user's code is a result too, its traceback on stderr.

    threads: of torch. compiled: as of `train`. Raises OSError where the run directory cannot be written.
    """
    from weft.reference import loop as reference
    from weft.workload.faults import fault_of

    if spec.strategy.compile == AUTO:
        print(_NOTHING_MEASURED, file=sys.stderr)
    run_dir = _new_directory(runs_dir, f"{spec.entry_file.stem}-reference")
    result: Message = {"job": run_dir.name, "run_dir": str(run_dir), "model": None, "validation": {}}
    start, told = time.monotonic(), _Steps(sys.stderr)
    lines: list[dict[str, Any]] = []
    try:
        with _own_streams():
            trained = reference.train(spec, threads=threads, on_step=told, on_line=lines.append, compiled=compiled)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        fault = fault_of(error)
        print(fault.message, file=sys.stderr)
        _write_lines(run_dir, lines)
        steps, loss = 0, None
        result |= {
            "state": "failed",
            "reason": fault.reason,
            "exception": fault.exception or None,
            "error": fault.message,
            "exit_code": fault.exit_code,
        }
    else:
        steps, loss = len(trained.losses), trained.losses[-1]
        _write_lines(run_dir, lines)
        model, best = _write_weights(run_dir, trained)
        validation = trained.validations[-1] if trained.validations else {}
        result |= {"state": "completed", "reason": None, "model": str(model), "validation": validation}
        result |= {"best": best and str(best), "error": None, "exit_code": 0}
        if trained.stopped is not None:
            result["stopped"] = f"stopped early after step {steps}: {trained.stopped}"
    seconds = time.monotonic() - start
    return result | {
        "steps": steps,
        "loss": loss,
        "seconds": seconds,
        "iteration_seconds": told.median_seconds() if steps else None,
        "limit_seconds": None,
    }


def _new_directory(runs_dir: Path, name: str) -> Path:
    for number in range(1, MAX_RUNS_OF_ONE_NAME):
        directory = runs_dir.resolve() / f"{name}-{number}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        return directory
    raise FileExistsError(f"{runs_dir}: {MAX_RUNS_OF_ONE_NAME} runs called {name}; remove some, or give --runs-dir")


def _write_lines(run_dir: Path, lines: list[dict[str, Any]]) -> None:
    metrics = run_dir / "metrics.jsonl"
    with _writing(metrics), open(metrics, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _write_weights(run_dir: Path, trained: ReferenceResult) -> tuple[Path, Path | None]:
    """The files of the trained weights and of the best, where the job keeps them."""
    model = run_dir / "model.safetensors"
    _save(trained.state, model)
    if trained.best is None:
        return model, None
    best = run_dir / "best.safetensors"
    _save(trained.best, best)
    return model, best


def _save(state: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    with _writing(path):
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Around what writes a file: its errors name that, and the remedy."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OSError(f"{path} cannot be written: {why}; make room, or give another --runs-dir") from error


@contextmanager
def _own_streams() -> Iterator[None]:
    """What the job's code puts in their place is its own for as long as it runs."""
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


class _Steps:
    """Called with (step, loss) after each update: stamps the newest of them, and prints at most once a second."""

    def __init__(self, shown: TextIO) -> None:
        self._shown = shown
        self._ends: deque[float] = deque(maxlen=STEPS_OF_MEDIAN + 1)
        self._printed_at = time.monotonic()

    def __call__(self, step: int, loss: float) -> None:
        now = time.monotonic()
        self._ends.append(now)
        if now - self._printed_at >= REPORT_SECONDS:
            self._printed_at = now
            print(f"step {step + 1}  loss {loss:.4g}", file=self._shown, flush=True)

    def median_seconds(self) -> float | None:
        """Of a step, from the end of the one before; None of a single one, which has imports and caches in it."""
        seconds = [after - before for before, after in pairwise(self._ends)]
        return median(seconds) if seconds else None
