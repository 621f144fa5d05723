"""Step memory: what a step leaves behind for its next run, wherever that is: in attributes of the model's modules, in
modules beside the model, in variables around its functions, in a generator of its own.

A step that leaves nothing may be run again in its place. Of one that leaves something nobody knows how to put it back.
"""

from __future__ import annotations

from typing import Any

from weft.workers.snapshots.attributes import TORCHS
from weft.workload.code.beside_model import modules_beside
from weft.workload.code.fingerprint import fingerprint
from weft.workload.cutting.placeholder import Placeholder
from weft.workload.workload import Workload


class StepMemory:
    def __init__(self, workload: Workload) -> None:
        self._modules = list(workload.model.modules())
        self._functions: dict[bool, list[Any]] = {  # by whether it learns
            True: [workload.step or workload.loss],
            False: [workload.validate or workload.step or list(workload.functions.values())],
        }
        self.has_buffers = any(
            buffer is not None for module in modules_beside(workload).values() for buffer in module._buffers.values()
        )  # beside the model: too much to look at, perhaps

    def look(self, *, learns: bool) -> str | None:
        """Another one after a run that has left something; None where nobody can tell. Of the model attributes alone:
        its parameters and buffers are known."""
        own = [
            {key: value for key, value in vars(module).items() if not (key in TORCHS or isinstance(value, Placeholder))}
            for module in self._modules
        ]
        return fingerprint(own, self._functions[learns], apart=self._modules)

    def close(self) -> None:
        """For good: lets go of the model, and of what functions have hold of."""
        self._modules, self._functions = [], {True: [], False: []}
