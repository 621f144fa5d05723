"""Adam and AdamW by torch's fused kernel, a tile at a time, so that all that is done to a tile finds it in the cache.

The kernel streams seven times the parameters through memory (values, gradient and two averages in; all but the gradient
out), and memory is what it waits for. What comes with it would stream as much again over whole tensors:

    scaled step    tile of gradient × scale ─▶ scratch, kernel                    the gradient is read once, not written
    speculation    sum of squares; copies of values and averages; kernel          the originals are read once

A speculation updates the copies of the averages, so the old ones stay where they are and are not written; the values,
which others have views of, are updated in place. Undoing copies the values back and swaps the averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.transport.memory.collectives import as_real
from weft.workers.updates.optimizer_state import ShardPart
from weft.workload.optimizer import has_hooks

_TYPES = (torch.optim.Adam, torch.optim.AdamW)  # exact types
_WIDE = (torch.float32, torch.float64)  # dtypes in which a sum of squares is exact enough
# Elements for each thread, which has a part of the caches, by measurement on one machine: smaller ones cost more calls
# than the nearer cache gives back, larger ones lose the cache where all cores update at once. From 128 to 512 Ki all
# are within a tenth of each other.
_TILE = 1 << 18


def can_tile(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every group takes the fused kernel, and nothing of the user's hangs on `step`."""
    if type(optimizer) not in _TYPES or has_hooks(optimizer):
        return False
    return all(
        group["fused"] and all(parameter.dtype in _WIDE and parameter.is_cpu for parameter in group["params"])
        for group in optimizer.param_groups
    )


def sum_of_squares(gradient: Tensor) -> float:
    """Of one dtype's elements, 1-D: summed in it (bfloat16 and float16: in float32) by tile, the tiles in float64."""
    wide = (tile if tile.dtype in _WIDE else tile.float() for tile in _tiles(as_real(gradient)))
    return sum(torch.dot(tile, tile).item() for tile in wide)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What a speculation has changed, as it was: the part's values, its count of steps. Its averages are the spare."""

    part: ShardPart
    values: Tensor
    step: float


class TiledAdam:
    """The update of one bucket's parts. optimizer: their twin, whose state is kept as torch keeps it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # Room for the averages of each part; where a speculation is kept, the averages before it.
        self._spare: dict[Tensor, dict[str, Tensor]] = {}
        self._kept: list[_Kept] = []

    def step(self, parts: Sequence[ShardPart], scale: float | Tensor, found_inf: Tensor | None = None) -> None:
        """Tensors are those of a device that stands in for another: their numbers are there."""
        self._kept = []
        if found_inf is not None and bool(found_inf):
            return
        scale = float(scale)
        for part, group in self._grouped(parts):
            state = self._state(part, group)
            state["step"] += 1
            tensors = [part.flat_values, part.flat_gradient, *_averages(state).values()]
            if scale == 1.0:
                _run_kernel(tensors, state["step"], group)
                continue
            scratch = torch.empty(min(_tile(), part.flat_gradient.numel()), dtype=part.flat_gradient.dtype)
            for values, gradient, *averages in zip(*map(_tiles, tensors), strict=True):
                scaled = torch.mul(gradient, scale, out=scratch[: gradient.numel()])
                _run_kernel([values, scaled, *averages], state["step"], group)

    def speculate(self, parts: Sequence[ShardPart], backup: Tensor, *, squares: bool) -> float:
        """backup: 1-D, of the shard's length, for the old values. Returns the gradient's sum of squares, if asked."""
        self._kept = []
        total = 0.0
        for part, group in self._grouped(parts):
            state = self._state(part, group)
            kept = _Kept(part, backup[part.range], float(state["step"]))
            self._kept.append(kept)
            old = self._swap_averages(part, state)
            state["step"] += 1
            sources = [part.flat_values, *old.values()]
            copies = [kept.values, *_averages(state).values()]
            for gradient, *both in zip(*map(_tiles, [part.flat_gradient, *sources, *copies]), strict=True):
                if squares:
                    total += torch.dot(gradient, gradient).item()
                values, copied = both[0], both[len(sources) :]
                for target, source in zip(copied, both, strict=False):
                    target.copy_(source)
                _run_kernel([values, gradient, *copied[1:]], state["step"], group)
        return total

    def confirm(self) -> None:
        self._kept = []

    def undo(self) -> None:
        for kept in self._kept:
            state = self._optimizer.state[kept.part.parameter]
            kept.part.flat_values.copy_(kept.values)
            self._swap_averages(kept.part, state)
            state["step"].fill_(kept.step)
        self._kept = []

    def forget(self, part: ShardPart) -> None:
        """The part is split: the room that was kept for it is let go."""
        self._spare.pop(part.parameter, None)

    def _grouped(self, parts: Sequence[ShardPart]) -> list[tuple[ShardPart, dict[str, Any]]]:
        of = {parameter: group for group in self._optimizer.param_groups for parameter in group["params"]}
        return [(part, of[part.parameter]) for part in parts]

    def _state(self, part: ShardPart, group: dict[str, Any]) -> dict[str, Any]:
        """As torch.optim.Adam begins it."""
        state: dict[str, Any] = self._optimizer.state[part.parameter]
        if not state:
            names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update({name: torch.zeros_like(part.flat_values) for name in names})
        return state

    def _swap_averages(self, part: ShardPart, state: dict[str, Any]) -> dict[str, Tensor]:
        """Gives the state the spare ones; what it had is the spare now, and returned."""
        old = _averages(state)
        state.update(self._spare.get(part.parameter) or {name: torch.empty_like(each) for name, each in old.items()})
        self._spare[part.parameter] = old
        return old


def _averages(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != "step"}


def _tile() -> int:
    return _TILE * torch.get_num_threads()


def _tiles(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor, _tile())


def _run_kernel(tensors: Sequence[Tensor], step: Tensor, group: dict[str, Any]) -> None:
    """tensors: values, gradient, both averages, and with amsgrad the greatest second one."""
    values, gradient, average, square, *greatest = tensors
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        [values],
        [gradient],
        [average],
        [square],
        greatest,
        [step],
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )
