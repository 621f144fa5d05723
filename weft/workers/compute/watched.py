"""Watched parameters: a module's own, whose reading somebody waits for.

    model.block.weight ──▶ nn.Module.__getattr__ ──▶ block._parameters["weight"] ──▶ before_read(weight)

Any code may read a parameter of a module that it does not call: a scale of another layer, a tied head, a penalty over
all parameters. Attributes and iterations alike come to this table, so nothing has to look at operations, which would
have modules of torch compute in another way (weft.workload.cutting.modes).
"""

from __future__ import annotations

from _collections_abc import dict_items, dict_values
from collections.abc import Callable, Container
from typing import Any

from torch import nn

Entry = nn.Parameter | None


class WatchedParameters(dict[str, Entry]):
    """In the place of `module._parameters`. A copy, or what is pickled, is a plain dictionary. `get` tells nobody: Weft
    looks for places with it."""

    def __init__(self, parameters: dict[str, Entry], before_read: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._before_read = before_read

    def __getitem__(self, key: str) -> Entry:
        found = super().__getitem__(key)
        if found is not None:
            self._before_read(found)
        return found

    def values(self) -> dict_values[str, Entry]:
        self._read_all()
        return super().values()

    def items(self) -> dict_items[str, Entry]:
        self._read_all()
        return super().items()

    def copy(self) -> dict[str, Entry]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)

    def _read_all(self) -> None:
        for each in super().values():
            if each is not None:
                self._before_read(each)


def watch(model: nn.Module, late: Container[int], before_read: Callable[[nn.Parameter], None]) -> None:
    """late: ids of parameters. Every module of the model that has one is watched from now on, but a scripted one, whose
    table is torch's."""
    for module in model.modules():
        if isinstance(module._parameters, dict) and any(
            each is not None and id(each) in late for each in module._parameters.values()
        ):
            module._parameters = WatchedParameters(module._parameters, before_read)
