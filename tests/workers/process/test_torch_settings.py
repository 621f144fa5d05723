"""What a job switches in torch is not the next one's."""

from __future__ import annotations

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


def test_the_precision_of_cudas_own_products_is_put_back(settings: TorchSettings) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    settings.restore()
    assert torch.backends.cuda.matmul.fp32_precision == before
