"""Start: the values that a model's training begins with, where these are not those that its function gives it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from weft.workload.building import Sink
from weft.workload.units import EXTRA_STATE, Unit, named_state
from weft.workload.workload import Workload, WorkloadError

MAX_NAMES = 4  # in a message
_Read = Callable[[str], torch.Tensor]


def begin(workload: Workload, directory: Path, sink: Sink | None = None) -> None:
    """Gives the model the values of `Workload.start`, one tensor at a time, but for what a sink has.

    directory: a relative path begins there. Errors: WorkloadError.
    """
    start = workload.start
    if start is None:
        return
    with _opened(start, directory) as (names, read), torch.no_grad():
        extra = {name for name in workload.model.state_dict() if name.endswith(EXTRA_STATE)}
        for name in extra.intersection(names):
            workload.model.get_submodule(name.removesuffix(EXTRA_STATE).removesuffix(".")).set_extra_state(read(name))
        state = dict(named_state([Unit(0, "", workload.model)]))
        names = [name for name in names if name not in extra]
        _check_names(workload.model, state, names, start)
        for name in names:
            if sink is None or not sink.has(state[name]):
                _fill(name, state[name], read(name))


@contextlib.contextmanager
def _opened(start: Any, directory: Path) -> Iterator[tuple[list[str], _Read]]:
    """The names, and what gives the tensor of each."""
    if isinstance(start, Mapping):
        yield list(start), start.__getitem__
        return
    path = directory / start
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        why = "is not there" if isinstance(error, FileNotFoundError) else f"is no safetensors file ({error})"
        raise WorkloadError(
            f"Workload.start: {path} {why}; give the path of a safetensors file, or a state dict: "
            "torch.load(path, mmap=True)"
        ) from None
    with file:
        yield list(file.keys()), file.get_tensor  # type: ignore[no-untyped-call]


def _check_names(model: nn.Module, state: Mapping[str, Any], names: list[str], start: Any) -> None:
    """A tensor that stands in the model twice may be there under one name."""
    unknown = [name for name in names if not isinstance(state.get(name), torch.Tensor)]
    given = {id(state[name]) for name in names if name in state}
    missing = [name for name, value in state.items() if isinstance(value, torch.Tensor) and id(value) not in given]
    for what, those in (("has, and the model has not,", unknown), ("lacks", missing)):
        if those:
            more = f" and {len(those) - MAX_NAMES} more" if len(those) > MAX_NAMES else ""
            raise WorkloadError(
                f"Workload.start {what} {', '.join(map(repr, those[:MAX_NAMES]))}{more}; give what "
                f"{type(model).__name__}.state_dict() has, by its names{_where_it_is(state, start)}"
            )


def _where_it_is(state: Mapping[str, Any], start: Any) -> str:
    """Of a checkpoint that has the state dict in it, or one whose names begin with another's, as DataParallel's do."""
    if not isinstance(start, Mapping):
        return ""
    for key, value in start.items():
        if isinstance(value, Mapping) and (_are_of(state, value) or _prefix(state, value)):
            return f": start[{key!r}]"
    prefix = _prefix(state, start)
    rest = f"{{name.removeprefix({prefix!r}): value for name, value in start.items() if name.startswith({prefix!r})}}"
    return f": {rest}" if prefix else ""


def _prefix(state: Mapping[str, Any], names: Iterable[Any]) -> str:
    """With which the model's names begin there."""
    names = [name for name in names if isinstance(name, str)]
    prefixes = sorted({f"{name.partition('.')[0]}." for name in names if "." in name})
    behind = {prefix: [name.removeprefix(prefix) for name in names if name.startswith(prefix)] for prefix in prefixes}
    return next((prefix for prefix in prefixes if _are_of(state, behind[prefix])), "")


def _are_of(state: Mapping[str, Any], names: Iterable[Any]) -> bool:
    """Most of the model's names are there."""
    return 2 * len(state.keys() & set(names)) > len(state)


def _fill(name: str, tensor: torch.Tensor, value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != tensor.shape:
        told = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise WorkloadError(
            f"Workload.start: {name!r} is {told}, and the model's has shape {tuple(tensor.shape)}; build the model as "
            "it was when these values were saved"
        )
    tensor.copy_(value)
