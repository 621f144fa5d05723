"""Attributes: what changes is kept as plain data and comes back; what is a parameter's or a result is left alone."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weft.workers.snapshots.attributes import MAX_PARTS, Attributes, check_kept
from weft.workers.snapshots.plain import decoded, encoded
from weft.workers.snapshots.remembered import MAX_BYTES


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.inner = nn.LSTM(2, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.value = value


def of(model: nn.Module) -> Attributes:
    return Attributes(dict(model.named_modules()))


def grown(value: Any, part: Any) -> Any:
    value.append(part)
    return value


def updated(value: Any, items: dict[Any, Any]) -> Any:
    value.update(items)
    return value


@torch.inference_mode()
def inferred(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a number": (lambda: 0, lambda value: value + 1),
    "a truth": (lambda: 1, lambda value: True),
    "nothing any more": (lambda: 3, lambda value: None),
    "a complex number": (lambda: 1j, lambda value: value + 1),
    "text": (lambda: "warm", lambda value: "cold"),
    "a shape": (lambda: torch.Size((1,)), lambda value: torch.Size((2, 3))),
    "a dtype": (lambda: torch.float32, lambda value: torch.float64),
    "a number of numpy's": (lambda: np.float64(1), lambda value: value * 3),
    "a list": (lambda: [1, [2]], lambda value: grown(value, {"a": (1, 2, 3)})),
    "a list in a list": (lambda: [1, [2]], lambda value: (value[1].append(3), value)[1]),
    "a window": (lambda: deque([1.0, 2.0], maxlen=2), lambda value: grown(value, 3.0)),
    "a long window": (lambda: deque(range(9999), maxlen=9999), lambda value: grown(value, 3)),
    "a number amid many": (lambda: [0] * 9_000, lambda value: (value.__setitem__(5_000, 1), value)[1]),
    "one of many lists": (lambda: [[0] for _ in range(999)], lambda value: (value[500].append(1), value)[1]),
    "one of many in a dict": (lambda: dict.fromkeys(range(999), 0), lambda value: updated(value, {500: 1})),
    "one of a large set for another": (lambda: {*range(9999)}, lambda value: value ^ {5000, 10_000}),
    "a set": (lambda: {1, "a"}, lambda value: value | {2.5}),
    "a dict": (lambda: {"a": 1}, lambda value: updated(value, {("b", 2): [torch.ones(2)]})),
    "an ordered dict": (lambda: OrderedDict(a=1), lambda value: updated(value, {"b": 2})),
    "a dict that makes its parts": (lambda: defaultdict(list, a=[1]), lambda value: (value["b"].append(2), value)[1]),
    "counts": (lambda: Counter("ab"), lambda value: updated(value, {"a": 2})),
    "a tensor in place": (lambda: torch.zeros(3), lambda value: value.add_(1)),
    "a tensor by its data": (lambda: torch.zeros(3), lambda value: (value.data.add_(1), value)[1]),
    "a tensor by numpy": (lambda: torch.zeros(()), lambda value: (np.add(value, 1, out=value.numpy()), value)[1]),
    "a tensor in inference mode": (lambda: inferred(torch.zeros, 3), lambda value: inferred(value.add_, 1)),
    "a view in steps by its data": (lambda: torch.zeros(2, 3).T[1:], lambda value: (value.data.add_(1), value)[1]),
    "another tensor": (lambda: torch.zeros(3), lambda value: torch.ones(2, dtype=torch.int8)),
    "a number of torch's": (lambda: torch.tensor(2), lambda value: value + 1),
    "an expanded tensor": (lambda: torch.zeros(1).expand(3), lambda value: torch.arange(3.0)),
    "three tensors": (lambda: (torch.zeros(1),) * 3, lambda value: tuple(each + 1 for each in value)),
    "an array": (lambda: np.zeros(3), lambda value: np.add(value, 2, out=value)),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (list, tuple, deque)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other) and (type(one) is type(other) or isinstance(one, np.generic))


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_comes_back_and_nothing_else(change: str) -> None:
    make, changed = CHANGES[change]
    one, other = Holder(make()), Holder(make())
    ours, theirs = of(one), of(other)
    assert ours.changed() == {}
    one.value = changed(one.value)
    kept = decoded(encoded(ours.changed()))
    assert {name: list(values) for name, values in kept.items()} == {"": ["value"]}
    assert not ours.fits({})
    theirs.restore(kept)
    assert same(one.value, other.value)
    assert getattr(one.value, "maxlen", None) == getattr(other.value, "maxlen", None)
    assert not isinstance(one.value, defaultdict) or one.value.default_factory() == other.value.default_factory()
    one.value = changed(changed(one.value))
    ours.restore(kept)
    assert same(one.value, other.value), "in one that has gone on, too"
    assert ours.lost() == theirs.lost() == []


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda own: float(torch.rand(1, generator=own))),
        (lambda: random.Random(1), lambda own: own.random()),
        (lambda: np.random.default_rng(1), lambda own: own.random()),
        (lambda: np.random.RandomState(1), lambda own: own.rand()),
    ],
    ids=["torch", "python", "numpy", "numpy as it was"],
)
def test_a_generator_goes_on_where_it_was(make: Callable[[], Any], draw: Callable[[Any], float]) -> None:
    one, other = Holder(make()), Holder(make())
    ours, theirs = of(one), of(other)
    assert ours.changed() == {}
    draw(one.value)
    theirs.restore(decoded(encoded(ours.changed())))
    assert draw(one.value) == draw(other.value)


def test_what_is_a_parameters_a_buffers_or_a_result_is_no_memory() -> None:
    model = Holder(None)
    model.alias, model.weights = model.mean[:2], [model.inner.weight_hh_l0]
    attributes = of(model)
    with torch.no_grad():
        for each in (*model.parameters(), model.mean):
            each.add_(1)
    model.value = model.inner.weight_hh_l0 * 2
    model.results = [model.value]
    model.map = torch.zeros(MAX_BYTES)
    assert attributes.changed() == {}
    assert attributes.lost() == []
    assert attributes.fits({})


class Pair(nn.Module):
    """Two modules hold one object, which something else may hold, too."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.first, self.second = Holder(shared), Holder(shared)


SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a dict": (lambda: {"calls": 0}, lambda value: updated(value, {"calls": 7})),
    "an ordered dict": (lambda: OrderedDict(b=0), lambda value: updated(value, {"a": 7})),
    "a dict that makes its parts": (lambda: defaultdict(list, a=[1]), lambda value: (value["b"].append(2), value)[1]),
    "counts": (lambda: Counter("ab"), lambda value: updated(value, {"a": 2})),
    "a list": (lambda: [1], lambda value: grown(value, 2)),
    "a window": (lambda: deque([1, 2], maxlen=2), lambda value: grown(value, 3)),
    "a set": (lambda: {1}, lambda value: (value.add(2), value)[1]),
    "an array": (lambda: np.zeros(3), lambda value: np.add(value, 2, out=value)),
    "a tensor": (lambda: torch.zeros(3), lambda value: value.add_(2)),
    "a generator": (lambda: random.Random(1), lambda value: (value.random(), value)[1]),
}


def told(value: Any) -> Any:
    return value.getstate() if isinstance(value, random.Random) else value


@pytest.mark.parametrize("kind", SHARED)
def test_what_two_modules_hold_is_one_when_it_comes_back_and_the_one_that_a_closure_holds(kind: str) -> None:
    make, change = SHARED[kind]
    there = make()
    one, other = Pair(make()), Pair(there)
    ours, theirs = of(one), of(other)
    change(one.first.value)
    kept = decoded(encoded(ours.changed()))
    theirs.restore(kept)
    assert other.first.value is other.second.value is there
    assert same(told(one.first.value), told(there))
    before = one.first.value
    saved = told(copy.deepcopy(before))
    change(change(before))
    ours.restore(kept)  # in one that has gone on, too
    assert one.first.value is one.second.value is before
    assert same(told(before), saved)


@pytest.mark.parametrize(
    "kind", [kind for kind in SHARED if kind != "a generator"]
)  # of which none comes back where none stands
def test_what_two_modules_come_to_hold_is_one_when_it_comes_back(kind: str) -> None:
    make, _ = SHARED[kind]
    one, other = Pair(None), Pair(None)
    ours, theirs = of(one), of(other)
    one.first.value = one.second.value = make()
    theirs.restore(decoded(encoded(ours.changed())))
    assert other.first.value is other.second.value


@pytest.mark.parametrize("kind", SHARED)
def test_what_two_modules_were_built_with_and_hold_no_longer_together_comes_back_as_two(kind: str) -> None:
    make, change = SHARED[kind]
    there = make()
    one, other = Pair(make()), Pair(there)
    ours, theirs = of(one), of(other)
    one.second.value = change(copy.deepcopy(one.second.value))
    theirs.restore(decoded(encoded(ours.changed())))
    assert other.first.value is there
    assert same(told(there), told(make()))
    assert same(told(other.second.value), told(one.second.value))


def test_parts_that_attributes_hold_in_common_are_one_when_they_come_back() -> None:
    def made() -> Pair:
        model, inner = Pair(None), {"calls": [0], "sum": torch.zeros(2)}
        model.first.value, model.second.value = {("a", 1): inner, "b": (inner,)}, [5, inner["calls"]]
        model.total = inner["sum"]
        return model

    def changed(model: Pair) -> None:
        model.total += 1
        model.second.value[1].append(3)
        late = [1]
        model.late, model.first.value["late"], model.second.late = late, late, {"in": late}

    one, other = made(), made()
    inner = other.first.value["a", 1]
    calls = inner["calls"]
    ours, theirs = of(one), of(other)
    changed(one)
    kept = decoded(encoded(ours.changed()))
    for attributes, model in ((theirs, other), (ours, one)):
        attributes.restore(kept)
        assert model.second.value[1] == [0, 3]
        model.total += 1
        model.second.value[1].append(4)
        model.late.append(5)
        for place in (model.first.value["a", 1], model.first.value["b"][0]):
            assert place["calls"] == [0, 3, 4]
            assert place["sum"].tolist() == [2, 2]
        assert model.first.value["late"] == model.second.late["in"] == [1, 5]
    assert other.first.value["a", 1] is inner
    assert inner["calls"] is calls


def test_a_choice_from_a_table_is_put_back_and_the_table_stays() -> None:
    def made() -> Pair:
        model = Pair(None)
        model.table = [{"rate": 1}, {"rate": 2}]
        model.first.value = model.table[0]
        return model

    one, other = made(), made()
    ours, theirs = of(one), of(other)
    one.first.value = one.table[1]
    theirs.restore(decoded(encoded(ours.changed())))
    assert other.first.value is other.table[1]
    assert other.table == [{"rate": 1}, {"rate": 2}]


def test_a_stage_that_has_one_of_two_holders_puts_it_back_in_place() -> None:
    """Whichever of them the one that was saved had first."""
    there = {"calls": 0}
    one, other = Pair({"calls": 0}), Pair(there)
    ours = of(one)
    one.first.value["calls"] += 1
    Attributes({"second": other.second}).restore(decoded(encoded(ours.changed())))
    assert other.second.value is there
    assert there == {"calls": 1}


def test_what_older_releases_have_saved_is_one_where_it_is_equal_and_was_built_as_one() -> None:
    """They told nothing of it."""
    other = Pair({"calls": 0})
    of(other).restore({"first": {"value": {"calls": 2}}, "second": {"value": {"calls": 2}}})
    assert other.first.value == {"calls": 2}
    assert other.first.value is other.second.value
    parted = Pair([torch.zeros(1)])
    of(parted).restore({"first": {"value": [torch.ones(1)]}, "second": {"value": [torch.zeros(1)]}})
    assert parted.first.value == [torch.ones(1)]
    assert parted.second.value == [torch.zeros(1)]
    drawing = Pair(random.Random(1))
    state = random.Random(2).getstate()
    of(drawing).restore({each: {"value": ("weft: generator", state, None)} for each in ("first", "second")})
    assert drawing.first.value is drawing.second.value
    assert drawing.first.value.getstate() == state


def test_a_view_into_another_attribute_stays_one() -> None:
    def made() -> Holder:
        model = Holder(torch.zeros(4))
        model.view = model.value[1:]
        return model

    one, other = made(), made()
    ours, theirs = of(one), of(other)
    one.value += 1
    theirs.restore(decoded(encoded(ours.changed())))
    other.value += 1
    assert other.view.tolist() == [2.0] * 3


@pytest.mark.parametrize(("value", "told"), [(object(), "a object"), ([{1: nn.ReLU()}], "a ReLU")], ids=["", "within"])
def test_what_cannot_be_written_down_is_told(value: Any, told: str) -> None:
    model = nn.Sequential(Holder(None))
    attributes = of(model)
    model[0].value = value
    assert attributes.lost() == [f"0.value ({told})"]
    assert attributes.changed() == {}


def test_what_is_deleted_is_gone_where_training_goes_on() -> None:
    one, other = Holder(1), Holder(1)
    attributes = of(one)
    del one.value
    kept = decoded(encoded(attributes.changed()))
    assert attributes.fits(kept)
    assert not attributes.fits({})
    of(other).restore(kept)
    assert "value" not in vars(other)
    of(other).restore(kept)  # a second time nothing is there to delete
    one.value = 2  # and what comes back is a change like another
    of(other).restore(attributes.changed())
    assert other.value == 2


def test_a_dict_that_makes_its_parts_by_the_users_function_keeps_that_one() -> None:
    one, other = Holder(defaultdict(lambda: 1)), Holder(defaultdict(lambda: 1))
    ours, theirs = of(one), of(other)
    one.value["b"] += 1
    theirs.restore(decoded(encoded(ours.changed())))
    assert other.value == {"b": 2}
    assert other.value["new"] == 1
    one.value = defaultdict(lambda: 3, a=1)
    assert ours.lost() == ["value (a defaultdict of <lambda>)"]


def test_what_is_too_large_is_told_where_it_was_there_when_the_model_was_built() -> None:
    """Else it is a result, most often."""
    model = Holder(torch.zeros(MAX_BYTES))
    model.late = None
    attributes = of(model)
    model.value.add_(1)
    model.late = torch.zeros(MAX_BYTES)
    assert attributes.lost() == ["value (of 4 MiB)"]
    assert attributes.changed() == {}


def test_what_contains_itself_is_told() -> None:
    model = Holder([])
    attributes = of(model)
    model.value.append(model.value)
    assert attributes.lost() == ["value (it contains itself)"]


def test_a_large_vocabulary_that_stays_is_not_looked_through() -> None:
    words = {str(number): number for number in range(100 * MAX_PARTS)}
    attributes = of(Holder(words))
    assert attributes.changed() == {}
    words["another"] = 1
    other = Holder(dict(list(words.items())[:-1]))
    of(other).restore(attributes.changed())
    assert list(other.value) == list(words)


def test_an_extra_state_is_all_that_its_module_tells() -> None:
    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.cache = 0, object()

        def get_extra_state(self) -> Any:
            return {"count": self.count, "of": torch.tensor(self.count)}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"] + int(state["of"])

    one, other = nn.Sequential(Telling()), nn.Sequential(Telling())
    ours, theirs = of(one), of(other)
    one[0].count, one[0].cache = 2, object()
    assert ours.lost() == []
    theirs.restore(decoded(encoded(ours.changed())))
    assert other[0].count == 4


def test_a_variable_may_be_called_like_what_each_module_has() -> None:
    variables = {"training": 0, "_parameters": 1}
    own = Attributes({"Workload.step.globals": variables, "": nn.Linear(1, 1)})
    variables |= {"training": 5, "_parameters": 6}
    kept = check_kept(own.changed())
    other, module = {"training": 0, "_parameters": 1}, nn.Linear(1, 1)
    Attributes({"Workload.step.globals": other}).restore(kept)
    assert other == variables
    Attributes({"Workload.step.globals": module}).restore(kept)  # as a hostile checkpoint would have it
    assert module.training is True
    assert len(module._parameters) == 2
    with pytest.raises(ValueError, match="is no attribute of"):
        check_kept({"layer": {"training": 5}})
