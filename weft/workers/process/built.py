"""Built: the workload as a worker that knows its part of the plan loads it, with little memory for the rest."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from weft.plan.worker_view import Unneeded
from weft.spec.job_spec import JobSpec
from weft.workers.process.footprint import small_pages, trim
from weft.workload.building import LITTLE_BYTES, NeedsValuesError, Sink, digest_of
from weft.workload.code.version import CodeVersion
from weft.workload.entry import load_again, load_workload, unload
from weft.workload.workload import Workload


class Untouched:
    """A workload that was loaded for an inspection, and that nobody has run since what it would find out was known: the
    stage of the worker that has it may begin with it. Of little memory, and with rows of tensors for data: whatever
    else they are, to load the batch that an inspection compares runs code of the user's."""

    def __init__(self) -> None:
        self._there: tuple[JobSpec, Workload] | None = None

    def note(self, spec: JobSpec, workload: Workload, facts: Mapping[str, Any]) -> None:
        """facts: of the inspection."""
        num_bytes = sum(parameter.nbytes for parameter in workload.model.parameters())
        is_little = facts["data_bytes"] is not None and num_bytes + facts["data_bytes"] <= LITTLE_BYTES
        self._there = (spec, workload) if is_little else None

    def or_unload(self, spec: JobSpec, before: Collection[str]) -> None:
        """After a look."""
        if self._there is None:
            unload(spec, before)
            gc.collect()  # models are full of cycles, and the job wants the memory

    def take(self, spec: JobSpec, before: Collection[str]) -> Workload | None:
        """Once; None where there is none, or it is of another strategy."""
        there, self._there = self._there, None
        if there is None:
            return None
        own, workload = there
        if own == spec:
            return workload
        unload(spec, before)
        return None


@contextlib.contextmanager
def built(
    spec: JobSpec, unneeded: Unneeded, before: Collection[str], untouched: Untouched, version: CodeVersion
) -> Iterator[Workload]:
    """The workload, of which the caller keeps what it needs and drops the rest before it leaves the block.

    What is unneeded has no values, or, where the user's function asks for these or copies modules, it is all there, and
    the job's workers take turns. before: as of `unload`. Errors: as of `load_workload`, and CodeChanged.
    """
    if (found := untouched.take(spec, before)) is not None:
        yield found
        return
    version.check()
    copies = unneeded.copied_bytes > LITTLE_BYTES
    with contextlib.ExitStack() as stack:
        if is_much(unneeded):
            stack.enter_context(small_pages())
        if copies:
            stack.enter_context(_turn(spec))
        made = _without(spec, unneeded, before) if unneeded.num_bytes > LITTLE_BYTES else []
        if is_much(unneeded) and not made and not copies:
            stack.enter_context(_turn(spec))
        made = made or [load_workload(spec)]
        version.check()
        yield made.pop()
        if is_much(unneeded):
            trim()


def built_again(spec: JobSpec, before: Collection[str], version: CodeVersion) -> Workload:
    """Another one, which shares nothing with those before it, the user's modules neither. Errors: as of `built`."""
    version.check()
    workload = load_again(before, spec)
    version.check()
    return workload


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
