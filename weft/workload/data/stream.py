"""Streams: an iterable dataset as one whose items are asked for by their numbers, as they come or nearly so.

Items are drawn one after another. Replicas may be fed in another order within a batch: what was drawn for a later
microbatch is kept until it is asked for. Going back begins the epoch again: from the state that the dataset had when
the job began, where it has one, and after its `set_epoch(e)`. One without a state has to begin anew with each `iter()`;
of one without a length, too, that is tried. Before each item torch's generator is seeded by (seed, epoch, number), so
what an item draws does not depend on who is fed when.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from weft.workload.data.tree import flatten
from weft.workload.randomness import seed_loading
from weft.workload.workload import WorkloadError, kind_of

_BEGINNING = -1  # stands for the number of an item in the key of what is drawn before the first
_NUM_TRIED = 4  # items that are drawn twice


class ItemStream(Dataset[Any]):
    """keep: items that are drawn before they are asked for, at most; those of a batch. again: one may be asked for
    several times, before the next. is_endless: it has no length of its own."""

    def __init__(
        self, dataset: Any, field: str, *, size: int, keep: int, again: bool = False, is_endless: bool = False
    ) -> None:
        self.is_endless, self._again = is_endless, again
        self._dataset = dataset
        self._field = field
        self._size = size
        self._keep = keep
        self._state = copy.deepcopy(self._dataset.state_dict()) if has_state(self._dataset) else None
        self._seed = self._first = 0
        self._items: Iterator[Any] | None = None  # of the pass that is drawn from; from the first item asked for
        self._next = 0  # the number of what is drawn next; numbers count over all passes here
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._size

    def begin(self, number: int, seed: int) -> None:
        """Items are counted from the first of this pass on."""
        self._first, self._seed = number * self._size, seed

    def rewind(self) -> None:
        """The pass of what is asked for next begins again."""
        self._items = None

    def __getitem__(self, number: int) -> Any:
        number += self._first
        if self._items is None or (number < self._next and number not in self._kept):
            self._next = number - number % self._size
            self._kept.clear()
        while self._next <= number:
            if len(self._kept) > self._keep:
                del self._kept[next(iter(self._kept))]
            coming = self._next
            self._kept[coming] = self._draw()
        return self._kept[number] if self._again else self._kept.pop(number)

    def _draw(self) -> Any:
        at, number = divmod(self._next, self._size)
        if number == 0:
            self._items = self._pass(at)
        assert self._items is not None
        try:
            with self._seeded(at, number):
                item = next(self._items)
        except StopIteration:
            raise WorkloadError(self._ended(at, number)) from None
        self._next += 1
        return item

    def _ended(self, at: int, number: int) -> str:
        ended = f"Workload.{self._field}: the {kind_of(self._dataset)} ended after {number} items"
        if self.is_endless:
            return (
                f"{ended}, and job.steps need {self._size}; give it a __len__ that tells how many it gives, to go "
                "through them again in each epoch, or train fewer steps"
            )
        needed = f"of epoch {at}, and {self._size} are needed"
        return f"{ended} {needed}; let its __len__ tell what it gives, or train fewer steps"

    def check_begins_again(self) -> None:
        """Of one with neither a length nor a state: raises WorkloadError where its first items are others when it is
        begun a second time. What the dataset raises is told where a batch is made of them."""
        if not self.is_endless or self._state is not None:
            return
        try:
            first, again = self._first_items(), self._first_items()
        except Exception:
            return
        if not _are_same(first, again):
            raise WorkloadError(
                f"Workload.{self._field}: the {kind_of(self._dataset)} has neither a length nor a state, and gave "
                "other items when it was begun again, as a job does that goes on; let its __iter__ open what it reads, "
                "and seed what it draws by, or give it state_dict and load_state_dict"
            )

    def _first_items(self) -> list[Any]:
        self.rewind()
        self._next = 0
        items: list[Any] = []
        with contextlib.suppress(WorkloadError):  # that it has ended
            while len(items) < min(_NUM_TRIED, self._size):
                items.append(self._draw())
        self.rewind()
        return items

    def _pass(self, at: int) -> Iterator[Any]:
        if self._state is not None:
            self._dataset.load_state_dict(copy.deepcopy(self._state))
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(at)
        with self._seeded(at, _BEGINNING):
            return iter(self._dataset)

    @contextlib.contextmanager
    def _seeded(self, at: int, number: int) -> Iterator[None]:
        """What draws beside the dataset, a collate function, must not see how many items came before. at: the pass."""
        state = torch.default_generator.get_state()
        seed_loading(self._seed, at, number)
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


def has_state(dataset: Any) -> bool:
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def stream_of(
    dataset: IterableDataset[Any],
    field: str,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    again: bool = False,
) -> ItemStream:
    """steps: how long it must last where it has no length. again: as of an ItemStream. Raises WorkloadError that names
    the field."""
    length = _length(dataset)
    if length is None and (steps is None or batch_size is None or field != "train"):
        raise WorkloadError(
            f"Workload.{field} is an IterableDataset ({kind_of(dataset)}) without a length; give it a __len__"
            f"{', or job.steps' * (field == 'train')}"
        )
    size = length if length is not None else (steps or 0) * (batch_size or 0)
    return ItemStream(dataset, field, size=size, keep=batch_size or 1, again=again, is_endless=length is None)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, AttributeError, NotImplementedError):  # as a class around another one may say it
        return None


def _are_same(items: list[Any], others: list[Any]) -> bool:
    """Whatever cannot be looked into is the same."""
    try:
        (tensors, skeleton), (other_tensors, other) = flatten(items), flatten(others)
    except WorkloadError:
        return True
    return skeleton == other and all(map(_is_same, tensors, other_tensors))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A NaN is equal to itself."""
    return tensor.contiguous().flatten().view(torch.uint8)
