"""A cut step: one stage's run of the user's whole step.

    stage 1 of 3     prologue ┊ block 0 ┊ block 1 ┃ block 2 ┊ block 3 ┃ block 4 ...
                     skipped: placeholders        ┃ run     ┊ run     ┃ left by an exception
                                                  ▲ bound to what has come   ▲ its arguments are sent

A call of an opaque module before the stage's own begins is skipped: its forward runs on placeholders, which tells
shapes alone, and once for each signature of its arguments. What depends on the batch alone is computed in every stage.
At the stage's first call the placeholders get what other stages have sent. Parameters and buffers of other stages are
placeholders throughout.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.plan.plan import Border
from weft.workload.cutting.calls import CallNumbers, Seed
from weft.workload.cutting.leaves import places_in, replaced, tensors_in
from weft.workload.cutting.loose import Lines, LooseNames, LooseResults, is_loose
from weft.workload.cutting.modes import look_at_assigned_data
from weft.workload.cutting.names import KeptMemory, Place, call_name, is_argument, names_by_place, places_of, slots_in
from weft.workload.cutting.placeholder import Placeholder, refuse_kept, resolved, sendable
from weft.workload.cutting.skipped import OtherStructure, SkippedCalls
from weft.workload.cutting.substitutes import Substitutes
from weft.workload.cutting.tape import Tape, alone, answered, playing
from weft.workload.cutting.visible import CallKind, Forward, Visible, listening, visible_modules
from weft.workload.workload import WorkloadError

Step = Callable[[nn.Module, Any], Any]
Bound = list[tuple[Placeholder, torch.Tensor]]
MAX_TAPES = 256  # of a stage, by the shapes of its batch
_SAME_CALLS = (
    "a step of several stages must call the same modules in the same order for every batch; keep what depends on the "
    "batch inside one module or, by strategy.split, inside one stage"
)


class OtherCallsError(WorkloadError):
    """A run makes other calls than the cut was found with, or passes something on that nobody saw."""


class Sent(list[torch.Tensor | None]):
    """What a stage that is not the last has for later ones."""


class _Leave(BaseException):
    """The next stage begins. No Exception, so that no `except Exception` of the user's stops it."""


class CutStep:
    def __init__(
        self,
        model: nn.Module,
        *,
        begins: Border | None,
        ends: Border | None,
        own: Collection[str],
        receives: Sequence[str],
        sends: Sequence[str],
        skipped: SkippedCalls,
    ) -> None:
        """begins, ends: None: with the step. own: names of the parameters and buffers that it computes with. receives,
        sends: names of values. skipped: what skipped calls return; several stages may have it in common."""
        self._model = model
        self._begins, self._ends = begins, ends
        self._can_begin = frozenset(begins.modules if begins else ())
        self._can_pass = frozenset(ends.modules if ends else ())
        self._can_end = frozenset((ends.ends or ends.modules) if ends else ())
        self._late = frozenset(border.late if (border := begins or ends) else ())
        self._receives, self._sends = tuple(receives), tuple(sends)
        instead = border.instead if (border := begins or ends) else ()
        self._substitutes = Substitutes(instead, [name for name in (*receives, *sends) if not is_argument(name)])
        self._visible = visible_modules(model)
        heard = (*receives, *sends, *self._substitutes.names)
        self._makers = {name.rpartition(":")[0] for name in heard}
        self._making = {call.partition("@")[0] for call in self._makers}  # modules
        self._loose = LooseNames()
        self._looks = LooseResults(self._loose, self._made) if any(map(is_loose, heard)) else None
        # Who looks at each operation sees those of these modules, too.
        self._shapes_alone = {each for each in self._visible if self._looks is None and each.tells_shapes_alone}
        self._own = frozenset(own)
        self._kept = KeptMemory()
        tables = (each.module for each in self._visible if each.kind is CallKind.TRANSPARENT)
        self._tables = {id(part) for module in tables for part in module.modules()}
        self._names = names_by_place(model)  # forward may put another tensor in a buffer's place
        self._others = {each for each in self._visible if each.kind is CallKind.OPAQUE and not self._has(each.module)}
        self.numbers = CallNumbers()
        self.before_call: Callable[[nn.Module], None] | None = None  # of a module that the stage has
        self._installation = contextlib.ExitStack()
        self._skipped = skipped
        self._occurrences: dict[Visible, int] = {}
        self._is_inside = False
        self._has_passed = False  # the first call of the next stage
        self._came: Mapping[str, torch.Tensor] = {}
        self._known: dict[str, Placeholder] = {}
        self._sent: dict[str, torch.Tensor] = {}
        self._tapes: dict[Any, Tape] = {}
        self.new_tape: Callable[[], Tape] = Tape  # asked in a run of shapes that none has had
        self._tape: Tape | None = None  # of this run
        self.bound: Bound = []  # by the last run
        self._rebound: Bound = []
        self._started = 0.0
        self.skipping_seconds = 0.0  # of the last run, before the stage's own call

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The model is this stage's: the others' parameters and buffers are placeholders."""
        look_at_assigned_data()
        foreign = self._foreign()
        with listening(self._visible, self):
            for slots, key, tensor, name in foreign:
                slots[key] = self._skipped.foreign(tensor, name)
            try:
                yield
            finally:
                for slots, key, tensor, _ in foreign:
                    slots[key] = tensor

    def install(self) -> None:
        """For good: nobody here has the others' parameters any more."""
        look_at_assigned_data()
        self._installation.enter_context(listening(self._visible, self))
        for slots, key, tensor, name in self._foreign():
            slots[key] = self._skipped.foreign(tensor, name)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Installed for good, for a moment nobody hears of the modules' calls."""
        self._installation.close()
        try:
            yield
        finally:
            self._installation.enter_context(listening(self._visible, self))

    def _foreign(self) -> list[Place]:
        """Where in the model what is not the stage's own stands; tables of modules without state are everybody's."""
        foreign = {at: name for at, name in self._names.items() if name not in self._own}
        return places_of({at: name for at, name in foreign.items() if id(at.module) not in self._tables})

    @property
    def modules(self) -> list[nn.Module]:
        """Those that are called whole: what one calls inside is nobody's business."""
        return [each.module for each in self._visible if each.kind is CallKind.OPAQUE]

    @property
    def has_buffers(self) -> bool:
        """Whether there are some that a run of it may change."""
        return any(key in module._buffers and name in self._own for (module, key), name in self._names.items())

    def _has(self, module: nn.Module) -> bool:
        """All that the module needs."""
        return all(self._names[slot] in self._own for slot in slots_in(module) if slot in self._names)

    def run(self, step: Step, batch: Any, received: Sequence[torch.Tensor | None], seed: Seed) -> Any:
        """What the step returns, of the last stage; of any other the tensors that it sends, in their order, and None
        for one that this run has not made: validation may have others than training. OtherStructure: run it again."""
        self.rebind([])
        came = zip(self._receives, received, strict=True)
        self._came = {name: tensor for name, tensor in came if tensor is not None}
        self._occurrences.clear()
        self._sent, self._known = {}, {}
        self._loose.begin()
        self._substitutes.begin()
        self._is_inside, self._has_passed = self._begins is None, False
        playing.tape = self._tape = self._tape_of(step, batch)
        playing.run = object()
        playing.redraws, playing.keeps = self._skipped.redraws.get("", ()), self._has_in_model
        playing.lines = None if self._is_inside else Lines()
        self._started, self.skipping_seconds = time.perf_counter(), 0.0
        try:
            self.numbers.begin(seed)
            with self._looks or contextlib.nullcontext():
                result = replaced(step(self._model, batch), resolved)
            for each in tensors_in(result) if self._ends is None else ():
                refuse_kept(each)
        except _Leave:
            return Sent(self._sent.get(name) for name in self._sends)
        except OtherStructure:
            self._tapes.clear()  # they have what was assumed
            raise
        finally:
            self.numbers.end()
            playing.tape = playing.run = playing.keeps = playing.lines = self._tape = None
            playing.redraws = ()
            self._skipped.end_run()
            self.bound = [(each, each.came) for each in self._known.values() if each.came is not None]
            for placeholder, _ in self.bound:
                placeholder.came = None
        if self._has_passed:
            return Sent(self._sent.get(name) for name in self._sends)
        if self._ends is not None:
            raise OtherCallsError(
                f"the step has ended without a call of {self._ends.modules[0]}, with which a stage begins; "
                f"{_SAME_CALLS}"
            )
        return self._result(result)

    def _result(self, result: Any) -> Any:
        unknown = next((each for each in tensors_in(result) if isinstance(each, Placeholder)), None)
        if unknown is None:
            return result
        missing = next((name.rpartition(":")[0] for name in self._receives if name not in self._came), None)
        why = f"{missing} was not called" if missing else "other modules were called, or other lines ran"
        raise OtherCallsError(
            f"the step returns {unknown.what}, which needs what no other stage has sent: before {self._first} {why}, "
            f"unlike when the step was tried before training; {_SAME_CALLS}"
        )

    def _has_in_model(self, tensor: torch.Tensor) -> bool:
        """Whether it stands in the model, for good, or is memory of what does."""
        return self._kept.has(tensor, [each for _, _, each, _ in places_of(self._names)])

    def rebind(self, bound: Bound) -> None:
        """As a run has left it: for a backward that calls modules again, with the arguments that they had."""
        for placeholder, _ in self._rebound:
            placeholder.came = None
        self._rebound = bound
        for placeholder, tensor in bound:
            placeholder.came = tensor

    def close(self) -> None:
        """For good: lets go of its runs."""
        self.rebind([])
        self._tapes.clear()
        self._came, self._known, self._sent, self.bound = {}, {}, {}, []
        self._substitutes.begin()

    def _tape_of(self, step: Step, batch: Any) -> Tape:
        shapes = [tensor.shape for tensor in tensors_in(batch)]
        key = (step, torch.is_grad_enabled(), self._model.training, *shapes)
        tape = self._tapes.pop(key, None) or self.new_tape()
        if len(self._tapes) >= MAX_TAPES:
            del self._tapes[next(iter(self._tapes))]
        self._tapes[key] = tape  # the newest last
        tape.rewind()
        return tape

    @property
    def _first(self) -> str:
        return self._begins.modules[0] if self._begins else "the beginning of the step"

    @property
    def span(self) -> str:
        """For people: where the stage begins and ends."""
        return f"from {self._first} to {self._ends.modules[0] if self._ends else 'the end of the step'}"

    # --- the listener

    def call(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.numbers.is_running:
            return self._again(visible, forward, args, kwargs)
        occurrence = self._occurrences[visible] = self._occurrences.get(visible, -1) + 1
        if visible.kind is not CallKind.OPAQUE:
            is_of_shapes = visible in self._shapes_alone and playing.lines is not None and not playing.redraws
            known = args[0] if args else None
            if is_of_shapes and isinstance(known, Placeholder) and not known.is_kept:  # else there is nothing to recall
                result = answered(visible, (args, kwargs), lambda: forward(*args, **kwargs))
                playing.lines.note(forward, (args, kwargs), result)
            else:
                result = forward(*args, **kwargs)
            if visible.name in self._making and (call := call_name(visible.name, occurrence)) in self._makers:
                self._returned(call, result)
            return result
        name = visible.name
        self._loose.call = call = call_name(name, occurrence) if occurrence else name
        if self._skipped.redraws:
            playing.redraws = ()
        if not self._is_inside and name in self._can_begin:
            args, kwargs = self._begin((args, kwargs))
        if name in self._can_pass and not self._has_passed:
            self._pass((args, kwargs))
        if call in self._can_end:
            raise _Leave
        if self._is_inside and not (visible in self._others and self._may_be_skipped(visible)):
            if kwargs or len(args) != 1 or type(args[0]) is not torch.Tensor:
                args, kwargs = replaced((args, kwargs), resolved)
            if self.before_call is not None:
                self.before_call(visible.module)
            result = self._unseen(self.numbers.run, visible, forward, args, kwargs)
        else:
            result = self._skip(visible, occurrence, forward, (args, kwargs))
        if self._skipped.redraws:
            playing.redraws = self._skipped.redraws.get(call, ())
        if call in self._makers:
            self._returned(call, result)
        return result

    def _skip(self, visible: Visible, occurrence: int, forward: Forward, given: tuple[Any, ...]) -> Any:
        assert self._tape is not None
        asker: object = visible
        if self._skipped.goes_by_numbers(visible):
            shapes = functools.partial(self._skipped.shapes, visible, occurrence, forward, given)
            asker = visible, self._unseen(alone, functools.partial(shapes, hides=self._is_inside))
        known = self._tape.recall(asker, given)
        if known is not None:
            result = known.answered(given)
        else:
            apart = functools.partial(self._unseen, alone)
            skip = functools.partial(self._skipped.skip, visible, occurrence, forward, given, apart=apart)
            result = self._unseen(answered, asker, given, functools.partial(skip, hides=self._is_inside))
        self.numbers.skip(visible)  # a forward that runs on placeholders may draw all the same
        return result

    def _may_be_skipped(self, visible: Visible) -> bool:
        """A call inside of the stage, of another stage's module."""
        if self._loose.call in self._late or visible.name in self._can_pass:
            return True
        raise OtherCallsError(
            f"{visible} is called in the stage {self.span}, and was not called there when the step was tried "
            f"before training, so another stage has it; {_SAME_CALLS}"
        )

    def _again(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """From inside a backward, by torch.utils.checkpoint around a call."""
        if visible.kind is not CallKind.OPAQUE:
            return forward(*args, **kwargs)
        args, kwargs = replaced((args, kwargs), resolved)
        return self.numbers.run(visible, forward, args, kwargs)

    def _begin(self, given: tuple[Any, ...]) -> tuple[Any, Any]:
        self._is_inside = True
        self.skipping_seconds = time.perf_counter() - self._started
        assert self._begins is not None
        for name, placeholder in self._known.items():
            placeholder.comes(self._came[name])
        self._substitute()
        came = {leaf: name for leaf, name in self._begins.given if name in self._came and name not in self._known}
        places = places_in(given) if came else []
        for leaf, name in came.items():
            tensor = places[leaf] if leaf < len(places) else None
            if isinstance(tensor, Placeholder) and tensor.came is None:
                tensor.comes(self._came[name])
                self._known[name] = tensor
        self._known |= self._unseen(playing.lines.computed, given, self._begins)
        playing.lines = None
        return replaced(given[0], resolved), replaced(given[1], resolved)

    def _substitute(self) -> None:
        """Of what other stages have sent, that which stands for what this run has left out."""
        for name, tensor in self._came.items() if self._substitutes.are_known else ():
            other = None if name in self._known else self._substitutes.of(name)
            if isinstance(other, Placeholder) and other.came is None:
                other.comes(tensor)
                self._known[name] = other

    def _pass(self, given: tuple[Any, ...]) -> None:
        """An argument of the call is sent under its name also where the module that makes it has been left out, and
        another one has made what is in its place."""
        assert self._ends is not None
        self._has_passed = True
        places = self._ends.given
        if self._substitutes.are_known:
            places = tuple((leaf, name) for leaf, name in places if is_argument(name))
            for name in self._sends:
                self._send_substitute(name)
        places = tuple((leaf, name) for leaf, name in places if name in self._sends and name not in self._sent)
        if not places:
            return
        tensors = places_in(given)
        made = {leaf: self._sent.get(name) for leaf, name in reversed(self._ends.given)}
        for leaf, name in places:
            there = tensors[leaf] if leaf < len(tensors) else None
            if name not in self._sent and there is not None:
                tensor = resolved(there) if self._substitutes.are_known else sendable(there)
                if tensor is not made[leaf] and not isinstance(tensor, Placeholder):  # else who has made it has sent it
                    self._sent[name] = made[leaf] = tensor

    def _send_substitute(self, name: str) -> None:
        other = None if name in self._sent else self._substitutes.of(name)
        if other is not None and not isinstance(tensor := resolved(other), Placeholder):
            self._sent[name] = tensor

    def _returned(self, call: str, result: Any) -> None:
        """Values are known by who returned them."""
        for leaf, tensor in enumerate(tensors_in(result)):
            self._made(f"{call}:{leaf}", tensor)

    def _made(self, name: str, tensor: torch.Tensor) -> None:
        self._substitutes.see(name, tensor)
        if self._is_inside and name in self._sends:
            self._sent[name] = sendable(tensor)
        elif name in self._came and isinstance(tensor, Placeholder):
            self._known[name] = tensor
            if self._is_inside:
                tensor.comes(self._came[name])

    def _unseen(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a call does inside is nobody's business."""
        if self._looks is None:
            return function(*args)
        with self._looks.paused():
            return function(*args)
