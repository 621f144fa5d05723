"""Descriptors: the limit is raised at the daemon's start, and strangers and new work never get the last ones.

A process gets the lowest number that is free, so a descriptor's number says how many are open below it: no counting.
"""

from __future__ import annotations

import errno
import os
import resource

MOST = 1 << 16  # raised no further: some programs that a job may start look at each number below their limit
RESERVE = 64  # for what the daemon has taken on: workers' sockets, files of jobs that run, the ledger
AMPLE = 1024  # 256 clients, 64 of HTTP, workers and files


def raise_limit() -> int:
    """Raises the soft limit as far as the hard one lets us; returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else MOST
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def is_among_the_last(descriptor: int) -> bool:
    """Whether it is one of those that are kept for what is under way."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(RESERVE, limit // 2)


def are_short() -> bool:
    """Whether the next one would be among the last."""
    try:
        descriptor = os.open("/", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return is_among_the_last(descriptor)
    finally:
        os.close(descriptor)


def hardly_one(later: str = "") -> str:
    """What a stranger is told who is refused, with the remedy. later: when to try again under a limit that is ample."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY or limit >= AMPLE:
        return f"the daemon has hardly a descriptor left; try again{later}"
    return (
        f"the daemon has hardly a descriptor left of the {limit} that it may have; start it under a higher "
        f"`ulimit -n`, {AMPLE} or more, or with LimitNOFILE={AMPLE} in its unit"
    )


def has_run_out(error: BaseException | None) -> bool:
    """Whether this process could open no more, which is what an error came of: the kernel's, or torch's text of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return True
        if isinstance(error, RuntimeError) and os.strerror(errno.EMFILE) in str(error):
            return True
        error = error.__cause__
    return False


def all_open() -> str:
    """Where it has: they cannot be counted, which would take one, and need not be."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"the {limit} descriptors that a process may have are all open here (RLIMIT_NOFILE)"
