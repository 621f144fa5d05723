"""Plain data as bytes: what goes there comes back, and nothing that comes is run."""

from __future__ import annotations

import collections
import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft.workers.snapshots.plain import decoded, encoded, packed, unpacked, why_not_plain


class Writes:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize(
    "value",
    [
        {"lr": 0.1, "betas": (0.9, 0.999), "name": None, "nested": [{"deep": (1, True, "text")}]},
        {"step": torch.tensor(7.0), "rows": torch.arange(6.0).reshape(2, 3)},
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(1 << 62),
        torch.tensor(True),
        [(), [], {}, ""],
        collections.Counter({30: 1, 80: 2}),  # the milestones of MultiStepLR
        collections.OrderedDict(a=torch.ones(2), b=1),
        torch.float32,
        float("inf"),
        1 << 80,
        {"\udcff": {3: -1, -2.5: (1 << 64) - 1, None: [()], True: "both", (1, ("a",)): torch.tensor(2)}},
        {"bytes": b"\xff\0", "complex": 1 + 2j, "size": torch.Size([2, 3])},
    ],
    ids=repr,
)
def test_plain_data_come_back_as_they_were(value: Any) -> None:
    assert same(decoded(encoded(value)), value)
    assert same(unpacked(packed(value)), value)
    assert why_not_plain(lambda: value) is None


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: (value,), lambda value: {"a": value}])
def test_whatever_is_in_whatever_comes_back(wrap: Any) -> None:
    """Some hundred tuples in each other ended the process that read them."""
    value: Any = 1
    for _ in range(200):
        value = wrap(value)
        assert same(unpacked(packed(value)), value)


def test_what_an_optimizer_keeps_is_packed_without_torchs_format() -> None:
    kept = {"states": {"weight": {"step": torch.tensor(3.0)}}, "options": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
    assert len(packed(kept)) < len(encoded(kept)) / 4
    assert len(packed(kept | {"rows": torch.ones(2)})) > len(encoded(kept))


def test_a_number_of_numpys_comes_back_as_pythons() -> None:
    """A learning rate is one where a user's lambda calls numpy, and only the ValueError at the restart told of it."""
    value = {"lr": np.float64(1 / 3), "_last_lr": [np.float32(0.5)], "steps": np.int64(3)}
    for back in (decoded(encoded(value)), unpacked(packed(value))):
        assert same(back, {"lr": 1 / 3, "_last_lr": [0.5], "steps": 3})


def test_a_tensor_without_dimensions_costs_no_file_of_its_own() -> None:
    few, many = (len(encoded([torch.tensor(1.0)] * count)) for count in (1, 101))
    assert (many - few) / 100 < 100


def test_what_comes_back_shares_nothing_with_what_was_encoded() -> None:
    count, rows = torch.tensor(1.0), torch.ones(3)
    data = encoded([count, rows])
    count.fill_(5)
    rows.fill_(5)
    assert same(decoded(data), [torch.tensor(1.0), torch.ones(3)])


@pytest.mark.parametrize("as_torch", [False, True], ids=["a pickle", "within torch's format"])
def test_bytes_that_would_run_something_run_nothing(tmp_path: Path, as_torch: bool) -> None:
    file = io.BytesIO()
    save: Any = torch.save if as_torch else pickle.dump
    save({"harmless": 1, "evil": Writes(tmp_path / "ran")}, file)
    with pytest.raises(ValueError, match=r"."):
        decoded(file.getvalue())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"\0" * 64, b"PK\3\4", b"garbage" * 100, pickle.dumps({"a": 1}, protocol=4)])
def test_bytes_that_are_nothing_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decoded(data)


def test_damaged_bytes_are_read_or_are_a_value_error() -> None:
    good = encoded({"a": torch.arange(5), "b": [1, 2.0, "text", torch.tensor(3.0)]})
    dice, refused = random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            decoded(bytes(damaged[: dice.choice([None, None, dice.randrange(len(damaged))])]))
        except ValueError:
            refused += 1
    assert refused


@pytest.mark.parametrize("dtype", ["nothing", 7, None])
def test_a_number_of_no_dtype_is_a_value_error(dtype: Any) -> None:
    file = io.BytesIO()
    torch.save(("weft: a tensor without dimensions", dtype, 1), file)
    with pytest.raises(ValueError, match=r"."):
        decoded(file.getvalue())


class Refuses:
    def __reduce__(self) -> Any:
        raise NotImplementedError("not me")


def test_what_does_not_come_back_is_named_in_a_line() -> None:
    assert why_not_plain(lambda: {"seen": frozenset({1})}) == (
        "ValueError: Unsupported global: GLOBAL frozenset was not an allowed global"
    )
    assert why_not_plain(lambda: [lambda: 1]) is not None
    assert why_not_plain(Refuses) == "NotImplementedError: not me"
