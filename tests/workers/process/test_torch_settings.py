"""What a job switches in torch is not the next one's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import pytest
import torch

from weft.workers.process.torch_settings import TorchSettings

SWITCHES: dict[str, Callable[[], object]] = {
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("high"),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "memory-efficient attention": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "plain attention": lambda: torch.backends.cuda.enable_math_sdp(False),
}
PARTS_OF_MKLDNN = [".mkldnn.matmul", ".mkldnn.conv", ".mkldnn.rnn"]


@pytest.fixture
def settings() -> Iterator[TorchSettings]:
    before = TorchSettings.now()
    yield before
    before.restore()


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_a_switch_is_seen_and_put_back(settings: TorchSettings, switch: Callable[[], object]) -> None:
    switch()
    assert TorchSettings.now() != settings
    settings.restore()
    assert TorchSettings.now() == settings


@pytest.mark.parametrize("part", ["", ".mkldnn", *PARTS_OF_MKLDNN, ".cuda.matmul", ".cudnn", ".cudnn.conv"])
def test_a_precision_is_put_back_and_what_follows_another_follows_it_again(settings: TorchSettings, part: str) -> None:
    switched = operator.attrgetter(f"backends{part}")(torch)
    switched.fp32_precision = {"none": "ieee"}.get(switched.fp32_precision, "none")
    settings.restore()
    assert TorchSettings.now() == settings
    torch.backends.fp32_precision = "bf16"
    assert {operator.attrgetter(f"backends{each}")(torch).fp32_precision for each in PARTS_OF_MKLDNN} == {"bf16"}
