"""State facts: what an optimizer keeps of a parameter, as the planner has to know it to let a bucket move; and what the
units of a model that is cut by its own forward have of its state.

It is found out on an optimizer that has stepped, with a gradient for at least one parameter of each sort. State can
move where all of it stands in `optimizer.state`, as tensors of the parameter's shape and as numbers. Of any other
nobody knows what belongs to one parameter: it stays where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.transport.memory.arena import dtype_name
from weft.workers.inspection.ran import Ties
from weft.workers.inspection.unit_facts import blank_facts
from weft.workers.updates.optimizer_state import is_elementwise, options
from weft.workers.updates.updates import group_of
from weft.workload.building import number_of
from weft.workload.cutting.recorded import Recorded

Entry = tuple[str, str, str, int]  # name, kind, dtype, itemsize
_NUMBERS = (bool, int, float)  # exact types


def optimizer_memory(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What the optimizer remembers beside its state, to be compared before and after a step. What cannot be compared
    is new each time."""
    standard = vars(torch.optim.SGD([torch.zeros(1)], lr=1.0)).keys()
    own = {name: value for name, value in vars(optimizer).items() if name not in standard}
    return [*(_plain(options(group)) for group in optimizer.param_groups), _plain(own)]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (*_NUMBERS, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    return value if callable(value) else object()


def state_facts(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Entry] | None:
    """The entries of a parameter's state; None where it cannot move.

    A parameter that has none yet, or in which an element is no less than all, is taken to be like another one of its
    group and dtype; of the same shape too, where the optimizer may look at it.
    """
    like, by_element = [parameter], is_elementwise(optimizer)
    if not optimizer.state.get(parameter) or (parameter.dim() == 0 and by_element):
        group = _group_of(optimizer, parameter)
        like = [
            p
            for p in group
            if p.dtype is parameter.dtype and p.dim() and optimizer.state.get(p)
            if by_element or p.shape == parameter.shape
        ]
        if not like:
            return None if parameter.dim() == 0 or any(optimizer.state.get(p) for p in group) else []
    entries = [_entry(name, value, like[0]) for name, value in optimizer.state[like[0]].items()]
    known = [entry for entry in entries if entry is not None]
    return known if len(known) == len(entries) else None


def sort_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[object, ...]:
    """Within a group, one parameter of a sort shows what is kept of all of them. An optimizer whose kernel treats each
    element by itself looks at no shape; any other may (Adafactor keeps sums over the rows of matrices)."""
    if is_elementwise(optimizer):
        return parameter.dtype, parameter.dim() > 0
    return parameter.dtype, parameter.shape


def _group_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> list[Tensor]:
    """All parameters of its group."""
    groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
    return next((group for group in groups if any(each is parameter for each in group)), [])


def _entry(name: object, value: Any, parameter: Tensor) -> Entry | None:
    if not isinstance(name, str):  # an optimizer of the user's may keep its state under any key
        return None
    if type(value) in _NUMBERS:
        return (name, type(value).__name__, "", 8)
    if not isinstance(value, Tensor):
        return None
    if value.dim() == 0:
        return (name, "tensor", dtype_name(value.dtype), value.element_size())
    if value.shape == parameter.shape:
        return (name, "elements", dtype_name(value.dtype), value.element_size())
    return None


def parameter_facts(
    model: nn.Module,
    users: Mapping[int, Sequence[int]],
    optimizer: torch.optim.Optimizer | None,
    stepped: torch.optim.Optimizer | None,
    digests: Mapping[int, int | None],
    changing: Collection[str],
    sparse: Collection[int],
    required: Collection[int],
) -> list[dict[str, Any]]:
    """Of each parameter, in the order of `model.parameters()`. users: numbers of units, by its id. stepped: an
    optimizer that has, where its state can move. changing: names. sparse: ids of those with sparse gradients. required:
    of those that required gradients as the model was built, or may come to: a model that freezes layers after some
    epochs has done so where it is tried."""
    named = list(model.named_parameters())
    groups = group_of(optimizer, [parameter for _, parameter in named]) if optimizer is not None else {}
    return [
        {
            "units": users[id(parameter)],
            "num_elements": parameter.numel(),
            "dtype": dtype_name(parameter.dtype),
            "itemsize": parameter.element_size(),
            "trained": (parameter.requires_grad or id(parameter) in required) and index in groups,
            "group": groups.get(index, 0),
            "state": None if stepped is None else state_facts(stepped, parameter),
            "changed_as": name if name in changing else None,
            "hooked_as": name if parameter._post_accumulate_grad_hooks else None,
            "sparse_as": name if id(parameter) in sparse else None,
            "number": number_of(parameter),
            "digest": digests.get(index),
        }
        for index, (name, parameter) in enumerate(named)
    ]


def cut_units(
    model: nn.Module,
    recorded: Recorded,
    built: Collection[str],
    changing: Collection[str],
    backward_changes: Sequence[str],
    rewritten: Collection[str],
) -> list[dict[str, Any]]:
    """Of each unit of a model that is cut by its own forward, before it is timed. built: names of the parameters and
    buffers that it began with. changing: of parameters that the step changes. backward_changes: of what a backward
    does. rewritten: of buffers that some run has changed, by any line."""
    modules = dict(model.named_modules())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    idle = (tensors.keys() & set(built)) - frozenset[str]().union(*recorded.uses)
    ties = Ties()
    units = []

    def is_constant(buffer: str) -> bool:
        """As it seems: of a module around units, whose lines each stage runs. One that is called in several units may
        begin to change what it has for a longer sequence."""
        around = buffer.rpartition(".")[0]
        return buffer not in rewritten and (not around or any(each.startswith(f"{around}.") for each in recorded.units))

    for number, (name, uses) in enumerate(zip(recorded.units, recorded.uses, strict=True)):
        border = recorded.border(number)
        own = [tensors[each] for each in uses if each in tensors]
        own_names = uses | idle if number == 0 else uses
        buffers = [each for each in own_names if each in tensors and not isinstance(tensors[each], nn.Parameter)]
        kept = sorted({*(each for each in buffers if not is_constant(each)), *uses.intersection(changing)})
        units.append(
            blank_facts(
                name,
                type(modules.get(name, model)).__name__,
                [each for each in own if isinstance(each, nn.Parameter)],
                [tensors[each] for each in buffers],
            )
            | {
                "state": sorted(own_names),
                "backward_changes": next((each for each in backward_changes if each in own_names), None),
                "repeated": list(recorded.repeated) if number == 0 else [],
                "given": [list(each) for each in border.given] if number else [],
                "ends": list(border.ends) if number else [],
                "late": list(border.late) if number else [],
                "instead": [] if number else [list(each) for each in border.instead],
            }
            | ties.of(number, [(each, tensors[each]) for each in kept])
        )
    return units
