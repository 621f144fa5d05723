"""A recording: one run of the whole step, looked at from outside: its calls, and what passes between them."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from weft.workload.cutting.calls import CallNumbers, Seed
from weft.workload.cutting.cut_step import Step
from weft.workload.cutting.leaves import places_in, tensors_in
from weft.workload.cutting.loose import LooseNames, made_by
from weft.workload.cutting.modes import aside
from weft.workload.cutting.names import argument_name, call_name, memory_of, named_tensors, output_name
from weft.workload.cutting.operation import (
    asks_for_numbers,
    generators,
    is_check,
    name_of,
    result_of,
    user_line,
    writes_numbers,
)
from weft.workload.cutting.placeholder import KNOWN
from weft.workload.cutting.recorded import Recorded
from weft.workload.cutting.regions import Fed, Read, Regions
from weft.workload.cutting.skipped import Key, Returned, key_of, returned_of
from weft.workload.cutting.visible import CallKind, Forward, Visible, listening, visible_modules
from weft.workload.step import own_backward
from weft.workload.workload import WorkloadError

# Of torch's functions that clip gradients: what they look up as they are called.
_CLIPPED_BY = {"_clip_grads_with_norm_": "clip_grad_norm_", "_group_tensors_by_device_and_dtype": "clip_grad_value_"}


class StepRecording(TorchFunctionMode):
    def __init__(self, model: nn.Module, made_once: Collection[str] = ()) -> None:
        """made_once: as of Recorded, of another run of a step."""
        super().__init__()
        self._model = model
        self._made_once = frozenset(made_once)
        self._visible = visible_modules(model)
        tables = {
            id(each) for top in self._visible if top.kind is CallKind.TRANSPARENT for each in top.module.buffers()
        }
        self._names = {id(each): name for name, each in named_tensors(model) if id(each) not in tables}
        self._state = dict(named_tensors(model))
        self._states_of = {each: self._state_of(each) for each in self._visible if each.kind is CallKind.OPAQUE}
        self._memory = {memory_of(self._state[name]): name for name in self._names.values()}
        self._versions = {name: p._version for name, p in model.named_parameters()}
        self._written: set[str] = set()  # parameters and buffers, past the count of changes: through .data
        self.numbers = CallNumbers()
        self._depth = 0  # within an opaque call
        self._calls: list[Visible] = []  # by region, from 1
        self._occurrences: dict[Visible, int] = {}
        self._fed: dict[int, Fed] = {}  # by id of the tensor, as it is now
        self._made: list[Fed] = []
        self._reads: list[Read] = []
        self._arguments: list[dict[int, Fed]] = [{}]  # by region, and leaf
        self._states: list[frozenset[str]] = []  # of each call
        self._returned: dict[Key, Returned] = {}
        self._loose = LooseNames()
        self._computed: Counter[str] = Counter()
        self._drawing: set[str] = set()  # operations on what is fed that have drawn since the last call
        self._redraws: dict[str, frozenset[str]] = {}
        self._instead: dict[str, str] = {}
        self._has_drawn = False  # for nothing that is fed
        self._varies = False

    def run(self, step: Step, batch: Any, seed: Seed) -> Recorded:
        refusing = register_optimizer_step_pre_hook(_refuse_update)
        try:
            with (
                _refusing_to_clip(),
                _refusing_to_scale(),
                listening(self._visible, self),
                self.numbers.running(seed),
                self,
            ):
                result = step(self._model, batch)
        finally:
            refusing.remove()
        self._read(None, tensors_in(result))
        return self._recorded(result)

    @property
    def changed(self) -> list[str]:
        """Parameters that a run changes."""
        return sorted(
            name
            for name, version in self._versions.items()
            if name in self._written or self._state[name]._version != version
        )

    @property
    def written(self) -> list[str]:
        """Parameters and buffers that it has seen the step write to, between modules, and parameters that any has."""
        return sorted(self._written.union(self.changed))

    @contextlib.contextmanager
    def installed_again(self, seed: Seed) -> Iterator[None]:
        """The backward of such a run."""
        with listening(self._visible, self), self.numbers.running_again(seed):
            yield

    # --- while it runs

    def call(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.numbers.is_running and visible.kind is CallKind.OPAQUE:
            return self.numbers.run(visible, forward, args, kwargs)
        if self._depth or not self.numbers.is_running:
            return forward(*args, **kwargs)
        occurrence = self._occurrences[visible] = self._occurrences.get(visible, -1) + 1
        if visible.kind is CallKind.OPAQUE:
            key, came = key_of(visible, occurrence, (args, kwargs)), tensors_in((args, kwargs))
            result = self._opaque(visible, occurrence, forward, args, kwargs)
            self._returned[key] = returned_of(result, came)
            self._note_substitutes(visible, occurrence, result)
            fed = tensors_in(result)
        else:
            result = forward(*args, **kwargs)
            fed = [tensor for tensor in tensors_in(result) if id(tensor) in self._fed]
        for leaf, tensor in enumerate(tensors_in(result)):
            if any(tensor is each for each in fed):
                is_own = leaf == 0 and visible.kind is CallKind.OPAQUE
                self._name(tensor, output_name(visible.name, occurrence, leaf), str(visible), is_own=is_own)
        return result

    def _opaque(
        self, visible: Visible, occurrence: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._calls.append(visible)
        self._drawing.clear()
        self._loose.call = call_name(visible.name, occurrence)
        self._states.append(self._states_of[visible])
        tensors = ((leaf, tensor) for leaf, tensor in enumerate(places_in((args, kwargs))) if tensor is not None)
        given = ((leaf, self._known(tensor)) for leaf, tensor in tensors)
        self._arguments.append({leaf: fed for leaf, fed in given if fed is not None})
        self._reads.append(Read(self._region, list(self._arguments[-1].values()), [], is_call=True))
        self._depth += 1
        try:
            with aside(self):
                return self.numbers.run(visible, forward, args, kwargs)
        finally:
            self._depth -= 1

    def _note_substitutes(self, visible: Visible, occurrence: int, result: Any) -> None:
        """Of what a call is given, and of the first that it returns: what it was given that looks like it."""
        given = {leaf: fed for leaf, fed in self._arguments[-1].items() if not fed.is_state}
        self._instead |= {argument_name(visible.name, leaf): fed.name for leaf, fed in given.items()}
        made = next(iter(tensors_in(result)), None)
        alike = (fed for fed in given.values() if made is not None and _is_alike(fed.tensor, made))
        if (fed := next(alike, None)) is not None:
            self._instead[output_name(visible.name, occurrence, 0)] = fed.name

    @property
    def _region(self) -> int:
        return len(self._calls)

    def _known(self, tensor: torch.Tensor) -> Fed | None:
        fed = self._fed.get(id(tensor))
        if fed is None and id(tensor) in self._names:
            name = self._names[id(tensor)]
            is_of_state = name not in self._made_once
            fed = Fed(self._state[name], 0, name, name, is_state=True, is_of_state=is_of_state)
            self._fed[id(tensor)] = fed
        return fed

    def _read(self, region: int | None, tensors: Sequence[torch.Tensor]) -> None:
        """Their numbers are needed there."""
        sources = [fed for tensor in tensors if (fed := self._known(tensor)) is not None]
        self._reads.append(Read(region, sources, []))

    def _feed(self, fed: Fed) -> None:
        self._fed[id(fed.tensor)] = fed
        self._made.append(fed)  # keeps the tensor, so that no other gets its id

    def _name(self, tensor: torch.Tensor, name: str, maker: str, *, is_own: bool) -> None:
        """is_own: the call is taken to have made it also where it gives back what it got, since a block that is left
        out at random does so at times. Whoever reads it then reads what the call got, too."""
        fed = self._fed.get(id(tensor))
        if fed is None or fed.is_loose:
            self._read(self._region, [tensor])
            self._feed(Fed(tensor, self._region, name, f"what {maker} returns", sources=() if fed is None else (fed,)))
        elif is_own and not fed.is_state:
            self._feed(Fed(tensor, self._region, name, f"what {maker} returns", given=fed))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            raise own_backward(f" at {user_line()}")
        before = generators()
        result = func(*args, **kwargs)
        has_drawn = not all(map(torch.equal, before, generators()))
        made = made_by(func, args, result)
        if not made and _is_quiet(func):
            return result
        written = self._note_written(made[0]) if made and writes_numbers(func) else None
        self._varies |= self._has_drawn and not made
        name = self._loose.next(func) if made else ""
        self._computed[name.removeprefix(f"~{self._loose.call} ").partition("#")[0]] += 1
        sources = [fed for tensor in tensors_in((args, kwargs)) if (fed := self._known(tensor)) is not None]
        if has_drawn:
            self._draws(name_of(func), is_fed=bool(sources))
        if sources:
            is_kept = any(id(tensor) in self._names for tensor in made)  # by the model, so written to only once
            is_of_state = not (written or is_kept) and all(fed.is_of_state for fed in sources)
            found = [
                Fed(
                    tensor,
                    self._region,
                    f"{name}:{leaf}",
                    result_of(func),
                    is_loose=True,
                    is_of_state=is_of_state,
                    sources=sources,
                )
                for leaf, tensor in enumerate(made)
            ]
            asks = "" if made or is_check(func) else asks_for_numbers(func, sources[0].what)
            self._reads.append(Read(self._region, sources, found, asks=asks, writes=written or ""))
            for fed in found:
                self._feed(fed)
        return result

    def _note_written(self, tensor: torch.Tensor) -> str | None:
        """Its name if it is the model's, or memory of that."""
        memory = memory_of(tensor)
        there = self._memory.get(memory) if memory else None
        name = self._names.get(id(tensor), there)
        if name is None:
            return None
        self._written.add(name)
        if name != there:  # assigned to its .data
            self._memory = {memory: name} | {key: each for key, each in self._memory.items() if each != name}
        return name

    def _draws(self, operation: str, *, is_fed: bool) -> None:
        """What depends on the batch alone is drawn by every stage, and with the same numbers if each has drawn what the
        one has drawn that had the numbers of the rest: a layer is left out behind a dropout, for example."""
        if is_fed:
            self._drawing.add(operation)
            return
        self._has_drawn = True
        if self._drawing:
            self._redraws[self._loose.call] = frozenset(self._drawing)

    # --- afterwards

    def _recorded(self, result: Any) -> Recorded:
        regions = Regions(self._calls, self._made, self._arguments, self._states, self._reads)
        recorded = Recorded(
            units=regions.units,
            values=regions.values,
            uses=regions.uses,
            given=regions.given,
            ends=regions.ends,
            late=regions.late,
            problems=regions.problems,
            repeated=regions.repeated,
            returned=self._returned,
            redraws=self._redraws,
            instead=tuple(self._instead.items()),
            called=frozenset(
                (each.number, occurrence)
                for each, newest in self._occurrences.items()
                if each.kind is CallKind.OPAQUE
                for occurrence in range(newest + 1)
            ),
            computed=frozenset((what, number) for what, count in self._computed.items() for number in range(count)),
            varies=self._varies,
            made_once=self._made_once | regions.made_once,
            result=result,
        ).with_left_out(self._left_out())
        return recorded.with_spares() if recorded.varies else recorded

    def _left_out(self) -> list[tuple[str, frozenset[str]]]:
        """Items of repeated blocks of which others were called."""
        called = {_kind_of_item(each) for each in self._calls} - {None}
        return [
            (each.name, self._states_of[each])
            for each in self._visible
            if each.kind is CallKind.OPAQUE and each not in self._occurrences and _kind_of_item(each) in called
        ]

    def _state_of(self, visible: Visible) -> frozenset[str]:
        """While the module has its own: torch.func.functional_call gives it others for a call."""
        return frozenset(self._names[id(each)] for _, each in named_tensors(visible.module))


def _refuse_update(optimizer: Any, args: Any, kwargs: Any) -> NoReturn:
    raise WorkloadError(
        f"the step calls the step() of {type(optimizer).__name__} at {user_line()}; leave it out, as zero_grad() and "
        "backward(): Weft updates all parameters by Workload.optimizer, and two that take turns (a GAN's) are no job"
    )


@contextlib.contextmanager
def _refusing_to_clip() -> Iterator[None]:
    """By what torch's functions call, however the step has come by them: without gradients they do nothing."""
    known = vars(clip_grad)
    before = {helper: known[helper] for helper in _CLIPPED_BY if helper in known}  # a torch may have others

    def refusing(helper: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_name == _CLIPPED_BY[helper]:
                _refuse_to_clip(_CLIPPED_BY[helper])
            return before[helper](*args, **kwargs)

        return call

    known.update({helper: refusing(helper) for helper in before})
    try:
        yield
    finally:
        known.update(before)


def _refuse_to_clip(name: str) -> NoReturn:
    raise WorkloadError(
        f"the step calls {name} at {user_line()}, and the gradient that it is to clip comes after the step; leave it "
        "out, as backward(): strategy.clip_norm bounds the norm of the whole gradient"
    )


@contextlib.contextmanager
def _refusing_to_scale() -> Iterator[None]:
    """What a GradScaler multiplies a loss by, its step() takes from the gradients, and here nobody calls that."""
    before = GradScaler.scale

    def scale(scaler: GradScaler, outputs: Any) -> Any:
        if not scaler.is_enabled():
            return before(scaler, outputs)
        raise WorkloadError(
            f"the step scales by a GradScaler at {user_line()}, and nothing would divide the gradients by that again; "
            "leave it out, as backward(): torch.autocast with bfloat16, or strategy.precision = 'bf16', needs none"
        )

    GradScaler.scale = scale  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        GradScaler.scale = before  # type: ignore[method-assign]


def _is_alike(given: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether it may stand for what was made, where gradients go, too."""
    return given.shape == made.shape and given.dtype is made.dtype and given.requires_grad <= made.requires_grad


def _kind_of_item(visible: Visible) -> tuple[str, type] | None:
    stack, _, number = visible.name.rpartition(".")
    return (stack, type(visible.module)) if number.isdigit() else None


def _is_quiet(func: Callable[..., Any]) -> bool:
    """Whether it tells what a placeholder can tell as well."""
    return func in KNOWN or func.__name__ in ("__repr__", "__format__")
