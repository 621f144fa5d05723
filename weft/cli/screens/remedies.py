"""Remedies: what helps against a bottleneck, of what the job has not been given already. Pure.

Each is a sentence and the settings that it names, as `--set` of `weft whatif` and `weft run` take them: alternatives,
each of one setting or more. An alternative is there only where it makes another strategy, and one that this model and
batch can be run by: a split that is unset is not advised to be unset, more microbatches than samples are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from weft.cli.screens.toml_text import toml
from weft.plan.kinds import Kind
from weft.plan.schedules.grid import schedule_of
from weft.spec.replica import MAX_MICROBATCHES, Replica
from weft.spec.schedule_text import is_grid, num_lines, why_not_stages
from weft.spec.strategy import MAX_LOADERS, MAX_PREFETCH, Strategy
from weft.transport.wire.frames import Message

MORE_WINDOW: Final = 8  # times: a window that is given is mostly 1, and a lane wants some tens of short tasks

Settings = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    text: str
    alternatives: tuple[Settings, ...] = ()  # each helps by itself, its settings together; empty where no setting helps


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the job runs by."""

    strategy: Strategy
    stages: Sequence[Message]  # as the plan's summary has them
    batch_size: int  # as many samples as there are at the most
    num_train: int  # samples of a pass over the data
    streams: bool = False  # of whose data one loader draws items one after another
    chosen: bool = False  # by `auto`: the job's file says less than the strategy
    resting: tuple[int, ...] = ()  # replicas whose share has become 0, so that they get no samples

    @classmethod
    def of(cls, plan: Message, *, chosen: bool = False) -> Setup | None:
        """None of a job that a Weft has recorded whose plans did not say."""
        if not all(key in plan for key in ("strategy", "stages", "batch_size", "num_train")):
            return None
        strategy = Strategy.model_validate(plan["strategy"])
        shares = () if strategy.steals else plan.get("shares", ())  # who steals may have none but once
        return cls(
            strategy=strategy,
            stages=plan["stages"],
            batch_size=min(plan["batch_size"], plan["num_train"]),
            num_train=plan["num_train"],
            streams=plan.get("streams", False),
            chosen=chosen,
            resting=tuple(number for number, share in enumerate(shares) if not share),
        )

    def splits_backwards(self, number: int) -> bool:
        """Whether a stage may compute the second part of a backward where it would have waited."""
        replica, strategy = self.replica(number), self.strategy
        if replica.working_window is not None:
            return False
        count = replica.microbatches or strategy.microbatches
        schedule = schedule_of(strategy.schedule, replica.num_stages, count, strategy.stages_per_worker)
        return any(each.kind is Kind.WEIGHT for program in schedule.programs for each in program)

    def replica_of(self, worker: str) -> int:
        """Of the stage on that worker; the first where it has none."""
        return next((stage.get("replica", 0) for stage in self.stages if stage["worker"] == worker), 0)

    def replica(self, number: int) -> Replica:
        return self.strategy.replica_list[number]

    def units(self, replica: int) -> list[tuple[int, int]]:
        """The first unit and the one after the last, by stage."""
        return [(stage["units"][0], stage["units"][1]) for stage in self.stages if stage.get("replica", 0) == replica]

    def changed(self, number: int, **axes: Any) -> Settings:
        """Settings that give a replica, or all where they are not listed, other values; None: as if never given."""
        listed = self.strategy.replicas
        if not isinstance(listed, list):
            return tuple(f"strategy.{axis}={toml(value)}" for axis, value in axes.items() if value is not None)
        tables = [replica.model_dump(exclude_none=True) for replica in listed]
        tables[number] = {axis: value for axis, value in (tables[number] | axes).items() if value is not None}
        return (f"strategy.replicas={toml(tables)}",)


# --- what could be otherwise: the settings, or None where nothing would be


def more_microbatches(setup: Setup, number: int) -> tuple[int, Settings] | None:
    """Twice as many, as far as a replica's share of a batch has samples for them."""
    own = setup.replica(number).microbatches or 1
    sharing = 1 if setup.strategy.steals else len(setup.strategy.replica_list)
    more = min(2 * own, MAX_MICROBATCHES, setup.batch_size // sharing)
    return _microbatches(setup, number, more) if more > own else None


def fewer_microbatches(setup: Setup, number: int) -> tuple[int, Settings] | None:
    own = setup.replica(number).microbatches or 1
    return _microbatches(setup, number, own // 2) if own > 1 else None


def _microbatches(setup: Setup, number: int, count: int) -> tuple[int, Settings] | None:
    if is_grid(setup.strategy.schedule):
        return None
    listed = setup.strategy.replicas
    if isinstance(listed, list) and listed[number].microbatches is not None:
        return count, setup.changed(number, microbatches=count)
    return count, (f"strategy.microbatches={count}",)


def fewer_stages(setup: Setup, number: int, count: int) -> Settings | None:
    """So many or fewer, as the schedule can have them, at least one; where a split is given the first of its cuts."""
    replica, strategy = setup.replica(number), setup.strategy
    possible = (
        fewer
        for fewer in range(count, 0, -1)
        if why_not_stages(strategy.schedule, fewer, strategy.stages_per_worker) is None
    )
    count = next(possible, 0)
    if not 1 <= count < replica.num_stages or is_grid(strategy.schedule):
        return None
    axes: dict[str, Any] = {"stages": count}
    if replica.split is not None:
        axes["split"] = replica.split[: count - 1]
    if replica.gpus is not None:
        axes["gpus"] = min(replica.gpus, num_lines(strategy.schedule, count, strategy.stages_per_worker))
    return setup.changed(number, **axes)


def larger_batch(setup: Setup) -> tuple[int, Settings] | None:
    more = min(2 * setup.batch_size, setup.num_train)
    return (more, (f"job.batch_size={more}",)) if more > setup.batch_size else None


def one_unit_less(setup: Setup, number: int, stage: int, lighter: int) -> list[int] | None:
    """The split in which a stage gives a unit to its neighbour; None where it has but one."""
    units = setup.units(number)
    if abs(lighter - stage) != 1 or not 0 <= lighter < len(units) or units[stage][1] - units[stage][0] < 2:
        return None
    split = [first for first, _ in units[1:]]
    if lighter < stage:
        split[stage - 1] += 1
    else:
        split[stage] -= 1
    return split


# --- what helps, by what is lost


def of_busy() -> Remedy:
    return Remedy(text="Only more workers, or faster arithmetic, make an iteration shorter.")


def of_data(setup: Setup, *, from_device: bool, source_is_busy: bool) -> Remedy:
    """from_device: it waits for the copy to the device, not for the loader."""
    if source_is_busy and not from_device:
        return _of_busy_loader(setup)
    step = "transfer" if from_device else "load"
    prefetch = setup.strategy.prefetch
    ahead = prefetch.transfer if from_device else prefetch.most_batches
    cheaper = "Bring less to the device, in fewer bytes" if from_device else "Make the dataset's items cheaper to get"
    if source_is_busy or ahead >= MAX_PREFETCH:
        return Remedy(text=f"{cheaper}.")
    more = min(2 * ahead, MAX_PREFETCH)
    what = "bring more microbatches" if from_device else "load more batches"
    text = f"{cheaper}, or {what} ahead with strategy.prefetch.{step} = {more}."
    return Remedy(text=text, alternatives=((f"strategy.prefetch.{step}={more}",),))


def _of_busy_loader(setup: Setup) -> Remedy:
    cheaper, more = "Make the dataset's items cheaper to get", setup.strategy.loaders + 1
    if setup.streams or more > MAX_LOADERS:
        return Remedy(text=f"{cheaper}.")
    text = f"{cheaper}, or, where a core is free for it, have one more loader: strategy.loaders = {more}."
    return Remedy(text=text, alternatives=((f"strategy.loaders={more}",),))


def of_small_tasks(setup: Setup, number: int) -> Remedy:
    parts, alternatives = [], []
    stages = setup.replica(number).num_stages
    if (fewer := fewer_stages(setup, number, stages // 2)) is not None:
        parts.append(f"fewer stages ({_spoken(fewer)})")
        alternatives.append(fewer)
    if (larger := fewer_microbatches(setup, number)) is not None:
        parts.append(f"larger microbatches ({_spoken(larger[1])})")
        alternatives.append(larger[1])
    if (batch := larger_batch(setup)) is not None:
        parts.append(f"larger batches ({_spoken(batch[1])})")
        alternatives.append(batch[1])
    if not parts:
        return Remedy(text="The model and its data are too small to be divided: run it in fewer parts.")
    text = " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return Remedy(text=f"{text[0].upper()}{text[1:]} make tasks longer.", alternatives=tuple(alternatives))


def of_bubble(setup: Setup, number: int) -> Remedy:
    if (more := more_microbatches(setup, number)) is not None:
        text = f"More microbatches make the bubble smaller: {_spoken(more[1])}."
        return Remedy(text=text, alternatives=(more[1],))
    enough = "There is a microbatch for each sample"
    if (fewer := fewer_stages(setup, number, setup.replica(number).num_stages - 1)) is not None:
        text = f"{enough}; fewer stages have a smaller bubble: {_spoken(fewer)}."
        return Remedy(text=text, alternatives=(fewer,))
    return _larger(setup, enough, "make it smaller")


def of_slow_stage(setup: Setup, number: int, stage: int | None, lighter: int) -> Remedy:
    """stage: of the replica; None where several share a worker, and nobody can say which one it is. lighter: the
    neighbour that computes less."""
    given = setup.replica(number).split is not None
    balance = ", or leave split unset to balance measured times" if given else ""
    if stage is None:
        return Remedy(text=f"Give it fewer units with strategy.split{balance}.")
    if (split := one_unit_less(setup, number, stage, lighter)) is not None:
        told = {"stages": len(split) + 1} if setup.chosen else {}  # which the job's file does not say
        cut = setup.changed(number, **told, split=split)
        why = "" if given else "Its units take longer than when they were inspected. "
        return Remedy(text=f"{why}Give it fewer units: {_spoken(cut)}{balance}.", alternatives=(cut,))
    fewer = fewer_stages(setup, number, setup.replica(number).num_stages - 1)
    one = "It is one unit, and a unit is not cut: make it two"
    if fewer is None:
        return Remedy(text=f"{one}.")
    return Remedy(text=f"{one}, or use fewer stages: {_spoken(fewer)}.", alternatives=(fewer,))


def of_slow_replica(setup: Setup, slow: int, number: int) -> Remedy:
    if setup.strategy.share == "fixed":
        text = 'Give it a smaller share of each batch: strategy.share = "adaptive".'
        return Remedy(text=text, alternatives=(('strategy.share="adaptive"',),))
    if setup.strategy.share == "stealing" and (more := more_microbatches(setup, number)) is not None:
        text = f"More microbatches let the others take more of its work: {_spoken(more[1])}."
        return Remedy(text=text, alternatives=(more[1],))
    text = "Shares follow its speed already; what is left over needs cores of its own"
    if (without := _without(setup, slow)) is None:
        return Remedy(text=f"{text}.")
    return Remedy(text=f"{text}, or a strategy without that replica: {_spoken(without)}.", alternatives=(without,))


def of_uneven_replicas(setup: Setup) -> Remedy:
    return _larger(setup, "Cores that are shared with other programs are a common reason", "even it out")


def of_sync(setup: Setup) -> Remedy:
    resting = setup.resting
    if resting and (without := _without(setup, *resting)) is not None:
        one = len(resting) == 1
        which = f"Replica {resting[0]} has" if one else f"Replicas {', '.join(map(str, resting))} have"
        left = f"a strategy without {'it' if one else 'them'}: {_spoken(without)}"
        text = f"{which} no samples any more, and take{'s' if one else ''} each update all the same: {left}."
        return Remedy(text=text, alternatives=(without,))
    strategy, parts, alternatives = setup.strategy, [], []
    if strategy.sync == "coarse":
        parts.append('let them begin within backward (strategy.sync = "fine")')
        alternatives.append(('strategy.sync="fine"',))
    windows = any(replica.working_window for replica in strategy.replica_list)
    if not any(strategy.staleness_list) and not windows:
        parts.append("allow strategy.staleness = 1")
        alternatives.append(("strategy.staleness=1",))
    if not parts:
        return _larger(setup, "They begin as early as they can", "reduce and update less often")
    text = ", or ".join(parts)
    return Remedy(text=f"{text[0].upper()}{text[1:]}.", alternatives=tuple(alternatives))


def _lacks_slots(strategy: Strategy, replica: Replica) -> bool:
    """Whether its schedule has fewer slots than a stage has microbatches."""
    count = replica.microbatches or strategy.microbatches
    if replica.num_stages == 1 or replica.working_window is not None:
        return False
    schedule = schedule_of(strategy.schedule, replica.num_stages, count, strategy.stages_per_worker)
    of_each = len(schedule.programs) == replica.num_stages  # a worker, as under any other schedule
    return of_each and schedule.in_flight(replica.num_stages - 1) < count


def of_slot(setup: Setup, number: int) -> Remedy:
    replica, strategy = setup.replica(number), setup.strategy
    if _lacks_slots(strategy, replica):
        text = 'strategy.schedule = "gpipe" has a slot for each microbatch, and takes the memory for it.'
        return Remedy(text=text, alternatives=(('strategy.schedule="gpipe"',),))
    if replica.device == "gpu" and strategy.prefetch.transfer < MAX_PREFETCH:
        more = min(2 * strategy.prefetch.transfer, MAX_PREFETCH)
        text = f"More slots of the device: strategy.prefetch.transfer = {more}."
        return Remedy(text=text, alternatives=((f"strategy.prefetch.transfer={more}",),))
    if replica.num_stages > 1 and (many := more_microbatches(setup, number)) is not None:
        return Remedy(text=f"More microbatches have more slots: {_spoken(many[1])}.", alternatives=(many[1],))
    return Remedy(text="Only whoever reads it can be made faster: its row says what it does meanwhile.")


def of_dispatch(setup: Setup, number: int) -> Remedy:
    window = setup.strategy.window
    if window is not None:
        more = (f"strategy.window={MORE_WINDOW * window}",)
        text = f"Leave strategy.window unset: it is {window}, and unset it covers a second."
        return Remedy(text=text, alternatives=(more,))
    if (larger := fewer_microbatches(setup, number)) is not None:
        text = f"Give the daemon a core, or make tasks longer with larger microbatches: {_spoken(larger[1])}."
        return Remedy(text=text, alternatives=(larger[1],))
    return _larger(setup, "Give the daemon a core", "make tasks longer")


def of_recovery() -> Remedy:
    return Remedy(text="The log says which worker was lost, and why.")


def of_idle() -> Remedy:
    return Remedy(text="Whoever stopped it (a debugger, SIGSTOP, a batch system) can let it go on.")


def of_update(setup: Setup, number: int) -> Remedy:
    if setup.replica(number).device == "gpu" and setup.strategy.update == "local":
        text = 'The CPU can take some of it over: strategy.update = "balanced".'
        return Remedy(text=text, alternatives=(('strategy.update="balanced"',),))
    return _larger(setup, "", "make fewer of them")


def _larger(setup: Setup, reason: str, effect: str) -> Remedy:
    if (batch := larger_batch(setup)) is None:
        return Remedy(text=f"{reason or 'A batch is all the data already, and there is one update for it'}.")
    start = f"{reason}; larger" if reason else "Larger"
    return Remedy(text=f"{start} batches {effect}: {_spoken(batch[1])}.", alternatives=(batch[1],))


def _without(setup: Setup, *numbers: int) -> Settings | None:
    """The replicas but these; None where the others' axes are lists too, or none would be left."""
    strategy = setup.strategy
    left = len(strategy.replica_list) - len(numbers)
    if left < 1 or strategy.shares is not None or isinstance(strategy.staleness, list):
        return None
    if not isinstance(strategy.replicas, list):
        return (f"strategy.replicas={left}",)
    tables = [replica.model_dump(exclude_none=True) for replica in strategy.replicas]
    return (f"strategy.replicas={toml([table for number, table in enumerate(tables) if number not in numbers])}",)


def _spoken(settings: Settings) -> str:
    return " with ".join(" = ".join(setting.split("=", 1)) for setting in settings)
