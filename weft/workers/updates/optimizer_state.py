"""What an owner's optimizer of one bucket works on: its tensors, and a twin of the user's optimizer that holds them.

    bucket    │ weight A (96)      │ bias A (5) ░░│ weight B (64)  │ weight C (32)     ...│    ░ padding
    shard                 ├──── one owner's range ───────────────────────────┤
    segments              ├─ A ────┤├ bias ┤     ├──── B ─────────┤├── C ────┤
    parts                 ├─ part 0 ───────┤     ├─ part 1 ──────────────────┤

An elementwise optimizer does not mind where a parameter ends: neighbours of one parameter group are one flat tensor, a
part. The rounding of a vector kernel does mind, since the last elements of a tensor, those that fill no vector, go
through scalar code that rounds differently. So a part ends behind a parameter that does not fill its vectors: those of
the user's parameter and ours are then the same elements, and the results the same bits.

Other optimizers see whole parameters of their own shape.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.workers.snapshots.held import VALUES
from weft.workers.snapshots.saved import Saved, shaped
from weft.workload.optimizer import tensors_by_place

# Exact types: a subclass may do anything. Here each element is updated by its own gradient and state alone.
_ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
# What torch's loops take at once: two vectors of AVX-512 (the fused kernels one). Narrower vectors divide it.
_VECTORS_BYTES = 128

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """The elements `start` to `stop` of a shard, which are those of one parameter from `offset` on, in memory order."""

    parameter: int  # in the list of the model's
    group: int  # in the user's optimizer's `param_groups`
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One owner's range of one bucket: values and gradient, 1-D, same length and dtype; segments in order, apart."""

    values: Tensor
    gradient: Tensor
    segments: tuple[Segment, ...]


class ShardPart:
    """One tensor of an optimizer: neighbouring segments of one group, or a parameter in its shape."""

    def __init__(self, shard: Shard, segments: Sequence[Segment], like: Tensor | None = None) -> None:
        self.segments = tuple(segments)
        self.group = segments[0].group
        self.range = slice(segments[0].start, segments[-1].stop)
        self.flat_values, self.flat_gradient = shard.values[self.range].data, shard.gradient[self.range].data
        values, self.gradient = self.flat_values, self.flat_gradient
        if like is not None:
            strides = _dense_strides(like)
            values, self.gradient = (flat.as_strided(like.shape, strides) for flat in (values, self.gradient))
        self.parameter, self._values = nn.Parameter(values), values

    def come_home(self) -> None:
        """Behind a step: one that has assigned `.data` has left its values elsewhere."""
        if self.parameter.data_ptr() != self._values.data_ptr():
            self._values.copy_(self.parameter.data)
            self.parameter.data = self._values


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter may be cut anywhere, its pieces updated by different owners."""
    return type(optimizer) in _ELEMENTWISE


def flat_parts(shard: Shard) -> list[ShardPart]:
    """As few parts as exact results allow, for an elementwise optimizer."""
    runs: list[list[Segment]] = []
    vectors = _VECTORS_BYTES // shard.values.element_size()
    for segment in shard.segments:
        last = runs[-1][-1] if runs else None
        joins = last is not None and last.stop == segment.start and last.group == segment.group
        if joins and (segment.start - runs[-1][0].start) % vectors == 0:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return [ShardPart(shard, run) for run in runs]


def whole_parts(shard: Shard, parameters: Sequence[Tensor]) -> list[ShardPart]:
    """One part per parameter, in its shape. Raises ValueError where the shard has a parameter in pieces."""
    for segment in shard.segments:
        if segment.offset != 0 or segment.stop - segment.start != parameters[segment.parameter].numel():
            raise ValueError(f"{segment}: the optimizer is not elementwise, so parameters must not be cut")
    return [ShardPart(shard, [segment], parameters[segment.parameter]) for segment in shard.segments]


def split(part: ShardPart, shard: Shard, optimizer: torch.optim.Optimizer) -> list[ShardPart]:
    """A part for each of its segments. The optimizer takes them in its place, each with its share of the state."""
    pieces = [ShardPart(shard, [segment]) for segment in part.segments]
    state = optimizer.state.pop(part.parameter, {})
    for piece in pieces:
        within = slice(piece.range.start - part.range.start, piece.range.stop - part.range.start)
        if state:
            optimizer.state[piece.parameter] = {
                name: value[within] if _is_per_element(value, part.parameter) else copy.deepcopy(value)
                for name, value in state.items()
            }
    for group in optimizer.param_groups:
        group["params"] = [
            each
            for parameter in group["params"]
            for each in ([piece.parameter for piece in pieces] if parameter is part.parameter else [parameter])
        ]
    return pieces


def states_of_segments(part: ShardPart, state: State) -> Iterator[tuple[Segment, State]]:
    """Each segment's share of a part's state: flat where it is by element, otherwise the part's own."""
    for segment in part.segments:
        within = slice(segment.start - part.range.start, segment.stop - part.range.start)
        yield (
            segment,
            {
                name: value.reshape(-1)[within] if _is_per_element(value, part.parameter) else value
                for name, value in state.items()
            },
        )


def are_alike(one: State, other: State) -> bool:
    """Whether two segments' states differ by elements alone, so that both may be one part's."""
    return one.keys() == other.keys() and all(
        _is_flat(value) or bool(value == other[name]) for name, value in one.items()
    )


def joined_state(part: ShardPart, states: Sequence[State], group: Mapping[str, Any]) -> State:
    """A part's state of those of its segments, which are alike; a copy, where the part is. group: the part's."""
    return {
        name: _joined(part, [state[name] for state in states])
        if _is_flat(value)
        else _placed(name, value, part.parameter, group)
        for name, value in states[0].items()
    }


def _joined(part: ShardPart, pieces: Sequence[Tensor]) -> Tensor:
    """Piece by piece: they may be in shared memory, and the part on a device."""
    joined = torch.empty_like(part.parameter.data, dtype=pieces[0].dtype)
    places = (joined,) if len(pieces) == 1 else torch.split(joined, [len(piece) for piece in pieces])
    for place, piece in zip(places, pieces, strict=True):
        place.copy_(piece.view(place.shape))
    return joined


def _placed(name: str, value: object, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A copy, where torch's load_state_dict would put it: only some kernels take the count of steps on the device."""
    counts_on_host = name == "step" and not (group.get("fused") or group.get("capturable"))
    if not isinstance(value, Tensor) or counts_on_host:
        return copy.deepcopy(value)
    return value.to(parameter.device, copy=True)


def parted_state(parameter: Tensor, state: State) -> tuple[dict[str, Tensor], State]:
    """(what there is for each element, the rest); of a parameter without dimensions, all but the count of steps. What
    is kept under no name (a number, a tuple), or under one that a checkpoint's "ENTRY/PARAMETER" cannot have, is of the
    rest."""
    elements = {
        name: value
        for name, value in state.items()
        if _is_per_element(value, parameter)
        and (parameter.dim() or name != "step")
        and isinstance(name, str)
        and name != VALUES
        and "/" not in name
    }
    return elements, {name: value for name, value in state.items() if name not in elements}


def restored_state(saved: Saved, name: str, own: Tensor, like: Tensor, group: Mapping[str, Any]) -> State:
    """What was kept of a parameter, for an optimizer that has it whole, as `own`; like: the model's. {} of nothing."""
    state = {entry: _placed(entry, value, own, group) for entry, value in saved.rest(name).items()}
    for entry, flat in saved.elements(name, like).items():
        state[entry] = torch.empty_like(own.data, dtype=flat.dtype)
        state[entry].copy_(shaped(flat, like))
    return state


def restored_options(saved: Saved, names: Iterable[str]) -> dict[str, Any]:
    """Of a group: a copy of those that were saved of the first of its parameters of which there are any. How the steps
    are computed is for the machine to say that computes them."""
    found = next((options for name in names if (options := saved.options(name)) is not None), {})
    return copy.deepcopy(how_it_updates(found))


def how_it_updates(group: Mapping[str, Any]) -> dict[str, Any]:
    """Its options without those of how the steps are computed."""
    return {name: value for name, value in options(group).items() if name not in ("fused", "foreach", "capturable")}


def flat_twin(
    template: torch.optim.Optimizer, parts: Sequence[ShardPart], parameters: Sequence[Tensor]
) -> torch.optim.Optimizer:
    """An optimizer like an elementwise template, of flat parts. Its groups: those that have a part here, in order."""
    twin = _empty_like(template)
    vars(twin).update(_attributes(template))
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**copy.deepcopy(options(template.param_groups[index])), "params": members}
        for index, members in _members(parts)
    ]
    for part in parts:
        state = _gathered(template, part, parameters)
        if state:
            twin.state[part.parameter] = state
    return twin


def whole_twin(
    template: torch.optim.Optimizer, parts: Sequence[ShardPart], parameters: Sequence[Tensor]
) -> torch.optim.Optimizer:
    """A deep copy of any optimizer in which our parts stand wherever it has the parameters themselves.

    So an optimizer that keeps lists of parameters, or another optimizer, beside its groups is copied rightly too. Its
    constructor is not called: nobody knows its arguments. Where it keeps tensors by place, all parameters keep theirs:
    those that are no parts, which have no gradient, without values.
    """
    ours = {id(parameters[part.segments[0].parameter]): part.parameter for part in parts}
    by_place = tensors_by_place(template) is not None
    memo: dict[int, Any] = {
        id(parameter): ours.get(id(parameter), _without_values(parameter) if by_place else parameter)
        for group in template.param_groups
        for parameter in group["params"]
    }
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    memo[id(template.state)] = state
    twin = _empty_like(template)
    vars(twin).update(copy.deepcopy(_attributes(template), memo))
    for parameter, entry in template.state.items():
        if id(parameter) in ours:
            state[ours[id(parameter)]] = copy.deepcopy(entry, memo)
    held = {id(part.parameter) for part in parts}
    for group in [] if by_place else twin.param_groups:
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in held]
    if not by_place:
        twin.param_groups[:] = [group for group in twin.param_groups if group["params"]]
    return twin


def _without_values(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def group_indices(template: torch.optim.Optimizer, parts: Iterable[ShardPart]) -> list[int]:
    """The template's groups that the twin has, in their order: those that have a part here, or all, see whole_twin."""
    if not is_elementwise(template) and tensors_by_place(template) is not None:
        return list(range(len(template.param_groups)))
    return _indices(parts)


def _indices(parts: Iterable[ShardPart]) -> list[int]:
    return sorted({part.group for part in parts})


def _members(parts: Sequence[ShardPart]) -> list[tuple[int, list[nn.Parameter]]]:
    return [(index, [part.parameter for part in parts if part.group == index]) for index in _indices(parts)]


def _attributes(template: torch.optim.Optimizer) -> dict[str, Any]:
    """Without `step`: a scheduler puts a wrapper there that is bound to the template."""
    return {name: value for name, value in vars(template).items() if name != "step"}


def _empty_like(template: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """copy.copy would go through Optimizer.__getstate__, which leaves out what a subclass has added."""
    cls = type(template)
    return cls.__new__(cls)


def _gathered(template: torch.optim.Optimizer, part: ShardPart, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The state that the constructor has made (Adagrad's) for the part's elements; {} where it has made none."""
    first = template.state.get(parameters[part.segments[0].parameter], {})
    state: dict[str, Any] = {}
    for name, value in first.items():
        if not _is_per_element(value, parameters[part.segments[0].parameter]):
            state[name] = _placed(name, value, part.parameter, template.param_groups[part.group])
            continue
        state[name] = torch.empty_like(part.parameter.data, dtype=value.dtype)
        for segment in part.segments:
            start, size = segment.start - part.range.start, segment.stop - segment.start
            source = _in_memory_order(template.state[parameters[segment.parameter]][name])
            state[name][start : start + size] = source[segment.offset : segment.offset + size]
    return state


def _is_per_element(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _is_flat(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _dense_strides(like: Tensor) -> tuple[int, ...]:
    """As in weft.transport.memory.arena.Layout, which gives the parameter its place."""
    return tuple(torch.empty_like(like, device="meta").stride())


def _in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
