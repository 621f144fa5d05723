"""Built: the workload as a worker that knows its part of the plan loads it, with little memory for the rest."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator

from weft.plan.worker_view import Unneeded
from weft.spec.job_spec import JobSpec
from weft.workers.process.footprint import small_pages, trim
from weft.workload.building import LITTLE_BYTES, NeedsValuesError, Sink, digest_of
from weft.workload.entry import load_workload, unload
from weft.workload.workload import Workload


@contextlib.contextmanager
def built(spec: JobSpec, unneeded: Unneeded, before: Collection[str]) -> Iterator[Workload]:
    """The workload, of which the caller keeps what it needs and drops the rest before it leaves the block.

    What is unneeded has no values, or, where the user's function asks for these or copies modules, it is all there, and
    the job's workers take turns. before: as of `unload`. Errors: as of `load_workload`.
    """
    copies = unneeded.copied_bytes > LITTLE_BYTES
    with contextlib.ExitStack() as stack:
        if is_much(unneeded):
            stack.enter_context(small_pages())
        if copies:
            stack.enter_context(_turn(spec))
        made = _without(spec, unneeded, before) if unneeded.num_bytes > LITTLE_BYTES else []
        if is_much(unneeded) and not made and not copies:
            stack.enter_context(_turn(spec))
        yield made.pop() if made else load_workload(spec)
        if is_much(unneeded):
            trim()


def built_again(spec: JobSpec, before: Collection[str]) -> Workload:
    """Another one, which shares nothing with those before it, the user's modules neither. Errors: as of
    `load_workload`."""
    unload(spec, before)
    return load_workload(spec)


def is_much(unneeded: Unneeded) -> bool:
    return unneeded.num_bytes + unneeded.copied_bytes > LITTLE_BYTES


def _without(spec: JobSpec, unneeded: Unneeded, before: Collection[str]) -> list[Workload]:
    """None where the function cannot do without, which its errors may come of, too, or where a value is not that of the
    inspection: the caller calls it again. Otherwise one."""
    with contextlib.suppress(Exception, NeedsValuesError):
        workload = load_workload(spec, Sink(unneeded.numbers, unneeded.largest_bytes))
        parameters = list(workload.model.parameters())
        if all(digest_of(parameters[place]) == digest for place, digest in unneeded.digests.items()):
            return [workload]
    unload(spec, before)
    return []


@contextlib.contextmanager
def _turn(spec: JobSpec) -> Iterator[None]:
    """One process at a time, of those with jobs of this directory; whoever dies hands it on."""
    descriptor = os.open(spec.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
