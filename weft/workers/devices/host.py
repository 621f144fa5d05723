"""The host: the cores of this process, whose tensors lie where everybody's do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

from weft.workers.devices.device import Act, Device, Result
from weft.workload.randomness import Movements

CORE_CACHE_BYTES = 4 << 20  # more than a core has to itself


class HostDevice(Device):
    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.drawing = threading.Lock()

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype)

    def cache_bytes(self) -> int:
        return CORE_CACHE_BYTES * torch.get_num_threads()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key)
        Movements.forget()

    def tell(self, value: torch.Tensor, use: Callable[[float], None]) -> None:
        use(float(value.item()))

    def after(self, act: Act) -> None:
        act()

    def computing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        started = time.perf_counter()
        result = work()
        return time.perf_counter() - started, result

    def is_clean(self) -> bool:
        return True

    # --- there is nothing to bring here or to give back, and nothing to tell that is not the host's

    def adopt(self, module: nn.Module) -> None: ...
    def give_back(self, module: nn.Module) -> None: ...
    def pin(self, block: torch.Tensor) -> None: ...
    def launching(self) -> None: ...
    def reset_peak(self) -> None: ...
    def end_job(self) -> None: ...
    def link_bytes_per_second(self) -> float | None: ...
    def probe_seconds(self) -> float | None: ...
    def capacity_bytes(self) -> int | None: ...
    def peak_bytes(self) -> int | None: ...
    def notice(self) -> str | None: ...
