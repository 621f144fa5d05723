"""The fork server's process, as the daemon starts it; what it does is in weft/workers/process/fork_server.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

# Large tensors come and go every iteration. Served from mappings of their own they would be page faults at 2.6 GB/s:
# one heap that is kept serves them from warm pages, and torch's huge pages the ones above 32 MiB. From glibc 2.35 on
# the heap has huge pages, too: to find a ResNet's many small tensors through small ones took 6 % of an iteration.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

# torch may ask for a GPU even while it is imported, and a process that has asked CUDA itself cannot be forked any more.
# NVML can be asked.
FORKABLE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


WORKERS_LOG = "workers.log"  # in the state directory: what the server says, and workers outside of jobs
MAX_LOG_BYTES = 64 << 20  # of it: what a program prints that a job starts must not fill the disk
TAIL_BYTES = 512  # of it, in the error that the server has died


class PoolError(RuntimeError):
    """The fork server cannot be started. The text says why."""


def _opened(log: Path) -> IO[bytes]:
    try:
        return log.open("ab")
    except OSError as error:
        raise PoolError(
            f"{log}: cannot be opened ({error.strerror}); move away what is there, or give another --state-dir"
        ) from error


def _tunables(environment: Mapping[str, str]) -> str:
    """Behind the user's own, of which glibc takes the last."""
    return ":".join(filter(None, [ALLOCATOR["GLIBC_TUNABLES"], environment.get("GLIBC_TUNABLES", "")]))


def bound(log: Path) -> None:
    """Begins the log anew where it is too large. Whoever has it open appends, and so goes on at its new end."""
    with suppress(OSError):
        size = log.stat().st_size
        if size > MAX_LOG_BYTES:
            os.truncate(log, 0)
            with log.open("ab") as file:
                file.write(b"this log had %d bytes, and begins anew\n" % size)


def last_line(log: Path) -> str:
    """That is not empty, quoted."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"({error.strerror})"
    return next((f"{line.strip()!r:.{TAIL_BYTES}}" for line in reversed(lines) if line.strip()), "(nothing)")


def start_fork_server(theirs: socket.socket, environment: Mapping[str, str], log: Path) -> psutil.Popen:
    """theirs: its end of the socket by which it is asked. Errors: PoolError."""
    # -P: a directory where the daemon was started that is called `weft`, a clone's, must not be taken for it.
    command = [sys.executable, "-P", "-m", "weft.workers", str(theirs.fileno()), str(os.getpid())]
    with _opened(log) as output:
        try:
            return psutil.Popen(  # a fork and an exec: about a millisecond
                command,
                pass_fds=[theirs.fileno()],
                env={**environment, **ALLOCATOR, **FORKABLE, "GLIBC_TUNABLES": _tunables(environment)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise PoolError(
                f"{sys.executable}: the fork server cannot be started ({error.strerror}); "
                "check the installation, and how many processes you may have"
            ) from error
