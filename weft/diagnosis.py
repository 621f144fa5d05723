"""Diagnosis: what a job's compute lanes lose most of their time to, in one sentence, and what helps. Pure.

The causes are weighed over all compute lanes; the sentence is about the lane that loses the greatest part to the
heaviest one. Under WORTH of their time nothing is worth mending, and the lanes are called busy.

    cause                    what else is looked at                          kind
    data                                                                     data
    activation, gradient     the busiest stage of the replica: longer?       slow-stage, or bubble
    sync, update             the busiest replica: longer? what was exposed   slow-replica, sync, or uneven-replicas
    slot                     the busiest stage of the replica: longer?       slow-stage, or slot
    dispatch, recovery, idle                                                 the same
    sync, update, transfer in the compute lane itself                        update
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from weft.transport.wire import Message

WORTH: Final = 0.05  # of the compute lanes' time: less is within what two runs of the same job differ by
UNEVEN: Final = 0.10  # a lane computes so much longer than the mean: then it is called slow; arbitrary
EXPOSED: Final = 0.5  # of a wait: if so much of it is reducing and updating, these are what is waited for; arbitrary

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
    """kind: for scripts. sentence: the bottleneck. remedy: what helps, "" where nothing does."""

    kind: str
    sentence: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a diagnosis is made from. lanes: seconds by mode; the others as `show` has them, empty where unknown."""

    lanes: Lanes
    stalls: Sequence[Message] = ()
    overlap: Mapping[str, Mapping[str, Mapping[str, float]]]
    plan: Message


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


def diagnose(times: Times) -> Diagnosis | None:
    """None before any lane has computed."""
    lanes = {lane: modes for lane, modes in times.lanes.items() if is_compute(lane) and _computed(modes) > 0}
    if not lanes:
        return None
    total = sum(sum(modes.values()) for modes in lanes.values())
    weights = {group: _seconds(lanes, modes) / total for group, modes in _GROUPS.items()}
    heaviest = max(weights, key=lambda group: weights[group])
    if weights[heaviest] < WORTH:
        return _busy(lanes, times)
    return _RULES[heaviest](_worst(lanes, _GROUPS[heaviest], times.stalls), lanes, times)


def is_compute(lane: str) -> bool:
    """Also "compute-1", of another stage on the same GPU."""
    return lane.rpartition("/")[2].partition("-")[0] == "compute"


def short(lane: str) -> str:
    """A compute lane is known by its worker's name."""
    return lane.removesuffix("/compute")


def _busy(lanes: Lanes, times: Times) -> Diagnosis:
    share = _seconds(lanes, ("forward", "backward")) / sum(sum(modes.values()) for modes in lanes.values())
    return Diagnosis(
        kind="busy",
        sentence=f"The compute lanes compute {_percent(share)} of their time: no wait is worth mending.",
        remedy="Only more workers, or faster arithmetic, make an iteration shorter.",
    )


def _data(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    source = times.lanes.get(loss.stall["on"], {}) if loss.stall else {}
    busy = _busy_share(source)
    how = f", and that lane works {_percent(busy)} of its time" if source else ""
    return Diagnosis(
        kind="data",
        sentence=f"{loss.waits()}: samples come slower than they are trained on{how}.",
        remedy="Make the dataset's items cheaper to get"
        + ("." if busy > 0.5 else ", or load more batches ahead with strategy.prefetch."),
    )


def _pipeline(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    stages = _stages_of_replica(loss.lane, lanes, times.plan)
    if (slow := _slow_stage(loss, stages, lanes)) is not None:
        return slow
    num_microbatches = times.plan.get("microbatches") or 1
    least = (len(stages) - 1) / (num_microbatches + len(stages) - 1)
    return Diagnosis(
        kind="bubble",
        sentence=f"{loss.waits()}: the stages are even, this is the bubble of {num_microbatches} "
        f"microbatch{'es' if num_microbatches > 1 else ''} in {len(stages)} stages ({_percent(least)} or more).",
        remedy="More microbatches make the bubble smaller: strategy.microbatches.",
    )


def _slow_stage(loss: _Loss, stages: Sequence[str], lanes: Lanes) -> Diagnosis | None:
    slow, longer = _busiest(stages, lanes)
    if slow == loss.lane or longer < UNEVEN:
        return None
    return Diagnosis(
        kind="slow-stage",
        sentence=f"{loss.waits()}: the {_ordinal(stages.index(slow))} stage is the slow one, it computes "
        f"{_percent(longer)} longer than the mean stage.",
        remedy="Give it fewer units with strategy.split, or leave split unset to balance measured times.",
    )


def _exchange(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    slow, longer = _busiest(list(lanes), lanes)
    replicas = {stage.get("replica") for stage in times.plan.get("stages", ())}
    if len(replicas) > 1 and slow != loss.lane and longer >= UNEVEN:
        return Diagnosis(
            kind="slow-replica",
            sentence=f"{loss.waits()}: {short(slow)} comes last, it computes {_percent(longer)} longer than the mean.",
            remedy='Give it a smaller share of each batch: strategy.share = "adaptive".',
        )
    waited = _seconds({loss.lane: lanes[loss.lane]}, _GROUPS["exchange"])
    exposed = max((sum(kind["exposed"] for kind in kinds.values()) for kinds in times.overlap.values()), default=0.0)
    if len(replicas) > 1 and exposed < EXPOSED * waited:
        return Diagnosis(
            kind="uneven-replicas",
            sentence=f"{loss.waits()}: the replicas compute for as long, but not at the same pace in each iteration, "
            "and each waits for the last one.",
            remedy="Cores that are shared with other programs are a common reason; larger batches even it out.",
        )
    return Diagnosis(
        kind="sync",
        sentence=f"{loss.waits()}: reducing and updating are not hidden, {_percent(exposed / waited)} of that wait.",
        remedy='Let them begin within backward (strategy.sync = "fine"), or allow strategy.staleness = 1.',
    )


def _slot(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    stages = _stages_of_replica(loss.lane, lanes, times.plan)
    return _slow_stage(loss, stages, lanes) or Diagnosis(
        kind="slot",
        sentence=f"{loss.waits()}: it is ahead, and what it has written last has not been read yet.",
        remedy="More microbatches give a pipeline more slots; where a device's copies are read, see strategy.prefetch.",
    )


def _dispatch(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    window = times.plan.get("window")
    ahead = f" ({window} {'tasks are' if window != 1 else 'task is'} sent ahead)" if window else ""
    return Diagnosis(
        kind="dispatch",
        sentence=f"{short(loss.lane)} waits {_percent(loss.share)} of its time for the daemon to dispatch{ahead}: "
        "its tasks are over before the next ones come.",
        remedy="Leave strategy.window unset, or make tasks longer with fewer microbatches or larger batches.",
    )


def _recovery(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    return Diagnosis(
        kind="recovery",
        sentence=f"{short(loss.lane)} spent {_percent(loss.share)} of its time in recoveries from lost workers.",
        remedy="The log says which worker was lost, and why.",
    )


def _idle(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    return Diagnosis(
        kind="idle",
        sentence=f"{short(loss.lane)} has nothing to do {_percent(loss.share)} of its time.",
        remedy="More microbatches give each replica something to take.",
    )


def _update(loss: _Loss, lanes: Lanes, times: Times) -> Diagnosis:
    return Diagnosis(
        kind="update",
        sentence=f"{short(loss.lane)} spends {_percent(loss.share)} of its time on {loss.mode} in its compute lane, "
        "where nothing hides it.",
        remedy="Larger batches make fewer of them; a second worker can take them over: strategy.update.",
    )


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
    return modes.get("forward", 0.0) + modes.get("backward", 0.0)


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
