"""Inspection: what a worker found out about the user's model and data, as values for the planner. Pure.

What depends on the kind of device (a unit's seconds, and under autocast a value's dtype too) is asked for with
`units_on`, `values_on` and `update_seconds_on`. A kind of device that the job does not use has not been measured: it is
taken to be like the one that was, which only a what-if asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from weft.spec.workers_needed import ONE_CORE, Host

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """One unit of the model on one kind of device. Times are seconds for one microbatch of the largest size, measured
    alone. The times of a unit after which the model cannot be cut may count as the next one's after which it can."""

    name: str
    parameter_bytes: int
    buffer_bytes: int
    forward_seconds: float
    backward_seconds: float
    tied_to: tuple[int, ...] = ()  # earlier units that share a buffer, or a parameter that the step itself changes
    tied_by: tuple[str, ...] = ()  # the name of one such tensor for each of them
    kind: str = ""  # the name of its class
    # It writes to its input, or keeps it; cut by calls, any value of another unit's, or the batch. Or a gradient does.
    in_place: bool = False
    carries_state: bool = False  # in training its forward computes with buffers that a forward has changed
    backward_changes: str | None = None  # the name of a parameter or buffer that its backward changes, too
    state: tuple[str, ...] = ()  # of a model cut by its own forward, names of the parameters and buffers that it uses
    counts: tuple[str, ...] = ()  # of the first unit of a stage of such a model, numbers in attributes that it changes
    repeated: tuple[str, ...] = ()  # of the first unit of such a model, modules that no stage begins with: called again
    given: tuple[tuple[int, str], ...] = ()  # of such a model, to the call with which it begins: as in Border
    ends: tuple[str, ...] = ()  # as in Border, like the next
    late: tuple[str, ...] = ()
    instead: tuple[tuple[str, str], ...] = ()  # of the first unit, as in Border
    kept_bytes: int = 0  # of its forward, for a backward, without parameters and what it is given; 0: not looked at
    small_forward_seconds: float = 0.0  # as above, for a microbatch of Inspection.small_size
    small_backward_seconds: float = 0.0
    input_part: float | None = None  # of backward_seconds, what the first of two parts takes, for the stage before
    weight_part: float | None = None  # and the second, for the parameters; both together are 1 or more
    around_forward_seconds: float = 0.0  # of a stage that begins with it, beside its units: the user's step
    around_backward_seconds: float = 0.0
    around_input_seconds: float = 0.0  # of the parts of a backward
    around_weight_seconds: float = 0.0

    # Where no schedule of the job splits backwards, half is the parameters', where there are any.

    @property
    def input_seconds(self) -> float:
        return self.backward_seconds * self._input_part

    @property
    def weight_seconds(self) -> float:
        return self.backward_seconds * self._weight_part

    @property
    def small_input_seconds(self) -> float:
        return self.small_backward_seconds * self._input_part

    @property
    def small_weight_seconds(self) -> float:
        return self.small_backward_seconds * self._weight_part

    @property
    def _input_part(self) -> float:
        return 1.0 - self._weight_part if self.input_part is None else self.input_part

    @property
    def _weight_part(self) -> float:
        return (0.5 if self.parameter_bytes else 0.0) if self.weight_part is None else self.weight_part


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFacts:
    """A tensor that one unit makes and later ones read. It crosses where these are in other stages."""

    name: str  # no other value has it
    maker: int  # the number of the unit
    readers: tuple[int, ...]  # of units, ascending, all above the maker
    dtype: str
    itemsize: int
    shapes: Mapping[int, Shape]  # by microbatch size
    differentiable: bool  # a gradient comes back for it


@dataclass(frozen=True, slots=True)
class StateFacts:
    """One entry of what the optimizer keeps of a parameter."""

    name: str
    kind: Literal["elements", "tensor", "int", "float", "bool"]  # a number for each element, a tensor of one, a number
    dtype: str = ""  # of a tensor
    itemsize: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts:
    """One parameter of the model, in the order of `model.parameters()`."""

    units: tuple[int, ...]  # that use it
    num_elements: int
    dtype: str
    itemsize: int
    trained: bool  # it requires a gradient
    group: int  # in the user's optimizer
    state: tuple[StateFacts, ...] | None = None  # None where nobody knows how to take it to another optimizer
    changed_as: str | None = None  # its name, where the step itself changes it, and not its update alone
    hooked_as: str | None = None  # its name, where the user's hook takes its gradient as it stands in `grad`
    sparse_as: str | None = None  # its name, where its gradient is sparse
    number: int | None = None  # in the order in which modules got theirs (weft.workload.building); None: it is a copy
    digest: int | None = None  # of what the user's function gave it; of a small model's none

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize

    @property
    def state_bytes(self) -> int:
        """Of what the optimizer keeps for each element."""
        return sum(self.num_elements * entry.itemsize for entry in self.state or () if entry.kind == "elements")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """The input or the target of one microbatch: its dtype and its shape for each microbatch size."""

    dtype: str
    itemsize: int
    shapes: Mapping[int, Shape]

    def max_bytes(self) -> int:
        return _max_bytes(self.shapes, self.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Threaded:
    """What the host's cores take with another number of threads."""

    threads: int
    seconds: tuple[tuple[float, float, float, float], ...]  # of each unit: forward, backward, and both of small_size
    update_seconds: float
    copy_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What one worker found out about a workload."""

    units: tuple[UnitFacts, ...]  # on the host's cores, or on the job's GPUs where no replica computes on the host
    input: TensorFacts  # of a model cut by its own forward the whole batch, packed
    target: TensorFacts | None  # None: every stage reads the whole batch
    num_train: int
    num_validation: int
    load_seconds: float
    update_seconds: float  # a step of the optimizer on the whole model, by the host; by a GPU where the host makes none
    metrics: tuple[str, ...]
    parameters: tuple[ParameterFacts, ...] = ()
    elementwise: bool = True  # the optimizer treats each element by itself: a parameter may be cut between owners
    weighted: bool = False  # the workload weighs microbatches by their targets
    copy_bytes_per_second: float = 5e9  # of memory, by one thread
    link_bytes_per_second: float | None = None  # between the host and the job's GPUs, the slowest
    device_bytes: int | None = None  # free memory of the smallest GPU
    gpu_bytes: tuple[int, ...] = ()  # of each of the job's GPUs, where they tell
    # By kind of worker, of each of the job's, what the same work takes it as a multiple of what it takes the inspecting
    # one; empty where all are alike.
    slowness: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    host: Host = ONE_CORE  # the daemon's workers, as the next
    peer_access: bool = False  # each GPU can read the memory of every other one
    small_size: int = 0  # of the second microbatch that units were timed with: so a call's cost and a sample's differ
    timed_size: int = 0  # of the first, of a job whose strategy is still to be chosen; others had their own largest
    most_samples: int = 0  # of a microbatch of training that could be looked at
    crowded: str | None = None  # why no larger one was, of such a job; as a reason
    refused_sizes: Mapping[int, str] = field(default_factory=dict)  # of microbatches, and what a forward raised there
    threaded: Threaded | None = None  # with all threads, of such a job
    device_units: tuple[UnitFacts, ...] = ()  # on the job's GPUs, where both kinds compute
    values: tuple[ValueFacts, ...] = ()  # that may cross from stage to stage, as they are where `units` ran
    device_values: tuple[ValueFacts, ...] = ()  # as they are where `device_units` ran
    cut_problems: Mapping[int, str] = field(default_factory=dict)  # unit -> why the model cannot be cut before it
    device_update_seconds: float | None = None  # by a GPU, where it makes any
    skipped_calls: str = ""  # what stages have to be told of calls that they skip, pickled, in base64
    compiled: tuple[str, ...] = ()  # names of units, of a job that compiles
    compiled_calls: str = ""  # calls of them that were seen, to be compiled ahead, in the same form
    draws: bool = True  # the model draws from torch's generator, as far as anybody knows
    seeds_others: bool = False  # it draws from Python's generator, or numpy's
    joint_optimizer: bool = False  # what its step makes of a parameter depends on which others it updates
    optimizer_draws: bool = False  # the optimizer's step does, from any of them
    streams: tuple[str, ...] = ()  # fields of the workload whose items are drawn one after another
    varying_shapes: tuple[Shape, ...] = ()  # of one tensor in batches of one size, where these are not alike
    data_bytes: int | None = None  # of training and validation data; None where they are more than rows of tensors
    batch_modules: tuple[str, ...] = ()  # whose output for a sample depends in training on the others, with their kinds
    lost_attributes: tuple[str, ...] = ()  # of modules, that a step changes and no snapshot has, with what they are
    lost_beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of scheduler, optimizer, data, on_epoch
    written: tuple[str, ...] = ()  # parameters, numbers, and buffers between modules, that the step itself changes
    keeps_elsewhere: bool = False  # a step that is run again, all else as it was, comes to another loss
    keeps_numbers: bool = False  # and comes to the same with the numbers in attributes that it had
    mixes_microbatches: bool = False  # a backward comes to other gradients behind another microbatch's forward
    loss_in_parts: tuple[float, ...] = ()  # that of a batch whole, and in two parts, where these differ
    loose_parameter: str | None = None  # on a device: the name of one that something beside modules has hold of
    set_by_step: str | None = None  # an option of the optimizer's groups, by name, that the step itself has set
    step_hook: str | None = None  # the user's around the optimizer's step, by what has registered it
    on_epoch: bool = False  # the workload has a function that is asked after each epoch
    epoch_metrics: tuple[str, ...] = ()  # which it returns
    endless: bool = False  # the training data are a stream without a length: one epoch, of what the steps need
    scheduler_metric: str | None = None  # that the scheduler takes of each validation; None of one that takes none
    scheduler_span: int | None = None  # how many training steps it is written for, where its own numbers say that
    unchosen: str | None = None  # why no strategy is chosen for a job that gives none, as a reason
    undivided: str | None = None  # why the batches of such a job stay whole, in the same form
    without_gpus: str | None = None  # why none of its candidates has any, where there are some; in the same form
    compiled_too: Inspection | None = None  # the same with units compiled, of a job that leaves open whether they are
    uncompiled: str | None = None  # why there is none, as a reason
    ready_seconds: float = 0.0  # what a worker takes to have kernels ready that were made before, of `compiled_too`
    unsaved: str | None = None  # what of the optimizer's or the scheduler's state could not be put back, as a reason

    @property
    def is_cut_by_calls(self) -> bool:
        """By the model's own forward, and not between the children of an `nn.Sequential`."""
        return self.target is None

    def units_on(self, device: str) -> tuple[UnitFacts, ...]:
        """device: "cpu" or "gpu"."""
        return self.device_units if device == "gpu" and self.device_units else self.units

    def values_on(self, device: str) -> tuple[ValueFacts, ...]:
        """device: "cpu" or "gpu"."""
        return self.device_values if device == "gpu" and self.device_units else self.values

    def update_seconds_on(self, device: str) -> float:
        """device: the kind of the worker in whose lane the update runs."""
        own = self.device_update_seconds if device == "gpu" else None
        return self.update_seconds if own is None else own

    def slowness_of(self, kind: str, number: int) -> float:
        """number: of the worker among the job's of its kind, as of the next."""
        own = self.slowness.get(kind, ())
        return own[number] if number < len(own) else 1.0

    def bytes_of_gpu(self, number: int) -> int | None:
        """Free memory; None where that is the host's."""
        return self.gpu_bytes[number] if number < len(self.gpu_bytes) else self.device_bytes

    def with_threads(self, threads: int) -> Inspection:
        """Of each CPU worker, where the times with so many are known, or those with fewer and with more: by Amdahl's
        law there is a part that each takes, and one that they divide."""
        known, own = self.threaded, self.host.threads
        if known is None or not (threads == known.threads or own < threads < known.threads):
            return self
        divided = (1 / own - 1 / threads) / (1 / own - 1 / known.threads) if threads != known.threads else 1.0

        def at(before: Any, behind: float) -> Any:
            return before + divided * (behind - before)

        names = ("forward_seconds", "backward_seconds", "small_forward_seconds", "small_backward_seconds")
        units = (
            replace(unit, **{name: at(getattr(unit, name), each) for name, each in zip(names, seconds, strict=True)})
            for unit, seconds in zip(self.units, known.seconds, strict=True)
        )
        return replace(
            self,
            units=tuple(units),
            update_seconds=at(self.update_seconds, known.update_seconds),
            copy_bytes_per_second=at(self.copy_bytes_per_second, known.copy_bytes_per_second),
            threaded=None,
        )

    def link_seconds(self, num_bytes: float) -> float:
        """Of a copy between the host and a device; a stand-in's are copies in memory."""
        return num_bytes / (self.link_bytes_per_second or self.copy_bytes_per_second)

    def copy_seconds(self, num_bytes: float) -> float:
        """Of a copy in the host's memory, by one thread."""
        return num_bytes / self.copy_bytes_per_second

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Inspection:
        return cls(
            units=_units(data["units"]),
            values=_values(data["values"]),
            cut_problems={int(cut): why for cut, why in data["cut_problems"]},
            device_units=_units(data.get("device_units", ())),  # these three: where both kinds of device compute
            device_values=_values(data.get("device_values", ())),
            device_update_seconds=data.get("device_update_seconds"),
            input=TensorFacts(**{**data["input"], "shapes": _shapes(data["input"]["shapes"])}),
            target=data["target"] and TensorFacts(**{**data["target"], "shapes": _shapes(data["target"]["shapes"])}),
            skipped_calls=data.get("skipped_calls", ""),
            compiled=tuple(data.get("compiled", ())),
            compiled_calls=data.get("compiled_calls", ""),
            draws=data.get("draws", True),
            seeds_others=data.get("seeds_others", False),
            joint_optimizer=data.get("joint_optimizer", False),
            optimizer_draws=data.get("optimizer_draws", False),
            varying_shapes=tuple(map(tuple, data.get("varying_shapes", ()))),
            metrics=tuple(data["metrics"]),
            link_bytes_per_second=data.get("link_bytes_per_second"),
            device_bytes=data.get("device_bytes"),
            gpu_bytes=tuple(data.get("gpu_bytes", ())),
            slowness={kind: tuple(own) for kind, own in data.get("slowness", {}).items()},
            streams=tuple(data.get("streams", ())),
            batch_modules=tuple(data.get("batch_modules", ())),  # as the one before and the next two
            lost_attributes=tuple(data.get("lost_attributes", ())),
            lost_beside=data.get("lost_beside", {}),
            written=tuple(data.get("written", ())),
            keeps_elsewhere=data.get("keeps_elsewhere", False),
            keeps_numbers=data.get("keeps_numbers", False),
            mixes_microbatches=data.get("mixes_microbatches", False),
            loss_in_parts=tuple(data.get("loss_in_parts") or ()),
            loose_parameter=data.get("loose_parameter"),
            set_by_step=data.get("set_by_step"),
            step_hook=data.get("step_hook"),
            data_bytes=data.get("data_bytes"),
            unchosen=data.get("unchosen"),
            undivided=data.get("undivided"),
            without_gpus=data.get("without_gpus"),
            unsaved=data.get("unsaved"),
            compiled_too=cls.from_wire(compiled) if (compiled := data.get("compiled_too")) else None,
            uncompiled=data.get("uncompiled"),
            ready_seconds=data.get("ready_seconds", 0.0),
            on_epoch=data.get("on_epoch", False),
            epoch_metrics=tuple(data.get("epoch_metrics", ())),
            endless=data.get("endless", False),
            scheduler_metric=data.get("scheduler_metric"),
            scheduler_span=data.get("scheduler_span"),
            host=Host(**data.get("host", {})),
            peer_access=data.get("peer_access", False),
            timed_size=data.get("timed_size", 0),
            most_samples=data.get("most_samples", 0),
            crowded=data.get("crowded"),
            refused_sizes=dict(data.get("refused_sizes", ())),
            threaded=_threaded(data.get("threaded")),
            small_size=data.get("small_size", 0),  # not in recordings of before it was measured
            parameters=tuple(map(_parameter, data["parameters"])),
            **{key: data[key] for key in _PLAIN},
        )


_PLAIN = (
    "num_train",
    "num_validation",
    "load_seconds",
    "update_seconds",
    "elementwise",
    "weighted",
    "copy_bytes_per_second",
)


_LISTS_OF_UNITS = ("tied_to", "tied_by", "state", "counts", "repeated", "ends", "late")


def _units(units: Any) -> tuple[UnitFacts, ...]:
    return tuple(
        UnitFacts(
            **{
                **unit,
                **{name: tuple(unit.get(name, ())) for name in _LISTS_OF_UNITS},
                "given": tuple((leaf, name) for leaf, name in unit.get("given", ())),
                "instead": tuple((name, other) for name, other in unit.get("instead", ())),
            }
        )
        for unit in units
    )


def _values(values: Any) -> tuple[ValueFacts, ...]:
    return tuple(
        ValueFacts(**{**value, "shapes": _shapes(value["shapes"]), "readers": tuple(value["readers"])})
        for value in values
    )


def _threaded(data: Any) -> Threaded | None:
    return data and Threaded(**{**data, "seconds": tuple(tuple(seconds) for seconds in data["seconds"])})


def _parameter(data: Mapping[str, Any]) -> ParameterFacts:
    return ParameterFacts(**{**data, "units": tuple(data["units"]), "state": _state(data.get("state"))})


def _state(entries: Any) -> tuple[StateFacts, ...] | None:
    return None if entries is None else tuple(StateFacts(*entry) for entry in entries)


def _shapes(pairs: Any) -> dict[int, Shape]:
    return {int(size): tuple(shape) for size, shape in pairs}


def _max_bytes(shapes: Mapping[int, Shape], itemsize: int) -> int:
    return max((math.prod(shape) * itemsize for shape in shapes.values()), default=0)


def slot_bytes(shapes: Mapping[int, Shape], itemsize: int) -> int:
    """Bytes of the largest microbatch, rounded up to the 64 that vector loads want."""
    return -(-_max_bytes(shapes, itemsize) // 64) * 64
