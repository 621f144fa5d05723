"""Shown: what of a stage's state no step changes: names, and parameters that nobody trains. So it is the same in every
snapshot, where the user has no function that is asked between two epochs. Parameters that the step itself changes count
as buffers, where inspection has seen that."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from weft.workers.compute.model_part import ModelPart
from weft.workers.snapshots.held import Held, Name
from weft.workload.workload import WorkloadError


class Shown:
    """Of the first replica. fixed, names: as in Held."""

    def __init__(
        self,
        part: ModelPart,
        first_names: Mapping[int, str],
        trained: Collection[int],
        *,
        is_asked: bool = False,
    ) -> None:
        """first_names: of the model's parameters, by id. trained: ids of those that are. is_asked: whether a
        function of the user's is, which may change the others."""
        self._is_asked = is_asked
        state, kept = part.named_state(), {id(buffer): name for name, buffer in part.buffers().items()}
        first = {**first_names, **kept}
        self.fixed: dict[str, torch.Tensor] = {
            first[id(tensor)]: tensor
            for _, tensor in state
            if isinstance(tensor, nn.Parameter)
            and id(tensor) not in kept
            and not (id(tensor) in trained and tensor.numel())
        }
        self.names = [
            Name(name, first[id(tensor)], tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride())
            for name, tensor in state
        ]
        self._untrained = {name: each for name, each in self.fixed.items() if id(each) not in trained}
        self.begin()

    def begin(self) -> None:
        """As they are now is how the step has to leave them."""
        self._versions = {name: tensor._version for name, tensor in self._untrained.items()}

    def hold(self, held: Held) -> None:
        """Errors: as of check."""
        self.check()
        held.fixed, held.names, held.changes_fixed = self.fixed, self.names, self._is_asked

    def check(self) -> None:
        """Raises WorkloadError for a parameter that the step has changed, and did not when it was tried."""
        changed = next((name for name, each in self._untrained.items() if each._version != self._versions[name]), None)
        if changed is not None:
            raise WorkloadError(
                f"the step itself has changed the parameter {changed!r:.80}, which is not trained, and did not when it "
                "was tried before training, so nobody has kept what it was; change it from the first step on, or keep "
                "in buffers (register_buffer) what a step changes"
            )
