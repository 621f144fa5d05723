from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.workload.cutting.visible import CallKind, Forward, Visible, listening, visible_modules

MODELS = runpy.run_path(str(Path(__file__).resolve().parents[2] / "any_models.py"))


def kinds(model: nn.Module) -> dict[str, CallKind]:
    return {each.name: each.kind for each in visible_modules(model)}


def opaque(model: nn.Module) -> list[str]:
    return [name for name, kind in kinds(model).items() if kind is CallKind.OPAQUE]


def test_items_of_repeated_blocks_are_seen_and_what_is_inside_of_them_is_not() -> None:
    model, _, _ = MODELS["parts"]("residual")
    assert opaque(model) == ["inlet", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "outlet"]
    assert kinds(model)["blocks"] is CallKind.WALKED


def test_a_block_with_containers_of_its_own_is_one_item() -> None:
    model, _, _ = MODELS["parts"]("resnet18")
    assert opaque(model)[:4] == ["conv1", "bn1", "layer1.0", "layer1.1"]


def test_layers_by_attribute_are_seen() -> None:
    model, _, _ = MODELS["parts"]("mlp")
    assert opaque(model) == ["first", "second", "again", "frozen", "last"]
    assert kinds(model)["drop"] is CallKind.TRANSPARENT


def test_two_stacks_of_one_class_are_walked_since_their_items_are_blocks() -> None:
    assert opaque(nn.Transformer(8, 2, 2, 2, 16, batch_first=True))[:2] == ["encoder.layers.0", "encoder.layers.1"]


def test_a_module_without_parts_is_seen_as_a_whole() -> None:
    assert kinds(nn.Linear(2, 2)) == {"": CallKind.OPAQUE}


@pytest.mark.parametrize(("persistent", "kind"), [(True, CallKind.OPAQUE), (False, CallKind.TRANSPARENT)])
def test_what_is_saved_makes_a_module_opaque_and_a_table_does_not(persistent: bool, kind: CallKind) -> None:
    model = nn.Module()
    model.layer, model.table = nn.Linear(2, 2), nn.Module()
    model.table.register_buffer("angles", torch.ones(2), persistent=persistent)
    assert kinds(model)["table"] is kind


def test_a_module_of_two_names_is_one() -> None:
    model = nn.Module()
    model.one = nn.Linear(2, 2)
    model.other, model.third = model.one, nn.Linear(2, 2)
    assert opaque(model) == ["one", "third"]


def test_the_items_of_a_list_are_seen_in_whatever_it_stands() -> None:
    """nanoGPT keeps its blocks in a dict beside two embeddings, and others each block's parts in a list: nobody calls
    these, and no stage began within."""
    model = nn.Module()
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model.transformer = nn.ModuleDict({"wte": nn.Embedding(2, 2), "wpe": nn.Embedding(2, 2), "h": blocks})
    model.layers = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)]) for _ in range(2))
    own = ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1"]
    assert opaque(model) == [*own, "layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["model", "in place"])
def test_a_compiled_model_is_run_as_it_was_before(how: str) -> None:
    """The tracing went through what listens to the calls, and failed there."""
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    plain = model(x)
    if how == "model":
        model = torch.compile(model, backend=_no_backend)
    else:
        model.compile(backend=_no_backend)
    heard: list[str] = []
    with listening(visible_modules(model), Hearing(heard)):
        assert torch.equal(model(x), plain)
    assert [name.removeprefix("_orig_mod").removeprefix(".") for name in heard][-2:] == ["0", "1"]


def _no_backend(*args: Any) -> Any:
    raise AssertionError("it is compiled")


class Hearing:
    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def call(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._heard.append(visible.name)
        return forward(*args, **kwargs)


def test_hooks_that_make_a_weight_are_a_part_of_the_call_and_others_stand_before_it() -> None:
    layer = nn.utils.spectral_norm(nn.Linear(2, 2))
    told: list[str] = []
    (own,) = layer._forward_pre_hooks.values()
    later = layer.register_forward_pre_hook(lambda module, args: told.append("user"))
    layer.register_forward_pre_hook(lambda module, args: told.append("last"))
    before = list(layer._forward_pre_hooks.values())

    class Heard:
        def call(self, visible: Visible, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            vector = layer.weight_u.clone()
            told.append("call")
            result = forward(*args, **kwargs)
            told.append("kept" if torch.equal(vector, layer.weight_u) else "made")
            return result

    with listening(visible_modules(layer), Heard()):
        layer(torch.ones(1, 2))
        assert own not in layer._forward_pre_hooks.values()
        later.remove()
    assert told == ["user", "last", "call", "made"]
    assert list(layer._forward_pre_hooks.values()) == [before[0], before[2]]
    assert before[0] is own
