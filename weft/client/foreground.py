"""Foreground: a job that runs to its end while its user looks on, for `weft run`, `weft compare` and `weft.run`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from weft.client.client import Client, DaemonUnreachable, RequestRefused
from weft.spec.job_spec import JobSpec
from weft.transport.wire.frames import Message

CANCEL_SECONDS = 10.0  # for a job to end after a Ctrl-C; then its daemon is stopped anyway


def run_in_foreground(client: Client, spec: JobSpec, job: str | None = None) -> tuple[Message, Message]:
    """The job's result and what `show` says of it then. Log and progress go to stderr. Whatever interrupts
    it cancels the job.

    job: its id, by default one that the daemon makes.
    """
    from weft.client.follower import follow

    job = client.submit(spec, job=job)["job"]
    try:
        with _stderr() as stderr:
            result = follow(client.follow(job), log=stderr, progress=stderr)
    except (DaemonUnreachable, RequestRefused):
        raise
    except BaseException:  # Ctrl-C, what the caller's signal handler raises, nobody who reads what is shown
        _cancel(client, job)
        raise
    return result, client.show(job)


def _cancel(client: Client, job: str) -> None:
    try:
        try:
            client.cancel(job)
            ended = client.wait(job, CANCEL_SECONDS)
        except (RequestRefused, KeyboardInterrupt):  # it does not end in time, or for one who has no more patience
            _tell_where(job, "is stopped", client.show(job)["run_dir"])
            raise
    except RequestRefused:
        return  # the daemon's end is the job's
    _tell_where(job, ended["state"], ended["run_dir"])


def _tell_where(job: str, how: str, run_dir: str) -> None:
    with contextlib.suppress(OSError), _stderr() as stderr:  # who reads stderr may be why it was cancelled
        print(f"weft: {job} {how}; its files stay in {run_dir}", file=stderr, flush=True)


@contextlib.contextmanager
def _stderr() -> Iterator[TextIO]:
    """Nowhere, in a process that was started without one."""
    if sys.stderr is not None:
        from weft.client.console import whole_stream

        yield whole_stream(sys.stderr)
        return
    with open(os.devnull, "w") as nowhere:
        yield nowhere
