"""Cut trial: one microbatch through the stages of a cut step, one after the other, in one process.

It proves the cut: the loss, every gradient and every buffer are those of the whole step, bit for bit, and so is what
validation reports, or the cut is not used. It also tells what each stage takes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.plan.error_places import TRIED_BACKWARD, TRIED_STEP, add_place
from weft.workers.compute.backward.hand_back import HandBack
from weft.workers.compute.backward.saved import SavedBytes, refuses_to_be_noted
from weft.workers.compute.backward.split import SplitBackward
from weft.workers.compute.model_part import modules_with
from weft.workers.compute.stage import leaf_of
from weft.workers.devices.device import Device
from weft.workers.inspection.times import OtherMemory
from weft.workers.inspection.unit_facts import block_of, blocks_kept
from weft.workers.snapshots.first_reads import FirstReads
from weft.workers.snapshots.stage_attributes import Numbers, StageAttributes
from weft.workload.cutting.calls import Seed
from weft.workload.cutting.cut_step import Bound, CutStep, Step
from weft.workload.cutting.leaves import tensors_in
from weft.workload.cutting.names import Attribute, named_tensors
from weft.workload.cutting.placeholder import giving_back
from weft.workload.cutting.recorded import Recorded, Value
from weft.workload.cutting.skipped import SkippedCalls
from weft.workload.data.tree import with_tensors

OTHER = 1.0625  # times: arbitrary, little, and exact in any dtype
_Root = tuple[torch.Tensor, torch.Tensor | None]


class StageError(Exception):
    """What a stage has raised, as its cause. number: of the stage."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class _Stage:
    first: int  # unit
    step: CutStep
    receives: list[Value]
    sends: list[Value]
    tied: list[nn.Parameter]  # parameters that later stages use too
    attributes: StageAttributes
    modules: Mapping[str, nn.Module]  # that are the stage's, by name
    # What was received, as a backward comes to it; not what only validation has:
    leaves: list[torch.Tensor | None] = field(default_factory=list)
    given: list[torch.Tensor | None] = field(default_factory=list)  # copies, since a module may write to it
    sent: list[torch.Tensor | None] = field(default_factory=list)
    bound: Bound = field(default_factory=list)
    reads: FirstReads = field(default_factory=FirstReads)


class CutTrial:
    """cuts: numbers of the units with which stages begin, the first not among them. values_of: what a step returns, by
    name; the loss is differentiated where gradients are enabled. forward_seconds, backward_seconds: of each stage, in
    the last run, without what it has skipped; of a run that has split backwards, split_seconds, of both parts. writing:
    units, which runs add to; a stage that begins with one of them may write to what it receives, or keep it.
    kept_bytes: what each stage's forward keeps for a backward, of the last run before which `counts` was set.
    attributes: of the model as it was built.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        recorded: Recorded,
        cuts: Sequence[int],
        skipped: SkippedCalls,
        device: Device,
        *,
        values_of: Callable[[Any], Mapping[str, torch.Tensor]],
        precision: Callable[[], contextlib.AbstractContextManager[object]],
        attributes: StageAttributes,
        writing: set[int],
    ) -> None:
        self._device = device
        self._model = model
        self._user_step = step
        self._values_of = values_of
        self._precision = precision
        self._attributes = attributes
        bounds = [0, *cuts, len(recorded.units)]
        self._stages = [
            _stage(model, recorded, bounds, number, skipped, attributes) for number in range(len(bounds) - 1)
        ]
        self.forward_seconds = [0.0] * len(self._stages)
        self.backward_seconds = [0.0] * len(self._stages)
        self.split_seconds = [(0.0, 0.0)] * len(self._stages)
        self.kept_bytes = [0] * len(self._stages)
        self.splits = False  # backwards, as some schedules do
        self.counts = False
        self._writing = writing

    @functools.cached_property
    def _other_memory(self) -> OtherMemory:
        return OtherMemory(self._device)

    def run(self, batch: Any, seed: Seed) -> Mapping[str, torch.Tensor]:
        """The values, forward and, where gradients are enabled, backward. Errors: StageError."""
        try:
            return self._once(batch, seed)
        except StageError as error:
            if not (self.counts and refuses_to_be_noted(error.__cause__)):
                raise
            self.counts, self.kept_bytes = False, [0] * len(self._stages)
            return self._once(batch, seed)
        finally:
            self.counts = False

    def _once(self, batch: Any, seed: Seed) -> Mapping[str, torch.Tensor]:
        with giving_back():
            values = self._forward(batch, seed)
            if torch.is_grad_enabled():
                self._backward(values["loss"], seed)
        return values

    def has_renewed(self) -> bool:
        """Where runs have left something in modules: each stage's are as they were built again."""
        if all(stage.attributes.is_as(self._attributes) for stage in self._stages):
            return False
        for stage in self._stages:
            stage.attributes = self._attributes.copied()
        return True

    def numbers(self) -> Numbers | None:
        """Numbers that runs have left in attributes; None where these keep anything else. Of an uncut step."""
        (stage,) = self._stages
        return stage.attributes.numbers() if stage.attributes.is_as(self._attributes, but_for_numbers=True) else None

    def other_number(self, numbers: Numbers) -> str | None:
        """A number that some stage, which has the module, has changed to another one, or that none has changed: in
        words."""
        left, counted = dict[Attribute, str](), set[Attribute]()
        for stage in self._stages:
            for name, module, key, value in _listed(stage.modules, numbers):
                own = stage.attributes.value(module, key)
                if not stage.attributes.differs(module, key, value):
                    counted.add(Attribute(module, key))
                elif self._attributes.differs(module, key, own):
                    return _told(name, key, own, value)
                else:  # nothing of it runs there
                    left.setdefault(Attribute(module, key), _told(name, key, own, value))
        return next((told for attribute, told in left.items() if attribute not in counted), None)

    def watch(self, attributes: Collection[Attribute]) -> None:
        """In runs from now on, which stages read what an earlier run has left in one of them."""
        for stage in self._stages:
            stage.reads = FirstReads(attributes)

    def read(self) -> list[set[Attribute]]:
        """Of each stage: those of them that it has read so."""
        return [stage.reads.read for stage in self._stages]

    def left(self) -> dict[Attribute, Any]:
        """Numbers, texts and None that runs have left in attributes. Of an uncut step."""
        (stage,) = self._stages
        return stage.attributes.left(self._attributes)

    def left_by_stages(self) -> list[list[str]]:
        """Of each stage: names of what `left` tells that its runs have left."""
        names = {id(module): name for name, module in self._model.named_modules()}
        left = [stage.attributes.left(self._attributes) for stage in self._stages]
        return [sorted(f"{names[id(module)]}.{key}".removeprefix(".") for module, key in own) for own in left]

    def others(self, left: Mapping[Attribute, Any]) -> list[dict[Attribute, str]]:
        """Of each stage: those of what the whole step has left that it has otherwise, in words."""
        names = {id(module): name for name, module in self._model.named_modules()}
        return [
            {
                Attribute(module, key): _told(names[id(module)], key, stage.attributes.value(module, key), value)
                for (module, key), value in left.items()
                if stage.attributes.differs(module, key, value)
            }
            for stage in self._stages
        ]

    def seconds(self) -> list[tuple[float, float]]:
        """Of each stage in the last run: forward and backward; where backwards are split, both parts of one."""
        if self.splits:
            return list(self.split_seconds)
        return list(zip(self.forward_seconds, self.backward_seconds, strict=True))

    def _forward(self, batch: Any, seed: Seed) -> Mapping[str, torch.Tensor]:
        made: dict[str, torch.Tensor | None] = {}
        result: Any = None
        for number, stage in enumerate(self._stages):
            wanted = [value.tensor.requires_grad and torch.is_grad_enabled() for value in stage.receives]
            stage.leaves = [
                leaf_of(made[value.name], wants) for value, wants in zip(stage.receives, wanted, strict=True)
            ]
            stage.given = [None if leaf is None else leaf.clone() for leaf in stage.leaves]
            versions = _versions(stage.given)
            stage.reads.begin()
            with (
                _blaming(number, TRIED_STEP),
                stage.attributes.installed(),
                stage.step.installed(),
                stage.reads.watching(),
            ):
                seconds, result = self._device.timed(partial(self._run, number, batch, seed))
                kept = blocks_kept(stage.attributes.modules) if stage.given else set()
            self.forward_seconds[number] = max(1e-9, seconds - stage.step.skipping_seconds)
            for i, (value, before, after) in enumerate(
                zip(stage.receives, versions, _versions(stage.given), strict=True)
            ):
                if before == after:
                    stage.leaves[i] = stage.given[i]
                if before != after or block_of(stage.given[i]) in kept:
                    self._writing.update(range(value.maker + 1, stage.first + 1))
            if number < len(self._stages) - 1:
                stage.sent = result
                made.update(zip((value.name for value in stage.sends), result, strict=True))
            stage.bound = stage.step.bound
        return self._values_of(result)

    def _run(self, number: int, batch: Any, seed: Seed) -> Any:
        stage, own = self._stages[number], with_tensors(batch, torch.Tensor.clone)  # a step may write to it
        with self._device.drawing, self._precision():
            if not self.counts:
                return stage.step.run(self._user_step, own, stage.given, seed)
            there = [tensor for _, tensor in named_tensors(self._model)]
            kept = SavedBytes([*there, *tensors_in(own), *(given for given in stage.given if given is not None)])
            with kept.noting():
                result = stage.step.run(self._user_step, own, stage.given, seed)
            kept.note(tensors_in(result))
            self.kept_bytes[number] = kept.num_bytes
            return result

    def _backward(self, loss: torch.Tensor, seed: Seed) -> None:
        gradients: dict[str, torch.Tensor] = {}
        for number, stage in reversed(list(enumerate(self._stages))):
            roots: list[_Root] = [(loss, None)] if number == len(self._stages) - 1 else []
            for value, tensor in [
                *zip(stage.sends, stage.sent, strict=False),
                *zip(stage.receives, stage.given, strict=True),
            ]:
                if tensor is not None and tensor.requires_grad and value.name in gradients:
                    roots.append((tensor, gradients[value.name]))
            for parameter in stage.tied:  # what later stages have made begins the stage's own sum, as in a job
                if parameter.grad is not None and parameter.requires_grad:  # it may have been frozen since
                    roots.append((parameter, parameter.grad))
                    parameter.grad = None
            stage.step.rebind(stage.bound)
            differentiate = self._in_two_parts if self.splits else self._at_once
            with (
                _blaming(number, TRIED_BACKWARD),
                stage.attributes.installed(),
                stage.step.installed(),
                stage.step.numbers.running_again(seed),
                stage.reads.watching(),
            ):
                differentiate(number, stage, roots, gradients)
            stage.leaves, stage.given, stage.sent = [], [], []

    def _at_once(self, number: int, stage: _Stage, roots: Sequence[_Root], gradients: dict[str, torch.Tensor]) -> None:
        hand_backs = [
            (leaf, HandBack(leaf, partial(_keep, gradients, value.name), at_once=False))
            for value, leaf in zip(stage.receives, stage.leaves, strict=True)
        ]
        self.backward_seconds[number], _ = self._device.timed(partial(_differentiate, roots))
        for leaf, hand_back in hand_backs:
            hand_back.finish(leaf)

    def _in_two_parts(
        self, number: int, stage: _Stage, roots: Sequence[_Root], gradients: dict[str, torch.Tensor]
    ) -> None:
        if not roots:
            self.split_seconds[number] = 0.0, 0.0
            return
        received = {i: leaf for i, leaf in enumerate(stage.leaves) if leaf is not None and leaf.requires_grad}
        tensors = [root for root, _ in roots]
        given = [torch.ones_like(root) if gradient is None else gradient for root, gradient in roots]
        of_input, split = self._device.timed(partial(SplitBackward, tensors, given, received))
        self._other_memory.fill_caches()  # what is left of it runs later
        of_weight, _ = self._device.timed(split.finish)
        self.split_seconds[number] = of_input, of_weight
        for i, gradient in split.received.items():
            _keep(gradients, stage.receives[i].name, gradient)


def others_of(model: nn.Module, changing: Sequence[str]) -> dict[str, torch.Tensor]:
    """Of parameters that a step changes, others to begin with, so that it shows where a stage does not change its own:
    a teacher may be as its student is, and stay so. Signs and zeros are theirs."""
    named = dict(model.named_parameters())
    return {name: named[name].detach() * OTHER for name in changing}


def run_as_it_is(trial: CutTrial, batch: Any, seed: Seed) -> None:
    """What the user's code raises passes as it is."""
    try:
        trial.run(batch, seed)
    except StageError as error:
        raise (error.__cause__ or error) from None


def _stage(
    model: nn.Module,
    recorded: Recorded,
    bounds: Sequence[int],
    number: int,
    skipped: SkippedCalls,
    attributes: StageAttributes,
) -> _Stage:
    first, last = bounds[number], bounds[number + 1]
    own = range(first, last)
    receives = [
        value for value in recorded.values if value.maker < first and any(reader in own for reader in value.readers)
    ]
    sends = [value for value in recorded.values if value.maker in own and value.readers[-1] >= last]
    names, later = (frozenset[str]().union(*recorded.uses[units]) for units in (slice(first, last), slice(last, None)))
    if number == 0:  # it has what no unit was seen to use, as in a job: torch.vmap hides its parameters
        names |= {name for name, _ in named_tensors(model)} - names - later
    return _Stage(
        first,
        CutStep(
            model,
            begins=recorded.border(first) if number else None,
            ends=recorded.border(last) if last < len(recorded.units) else None,
            own=names,
            receives=[value.name for value in receives],
            sends=[value.name for value in sends],
            skipped=skipped,
        ),
        receives,
        sends,
        [parameter for name, parameter in model.named_parameters() if name in names & later],
        attributes.copied(),
        modules_with(model, names),
    )


def _listed(modules: Mapping[str, nn.Module], numbers: Numbers) -> Iterator[tuple[str, nn.Module, str, float]]:
    for name, module in modules.items():
        yield from ((name, module, key, value) for key, value in numbers[id(module)].items())


def _told(module: str, key: str, own: Any, value: Any) -> str:
    attribute = f"{module}.{key}".removeprefix(".")
    return f"the attribute {attribute!r} ({own!s:.40} for {value!s:.40})"


def _versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if each is None else each._version for each in tensors]


def _keep(gradients: dict[str, torch.Tensor], name: str, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        gradients[name] = gradient


def _differentiate(roots: Sequence[_Root]) -> None:
    if roots:
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])


@contextlib.contextmanager
def _blaming(number: int, place: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        add_place(error, place, innermost=True)
        raise StageError(number) from error
