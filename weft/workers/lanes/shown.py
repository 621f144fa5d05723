"""Shown: what of a stage's state no step changes: names, and parameters that nobody trains. So it is the same in every
snapshot, where the user has no function that is asked between two epochs. Parameters that the step itself changes count
as buffers, where inspection has seen that."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from weft.plan.worker_view import WorkerView
from weft.workers.compute.model_part import ModelPart, OwnPart
from weft.workers.snapshots.attributes import Attributes
from weft.workers.snapshots.held import Held, Name
from weft.workers.snapshots.whole_model import WholeModel
from weft.workload.workload import EpochFunction, Workload, WorkloadError

_NAMELESS = (int, float, str, torch.Tensor, np.ndarray, np.generic, list, tuple, set)


class Shown:
    """Of the first replica. fixed, names: as in Held."""

    def __init__(
        self,
        part: ModelPart,
        first_names: Mapping[int, str],
        trained: Collection[int],
        attributes: Attributes,
        *,
        is_asked: bool = False,
    ) -> None:
        """first_names: of the model's parameters, by id. trained: ids of those that are. attributes: of the stage, as
        it was built. is_asked: whether a function of the user's is, which may change the others."""
        self._is_asked, self._attributes = is_asked, attributes
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

    def kept(self, *, alone: bool) -> set[tuple[str, str]]:
        """Attributes of modules in which the stage's own steps have left something, which no other stage goes by. Not
        what has parts by name, of which others may go by one. alone: there is no other replica; or lists are told
        alone, as of ReadElsewhere."""
        modules = self._attributes.modules
        changed = {name: own for name, own in self._attributes.changed().items() if name in modules}
        return {
            (name, key)
            for name, own in changed.items()
            for key in own
            if isinstance(vars(modules[name]).get(key), (*_NAMELESS, type(None)) if alone else list)
        }

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


@dataclass(frozen=True, slots=True)
class Asked:
    """`Workload.on_epoch`, as the step knows it that runs to its end here: stages of one worker may have a workload
    each, with variables and a model of its own."""

    function: EpochFunction | None
    names: Sequence[str]
    whole: WholeModel

    @classmethod
    def of(cls, view: WorkerView, owned: Sequence[OwnPart], workload: Workload, *, on_host: bool) -> Asked:
        """owned: of the worker's stages, before any of them moves. workload: where it has none of the first replica."""
        pairs = [(stage, own.workload) for stage, own in zip(view.stages, owned, strict=True) if stage.replica == 0]
        asked = max(pairs, key=lambda pair: pair[0].stage)[1] if pairs else workload
        own = [stage for stage, its in pairs if its is asked]
        return cls(asked.on_epoch, asked.epoch_metrics, WholeModel(asked, view, own, on_host=on_host))
