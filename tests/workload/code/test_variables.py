"""Variables: whatever a job's functions keep outside of modules is found, read and written where it is."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.workers.snapshots.attributes import Attributes
from weft.workers.snapshots.first_reads import FirstReads
from weft.workers.snapshots.step_memory import LostAttributes
from weft.workload.code.variables import VariableSearch, variables_of
from weft.workload.cutting.names import Attribute
from weft.workload.workload import Workload

count = 0
table = {"count": 0}
settings = argparse.Namespace(count=0)


class Counter:
    shared = 0

    def __init__(self) -> None:
        self.count, self.inner = 0, {"count": [0]}

    def __call__(self, *_: Any) -> None:
        self.count += 1

    def deep(self, *_: Any) -> None:
        self.inner["count"][0] += 1

    @classmethod
    def of_all(cls, *_: Any) -> None:
        cls.shared += 1


counter = Counter()


def in_a_global(*_: Any) -> None:
    global count
    count += 1


def in_a_new_global(*_: Any) -> None:
    global made
    made = globals().get("made", 0) + 1  # type: ignore[name-defined]


def in_a_table(*_: Any) -> None:
    table["count"] += 1


def in_settings(*_: Any) -> None:
    settings.count += 1


def in_itself(*_: Any) -> None:
    in_itself.count = getattr(in_itself, "count", 0) + 1  # type: ignore[attr-defined]


def in_a_default(*_: Any, kept: Any = Counter()) -> None:  # noqa: B008
    kept.count += 1


def in_an_object(*_: Any) -> None:
    counter()


def in_a_lists_default(*_: Any, kept: Any = []) -> None:  # noqa: B006
    kept.append(len(kept))


class Slotted:
    __slots__ = ("count", "later")

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __call__(self, *_: Any) -> None:
        self.count += 1
        self.later = [self.count]


@dataclass(slots=True)
class Inner:
    past: list[int] = field(default_factory=list)


class Mixed(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1
        self.past.append(self.count)


class Table(dict[str, Any]):
    def __call__(self, *_: Any) -> None:
        self["count"] = self.get("count", 0) + 1


class Ordered(OrderedDict[str, Any]):
    def __call__(self, *_: Any) -> None:
        self[f"count {len(self)}"] = 1


class Past(list[int]):
    def __call__(self, *_: Any) -> None:
        self.append(len(self))


class Window(deque[int]):
    def __init__(self) -> None:
        super().__init__(maxlen=2)

    def __call__(self, *_: Any) -> None:
        self.append((self[-1] if self else 0) + 1)


class Names(set[int]):
    def __call__(self, *_: Any) -> None:
        self.add(len(self))


def on_a_class_that_had_none(*_: Any) -> None:
    Past.seen = getattr(Past, "seen", 0) + 1  # type: ignore[attr-defined]


def counting(function: Callable[..., Any]) -> Callable[..., Any]:
    count = 0

    @wraps(function)
    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        counted.calls = count  # type: ignore[attr-defined]
        return function(*args)

    return counted


def of_itself_within() -> Callable[..., None]:
    def step(*_: Any) -> None:
        step.count = getattr(step, "count", 0) + 1  # type: ignore[attr-defined]

    return step


def many() -> Callable[..., None]:
    counters = [Counter() for _ in range(200)]
    return lambda *_: counters[-1]()


def around() -> Callable[..., None]:
    count = 0

    def step(*_: Any) -> None:
        nonlocal count
        count += 1

    return step


class Net(nn.Linear):
    calls = 0

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.counters = [Counter()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Net.calls += 1
        self.counters[0]()
        return super().forward(x)


STEPS: dict[str, Callable[[], Callable[..., Any]]] = {
    "a global": lambda: in_a_global,
    "one that was not there": lambda: in_a_new_global,
    "a table": lambda: in_a_table,
    "a namespace": lambda: in_settings,
    "a function's own": lambda: in_itself,
    "a default": lambda: in_a_default,
    "an object": lambda: in_an_object,
    "around": around,
    "a method's object": lambda: Counter().deep,
    "one that is called": Counter,
    "a class": lambda: Counter.of_all,
    "a partial's": lambda: partial(lambda kept, *_: kept(), Counter()),
    "a function that it calls": lambda: lambda *_: [in_an_object(), in_a_table()],
    "a list that is a default": lambda: in_a_lists_default,
    "slots": Slotted,
    "slots and others": Mixed,
    "a dict of its own class": Table,
    "an ordered one": Ordered,
    "a list of its own class": Past,
    "a deque of its own class": Window,
    "a set of its own class": Names,
    "a class that had none": lambda: on_a_class_that_had_none,
    "a decorator's": lambda: counting(lambda *_: None),
    "one's that is decorated": lambda: counting(around()),
    "one's that is remembered": lambda: partial(lru_cache(0)(in_a_global)),
    "a function's within": of_itself_within,
    "the last of many": many,
    "a partial's list": lambda: partial(lambda kept, *_: kept.append(len(kept)), []),
    "the model's": lambda: lambda model, batch: model(batch),
}


@pytest.mark.parametrize("asked", ["step", "on_epoch"])
@pytest.mark.parametrize("where", STEPS)
def test_what_has_changed_is_found_and_put_back(where: str, asked: str) -> None:
    function = STEPS[where]()
    others = {} if asked == "step" else {"step": torch.nn.functional.mse_loss}
    model, batch = Net(), torch.zeros(1, 2)
    data = (torch.zeros(4, 2),)
    given: dict[str, Any] = {"train": data, "optimizer": torch.optim.SGD, asked: function, **others}
    attributes = Attributes({**dict(model.named_modules()), **variables_of(Workload(model, **given))})
    assert attributes.changed() == {}
    for _ in range(3):
        function(model, batch)
    kept = attributes.changed()
    assert kept
    then = json.dumps(kept, default=str)
    function(model, batch)
    assert json.dumps(attributes.changed(), default=str) != then
    attributes.restore(kept)
    assert json.dumps(attributes.changed(), default=str) == then
    again = variables_of(Workload(model, **given))
    assert kept.keys() <= again.keys()  # by the same names


def test_data_optimizers_and_what_is_installed_are_kept_otherwise() -> None:
    class Data(torch.utils.data.Dataset[int]):
        read = 0

    class Own(torch.optim.SGD):
        pass

    model, data = Net(), Data()
    own = Own(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Any) -> Any:
        return data.read + own.param_groups[0]["lr"] + json.dumps(batch) + torch.zeros(3)

    workload = Workload(model, data, step=step, optimizer=lambda parameters: own)
    found = variables_of(workload)
    assert not [
        name for name in found if name.startswith(("Workload.step.data.", "Workload.step.own.", "Workload.step.json"))
    ]
    assert found["Workload.step.around"].keys() == {"data", "own"}


def test_an_attribute_of_a_class_that_is_watched_for_a_while_is_there_all_the_time() -> None:
    model = Net()
    attributes = Attributes(variables_of(Workload(model, (torch.zeros(4, 2),), optimizer=torch.optim.SGD)))
    with FirstReads([Attribute(model, "calls")]).watching():
        assert attributes.changed() == {}
        attributes.restore(attributes.changed())
    assert "calls" in vars(Net)


def test_iterators_that_a_function_draws_from_are_named_and_files_are_not(tmp_path: Path) -> None:
    numbers = itertools.count()
    with (tmp_path / "log").open("w") as log:

        def step(*_: Any) -> None:
            log.write(f"{next(numbers)}")

        workload = Workload(Net(), (torch.zeros(4, 2),), step=step, optimizer=torch.optim.SGD)
        assert VariableSearch(workload).iterators == {"Workload.step.numbers": numbers}
        lost = LostAttributes(workload)
        assert lost.names() == []
        next(numbers)
    assert lost.names() == ["Workload.step.numbers (a count)"]


def test_objects_in_a_set_are_not_kept_since_their_order_is_another_in_each_process() -> None:
    counters = {Counter(), Counter()}

    def step(*_: Any) -> None:
        for each in counters:
            each()

    found = variables_of(Workload(Net(), (torch.zeros(4, 2),), step=step, optimizer=torch.optim.SGD))
    assert not [name for name in found if name.startswith("Workload.step.counters.")]
