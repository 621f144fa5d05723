"""A model's mode while it is inspected, each time that of the first epoch.

A job calls `train()` once an epoch, an inspection many times. A model that counts these calls (its layers are thawed,
or its dropout grows) would be another one in each run, and nothing that is compared would be equal.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from weft.workload.units import enter_mode

_PLAIN = (bool, int, float, str, type(None))
_ABSENT = object()

_found: WeakKeyDictionary[nn.Module, dict[bool, dict[str, Any]]] = WeakKeyDictionary()


def set_mode(model: nn.Module, training: bool = True, *, is_part: bool = False) -> None:
    """As `model.train()`, or `model.eval()`. Of the attributes that this changes the numbers, texts and None are first
    put back to what the first call for that mode has found, so each call does what that one did.

    is_part: of a model, which hands on its mode by `train(mode)`.
    """
    modules = [*model.modules()]
    for module in modules:
        for key, value in _found.get(module, {}).get(training, {}).items():
            vars(module).pop(key, None)
            if value is not _ABSENT:
                vars(module)[key] = value
    before = {module: _plain(module) for module in modules if training not in _found.get(module, {})}
    if is_part:
        model.train(training)
    else:
        enter_mode(model, training)
    for module, had in before.items():
        now = _plain(module)
        changed = {key: had.get(key, _ABSENT) for key in now.keys() | had.keys() if _differ(now, had, key)}
        _found.setdefault(module, {})[training] = changed


def set_by_mode(model: nn.Module, training: bool) -> dict[int, dict[str, Any]]:
    """Behind `set_mode`: the attributes that it changes, where it has set them, by the id of their module."""
    keys = ((module, _found.get(module, {}).get(training, {}).keys()) for module in model.modules())
    return {id(module): {key: vars(module)[key] for key in own if key in vars(module)} for module, own in keys}


def _plain(module: nn.Module) -> dict[str, Any]:
    return {key: each for key, each in vars(module).items() if type(each) in _PLAIN and key != "training"}


def _differ(now: dict[str, Any], had: dict[str, Any], key: str) -> bool:
    return bool(now.get(key, _ABSENT) != had.get(key, _ABSENT))
