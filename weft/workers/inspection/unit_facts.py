"""Unit facts: what one kind of device makes of each unit of a model: seconds; shape and dtype of what it passes on.

One span of units after the other comes to the device, runs, and goes back, so that of the model no more than a span has
to fit there beside the activations between two of them. A span ends with the first unit that passes on one tensor: only
there can the model be cut. Most spans are of one unit; within a longer one a dict, a dataclass or an object of the
user's goes from unit to unit with its graph, and nobody has to know what is in it.

    span 0   adopt ▸ every size once, for shapes ▸ the largest forward and backward, for times ▸ a small one ▸ give back
    span 1                                                                                         adopt ▸ ...
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.plan.error_places import function_place, unit_place, within
from weft.spec.job_spec import JobSpec
from weft.transport.memory.arena import dtype_name
from weft.workers.compute.backward.saved import SavedBytes, refuses_to_be_noted
from weft.workers.compute.backward.split import SplitBackward
from weft.workers.compute.handover import can_have_gradient, described, is_plain
from weft.workers.compute.model_part import functions_with_state
from weft.workers.compute.stage import computing_in
from weft.workers.devices.device import Device
from weft.workers.inspection.ran import StateBefore, Ties, carried, tried
from weft.workers.inspection.times import TIMED_RUNS, OtherMemory, Times, fastest, parts_of_backward, repeated
from weft.workload.aliases import dense_parts
from weft.workload.code.first_epoch import set_mode
from weft.workload.code.places import parts_within
from weft.workload.cutting.leaves import tensors_in
from weft.workload.cutting.names import named_tensors
from weft.workload.cutting.placeholder import Placeholder
from weft.workload.randomness import OtherGenerators
from weft.workload.step import function_value
from weft.workload.units import units
from weft.workload.workload import Workload

SMALL_RUNS = 2
SMALLER = 4  # times, the second size that units are timed with: far enough for a slope, and an eighth of the time more
MAX_DEPTH = 3  # of containers in an attribute that are looked into; arbitrary
_NOT_KEPT = frozenset({"_modules", "_parameters"})
_CONTAINERS = (list, tuple, set, deque, dict)

Pair = tuple[torch.Tensor, torch.Tensor]  # inputs, targets
Samples = Mapping[int, Pair]  # by microbatch size
Run = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class RanUnits:
    """What the units are, and what they passed on, in the wire form of Inspection's fields of these names."""

    units: list[dict[str, Any]]
    values: list[dict[str, Any]]
    cut_problems: list[list[Any]]
    small_size: int


def inspect_units(
    workload: Workload,
    spec: JobSpec,
    samples: Samples,
    held_out: Pair | None,
    *,
    trained: Sequence[int],
    device: Device,
    others: OtherGenerators,
    leave: Callable[[nn.Module], None],
) -> RanUnits:
    """A value for each unit's output but the last one's, or a problem where that is no plain tensor.

    held_out: a microbatch of validation, if there is one; with what a metric raises a job would end behind an epoch.
    trained: sizes that are known to occur in training; others go through in validation's mode: batch norm trains on no
    batch of one. others: sees whether these generators draw. leave: called with each unit, and a loss that is a module,
    before it leaves the device; it has the gradients that its runs have left.
    """
    modules = units(workload.model)
    facts = [
        blank_facts(name, type(module).__name__, module.parameters(), module.buffers()) for name, module in modules
    ]
    _record_ties(modules, facts)
    runs = _Runs(workload, spec, samples, held_out, trained, device, others)
    span: list[nn.Module] = []
    for number, (name, module) in enumerate(modules):
        is_last = number == len(modules) - 1
        if module not in span:
            device.adopt(module)
        span.append(module)
        place = f"{unit_place(number, name, module)}, tried before training"
        with within(place, innermost=True):
            passes = runs.record_output(number, module)
        if not passes and not is_last:
            continue
        needed = {id(each): each for each in span}
        for head in functions_with_state(workload) if is_last else ():
            needed[id(head)] = head  # not before: it may hold units that have come and gone
            device.adopt(head)
        with within(place, innermost=True):
            runs.measure(span, facts[number + 1 - len(span) : number + 1], is_last=is_last)
        for each in needed.values():
            leave(each)
            device.give_back(each)
        span = []
    if not runs.small_size:
        for fact in facts:
            fact["small_forward_seconds"] = fact["small_backward_seconds"] = 0.0
    cuts = range(1, len(modules))  # the last unit's output goes to no other
    values = [value for number, value in runs.values.items() if number + 1 in cuts]
    problems = [[number + 1, why] for number, why in runs.problems.items() if number + 1 in cuts]
    return RanUnits(facts, values, problems, runs.small_size)


def blank_facts(
    name: str, kind: str, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]
) -> dict[str, Any]:
    """Of a unit before anything has run: the wire form of UnitFacts."""
    return {
        "name": name,
        "kind": kind,
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "buffer_bytes": sum(part.nbytes for each in buffers for part in dense_parts(each)),
        "forward_seconds": 0.0,
        "backward_seconds": 0.0,
        "tied_to": [],
        "tied_by": [],
        "in_place": False,
        "carries_state": False,
        "backward_changes": None,
        "kept_bytes": 0,
        "small_forward_seconds": 0.0,
        "small_backward_seconds": 0.0,
    }


def _value_facts(number: int, outputs: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    """The wire form of the ValueFacts of a unit's output, by the size of microbatch."""
    largest = outputs[max(outputs)]
    return {
        "name": str(number),
        "maker": number,
        "readers": [number + 1],
        "dtype": dtype_name(largest.dtype),
        "itemsize": largest.element_size(),
        "shapes": [[size, list(y.shape)] for size, y in sorted(outputs.items())],
        "differentiable": can_have_gradient(largest),
    }


def _record_ties(modules: Sequence[tuple[str, nn.Module]], facts: Sequence[dict[str, Any]]) -> None:
    """Before any unit is moved, which makes other tensors of buffers."""
    ties = Ties()
    for number, ((prefix, module), fact) in enumerate(zip(modules, facts, strict=True)):
        fact |= ties.of(number, ((prefix + name, buffer) for name, buffer in module.named_buffers()))


class _Runs:
    """What goes through the units, each from where the one before has left it. small_size: 0 where there is none.
    values, problems: of what each unit has passed on, by its number."""

    def __init__(
        self,
        workload: Workload,
        spec: JobSpec,
        samples: Samples,
        held_out: Pair | None,
        trained: Sequence[int],
        device: Device,
        others: OtherGenerators,
    ) -> None:
        self._spec, self._others = spec, others
        self._num_units = len(units(workload.model))
        self._other_memory = OtherMemory(device)
        inputs, target = samples[max(samples)]
        self.small_size = size_of_small(spec, len(inputs))
        self._compiles = spec.strategy.compile
        self._backward_changes: list[str] = []
        self.values: dict[int, dict[str, Any]] = {}
        self.problems: dict[int, str] = {}
        self._functions = workload.functions
        self._precision = spec.strategy.precision
        self._trained = trained
        self._has_replicas = spec.strategy.may_have_replicas
        self._splits = spec.strategy.may_split_backwards and spec.job.mode == "train"
        self._device = device
        # Training first: some layers begin with the first batch that they train on, and evaluate none before it.
        by_mode = sorted(samples, key=lambda size: (size not in trained, size))
        self._shaped: dict[int, Any] = {size: device.put(samples[size][0]) for size in by_mode}
        self._largest: Any = device.put(inputs)
        self._target = device.put(target)
        self._small: Any = self._largest[: self.small_size]
        self._held_out: Any = None if held_out is None else device.put(held_out[0])
        self._held_out_target = None if held_out is None else device.put(held_out[1])

    def record_output(self, number: int, module: nn.Module) -> bool:
        """Whether a slot can hold what a unit makes of each size."""
        outputs = {}
        for size, x in self._shaped.items():
            is_trained = size in self._trained
            set_mode(module, is_trained, is_part=True)
            if self._compiles and is_trained:
                self._run(module, x)  # with gradients, and what comes out the way of validation
                set_mode(module, False, is_part=True)
            with torch.no_grad():
                outputs[size] = self._shaped[size] = self._run(module, x)
        if self._held_out_target is not None:
            set_mode(module, False, is_part=True)
            with torch.no_grad():
                self._held_out = self._run(module, self._held_out)
        set_mode(module, is_part=True)
        dtypes = {getattr(y, "dtype", None) for y in outputs.values()}
        if passes := len(dtypes) == 1 and all(map(is_plain, outputs.values())):
            self.values[number] = _value_facts(number, outputs)
        else:
            odd = [described(y) for y in outputs.values() if not is_plain(y)]
            what = odd[0] if odd else "a tensor whose dtype depends on the microbatch"
            self.problems[number] = (
                f"unit {number} ({type(module).__name__}) passes on {what}, and only a plain tensor goes from stage to "
                "stage"
            )
        return passes

    def measure(self, span: Sequence[nn.Module], facts: Sequence[dict[str, Any]], *, is_last: bool) -> None:
        """What the units take together counts as the last one's: nobody can tell them apart who needs to know."""
        self._largest = self._begin(self._largest)  # without what the span before has kept for a backward
        module = span[0] if len(span) == 1 else nn.Sequential(*span)
        run = partial(self._run, partial(self._with_loss, module) if is_last else module)
        fact = facts[-1]
        facts[0]["in_place"], fact["kept_bytes"] = self._first_run(run, span)
        fact["carries_state"] = self._has_replicas and bool(carried(span, partial(self._outputs, run)))
        x = self._largest
        self._backward_changes = []
        fact["forward_seconds"], fact["backward_seconds"], self._largest = self._times(run, x, TIMED_RUNS, module)
        if is_last and self._held_out_target is not None:
            self._validate(self._held_out, self._held_out_target)
        fact["backward_changes"] = next(iter(self._backward_changes), None)
        if self._splits and (parts := tried(partial(self._parts, run, x))):
            fact |= parts_of_backward(fact["backward_seconds"], *parts)
        if self.small_size:
            self._measure_small(module, fact)

    def _validate(self, output: Any, target: torch.Tensor) -> None:
        """As `UnitStage.measure` does; the loss was tried in training."""
        metrics = {name: function for name, function in self._functions.items() if name != "loss"}
        with torch.no_grad(), computing_in(self._precision, self._device):
            for name, function in metrics.items():
                with within(f"{function_place(name)}, tried before training"):
                    function_value(function(output, target), name)

    def _first_run(self, run: Run, span: Sequence[nn.Module]) -> tuple[bool, int]:
        """Whether the units change their input, by autograd's own count of changes, or keep it for later calls; and the
        bytes that they keep for a backward. What compiled units keep nobody looks at."""
        given = self._largest.clone()
        before, modules = given._version, [part for module in span for part in module.modules()]
        kept = SavedBytes([given, self._target, *(each for module in span for _, each in named_tensors(module))])
        looks = self._spec.job.mode == "train" and not self._compiles
        try:
            with kept.noting() if looks else contextlib.nullcontext():
                made = run(given)
        except RuntimeError as error:
            if not (looks and refuses_to_be_noted(error)):
                raise
            run(given := self._largest.clone())
        else:
            kept.note(tensors_in(made) if looks else [])
        return given._version != before or keeps(modules, [given]), kept.num_bytes

    def _outputs(self, run: Run, draw: int) -> list[torch.Tensor]:
        with self._device.drawing, torch.no_grad():
            self._device.seed(draw)
            self._others.seed(draw)
            return [y.clone() for y in tensors_in(run(self._largest.clone()))]

    def _measure_small(self, module: nn.Module, fact: dict[str, Any]) -> None:
        """Without the loss: a count that the user keeps of its calls is none of a quarter microbatch's business, and
        what it costs goes with the samples, as it does in a head of many classes."""
        measured = tried(lambda: self._times(partial(self._run, module), self._small, SMALL_RUNS))
        if measured is None:
            self.small_size, self._small = 0, None
        else:
            fact["small_forward_seconds"], fact["small_backward_seconds"], self._small = measured

    def _times(self, run: Run, x: Any, runs: int, watched: nn.Module | None = None) -> tuple[float, float, Any]:
        """(forward seconds, backward seconds, output) of one unit, the fastest of the runs after the first. watched:
        in which the first backward may change something."""
        y: Any = None

        def once(watched: nn.Module | None = None) -> Times:
            nonlocal x, y
            given = (x := self._begin(x)).clone()  # a unit may work in place, which autograd forbids on a leaf
            self._other_memory.fill_caches()
            forward, y = self._device.timed(partial(run, given))
            before = None if watched is None else StateBefore(watched)
            backward, _ = self._device.timed(partial(_backward, y))
            self._backward_changes += [] if before is None else before.changed()
            return [(forward, backward)]

        once(watched)
        ((forward, backward),) = fastest(repeated(once, runs, self._spec, self._num_units))
        return forward, backward, y

    def _parts(self, run: Run, x: Any) -> tuple[float, float] | None:
        """What both parts of a split backward take, each in the fastest of the runs after the first; None where nothing
        can be split."""

        def once() -> Times:
            nonlocal x
            x = _leaf(x)
            outputs = _differentiable(run(x.clone()))
            if not outputs:
                return []
            received = {0: x} if x.requires_grad else {}
            gradients = [torch.ones_like(each) for each in outputs]
            of_input, split = self._device.timed(partial(SplitBackward, outputs, gradients, received))
            self._other_memory.fill_caches()  # it runs later, or nothing is gained by a split
            of_weight, _ = self._device.timed(split.finish)
            return [(of_input, of_weight)]

        if not once():
            return None
        (parts,) = fastest(repeated(once, SMALL_RUNS, self._spec, self._num_units))
        return parts

    def _begin(self, x: Any) -> Any:
        """Compiled, a unit that nobody asks for a gradient is another one."""
        return x.detach() if self._compiles and not x.requires_grad else _leaf(x)

    def _run(self, call: Run, x: Any) -> Any:
        """As a stage does."""
        with computing_in(self._precision, self._device):
            return call(x)

    def _with_loss(self, module: nn.Module, x: Any) -> Any:
        y = module(x)
        with within(f"{function_place('loss')}, tried before training"):
            loss = self._functions["loss"](y, self._target)
        return function_value(loss, "loss")


def size_of_small(spec: JobSpec, largest: int) -> int:
    """Of a second microbatch to time; 0 for none. Where units are compiled, for each size anew, it has to be worth it:
    where a strategy is to be chosen."""
    return max(1, largest // SMALLER) if largest > 1 and (spec.strategy.is_auto or not spec.strategy.compile) else 0


def _differentiable(y: Any) -> list[torch.Tensor]:
    return [each for each in tensors_in(y) if each.requires_grad]


def _backward(y: Any) -> None:
    if outputs := _differentiable(y):
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])


def keeps(modules: Iterable[nn.Module], given: Sequence[torch.Tensor | None]) -> bool:
    """Whether a buffer or an attribute of theirs is in the memory of what a forward was given. In a job that is a slot,
    where the next microbatch is to stand."""
    return any(tensor is not None for tensor in given) and not blocks_kept(modules).isdisjoint(map(block_of, given))


def blocks_kept(modules: Iterable[nn.Module]) -> set[int]:
    """Where the memory of their buffers and attributes begins."""
    found: set[int] = set()
    for module in modules:
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) or (isinstance(value, _CONTAINERS) and key not in _NOT_KEPT):
                found.update(map(block_of, _plainly_in(value, MAX_DEPTH)))
    return found - {0}


def _plainly_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Without a look into objects, whatever they are."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, _CONTAINERS):
        for part in list(parts_within(value)):
            yield from _plainly_in(part, depth - 1)


def block_of(tensor: torch.Tensor | None) -> int:
    """Where its memory begins; 0 of what has none."""
    if tensor is None or tensor.layout is not torch.strided or isinstance(tensor, Placeholder):
        return 0
    return tensor.untyped_storage().data_ptr()


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(can_have_gradient(value))
