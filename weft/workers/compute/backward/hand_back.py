"""Hand-back: the gradient of what a stage has received, as autograd makes it, for the stage that it goes to."""

from __future__ import annotations

from collections.abc import Callable

import torch


class HandBack:
    """Calls `use`, once for each backward, with the gradient of one value that the stage has received; None where
    nothing of the backward has come to it.

    `x.grad` would do but for its strides, which are x's own: the stage before would sum in another order than it does
    in the whole model. at_once: from inside backward, where autograd then need not copy what it accumulates.
    """

    def __init__(self, x: torch.Tensor | None, use: Callable[[torch.Tensor | None], None], *, at_once: bool) -> None:
        """x: the leaf. It is asked for again in the end, and not kept: its hooks hold this."""
        self._use = use
        self._at_once = at_once
        self._num_parts = 0
        self._last: torch.Tensor | None = None
        if x is not None and x.requires_grad:
            x.register_hook(self._came)  # type: ignore[no-untyped-call]

    def _came(self, gradient: torch.Tensor) -> None:
        self._num_parts += 1
        if self._at_once and self._num_parts == 1:
            self._use(gradient)
        else:
            self._last = gradient

    def finish(self, x: torch.Tensor | None) -> None:
        """After backward."""
        if self._num_parts == 0:
            self._use(None)
        elif self._num_parts > 1:  # autograd has summed them
            self._use(None if x is None else x.grad)
        elif self._last is not None:
            self._use(self._last)
