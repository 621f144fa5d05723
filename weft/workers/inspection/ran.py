"""Ran: what came of running a model, however it is cut, in the wire form of Inspection's fields of these names; and
what each run is to find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from weft.plan.division import Part
from weft.plan.itinerary import Iteration
from weft.transport.memory.arena import dtype_name
from weft.workers.compute.forward_buffers import Began, Changed, ForwardBuffers
from weft.workers.compute.handover import can_have_gradient
from weft.workers.snapshots.stage_attributes import StageAttributes, numbers_of, singles_of
from weft.workload.aliases import dense_parts, has_memory, overlap
from weft.workload.code.first_epoch import set_by_mode, set_mode
from weft.workload.cutting.names import named_tensors
from weft.workload.cutting.recorded import Recorded, Value

Result = TypeVar("Result")
DRAWS = 5  # that are tried: all of them leave out a block in one job of a hundred whose block is in four of ten


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    units: list[dict[str, Any]]
    values: list[dict[str, Any]]
    cut_problems: list[list[Any]]
    small_size: int
    input: dict[str, Any]
    target: dict[str, Any] | None
    load_seconds: float
    metrics: list[str]
    users: Mapping[int, Sequence[int]]  # numbers of units, by the id of each parameter
    skipped_calls: str = ""
    draws: bool = True
    seeds_others: bool = False
    varying_shapes: Sequence[tuple[int, ...]] = ()
    changing: Sequence[str] = ()  # parameters that were seen to be changed by the step itself
    written: Sequence[str] = ()  # these, buffers that it writes to by lines between modules, and numbers

    def facts(self) -> dict[str, Any]:
        """What of it is in the wire form of weft.plan.inspection.Inspection as it is here."""
        return {
            "units": self.units,
            "values": self.values,
            "cut_problems": self.cut_problems,
            "small_size": self.small_size,
            "input": self.input,
            "target": self.target,
            "metrics": self.metrics,
            "skipped_calls": self.skipped_calls,
            "draws": self.draws,
            "seeds_others": self.seeds_others,
            "written": list(self.written),
            "varying_shapes": [list(shape) for shape in self.varying_shapes],
        }


class Ties:
    """What several units keep between them and forward changes, or may: two copies would drift apart, and so would two
    views of one memory. A parameter that updates alone change may be in two stages, since its gradients are summed."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, str, torch.Tensor]] = {}  # by the tensor's id

    def of(self, number: int, kept: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """In the wire form of UnitFacts, of a unit behind all that were asked about before. kept: names and tensors."""
        tied: dict[int, str] = {}
        for name, tensor in kept:
            self._first.setdefault(id(tensor), (number, name, tensor))
            for first, its_name, other in self._first.values():
                if first != number and (other is tensor or _share_memory(other, tensor)):
                    tied.setdefault(first, its_name)
        return {"tied_to": sorted(tied), "tied_by": [tied[first] for first in sorted(tied)]}


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return has_memory(one) and has_memory(other) and overlap(one, other)


def first_batch(size: int, *, training: bool) -> tuple[Iteration, Part]:
    """Of so many samples."""
    return Iteration(index=0, training=training, epoch=0, step=0, start=0, size=size), Part(0, 0, size)


def tensor_facts(tensors: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    first = next(iter(tensors.values()))
    return {
        "dtype": dtype_name(first.dtype),
        "itemsize": first.element_size(),
        "shapes": [[size, list(tensor.shape)] for size, tensor in tensors.items()],
    }


def value_facts(value: Value, shapes: Mapping[int, tuple[int, ...]]) -> dict[str, Any]:
    return {
        "name": value.name,
        "maker": value.maker,
        "readers": list(value.readers),
        "dtype": dtype_name(value.tensor.dtype),
        "itemsize": value.tensor.element_size(),
        "shapes": [[size, list(shape)] for size, shape in sorted(shapes.items())],
        "differentiable": value.tensor.requires_grad,
    }


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """Of one microbatch: what a whole step and a cut one must agree on."""

    values: dict[str, torch.Tensor]  # the loss, and of a validation what else it reports
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    changed: dict[str, torch.Tensor]  # parameters that the step changes by itself

    @classmethod
    def of(
        cls, model: nn.Module, values: Mapping[str, torch.Tensor], changing: Collection[str] = (), *, learns: bool
    ) -> TrialOutcome:
        """changing: names of parameters."""
        parameters = model.named_parameters() if learns else ()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in parameters}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        known = dict(model.named_parameters()) if changing else {}
        changed = {name: known[name].detach().clone() for name in changing}
        return cls({name: value.detach().clone() for name, value in values.items()}, gradients, buffers, changed)

    def like(self, model: nn.Module, values: Mapping[str, torch.Tensor], *, learns: bool) -> TrialOutcome:
        return self.of(model, values, self.changed, learns=learns)

    def difference(self, other: TrialOutcome) -> str | None:
        """What differs first, in words."""
        for name, value in self.values.items():
            if not _equal(value, other.values[name]):
                return f"the {name} ({float(other.values[name]):.9g} for {float(value):.9g})"
        for name, gradient in self.gradients.items():
            if not _equal(gradient, other.gradients[name]):
                return f"the gradient of {name}"
        for name, buffer in self.buffers.items():
            if not _equal(buffer, other.buffers[name]):
                return f"the buffer {name}"
        for name, parameter in self.changed.items():
            if not _equal(parameter, other.changed[name]):
                return f"{name}, a parameter that the step changes by itself,"
        return None


class StateBefore:
    """Parameters and buffers of a module as they are now, to be compared later on."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._versions = {name: (each, each._version) for name, each in named_tensors(module)}
        self._values = {name: each.detach().clone() for name, each in module.named_buffers()}

    def changed(self) -> list[str]:
        """Names of those that are others by now. Some kernels write to buffers, and autograd does not count that."""
        return [name for name, each in named_tensors(self._module) if self._is_other(name, each)]

    def _is_other(self, name: str, tensor: torch.Tensor) -> bool:
        before, version = self._versions.get(name, (None, 0))
        is_same = tensor is before and tensor._version == version
        return not (is_same and (name not in self._values or _equal(tensor, self._values[name])))


def tried(run: Callable[[], Result]) -> Result | None:
    """None where the user's code refuses what the job itself will never give it: batch norm one sample, for example."""
    try:
        return run()
    except Exception:  # whatever it raises
        return None


def carried(modules: Sequence[nn.Module], outputs: Callable[[int], list[torch.Tensor]]) -> Changed:
    """The buffers that a forward changes, as they were, where what comes out is another where these are others; else
    none. outputs: of a forward with the random numbers of a draw, some of which may leave out who changes them."""
    has_some = any(True for module in modules for _ in module.buffers())
    tries = (_carried(modules, partial(outputs, draw)) for draw in range(DRAWS if has_some else 0))
    return next(filter(None, tries), [])


def mark_carriers(
    units: list[dict[str, Any]], recorded: Recorded, model: nn.Module, outputs: Callable[[int], list[torch.Tensor]]
) -> None:
    """Those whose forward computes with what a forward has left in their buffers. outputs: as `carried` takes it."""
    names = {id(module): name for name, module in model.named_modules()}
    for (module, key), _ in carried([model], outputs):
        for unit in _units_with(f"{names[id(module)]}.{key}".lstrip("."), recorded):
            units[unit]["carries_state"] = True


def users_of(recorded: Recorded, model: nn.Module) -> dict[int, list[int]]:
    """As `Ran.users`."""
    return {id(parameter): _units_with(name, recorded) for name, parameter in model.named_parameters()}


def _units_with(name: str, recorded: Recorded) -> list[int]:
    """The first of what none was seen to use."""
    return [unit for unit, uses in enumerate(recorded.uses) if name in uses] or [0]


def _carried(modules: Sequence[nn.Module], outputs: Callable[[], list[torch.Tensor]]) -> Changed:
    """Vectors that have converged change no more. Twice with the same buffers first: of a kernel that gives other bits
    each time nobody can tell."""
    buffers = ForwardBuffers(modules, can_compare=True)
    buffers.begin()
    first = outputs()
    if not (changed := buffers.end().buffers):
        return []
    with buffers.as_they_were(Began(changed)):
        again = outputs()
    with buffers.as_they_were(Began([(slot, _other(value)) for slot, value in changed])):
        other = tried(outputs)
    return changed if _all_equal(first, again) and (other is None or not _all_equal(first, other)) else []


def _other(value: torch.Tensor | None) -> torch.Tensor | None:
    """A count stays, which may be an index that leaves its bounds, and so does what is sparse."""
    if value is None or value.layout is not torch.strided or not can_have_gradient(value):
        return value
    return value + torch.randn_like(value)


def _all_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.layout is torch.sparse_coo is other.layout:  # the gradient of an embedding, a graph's adjacency
        one, other = one.coalesce(), other.coalesce()
    if one.layout is not torch.strided and one.layout is other.layout:
        return one.shape == other.shape and all(map(_equal, dense_parts(one), dense_parts(other)))
    one, other = one.to_dense(), other.to_dense()
    return (
        one.shape == other.shape
        and one.dtype is other.dtype
        and torch.equal(one.isnan(), other.isnan())
        and (torch.equal(one.nan_to_num(), other.nan_to_num()))
    )


# --- what each run finds

_Numbers = tuple[str, dict[str, Any], dict[str, float]]  # of a module: its name, its attributes, those as they were
_Singles = tuple[dict[str, Any], dict[str, Any]]


class StatesOfRuns:
    """Buffers of a model, numbers in attributes of its modules, and parameters that its step changes by itself, as each
    run is to find them: as the model was built; in validation buffers and parameters as a step of training has left
    them, where it needs that."""

    def __init__(self, model: nn.Module, train: Callable[[], object] | None) -> None:
        """train: runs a step of training, in a job that trains."""
        self.model = model
        self._train = train
        self._kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._numbers, self._singles = self._found()
        self._set: Mapping[int, Mapping[str, Any]] = {}  # attributes, by the mode of validation; by a module's id
        self.leaves = False  # a run has left another number, text or None in an attribute
        self.counted: dict[str, None] = {}  # names of attributes in which a run has left another number
        self.changed: set[str] = set()  # names of buffers that some run has changed
        self._versions: dict[str, int] = {}
        self._note_versions()
        self._trained: dict[str, torch.Tensor] | None = None

    def _found(self) -> tuple[list[_Numbers], list[_Singles]]:
        named = [(name, vars(each)) for name, each in self.model.named_modules()]
        return [(name, now, numbers_of(now)) for name, now in named], [(now, singles_of(now)) for _, now in named]

    def begin_with(self, others: Mapping[str, torch.Tensor]) -> None:
        """others: parameters, by name."""
        self._kept |= others

    def restore(self) -> None:
        """Behind each run."""
        for name, buffer in self.model.named_buffers():
            if name not in self.changed and self._has_changed(name, buffer):
                self.changed.add(name)
        put_back(self.model, self._kept)
        self._note_versions()
        self.leaves = self.leaves or any(singles_of(now) != singles for now, singles in self._singles)
        for name, now, numbers in self._numbers:
            counted = [key for key, number in numbers.items() if now.get(key) != number]
            self.counted |= dict.fromkeys(f"{name}.{key}".removeprefix(".") for key in counted)
            now.update(numbers)

    def has_new_buffers(self) -> bool:
        """Which a run has made, and `restore` leaves."""
        return any(name not in self._kept for name, _ in self.model.named_buffers())

    def _has_changed(self, name: str, buffer: torch.Tensor) -> bool:
        """torch counts no changes that go through .data, nor those of a batch norm's kernel."""
        before = self._kept.get(name)
        if before is None or before.layout is not buffer.layout or self._versions.get(name) != buffer._version:
            return True
        return not all(map(torch.equal, dense_parts(before), dense_parts(buffer)))

    def _note_versions(self) -> None:
        self._versions = {name: buffer._version for name, buffer in self.model.named_buffers()}

    def evaluated(self, run: Callable[[], Result]) -> Result:
        """What a run in validation's mode returns. No job has one before it has trained, and some layers begin with the
        first batch that they train on: so where it raises with the model as it was built, it has another one."""
        if self._train is not None and self._trained is None:
            if (found := tried(run)) is not None:
                return found
            self.restore()
            set_mode(self.model)
            self._train()
            self._trained = self._now()
            self.restore()
        return run()

    def _now(self) -> dict[str, torch.Tensor]:
        named = (*self.model.named_buffers(), *self.model.named_parameters())
        buffers = {name for name, _ in self.model.named_buffers()}
        return {name: tensor.detach().clone() for name, tensor in named if name in buffers | self._kept.keys()}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """As validation does."""
        was, found = self.model.training, (self._numbers, self._singles)
        set_mode(self.model, False)
        self._numbers, self._singles = self._found()  # with what a model's own `eval()` has set
        self._set = set_by_mode(self.model, False)
        try:
            with torch.no_grad(), self.of_validation():
                yield
        finally:
            self._numbers, self._singles = found
            self._set = {}
            set_mode(self.model, was)

    def in_mode(self, attributes: StageAttributes) -> StageAttributes:
        """attributes: of the model as it was built. What the stages of a run find."""
        return attributes.with_those(self._set)

    @contextlib.contextmanager
    def of_validation(self) -> Iterator[None]:
        """What runs inside finds what validation does."""
        if self._trained is None:
            yield
            return
        kept, self._kept = self._kept, self._trained
        self.restore()
        try:
            yield
        finally:
            self._kept = kept
            self.restore()


@torch.no_grad()
def put_back(model: nn.Module, kept: Mapping[str, torch.Tensor]) -> None:
    """kept: what buffers and parameters were, by name."""
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if (before := kept.get(name)) is None:
            continue
        if (tensor.shape, tensor.dtype) == (before.shape, before.dtype):
            tensor.copy_(before)
        else:  # forward has put another buffer in its place
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._buffers[key] = before.clone()
