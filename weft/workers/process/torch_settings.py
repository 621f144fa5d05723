"""Torch settings: what a job's code may switch in torch for the whole process, which outlives the job."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch._dynamo.config

from weft.workload.compiling.compiler import CACHE_VARIABLE, set_cache

_PARTS = {"generic": ("all",), "mkldnn": ("all", "matmul", "conv", "rnn"), "cuda": ("all", "matmul", "conv", "rnn")}
_PLACES = [(backend, part) for backend, parts in _PARTS.items() for part in parts]  # each after what it follows


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSettings:
    """Those that change numbers or speed. `restore` gives the next job what the worker began with."""

    deterministic: bool
    warns_only: bool
    matmul_precision: str
    precisions: tuple[str, ...]  # of float32, in each of _PLACES
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    flash: bool
    mem_efficient: bool
    math: bool
    recompile_limit: int
    accumulated_recompile_limit: int
    compiled: str | None  # where files of torch's compiler are kept

    @classmethod
    def now(cls) -> TorchSettings:
        return cls(
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warns_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            matmul_precision=torch.get_float32_matmul_precision(),
            precisions=tuple(torch._C._get_fp32_precision_getter(*place) for place in _PLACES),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            cudnn_deterministic=torch.backends.cudnn.deterministic,
            flash=torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
            mem_efficient=torch.backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]
            math=torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]
            recompile_limit=torch._dynamo.config.recompile_limit,
            accumulated_recompile_limit=torch._dynamo.config.accumulated_recompile_limit,
            compiled=os.environ.get(CACHE_VARIABLE),
        )

    def restore(self) -> None:
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warns_only)
        torch.set_float32_matmul_precision(self.matmul_precision)
        for place, precision in zip(_PLACES, self.precisions, strict=True):  # the line above has set two of them, too
            if torch._C._get_fp32_precision_getter(*place) != precision:  # one that follows another is left to
                torch._C._set_fp32_precision_setter(*place, precision)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cuda.enable_flash_sdp(self.flash)
        torch.backends.cuda.enable_mem_efficient_sdp(self.mem_efficient)
        torch.backends.cuda.enable_math_sdp(self.math)
        torch._dynamo.config.recompile_limit = self.recompile_limit
        torch._dynamo.config.accumulated_recompile_limit = self.accumulated_recompile_limit
        set_cache(self.compiled)
