"""What a fingerprint tells apart, what it does not, and that another process comes to the same."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weft.workload.code import fingerprint as module
from weft.workload.code.fingerprint import fingerprint

FACTOR = [2.0]


def scaled(x: float) -> float:
    return x * FACTOR[0]


def nested(x: float) -> list[float]:
    return [scaled(x) for _ in range(2)]


class Scale(nn.Module):
    power = 1

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) * self.factor * FACTOR[0]


@dataclass(slots=True)
class Slotted:
    value: int


def model(factor: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Scale(factor), nn.Dropout(0.5))


def changed(change: Callable[[Any], object]) -> nn.Module:
    made = model()
    change(made)
    return made


def closing_over(value: object) -> Callable[[], object]:
    return lambda: value


def with_attribute(value: object) -> Callable[[], object]:
    made = closing_over(None)
    vars(made)["calls"] = value
    return made


def tensor(num: int, place: int) -> torch.Tensor:
    made = torch.zeros(num, dtype=torch.uint8)
    made[place] = 1
    return made


DIFFERENT: dict[str, tuple[object, object]] = {
    "a number and its text": (1, "1"),
    "a number and a truth": (1, True),
    "what is in which list": ([[1], [2]], [[1, 2], []]),
    "an attribute": (model(), model(2.0)),
    "an installed module's": (model(), changed(lambda made: setattr(made[1], "p", 0.1))),
    "a mode": (model(), changed(lambda made: made[1].eval())),
    "a parameter": (model(), changed(lambda made: made[0].linear.weight.data[0, 0].zero_())),
    "what is trained": (model(), changed(lambda made: made[0].linear.weight.requires_grad_(False))),
    "a hook": (model(), changed(lambda made: made.register_forward_hook(print))),
    "a buffer": (model(), changed(lambda made: made.register_buffer("b", torch.zeros(1)))),
    "what is tied": ([one := torch.zeros(2), one], [torch.zeros(2), torch.zeros(2)]),
    "an order in memory": (torch.zeros(2, 3), torch.zeros(3, 2).t()),
    "a large tensor's end": (tensor(1 << 22, 0), tensor(1 << 22, -1)),
    "what a function closes over": (closing_over(1), closing_over(2)),
    "a function's own attribute": (with_attribute(1), with_attribute(2)),
    "an argument that is given": (functools.partial(scaled, 1), functools.partial(scaled, 2)),
    "code": (lambda x: x + 1, lambda x: x + 2),
    "an array": (np.zeros(3), np.ones(3)),
    "an array of objects": (np.array(["a", None]), np.array(["b", None])),
    "a slot": (Slotted(1), Slotted(2)),
    "a class's member": (Slotted, Scale),
    "a generator": (random.Random(0), random.Random(1)),
    "a list's length": (list(range(50_000)), list(range(50_001))),
    "a mapping's order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_is_different_has_another_fingerprint(what: str) -> None:
    one, other = map(fingerprint, DIFFERENT[what])
    assert one is not None
    assert other is not None
    assert one != other
    assert one == fingerprint(DIFFERENT[what][0]), "the same again"


def test_a_global_that_a_function_names_counts_and_so_does_one_that_a_method_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = [fingerprint(scaled), fingerprint(nested), fingerprint(model())]
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", [3.0])
    assert all(now != was for now, was in zip(map(fingerprint, (scaled, nested, model())), before, strict=True))
    before = [fingerprint(model())]
    monkeypatch.setattr(Scale, "power", 2)
    assert [fingerprint(model())] != before


def test_what_is_known_otherwise_is_not_looked_into() -> None:
    known, other = Scale(1.0), Scale(2.0)
    before = fingerprint(known, other, apart=[known])
    known.factor = 3.0
    assert fingerprint(known, other, apart=[known]) == before is not None
    other.factor = 3.0
    assert fingerprint(known, other, apart=[known]) != before


def test_what_holds_itself_ends() -> None:
    own: list[Any] = [1]
    own.append(own)
    other: list[Any] = [1]
    other.append([other])
    assert fingerprint(own) not in (None, fingerprint(other))


class Raises:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no")


def test_what_cannot_be_taken_apart_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fingerprint(Raises()) is None
    monkeypatch.setattr(module, "MAX_VALUES", 10)
    assert fingerprint([1] * 5) is not None
    assert fingerprint([1] * 20) is None


TELL = """
import sys
sys.path.insert(0, sys.argv[1])
import test_fingerprint as own
from weft.workload.code.fingerprint import fingerprint
print(fingerprint(own.model(), own.nested, own.scaled, {"a", "b", "c"}, frozenset([1, 2]), own.Slotted))
"""


def test_other_processes_come_to_the_same() -> None:
    told = set()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", TELL, str(Path(__file__).parent)]
        told.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    (one,) = told
    assert len(one.strip()) == 64


def test_a_tensor_that_was_looked_at_may_still_be_resized() -> None:
    """As observers of quantisation-aware training do with their buffers."""
    held = torch.ones(1)
    fingerprint(held)
    assert held.resize_(3).shape == (3,)
