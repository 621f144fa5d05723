"""What a model begins with: a safetensors file or a state dict, by the model's own names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weft.workload.building import Sink, number_of, numbered
from weft.workload.start import begin
from weft.workload.workload import Workload, WorkloadError

WIDTH = 160


def made() -> nn.Module:
    table, head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
    head.weight = table.weight
    return nn.Sequential(table, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), head)


def workload(model: nn.Module, start: Any) -> Workload:
    return Workload(model, (), loss=nn.MSELoss(), optimizer=lambda params: torch.optim.SGD(params), start=start)


@pytest.fixture
def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        name: torch.rand(value.shape).to(value.dtype) + (value.dtype == torch.int64) * 7
        for name, value in made().state_dict().items()
        if name != "3.weight"
    }


@pytest.mark.parametrize("how", ["path", "relative path", "state dict"])
def test_a_model_has_the_values_that_it_is_to_begin_with(
    tmp_path: Path, values: dict[str, torch.Tensor], how: str
) -> None:
    """3.weight is 0.weight: one name is enough."""
    path = tmp_path / "start.safetensors"
    save_file(values, path)
    model = made()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    begin(workload(model, {"path": str(path), "relative path": path.name, "state dict": values}[how]), tmp_path)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in values.items())
    assert torch.equal(state["3.weight"], values["0.weight"])
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


def test_values_of_another_dtype_are_rounded(tmp_path: Path, values: dict[str, torch.Tensor]) -> None:
    model = made().bfloat16()
    begin(workload(model, values), tmp_path)
    assert torch.equal(model.get_parameter("1.weight"), values["1.weight"].bfloat16())


def test_what_is_not_needed_is_not_read(tmp_path: Path, values: dict[str, torch.Tensor]) -> None:
    with numbered():
        whole = made()
    number = number_of(whole.get_parameter("0.weight"))
    assert number is not None
    sink = Sink([number], 4 * WIDTH * WIDTH)
    with numbered(sink):
        model = made()
    read = []

    class Told(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().__getitem__(name)

    begin(workload(model, Told(values)), tmp_path, sink)
    assert read == [name for name in values if name != "0.weight"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"4.weight": torch.ones(1)},
            r"has, and the model has not, '4.weight'; give what Sequential.state_dict\(\) has",
        ),
        ({"1.weight": None}, "lacks '1.weight'; give what"),
        ({"0.weight": None}, "lacks '0.weight', '3.weight'; give what"),
        (
            {"1.bias": torch.ones(3)},
            r"'1.bias' is shape \(3,\), and the model's has shape \(160,\); build the model as it",
        ),
        ({"1.bias": 3}, r"'1.bias' is int, and the model's has shape \(160,\)"),
    ],
)
def test_values_of_another_model_are_refused_by_name(
    tmp_path: Path, values: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    start = {name: value for name, value in {**values, **change}.items() if value is not None}
    with pytest.raises(WorkloadError, match="Workload.start.* " + text):
        begin(workload(made(), start), tmp_path)


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (lambda values: {"epoch": 3, "state_dict": values, "optimizer": {"state": {}}}, ": start['state_dict']"),
        (lambda values: {"net": {f"module.{name}": value for name, value in values.items()}}, ": start['net']"),
        (
            lambda values: {f"module.{name}": value for name, value in values.items()},
            ": {name.removeprefix('module.'): value for name, value in start.items() if name.startswith('module.')}",
        ),
        (
            lambda values: {"loss.weight": values["1.bias"], **{f"a.{name}": value for name, value in values.items()}},
            ": {name.removeprefix('a.'): value for name, value in start.items() if name.startswith('a.')}",
        ),
        (lambda values: {"1.weight": values["1.weight"]}, ""),
        (lambda values: {f"a.{name}": value for name, value in list(values.items())[:2]}, ""),
    ],
    ids=["checkpoint", "checkpoint of a wrapped one", "wrapped", "beside another", "some", "some of another"],
)
def test_a_checkpoint_of_a_script_is_told_with_where_the_values_are_in_it(
    tmp_path: Path, values: dict[str, torch.Tensor], kept: Callable[[dict[str, Any]], dict[str, Any]], told: str
) -> None:
    with pytest.raises(WorkloadError) as caught:
        begin(workload(made(), kept(values)), tmp_path)
    assert str(caught.value).endswith(f"by its names{told}")


def test_a_file_that_cannot_be_read_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"start: .*none.safetensors is not there; give the path of a safetensors"):
        begin(workload(made(), "none.safetensors"), tmp_path)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(WorkloadError, match=r"Workload.start: .*text is no safetensors file \(.*\); give the path"):
        begin(workload(made(), "text"), tmp_path)
    with pytest.raises(WorkloadError, match=r"Workload.start: .* is no safetensors file"):
        begin(workload(made(), tmp_path), tmp_path)
