"""Forward parts: where a stage's first forward of an iteration waits for parameters that are still on their way.

The forward runs in one call, from inside of its first part's task. Where it is about to call a module whose parameters
a later part waits for, that part's task begins: the lane ends the one that it is in, and waits.

    lane       FORWARD(r,s,0,b)   ▕ stall_update ▏ FORWARD(r,s,0)
    forward    unit 0   unit 1    ▕    waits     ▏ unit 2   unit 3
                                  ▲ reach(unit 2): go_on

A part is reached by the first call of any module that has a parameter of it, in whatever order a step calls modules;
and by whoever reads such a parameter of a module that is not called. Parameters that are no called module's own are
waited for before the forward begins. A part that a forward has not reached is a task with nothing to do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import nn

from weft.plan.buckets import Holder, parts_of_forward
from weft.plan.worker_view import WorkerView
from weft.workers.compute.watched import watch
from weft.workers.devices.device import Device
from weft.workload.randomness import generators_kept

_NOTHING = contextlib.nullcontext()


class ForwardParts:
    """part_of: by id of a parameter, the number of the part that waits for it; 0 of others. count: of parts. go_on:
    ends the task that the calling lane is in and begins its next one. device: whose `drawing` a forward holds, and lets
    go while it waits."""

    def __init__(
        self, part_of: Mapping[int, int], count: int, go_on: Callable[[], None], device: Device | None
    ) -> None:
        self._part_of = part_of
        self._last = count - 1
        self._go_on = go_on
        self._device = device
        self._at = self._last  # behind the first forward there is nothing to wait for
        self._thread = 0  # that is in the user's code

    @classmethod
    def of(
        cls,
        view: WorkerView,
        holder: Holder,
        parameters: list[nn.Parameter],
        go_on: Callable[[Holder], None],
        device: Device,
    ) -> ForwardParts:
        """parameters: the model's, of which it has the stage's."""
        borders = [
            task.bucket
            for program in view.programs.values()
            for task in program
            if task.goes_on and task.bucket is not None and task.holder == holder
        ]
        if not borders or view.synchronisation is None:
            return cls.whole()
        buckets = view.synchronisation.buckets
        parts = parts_of_forward(buckets, holder, borders)
        part_of = {
            id(parameters[place.parameter]): parts[bucket.index]
            for bucket in buckets
            if bucket.index in parts
            for place in bucket.places
        }
        return cls(part_of, len(borders) + 1, lambda: go_on(holder), device)

    @classmethod
    def whole(cls) -> ForwardParts:
        """Of a forward that waits for all before it begins."""
        return cls({}, 1, lambda: None, None)

    @property
    def count(self) -> int:
        return self._last + 1

    def needed_by(self, parameters: Iterable[nn.Parameter]) -> int:
        """The number of the part that waits for the last of them."""
        return max((self._part_of.get(id(each), 0) for each in parameters), default=0)

    def watch(self, model: nn.Module) -> None:
        """From now on whoever reads a late part's parameter waits for it."""
        late = {parameter for parameter, part in self._part_of.items() if part}
        if late:
            watch(model, late, self._read)

    def seeing_reads(self) -> contextlib.AbstractContextManager[None]:
        """Around the user's code, whose thread holds `drawing`."""
        return self._seeing_reads() if self._at < self._last else _NOTHING

    @contextlib.contextmanager
    def _seeing_reads(self) -> Iterator[None]:
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = 0

    def begin(self) -> None:
        """The first forward of an iteration."""
        self._at = 0

    def end(self) -> None:
        """It is over, or will never be."""
        self._at = self._last

    def reach(self, part: int) -> None:
        """Before anything of the part is read. The caller holds `drawing`, and seeds generators after it. Errors: those
        of a lane that ends."""
        while self._at < part:
            self._at += 1
            self._wait()

    def _read(self, parameter: nn.Parameter) -> None:
        """In the midst of whatever the user's code computes, which goes on to draw."""
        part = self._part_of.get(id(parameter), 0)
        if self._at < part and self._thread == threading.get_ident():
            with generators_kept():
                self.reach(part)

    def _wait(self) -> None:
        assert self._device is not None
        self._device.drawing.release()  # what is waited for may be behind another stage's backward
        try:
            self._go_on()
        finally:
            self._device.drawing.acquire()
        self._device.launching()
