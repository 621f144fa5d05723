"""Modes: what looks at every operation of a step must not be seen by what it looks at.

Modules of torch ask whether somebody does (`has_torch_function`), and compute in another way then: an encoder layer
leaves its fused kernel in evaluation, and its numbers are others in their last bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.overrides import TorchFunctionMode, _get_current_function_mode


@contextlib.contextmanager
def aside(mode: TorchFunctionMode) -> Iterator[None]:
    """Without the mode, for as long as a module runs. Where the user's own mode is within it, that is seen anyway."""
    if _get_current_function_mode() is not mode:  # type: ignore[no-untyped-call]
        yield
        return
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()
