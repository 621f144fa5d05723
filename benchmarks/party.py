"""A party to a benchmark: processes of a script in peers/, one for each config, that do what their input says.

They have the allocator that workers have, unless it is said. They end when their input does, by their own will within
seconds or killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.scheduler.daemon.fork_server import ALLOCATOR

PEERS = Path(__file__).resolve().parent / "peers"
END_SECONDS = 10.0  # for a process whose partner has died in the middle of an operation, too

Party = list[subprocess.Popen[str]]


@contextmanager
def party(
    script: str,
    configs: Sequence[Mapping[str, Any]],
    *,
    threads: int = 1,
    environment: Mapping[str, str] = MappingProxyType({}),
    allocator: Mapping[str, str] = ALLOCATOR,
    descriptors: Sequence[int] = (),
) -> Iterator[Party]:
    """threads: of each process. environment: beside the allocator's. descriptors: that stay open in every process."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(PEERS / script), json.dumps(config)],
            env={**os.environ, **allocator, "OMP_NUM_THREADS": str(threads), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            text=True,
        )
        for config in configs
    ]
    try:
        yield processes
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def ask(processes: Party, what: object) -> list[Any]:
    """Has every process run that at the same time, such as a number of iterations; what each of them measured."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"run {what}\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        assert process.stdout is not None
        answers.append(json.loads(process.stdout.readline()))
    return answers
