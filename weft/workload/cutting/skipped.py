"""Skipped calls: what a call of another stage's module returns, without its numbers.

Known for each signature of a call: the structure of what it returns, with a tensor without numbers (on torch's meta
device) in each tensor's place, and which of them are given back as they came in. It comes from running the module on
placeholders, or, for a module whose forward asks for numbers, from a run that had them.
A module whose shapes depend on numbers that the batch has (it packs by lengths, say) runs on placeholders each time.

To run a module on placeholders may take longer than its own forward, and batches may have other shapes each time. So
where a call has returned the same but for shapes, for several signatures, it gives late placeholders for others: few
are asked for their shape before what they stand for has come over.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from weft.workload.code.own_classes import Modules, Unpickling
from weft.workload.compiling.compiled import uncompiled
from weft.workload.cutting.leaves import copied, lying_as, parts_of, replaced, tensors_in
from weft.workload.cutting.modes import NumbersRead
from weft.workload.cutting.placeholder import Placeholder, placeholder_of, sized, without_numbers
from weft.workload.cutting.tape import alone, of_no_run
from weft.workload.cutting.visible import Forward, Visible
from weft.workload.workload import WorkloadError

MAX_SIGNATURES = 4096  # of all skipped calls of a stage; a batch of another length has others
ALIKE, NEVER = 2, -math.inf  # signatures for which a call has returned the same but for shapes: arbitrary
Key = tuple[Any, ...]
Kept = TypeVar("Kept")
Redraws = Mapping[str, frozenset[str]]  # by the name of a call, operations behind it that draw where they are skipped


@dataclass(frozen=True, slots=True)
class Returned:
    """Can be pickled where its structure can."""

    structure: Any  # with meta tensors
    requires: tuple[bool, ...]  # gradients, by leaf, where they are enabled
    given: Mapping[int, int]  # leaf -> which tensor of the arguments it is
    again: Mapping[int, int]  # leaf -> an earlier one, which is the same tensor
    shaped_as: tuple[frozenset[int], ...]  # by leaf, the tensors of the arguments that have its shape

    def is_like(self, other: Returned, *, but_for_shapes: bool = False) -> bool:
        """Whether the same placeholders stand for both; of what is no tensor nobody asks, nor, at random, whether a
        block gives back what it got."""

        def seen(returned: Returned) -> list[Any]:
            leaves = tensors_in(returned.structure)
            return [leaf.dtype if but_for_shapes else (leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]

        are_alike = seen(self) == seen(other) and self.again == other.again
        return are_alike and self._given_behind_the_first() == other._given_behind_the_first()

    def _given_behind_the_first(self) -> dict[int, int]:
        return {leaf: number for leaf, number in self.given.items() if leaf}

    def but_for_shapes(self) -> object:
        """None of what has more in it than tensors: that may depend on shapes, too."""
        leaves, structure = tree_flatten(self.structure)
        if not all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves):
            return None
        dtypes = [leaf is not None and leaf.dtype for leaf in leaves]
        return structure, dtypes, self.requires, dict(self.given), dict(self.again)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs what no placeholder can go through, with a traceback; here that is an answer."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def pickled(records: Mapping[Key, Returned], redraws: Redraws) -> str:
    """For the other workers of the job, in base64. Errors: WorkloadError."""
    if not records and not redraws:
        return ""
    try:
        return base64.b64encode(pickle.dumps((dict(records), dict(redraws)), pickle.HIGHEST_PROTOCOL)).decode()
    except Exception as error:  # whatever an object of the user's raises
        raise WorkloadError(
            f"what a module returns cannot go to another process ({error}), and it cannot be skipped without; use "
            "stages = 1, or return tensors in tuples and dicts"
        ) from error


def unpickled(text: str, device: torch.device | None = None, modules: Modules | None = None) -> SkippedCalls:
    """For the job itself. device: as of SkippedCalls. modules: as of Unpickling."""
    records, redraws = Unpickling(base64.b64decode(text), modules).load() if text else ({}, {})
    return SkippedCalls(records, device, redraws, late=True)


def returned_of(result: Any, came: Sequence[torch.Tensor]) -> Returned:
    """came: in the arguments, before the call: it may have written to a dict that it was given."""
    leaves = tensors_in(result)
    arguments = {id(tensor): number for number, tensor in reversed(list(enumerate(came)))}
    with torch._C.DisableTorchFunctionSubclass():
        requires = tuple(leaf.requires_grad for leaf in leaves)
        shapes = [sized(tensor).shape for tensor in came]
        shaped_as = tuple(
            frozenset(number for number, shape in enumerate(shapes) if shape == sized(leaf).shape) for leaf in leaves
        )
    firsts = {id(tensor): leaf for leaf, tensor in reversed(list(enumerate(leaves)))}
    again = {leaf: first for leaf, tensor in enumerate(leaves) if (first := firsts[id(tensor)]) != leaf}
    same = {leaf: arguments[id(tensor)] for leaf, tensor in enumerate(leaves) if id(tensor) in arguments}
    try:
        structure = replaced(result, without_numbers)
    except Exception:  # what a class that looks at its tensors raises: a packed sequence wants some on the host
        structure = replaced(result, lambda tensor: torch.empty_like(tensor, requires_grad=False))
    return Returned(structure, requires, same, again, shaped_as)


def key_of(visible: Visible, occurrence: int, given: tuple[Any, ...]) -> Key:
    """The signature of a call: equal for what a module treats alike, as far as structure and shapes go. The last of it
    is the whole; what stands before it tells enough where nothing better is known."""
    first = next(iter(tensors_in(given)), None)
    return (visible.number, occurrence, visible.module.training, _signature(first), _signature(given))


def form_of(visible: Visible, occurrence: int, given: tuple[Any, ...]) -> Key:
    """Equal for calls that differ by the shapes of tensors alone."""
    return (visible.number, occurrence, visible.module.training, _signature(given, shape_of=lambda tensor: None))


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    tensor = sized(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(tensor.shape)


def _signature(value: Any, shape_of: Callable[[torch.Tensor], Any] = _shape_of) -> Any:
    if isinstance(value, torch.Tensor):
        shape = shape_of(value)  # modules may have to run for it
        with torch._C.DisableTorchFunctionSubclass():
            return shape, str(value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(_signature(part, shape_of) for part in value)
    if isinstance(value, dict):
        return tuple((key, _signature(part, shape_of)) for key, part in value.items())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__qualname__, _signature(parts_of(value), shape_of)


def _keep(known: dict[Key, Kept], key: Key, value: Kept) -> None:
    """As the newest; of too many the oldest goes. A number among the arguments may be another one in each step."""
    known.pop(key, None)
    if len(known) >= MAX_SIGNATURES:
        del known[next(iter(known))]
    known[key] = value


def _like_arguments(records: Sequence[Returned], arguments: Sequence[torch.Tensor]) -> Returned | None:
    """What a call returns if, as in all records of it, outputs have the shapes of the same arguments; None if not."""
    structures = [tensors_in(each.structure) for each in records]
    made = []
    for leaf in range(len(structures[0])):
        common = frozenset.intersection(*(each.shaped_as[leaf] for each in records if leaf < len(each.shaped_as)))
        alike = [leaves[leaf] for leaves in structures if leaf < len(leaves)]
        if not common or min(common) >= len(arguments):
            return None
        if (like := lying_as(alike, arguments[min(common)].shape)) is None:
            return None
        made.append(like)
    leaves = iter(made)
    return dataclasses.replace(records[0], structure=replaced(records[0].structure, lambda meta: next(leaves)))


class OtherStructure(BaseException):
    """A call of which it was assumed returns other structures for other shapes, and it is not assumed again. No
    Exception, so that no `except Exception` of the user's stops it: the run is to be made anew."""


class _Later:
    """A skipped call of which nobody has asked yet what shapes it returns."""

    def __init__(self, find: Callable[[tuple[Any, ...]], Returned], given: tuple[Any, ...], like: object) -> None:
        """find: by what is given. like: what it returns, but for shapes."""
        self._find, self._given, self._like = find, given, like
        self._leaves: list[torch.Tensor] | None = None

    def find(self) -> None:
        if self._leaves is not None:
            return
        returned = self._find(self._given)
        if returned.but_for_shapes() != self._like:
            raise OtherStructure
        self._leaves, self._given = tensors_in(returned.structure), ()

    def leaf(self, number: int) -> torch.Tensor:
        self.find()
        assert self._leaves is not None
        return self._leaves[number]

    def forget_numbers(self, hidden: Callable[[torch.Tensor], Placeholder]) -> None:
        self._given = replaced(self._given, lambda each: each if isinstance(each, Placeholder) else hidden(each))


def _find_leaf(of_run: Sequence[_Later], later: _Later, leaf: int) -> torch.Tensor:
    """Earlier calls of its run first, of which this one may have been given what they return: no deep recursion. It may
    be asked for in another run, which has been given a placeholder of this one by heart."""
    for each in of_run:
        if each is later:
            break
        each.find()
    return later.leaf(leaf)


class SkippedCalls:
    def __init__(
        self,
        records: Mapping[Key, Returned],
        device: torch.device | None = None,
        redraws: Redraws = MappingProxyType({}),
        *,
        late: bool = False,
    ) -> None:
        """records: of runs that had the numbers; `needed` of them are those that placeholders do not lead to. device:
        that the step computes on; the host's cores. late: whether there may be late placeholders, which are not asked
        for all that is `needed`."""
        self.device = device
        self.redraws = redraws
        self._foreign: MutableMapping[torch.Tensor, Placeholder] = WeakTensorKeyDictionary()
        self._known: dict[Key, Returned] = {}
        self._records: dict[Key, Returned] = {}
        self._by_first: dict[Key, Returned] = {}
        self.learn(records)
        self.needed: dict[Key, Returned] = {}
        self._may_be_late = late
        self._alike: dict[Key, tuple[Returned, float]] = {}  # by form: the first, and how many were like it
        self._later: list[_Later] = []  # of this run
        self._by_numbers: set[Visible] = set()  # modules whose shapes may be others for the same signature

    def foreign(self, tensor: torch.Tensor, name: str) -> Placeholder:
        """For a parameter or buffer of another stage; one for each, since they take time to make."""
        made = self._foreign.get(tensor)
        if made is None:
            made = placeholder_of(tensor, name, requires_grad=tensor.requires_grad, device=self.device)
            self._foreign[tensor] = made
        return made

    def learn(self, records: Mapping[Key, Returned]) -> None:
        """Of another run, with other shapes."""
        self._records |= records
        self._by_first |= {key[:-1]: each for key, each in records.items()}

    def forget(self) -> None:
        """What forwards have told: each runs again on placeholders, and leaves in its module what it keeps there."""
        self._known.clear()
        self._alike.clear()

    def learn_needed(self, records: Mapping[Key, Returned]) -> None:
        """Of another run: of those calls for which one was needed before."""
        calls = {key[:2] for key in self.needed}
        self.needed |= {key: each for key, each in records.items() if key[:2] in calls}

    def skip(
        self,
        visible: Visible,
        occurrence: int,
        forward: Forward,
        given: tuple[Any, ...],
        *,
        hides: bool = False,
        apart: Callable[..., Any] = alone,
    ) -> Any:
        """hides: what is given has numbers, and is the stage's own, so the module must not write to it. apart: by which
        a function is called that the run must not notice, later on. Of a module of which `goes_by_numbers`, this comes
        behind `shapes`."""
        find = functools.partial(self._find, visible, occurrence, forward, hides=hides)
        form = form_of(visible, occurrence, given)
        later, returned = None, None if hides else self._returned_but_for_shapes(form)
        if returned is not None and not self._is_known(visible, occurrence, given):
            later = _Later(functools.partial(apart, find), given, returned.but_for_shapes())
            self._later.append(later)
        else:
            returned = find(given)
        what = (f"output {leaf} of {visible}" if leaf else f"the output of {visible}" for leaf in itertools.count())
        return replaced(returned.structure, self._placing(returned, what, given, later))

    def goes_by_numbers(self, visible: Visible) -> bool:
        return visible in self._by_numbers

    def shapes(
        self, visible: Visible, occurrence: int, forward: Forward, given: tuple[Any, ...], *, hides: bool
    ) -> tuple[torch.Size, ...]:
        """That the call returns this time."""
        self._known.pop(key_of(visible, occurrence, given), None)
        returned = self._find(visible, occurrence, forward, given, hides=hides)
        return tuple(each.shape for each in tensors_in(returned.structure))

    def end_run(self) -> None:
        """What late placeholders would be found by has no numbers from now on: those were the run's."""
        for later in self._later:
            later.forget_numbers(self._hidden)
        self._later = []

    def _is_known(self, visible: Visible, occurrence: int, given: tuple[Any, ...]) -> bool:
        if any(isinstance(each, Placeholder) and not each.is_known for each in tensors_in(given)):
            return False
        return key_of(visible, occurrence, given) in self._known

    def _returned_but_for_shapes(self, form: Key) -> Returned | None:
        returned, count = self._alike.get(form, (None, 0))
        return returned if self._may_be_late and count >= ALIKE else None

    def _find(
        self, visible: Visible, occurrence: int, forward: Forward, given: tuple[Any, ...], *, hides: bool
    ) -> Returned:
        key = key_of(visible, occurrence, given)
        returned = self._known.pop(key, None)
        if returned is None:
            seen = copied(replaced(given, self._hidden) if hides else given)
            returned = self._computed(key, visible, forward, seen)
            form = form_of(visible, occurrence, given)
            first, count = self._alike.get(form, (returned, 0))
            like = first.but_for_shapes()
            is_alike = like is not None and like == returned.but_for_shapes() and visible not in self._by_numbers
            _keep(self._alike, form, (first, count + 1 if is_alike else NEVER))
        _keep(self._known, key, returned)
        return returned

    def _hidden(self, tensor: torch.Tensor) -> Placeholder:
        return placeholder_of(tensor, "an argument", requires_grad=tensor.requires_grad, device=self.device)

    def _computed(self, key: Key, visible: Visible, forward: Forward, given: tuple[Any, ...]) -> Returned:
        record = self._records.get(key) or self._by_first.get(key[:-1])  # a mask may be there, or not
        came, read = tensors_in(given), NumbersRead()
        try:
            with torch.enable_grad(), _quiet(), read.looking(), of_no_run():  # its objects are given to others, too
                returned = returned_of(uncompiled(forward)(*given[0], **given[1]), came)
        except Exception as error:  # whatever a module raises that gets no numbers
            return self._recorded(key, record) if record is not None else self._shaped_alike(key, visible, given, error)
        if read.any:
            self._by_numbers.add(visible)
        if record is None or returned.is_like(record) or (read.any and returned.is_like(record, but_for_shapes=True)):
            return returned
        return self._recorded(key, record)

    def _recorded(self, key: Key, record: Returned) -> Returned:
        self.needed[key] = record
        return record

    def _shaped_alike(self, key: Key, visible: Visible, given: tuple[Any, ...], error: Exception) -> Returned:
        """For arguments of shapes that no run has had."""
        records = [record for other, record in self._records.items() if other[:3] == key[:3]]
        if not records:
            raise error
        arguments = tensors_in(given)
        alike = _like_arguments(records, arguments)
        if alike is None:
            shapes = ", ".join(str(tuple(each.shape)) for each in arguments)
            raise WorkloadError(
                f"{visible} asks for numbers that this stage does not have, and no batch that was tried before the "
                f"training gave it shapes as here ({shapes}); pad all batches to one length in Workload.collate, or "
                "cut elsewhere (strategy.split; stages = 1 cuts nowhere)"
            ) from error
        return alike

    def _placing(
        self, returned: Returned, what: Iterator[str], given: tuple[Any, ...], later: _Later | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        arguments = tensors_in(given) if returned.given else []
        made: list[torch.Tensor] = []

        def placed(leaf: int, text: str, meta: torch.Tensor) -> torch.Tensor:
            if leaf in returned.again:
                return made[returned.again[leaf]]
            if leaf and leaf in returned.given:
                return arguments[returned.given[leaf]]  # a first one is the call's own, made or written to or neither
            requires = returned.requires[leaf] and torch.is_grad_enabled()
            if later is None:
                return placeholder_of(meta, text, requires_grad=requires, device=self.device)
            find = functools.partial(_find_leaf, self._later, later, leaf)
            return Placeholder.late(meta, find, text, requires_grad=requires, device=self.device)

        def place(meta: torch.Tensor) -> torch.Tensor:
            made.append(placed(len(made), next(what), meta))
            return made[-1]

        return place
