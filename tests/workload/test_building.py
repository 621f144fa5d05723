"""A model that is built without memory for what a process has no use for: the rest has the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from weft.workload.building import SMALL_BYTES, SUMMED_WORDS, NeedsValuesError, Sink, digest_of, number_of, numbered

WIDTH = 160
assert 4 * WIDTH * WIDTH > SMALL_BYTES
Build = Callable[[], nn.Module]


def layers(*between: Callable[[list[nn.Module]], object]) -> nn.Module:
    made: list[nn.Module] = []
    for number in range(4):
        made.append(nn.Linear(WIDTH, WIDTH))
        for act in between:
            if number == 2:
                act(made)
    return nn.Sequential(*made)


def embedded() -> nn.Module:
    table, head = nn.Embedding(WIDTH, WIDTH, padding_idx=0), nn.Linear(WIDTH, WIDTH, bias=False)
    head.weight = table.weight
    return nn.Sequential(table, nn.LSTM(WIDTH, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3), nn.Bilinear(WIDTH, 4, WIDTH), head)


def drawn_at_once() -> nn.Module:
    model = nn.Module()
    for number in range(4):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t()))
    return model


def initialised_again() -> nn.Module:
    """As transformers do it: when all modules are there."""
    model = layers()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            module.weight.data[0].zero_()
            nn.init.orthogonal_(module.weight)
            module.weight.data.mul_(2.0).clamp_(-1, 1)
    return model


def drawn_by_other_names() -> nn.Module:
    """A parameter that another tensor, or an array, has the memory of, and is filled by it."""
    model = nn.Module()
    for number in range(3):
        table = torch.empty(WIDTH, WIDTH)
        model.register_parameter(f"p{number}", nn.Parameter(table))
        nn.init.normal_(table)
        array = np.empty((WIDTH, WIDTH), np.float32)
        model.register_parameter(f"n{number}", nn.Parameter(torch.from_numpy(array)))
        array[:] = number
    return model


BUILDS: dict[str, Build] = {
    "drawn by other names": drawn_by_other_names,
    "linear layers": layers,
    "of all kinds, one of them tied": embedded,
    "drawn before a module has them": drawn_at_once,
    "initialised again": initialised_again,
    "with weights normed": lambda: nn.Sequential(
        *(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
    ),
    "in blocks that are copied": lambda: nn.Transformer(WIDTH, 2, 2, 2, 256, batch_first=True),
    "with a sum of a layer's own that was just drawn": lambda: layers(
        lambda made: made[2].bias.data.add_(made[2].weight.data.sum(1))  # type: ignore[operator, union-attr]
    ),
    "looked at without values": lambda: layers(
        lambda made: (repr(made), made[0].weight.shape, torch.empty_like(made[0].weight), len(made[1].weight))  # type: ignore[arg-type]
    ),
}
NEED_VALUES: dict[str, Callable[[list[nn.Module]], object]] = {
    "a layer that begins as another": lambda made: made[2].load_state_dict(made[0].state_dict()),
    "a copy": lambda made: copy.deepcopy(made[0]),
    "a sum": lambda made: float(made[0].weight.detach().sum()),  # type: ignore[operator, union-attr]
    "numbers": lambda made: made[0].weight.tolist(),  # type: ignore[operator, union-attr]
    "numpy": lambda made: made[0].weight.detach().numpy(),  # type: ignore[operator, union-attr]
    "a call": lambda made: made[0](torch.zeros(1, WIDTH)),
    "its memory": lambda made: setattr(made[3 - 1].weight, "data", made[0].weight.data),
    "another dtype": lambda made: made[0].double(),
    "a list of them": lambda made: torch.stack([each.weight for each in made]),  # type: ignore[misc]
}


def numbers_of(model: nn.Module) -> dict[str, int | None]:
    return {name: number_of(parameter) for name, parameter in model.named_parameters()}


def built(build: Build, sink: Sink | None = None) -> nn.Module:
    torch.manual_seed(1)
    with numbered(sink):
        return build()


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kind", BUILDS)
def test_what_is_needed_has_the_bits_of_the_whole_model(kind: str, part: int) -> None:
    whole = built(BUILDS[kind])
    numbers = numbers_of(whole)
    names = list(numbers)
    own = names[part * len(names) // 3 : (part + 1) * len(names) // 3]
    sizes = {number: whole.get_parameter(name).nbytes for name, number in numbers.items() if name not in own}
    after = torch.rand(1)
    sink = Sink([number for number in sizes if number is not None], max(sizes.values()))
    model = built(BUILDS[kind], sink)
    assert torch.equal(torch.rand(1), after), "random numbers go on alike"
    assert {name: number for name, number in numbers_of(model).items() if number is not None} == {
        name: number for name, number in numbers.items() if number is not None
    }
    for name, parameter in model.named_parameters():
        if kind not in ("drawn by other names", "with weights normed"):  # which others may have the memory of
            assert sink.has(parameter) is (numbers[name] is not None and sizes.get(numbers[name], 0) >= SMALL_BYTES)
        if not sink.has(parameter):
            assert torch.equal(parameter, whole.get_parameter(name)), name
            assert parameter.stride() == whole.get_parameter(name).stride()


@pytest.mark.parametrize("kind", NEED_VALUES)
def test_a_function_that_asks_for_values_that_are_not_there_is_stopped(kind: str) -> None:
    whole = built(lambda: layers(NEED_VALUES[kind]))
    numbers = [number for name, number in numbers_of(whole).items() if name[0] in "01" and number is not None]
    with pytest.raises(NeedsValuesError):
        built(lambda: layers(NEED_VALUES[kind]), Sink(numbers, 4 * WIDTH * WIDTH))


def test_what_is_not_needed_takes_one_place() -> None:
    numbers = range(8)
    sink = Sink(numbers, 4 * WIDTH * WIDTH)
    model = built(layers, sink)
    weights = [each.weight for each in model]  # type: ignore[union-attr]
    assert len({each.data_ptr() for each in weights}) == 1  # type: ignore[operator, union-attr]


def test_the_numbers_of_one_model_are_not_those_of_the_next() -> None:
    model: Any = built(layers)
    assert list(numbers_of(model).values()) == list(range(8))
    assert list(numbers_of(built(layers)).values()) == list(range(8))
    assert number_of(nn.Linear(1, 1).weight) is None, "nobody numbers what a job does not build"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_a_digest_is_of_the_values_in_whatever_order_they_lie(dtype: torch.dtype) -> None:
    values = torch.arange(15).reshape(3, 5).to(dtype)
    digest = digest_of(values)
    assert digest == digest_of(values.clone())
    assert digest == digest_of(torch.empty(5, 3, dtype=dtype).t().copy_(values))
    values[1, 2] += 1
    assert digest_of(values) != digest
    half = torch.zeros(4 * SUMMED_WORDS, dtype=dtype)
    assert digest_of(torch.cat([half, half + 1])) != digest_of(torch.cat([half + 1, half]))
    assert digest_of(torch.empty(2, device="meta")) is None
