"""Once: nodes of autograd's graph that no backward may run twice, since their second run may be another one.

A kernel of torch's has the same bits as often as it runs. What the user has written may scale in place what it keeps,
let go of it, count its calls or draw: a Python function's backward, and a hook of a tensor, which autograd calls before
it runs the node that has made it. What `torch.utils.checkpoint` has packed a part of the forward makes again, for each
call of autograd anew, and its buffers change each time. Which hooks a node has autograd does not tell, so they are
noted where they are registered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

_HOOKED = "weft: a hook of the user's"  # in a node's metadata
_HIDING = {"CopySlices", "CppFunction"}  # types of nodes that do not show what they run, or have saved


def differs_again(node: Node) -> bool:
    """Whether its second run may be another one than its first."""
    return (
        isinstance(node, BackwardCFunction)
        or type(node).__name__ in _HIDING
        or _HOOKED in _notes(node)
        or runs_forward_again(node)
    )


def runs_forward_again(node: Node) -> bool:
    """Whether what it has saved comes from a hook, which may run more than what it is saved for."""
    for name in _saved_by(type(node)):
        saved = getattr(node, name)  # of a tensor or of several; None of one that was not given
        for each in saved if isinstance(saved, (list, tuple)) else (saved,):
            if each is not None and each.unpack_hook is not None:
                return True
    return False


@functools.cache
def _saved_by(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _notes(node: Node) -> dict[str, Any]:
    """That live as long as the node does."""
    notes: Any = node.metadata  # a property, which torch's types take for a method
    return notes  # type: ignore[no-any-return]


def _noting(register: Callable[..., Any]) -> Callable[..., Any]:
    """The same, by which it shows at the node that has made the tensor."""

    @functools.wraps(register)
    def noting(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = register(self, *args, **kwargs)
        if self.grad_fn is not None:
            _notes(self.grad_fn)[_HOOKED] = True
        return made

    return noting


torch.Tensor.register_hook = _noting(torch.Tensor.register_hook)  # type: ignore[method-assign]  # the only way to know
torch.Tensor.retain_grad = _noting(torch.Tensor.retain_grad)  # type: ignore[method-assign]  # adds to the gradient, too
