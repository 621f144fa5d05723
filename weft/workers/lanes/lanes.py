"""The lanes of one worker in one attempt: one in the calling thread, the others in threads of their own.

A lane ends when its inbox brings None or the attempt is aborted. What a lane in the calling thread raises is raised
here, once the others have ended too; what another raises is told at once and ends that lane alone: the daemon, who
hears of it, ends the rest.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from weft.plan.graph import Task
from weft.plan.schedules.dynamic import PassOrder
from weft.workers.devices.device import Accelerator
from weft.workers.lanes.account import Send
from weft.workers.lanes.attempt import Attempt
from weft.workers.lanes.host_lane import HostLane
from weft.workers.lanes.lane import LaneLoop, Observer
from weft.workers.lanes.launched import Launched
from weft.workers.lanes.queue import Inbox
from weft.workers.lanes.stream_lane import StreamLane

Guard = Callable[[Callable[[], None]], object]
Progress = Callable[[], list[dict[str, Any]]]  # of each lane, see LaneLoop


def run_lanes(
    main: str,
    programs: Mapping[str, Sequence[Task]],
    inboxes: Mapping[str, Inbox],
    attempt: Attempt,
    send: Send,
    guard: Guard,
    *,
    threads: int,
    stamps: bool = True,
    observer: Observer | None = None,
    watch: Callable[[Progress], None] | None = None,
    free: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """programs: by lane. main: the lane of the calling thread. guard: runs a lane in another thread, and tells what it
    raises. threads: of torch, in each lane. stamps: see Account. watch: gets what tells another thread how far the
    lanes are. free: as in the graph, by lane."""
    orders = {name: PassOrder(programs[name], limit) for name, limit in free.items()}
    lanes = _make_lanes(main, programs, attempt, send, observer, orders, stamps=stamps)
    if watch is not None:
        watch(lambda: [lane.progress() for lane in lanes.values()])

    def run_beside(name: str) -> None:
        torch.set_num_threads(threads)  # torch counts them for each thread of ours
        guard(lambda: lanes[name].run(inboxes[name]))

    beside = [
        threading.Thread(target=run_beside, args=(name,), name=name, daemon=True) for name in lanes if name != main
    ]
    for thread in beside:
        thread.start()
    has_ended = False
    try:
        lanes[main].run(inboxes[main])
        has_ended = True
    finally:
        if not has_ended:
            attempt.abort()
            for inbox in inboxes.values():
                inbox.put(None)
        for thread in beside:
            thread.join()


def _make_lanes(
    main: str,
    programs: Mapping[str, Sequence[Task]],
    attempt: Attempt,
    send: Send,
    observer: Observer | None,
    orders: Mapping[str, PassOrder],
    *,
    stamps: bool,
) -> Mapping[str, LaneLoop]:
    operations = {name: attempt.operations(name, program) for name, program in programs.items()}
    make: Callable[..., LaneLoop]
    if isinstance(attempt.device, Accelerator):
        own_tasks = frozenset(task for own in operations.values() for task in own)
        launched = Launched(attempt.num_tasks, own_tasks, attempt.course.begins)
        attempt.abort_with(launched.board)
        make = functools.partial(StreamLane, device=attempt.device, launched=launched)
    else:
        make = functools.partial(_host_lane, orders)
    return {
        name: make(name, attempt, own, send, stamps=stamps, observer=observer, is_main=name == main)
        for name, own in operations.items()
    }


def _host_lane(orders: Mapping[str, PassOrder], name: str, *arguments: Any, **options: Any) -> HostLane:
    return HostLane(name, *arguments, order=orders.get(name), **options)
