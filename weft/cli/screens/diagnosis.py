"""Diagnosis: what a job's compute lanes lose most of their time to, in one sentence, and what helps. Pure.

The causes are weighed over all compute lanes; the sentence is about the lane that loses the greatest part to the
heaviest one. Under WORTH of their time nothing is worth mending, and the lanes are called busy.

    cause                    what else is looked at                          kind
    any that lanes share     the critical path: gaps between short tasks?    small-tasks
    data                                                                     data
    activation, gradient     the busiest stage of the replica: longer?       slow-stage, or bubble
    sync, update             the busiest replica: longer? what was exposed   slow-replica, sync, or uneven-replicas
    slot                     the busiest stage of the replica: longer?       slow-stage, or slot
    dispatch, recovery, idle                                                 the same
    sync, update, transfer in the compute lane itself                        update

Lanes of a replica whose share of the batch has become 0 wait for what they are not given. They are not looked at.

What helps is in weft/cli/screens/remedies.py: it depends on what the job has been given already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from weft.cli.screens import remedies
from weft.cli.screens.remedies import Remedy, Settings, Setup
from weft.plan.kinds import COMPUTE_MODES, is_compute_lane
from weft.transport.wire.frames import Message

WORTH: Final = 0.05  # of the compute lanes' time: less is within what two runs of the same job differ by
UNEVEN: Final = 0.10  # a lane computes so much longer than the mean: then it is called slow; arbitrary
GAPS: Final = 0.25  # of the critical path: if so much of it is between tasks, their number costs; arbitrary
SHORT: Final = 0.002  # seconds of a task: above it a wake-up (50 µs, more on shared cores) is small beside it
EXPOSED: Final = 0.5  # of a wait: if so much of it is reducing and updating, these are what is waited for; arbitrary
MOST: Final = (
    0.5  # of the time of a lane that brings samples: if so much is waiting for them, they come late to it, too
)

_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "data": ("stall_data",),
    "pipeline": ("stall_activation", "stall_gradient"),
    "exchange": ("stall_sync", "stall_update"),
    "slot": ("stall_slot",),
    "dispatch": ("stall_dispatch",),
    "recovery": ("recovery",),
    "idle": ("idle",),
    "update": ("sync", "update", "transfer"),
}
_WAITED_FOR: Final = {
    "stall_data": "data",
    "stall_activation": "activations",
    "stall_gradient": "gradients",
    "stall_sync": "gradients to be reduced",
    "stall_update": "updated parameters",
    "stall_slot": "a free slot",
}
_ORDINALS: Final = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")

Lanes = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    kind: str  # for scripts
    sentence: str  # the bottleneck
    remedy: str  # what helps, "" where nothing is known
    alternatives: tuple[Settings, ...] = ()  # the settings that it names, as `Remedy` has them


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a diagnosis is made from: as `show` has it, empty where unknown."""

    lanes: Lanes  # seconds by mode
    stalls: Sequence[Message] = ()
    overlap: Mapping[str, Mapping[str, Mapping[str, float]]]
    plan: Message
    path: Message | None = None  # the critical path of the last iterations
    chosen: bool = False  # whether the strategy is one that `auto` has chosen

    @property
    def setup(self) -> Setup | None:
        return Setup.of(self.plan, chosen=self.chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """The lane that loses most to the heaviest group: the mode, its share of the lane's time, the task waited for."""

    lane: str
    mode: str
    share: float
    stall: Message | None

    def waits(self) -> str:
        where = f", longest for {self.stall['task']} on {short(self.stall['on'])}" if self.stall else ""
        return f"{short(self.lane)} waits {_percent(self.share)} of its time for {_WAITED_FOR[self.mode]}{where}"

    @property
    def worker(self) -> str:
        return self.lane.partition("/")[0]


def diagnose(times: Times) -> Diagnosis | None:
    """None before any lane has computed."""
    lanes = {lane: modes for lane, modes in times.lanes.items() if is_compute_lane(lane) and _computed(modes) > 0}
    if not lanes:
        return None
    resting = _resting_workers(times)
    lanes = {lane: modes for lane, modes in lanes.items() if lane.partition("/")[0] not in resting} or lanes
    total = sum(sum(modes.values()) for modes in lanes.values())
    weights = {group: _seconds(lanes, modes) / total for group, modes in _GROUPS.items()}
    heaviest = max(weights, key=lambda group: weights[group])
    if weights[heaviest] < WORTH:
        return _busy(lanes, times)
    loss = _worst(lanes, _GROUPS[heaviest], times.stalls)
    if heaviest in _OF_HAND_OVERS and (small := _small_tasks(loss, lanes, times)) is not None:
        return small
    return _RULES[heaviest](loss, lanes, times)


def short(lane: str) -> str:
    """A compute lane is known by its worker's name."""
    return lane.removesuffix("/compute")


def _found(kind: str, sentence: str, remedy: Remedy | None) -> Diagnosis:
    if remedy is None:
        return Diagnosis(kind=kind, sentence=sentence, remedy="")
    return Diagnosis(kind=kind, sentence=sentence, remedy=remedy.text, alternatives=remedy.alternatives)


def _busy(lanes: Lanes, times: Times) -> Diagnosis:
    share = _seconds(lanes, COMPUTE_MODES) / sum(sum(modes.values()) for modes in lanes.values())
    sentence = f"The compute lanes compute {_percent(share)} of their time: no wait is worth mending."
    return _found("busy", sentence, remedies.of_busy())


def _small_tasks(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis | None:
    """Tasks so short that what passes between them counts, of a job that is divided."""
    path, num_stages = times.path, len(_stages_of_replica(loss.lane, lanes, times.plan))
    num_replicas = len({stage.get("replica") for stage in times.plan.get("stages", ())})
    if path is None or not path["seconds"] or (num_stages < 2 and num_replicas < 2):
        return None
    gaps = path["gap_seconds"] / path["seconds"]
    tasks = [step["seconds"] for step in path["steps"] if step["mode"] in COMPUTE_MODES]
    if gaps < GAPS or not tasks or median(tasks) > SHORT:
        return None
    parts = f"{num_stages} stages" if num_stages > 1 else f"{num_replicas} replicas"
    setup = times.setup
    return _found(
        "small-tasks",
        f"Tasks of {1e6 * median(tasks):.0f} µs are too small for {parts}: {_percent(gaps)} of the critical path "
        "passes between them, with wake-ups and dispatch.",
        remedies.of_small_tasks(setup, setup.replica_of(loss.worker)) if setup else None,
    )


def _data(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    on, then = loss.stall["on"] if loss.stall else "", ""
    if _waits_most(times.lanes.get(on, {})):  # what brings them to a device waits for a loader
        behind = _worst({on: times.lanes[on]}, ("stall_data",), times.stalls).stall
        loaders = [lane for lane in times.lanes if lane.endswith("/load")]
        on = behind["on"] if behind else max(loaders, key=lambda lane: _busy_share(times.lanes[lane]), default="")
        then = f", which waits for {behind['task'] if behind else 'data'} on {short(on)}" if on else ""
    source = times.lanes.get(on, {})
    busy = _busy_share(source)
    how = f", and that lane works {_percent(busy)} of its time" if source else ""
    sentence = f"{loss.waits()}{then}: samples come slower than they are trained on{how}."
    from_device = on.endswith("/fetch")
    setup = times.setup
    remedy = remedies.of_data(setup, from_device=from_device, source_is_busy=busy > 0.5) if setup else None
    return _found("data", sentence, remedy)


def _waits_most(modes: Mapping[str, float]) -> bool:
    """Whether the lane waits for data for most of its time."""
    return modes.get("stall_data", 0.0) > MOST * sum(modes.values())


def _pipeline(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    stages = _stages_of_replica(loss.lane, lanes, times.plan)
    if (slow := _slow_stage(loss, stages, lanes, times)) is not None:
        return slow
    setup = times.setup
    number = setup.replica_of(loss.worker) if setup else 0
    num_microbatches = (setup.replica(number).microbatches if setup else times.plan.get("microbatches")) or 1
    waiting = len(set(stages)) - 1  # of each worker, for as long as one of its stages takes, at the least
    least = waiting / (num_microbatches * len(stages) / (waiting + 1) + waiting)
    share = "" if setup and setup.splits_backwards(number) else f" ({_percent(least)} or more)"
    return _found(
        "bubble",
        f"{loss.waits()}: the stages are even, this is the bubble of {num_microbatches} "
        f"microbatch{'es' if num_microbatches > 1 else ''} in {len(stages)} stages{share}.",
        remedies.of_bubble(setup, number) if setup else None,
    )


def _slow_stage(loss: _Loss, stages: Sequence[str], lanes: Lanes, times: Times) -> Diagnosis | None:
    slow, longer = _busiest(stages, lanes)
    if slow == loss.lane or longer < UNEVEN:
        return None
    place = stages.index(slow)
    sentence = (
        f"{loss.waits()}: the {_ordinal(place)} stage is the slow one, it computes {_percent(longer)} longer than the "
        "mean stage."
    )
    if (setup := times.setup) is None:
        return _found("slow-stage", sentence, None)
    number = setup.replica_of(loss.worker)
    known = len(stages) == len(setup.units(number)) == len(set(stages))
    beside = [each for each in (place - 1, place + 1) if 0 <= each < len(stages)]
    lighter = min(beside, key=lambda each: _computed(lanes[stages[each]]))
    return _found("slow-stage", sentence, remedies.of_slow_stage(setup, number, place if known else None, lighter))


def _exchange(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    slow, longer = _busiest(list(lanes), lanes)
    setup, resting = times.setup, _resting_workers(times)
    stages = times.plan.get("stages", ())
    replicas = {stage.get("replica") for stage in stages if stage["worker"] not in resting}
    if len(replicas) > 1 and slow != loss.lane and longer >= UNEVEN:
        sentence = f"{loss.waits()}: {short(slow)} comes last, it computes {_percent(longer)} longer than the mean."
        remedy = None
        if setup is not None:
            worker = slow.partition("/")[0]
            remedy = remedies.of_slow_replica(setup, setup.replica_of(worker), setup.replica_of(loss.worker))
        return _found("slow-replica", sentence, remedy)
    waited = _seconds({loss.lane: lanes[loss.lane]}, _GROUPS["exchange"])
    beside = (kinds for worker, kinds in times.overlap.items() if worker not in resting)
    exposed = max((sum(kind["exposed"] for kind in kinds.values()) for kinds in beside), default=0.0)
    if len(replicas) > 1 and exposed < EXPOSED * waited:
        return _found(
            "uneven-replicas",
            f"{loss.waits()}: the replicas compute for as long, but not at the same pace in each iteration, "
            "and each waits for the last one.",
            remedies.of_uneven_replicas(setup) if setup else None,
        )
    return _found(
        "sync",
        f"{loss.waits()}: reducing and updating are not hidden, {_percent(exposed / waited)} of that wait.",
        remedies.of_sync(setup) if setup else None,
    )


def _slot(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    stages = _stages_of_replica(loss.lane, lanes, times.plan)
    if (slow := _slow_stage(loss, stages, lanes, times)) is not None:
        return slow
    setup = times.setup
    sentence = f"{loss.waits()}: it is ahead, and what it has written last has not been read yet."
    return _found("slot", sentence, remedies.of_slot(setup, setup.replica_of(loss.worker)) if setup else None)


def _dispatch(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    window, setup = times.plan.get("window"), times.setup
    ahead = f" ({window} {'tasks are' if window != 1 else 'task is'} sent ahead)" if window else ""
    return _found(
        "dispatch",
        f"{short(loss.lane)} waits {_percent(loss.share)} of its time for the daemon to dispatch{ahead}: "
        "its tasks are over before the next ones come.",
        remedies.of_dispatch(setup, setup.replica_of(loss.worker)) if setup else None,
    )


def _recovery(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    sentence = f"{short(loss.lane)} spent {_percent(loss.share)} of its time in recoveries from lost workers."
    return _found("recovery", sentence, remedies.of_recovery())


def _idle(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    sentence = f"{short(loss.lane)} stood still {_percent(loss.share)} of its time: its process was stopped."
    return _found("idle", sentence, remedies.of_idle())


def _update(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    setup = times.setup
    return _found(
        "update",
        f"{short(loss.lane)} spends {_percent(loss.share)} of its time on {loss.mode} in its compute lane, "
        "where nothing hides it.",
        remedies.of_update(setup, setup.replica_of(loss.worker)) if setup else None,
    )


_OF_HAND_OVERS: Final = ("pipeline", "exchange", "slot", "dispatch")
_RULES: Final[Mapping[str, Callable[[_Loss, Lanes, Times], Diagnosis]]] = {
    "data": _data,
    "pipeline": _pipeline,
    "exchange": _exchange,
    "slot": _slot,
    "dispatch": _dispatch,
    "recovery": _recovery,
    "idle": _idle,
    "update": _update,
}


def _worst(lanes: Lanes, modes: Sequence[str], stalls: Sequence[Message]) -> _Loss:
    share, lane, mode = max(
        (seconds.get(mode, 0.0) / sum(seconds.values()), lane, mode)
        for lane, seconds in lanes.items()
        for mode in modes
    )
    cause = mode.removeprefix("stall_")
    found = [stall for stall in stalls if (stall["lane"], stall["cause"]) == (lane, cause) and stall["task"]]
    longest = max(found, key=lambda stall: float(stall["seconds"]), default=None)
    return _Loss(lane=lane, mode=mode, share=share, stall=longest)


def _resting_workers(times: Times) -> set[str]:
    """Of replicas that get no samples any more."""
    setup = times.setup
    return {stage["worker"] for stage in setup.stages if stage.get("replica", 0) in setup.resting} if setup else set()


def _stages_of_replica(lane: str, lanes: Lanes, plan: Message) -> list[str]:
    """The compute lanes of the lane's own replica, in the order of its stages; all lanes where no plan says so."""
    stages = [(stage.get("replica", 0), f"{stage['worker']}/compute") for stage in plan.get("stages", ())]
    own = next((replica for replica, name in stages if name == lane), None)
    return [name for replica, name in stages if replica == own and name in lanes] or list(lanes)


def _busiest(names: Sequence[str], lanes: Lanes) -> tuple[str, float]:
    """The lane that computes longest, and by how much of the mean it is above that."""
    computed = {name: _computed(lanes[name]) for name in names}
    busiest = max(computed, key=lambda name: computed[name])
    return busiest, computed[busiest] / fmean(computed.values()) - 1


def _computed(modes: Mapping[str, float]) -> float:
    return sum(modes.get(mode, 0.0) for mode in COMPUTE_MODES)


def _seconds(lanes: Lanes, modes: Sequence[str]) -> float:
    return sum(seconds.get(mode, 0.0) for seconds in lanes.values() for mode in modes)


def _busy_share(modes: Mapping[str, float]) -> float:
    total = sum(modes.values())
    waited = sum(seconds for mode, seconds in modes.items() if is_wait(mode))
    return 1 - waited / total if total else 0.0


def is_wait(mode: str) -> bool:
    return mode.startswith("stall_") or mode in ("recovery", "idle")


def _ordinal(index: int) -> str:
    return _ORDINALS[index] if index < len(_ORDINALS) else f"{index + 1}th"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
