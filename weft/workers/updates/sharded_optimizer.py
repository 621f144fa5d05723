"""The user's optimizer over shards: each owner updates its own range of every bucket, in place.

It computes what the optimizer that the user's factory built would compute on the parameters themselves: the same
bits for the elementwise optimizers of torch, wherever a range begins (a multiple of 128 bytes into its parameter; 64 do
in float32), for parameters with and without a gradient, and for a gradient that is clipped. The user's object is the
template of class, groups and hyperparameters; it is never stepped.

Clipping needs the norm of the whole gradient, which is known last. Two ways to go about it, the caller's choice:

    wait         sum_of_squares(bucket) ... the norm ... step(bucket, scale=s)
    speculate    speculate(bucket) ... the norm ... confirm(bucket), or undo(bucket) and step(bucket, scale=s)

Waiting takes less memory and, alone on a machine, less time. Speculation runs before the norm is there, beside a
backward that goes on or in a bubble; it pays where that time is free and clipping is rare.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.plan.error_places import step_place, within
from weft.workers.snapshots.held import VALUES, Extent, Held, Piece
from weft.workers.snapshots.saved import Saved
from weft.workers.updates.optimizer_state import (
    Segment,
    Shard,
    ShardPart,
    State,
    are_alike,
    flat_parts,
    flat_twin,
    group_indices,
    is_elementwise,
    joined_state,
    options,
    parted_state,
    restored_options,
    restored_state,
    split,
    states_of_segments,
    whole_parts,
    whole_twin,
)
from weft.workers.updates.tiled_adam import TiledAdam, can_tile, sum_of_squares
from weft.workload.optimizer import has_hooks

__all__ = ["Segment", "Shard", "ShardedOptimizer", "is_elementwise"]

Touched = Callable[[int], bool]


class ShardedOptimizer:
    """One owner's optimizer. template: as make_optimizer built it on `parameters`, which Segment.parameter indexes.

    shards: by bucket. speculative: whether `speculate` will be called, which needs room for a copy of the values and
    of the state. A template that is not elementwise needs its parameters whole: ValueError otherwise.
    """

    def __init__(
        self,
        template: torch.optim.Optimizer,
        shards: Mapping[int, Shard],
        *,
        parameters: Sequence[Tensor],
        speculative: bool,
    ) -> None:
        self._template = template
        self._known = _all_options(template)
        self._buckets = {
            bucket: _Bucket(template, shard, parameters, speculative=speculative) for bucket, shard in shards.items()
        }

    @torch.no_grad()
    def sum_of_squares(self, bucket: int, *, touched: Touched | None = None) -> float:
        """Of the shard's gradient, summed in float64 over tiles; inf or nan where the gradient is not finite."""
        return sum(sum_of_squares(part.flat_gradient) for part in self._buckets[bucket].choose(touched))

    @torch.no_grad()
    def step(
        self,
        bucket: int,
        *,
        touched: Touched | None = None,
        scale: float | Tensor = 1.0,
        found_inf: Tensor | None = None,
    ) -> None:
        """One step with gradient × scale, rounded to the gradient's dtype as clip_grad_norm_ does.

        touched: whether the parameter of that index has a gradient this time; one that has none is left alone, as torch
        leaves one whose `grad` is None. The gradient itself is not changed. A speculation is confirmed. Of a device,
        scale may be a tensor, and so may what says whether the step changes anything: found_inf, float32, 1.0 where it
        does not; only where `can_skip_on_device`.
        """
        chosen = self._buckets[bucket]
        chosen.update.step(chosen.choose(touched), scale, found_inf)

    @torch.no_grad()
    def speculate(self, bucket: int, *, touched: Touched | None = None, squares: bool = True) -> float:
        """A step with scale 1 that can be undone; returns what `sum_of_squares` does, for a part of its cost.

        One step can be undone: the speculation before is confirmed. Without `squares` it returns 0.0, and of a device
        waits for nothing.
        """
        chosen = self._buckets[bucket]
        assert chosen.backup is not None, "speculate() needs ShardedOptimizer(speculative=True)"
        return chosen.update.speculate(chosen.choose(touched), chosen.backup, squares=squares)

    @torch.no_grad()
    def undo(self, bucket: int) -> None:
        """Values and state as they were before the last speculation, bit for bit; nothing where there is none."""
        self._buckets[bucket].update.undo()

    def confirm(self, bucket: int) -> None:
        """The last speculation stays."""
        self._buckets[bucket].update.confirm()

    def take_state(self, bucket: int, *, keeps: bool) -> Iterator[tuple[Segment, State]]:
        """The state of each segment, tensors flat and its own. Without `keeps` it is forgotten here: another optimizer
        goes on with it, until `give_state` brings it back."""
        return self._buckets[bucket].take_state(keeps=keeps)

    @torch.no_grad()
    def give_state(self, bucket: int, state_of: Callable[[Segment], State]) -> None:
        """Goes on with what another optimizer like this one has come to. What `state_of` answers is copied."""
        self._buckets[bucket].give_state(state_of)

    def hold(self, bucket: int, held: Held, names: Sequence[str]) -> None:
        """Adds the shard's values and what is kept of them. names: of the parameters."""
        self._buckets[bucket].hold(held, names)

    def rewind(self, bucket: int) -> None:
        """Knows nothing of any step, as before `restore`; a speculation stays."""
        self._buckets[bucket].rewind()

    @torch.no_grad()
    def restore(self, bucket: int, saved: Saved, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Goes on with the state and the options that were saved; values are where they have to be already."""
        self._buckets[bucket].restore(saved, names, parameters)

    def read_hyperparameters(self) -> None:
        """Takes over what has changed in the template's groups since last time, such as lr after a scheduler's step.

        To be called as well before the first step, where a scheduler was attached since: it sets the first lr. What has
        not changed there is left alone, since some optimizers count their steps in the group.
        """
        now = _all_options(self._template)
        for index, (group, known) in enumerate(zip(now, self._known, strict=True)):
            changed = {name: value for name, value in group.items() if not _equal(value, known.get(name))}
            for bucket in self._buckets.values() if changed else ():
                bucket.set_options(index, changed)
        self._known = now


class _Bucket:
    """One shard: its parts, the twin of the template that holds them, and the way in which they are updated."""

    def __init__(
        self, template: torch.optim.Optimizer, shard: Shard, parameters: Sequence[Tensor], *, speculative: bool
    ) -> None:
        self._is_flat = flat = is_elementwise(template)
        self._shard = shard
        self._parts = flat_parts(shard) if flat else whole_parts(shard, parameters)
        self._groups = group_indices(template, self._parts)
        self._twin = (flat_twin if flat else whole_twin)(template, self._parts, parameters)
        self.update = TiledAdam(self._twin) if can_tile(self._twin) else _StepUpdate(self._twin, parameters)
        self.backup = torch.zeros_like(shard.values) if speculative else None  # zeros: touched here, by its owner

    def choose(self, touched: Touched | None) -> list[ShardPart]:
        """The parts with a gradient. One in which only some segments have one is split, for good."""
        if touched is None:
            return self._parts
        parts: list[ShardPart] = []
        chosen: list[ShardPart] = []
        for part in self._parts:
            answers = [touched(segment.parameter) for segment in part.segments]
            mixed = any(answers) and not all(answers)
            pieces = self._split(part) if mixed else [part]
            parts += pieces
            chosen += [piece for piece, answer in zip(pieces, answers, strict=mixed) if answer]
        self._parts = parts
        return chosen

    def take_state(self, *, keeps: bool) -> Iterator[tuple[Segment, State]]:
        self.update.confirm()
        for part in self._parts:
            state = self._twin.state.get(part.parameter, {})
            yield from states_of_segments(part, state)
            if not keeps:
                self._twin.state.pop(part.parameter, None)
                self.update.forget(part)

    def give_state(self, state_of: Callable[[Segment], State]) -> None:
        """A part whose segments are not in the same state is split, for good."""
        parts: list[ShardPart] = []
        for part in self._parts:
            self._twin.state.pop(part.parameter, None)
            states = [state_of(segment) for segment in part.segments]
            alike = all(are_alike(states[0], state) for state in states[1:])
            parts += [part] if alike else self._split(part)
        self._parts = parts
        for part in parts:
            group = self._twin.param_groups[self._groups.index(part.group)]
            if state := joined_state(part, [state_of(segment) for segment in part.segments], group):
                self._twin.state[part.parameter] = state

    def hold(self, held: Held, names: Sequence[str]) -> None:
        self.update.confirm()
        if self._is_flat:
            extents = [Extent(names[s.parameter], s.offset, s.start, s.stop) for s in self._shard.segments]
            held.pieces.append(Piece(VALUES, extents, self._shard.values))
        for part in self._parts:
            if not self._is_flat:
                held.add_whole(names[part.segments[0].parameter], VALUES, part.parameter.data)
            self._hold_state(part, held, names)
            group = self._twin.param_groups[self._groups.index(part.group)]
            held.options |= dict.fromkeys((names[segment.parameter] for segment in part.segments), options(group))

    def _hold_state(self, part: ShardPart, held: Held, names: Sequence[str]) -> None:
        elements, rest = parted_state(part.parameter, self._twin.state.get(part.parameter, {}))
        own = [names[segment.parameter] for segment in part.segments]
        if rest:
            held.states |= dict.fromkeys(own, rest)
        for entry, value in elements.items():
            if self._is_flat:
                start = part.range.start
                extents = [
                    Extent(name, segment.offset, segment.start - start, segment.stop - start)
                    for name, segment in zip(own, part.segments, strict=True)
                ]
                held.pieces.append(Piece(entry, extents, value))
            else:
                held.add_whole(own[0], entry, value)

    def rewind(self) -> None:
        self.update.confirm()
        for part in self._parts:
            self._twin.state.pop(part.parameter, None)

    def restore(self, saved: Saved, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        for part in self._parts:
            self.set_options(part.group, restored_options(saved, [names[s.parameter] for s in part.segments]))
        if self._is_flat:
            self._restore_segments(saved, names, parameters)
            return
        for part in self._parts:
            number, group = part.segments[0].parameter, self._twin.param_groups[self._groups.index(part.group)]
            if state := restored_state(saved, names[number], part.parameter, parameters[number], group):
                self._twin.state[part.parameter] = state

    def _restore_segments(self, saved: Saved, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        numbers = [segment.parameter for segment in self._shard.segments]
        rest = {number: saved.rest(names[number]) for number in numbers}
        elements = {number: saved.elements(names[number], parameters[number]) for number in numbers}

        def state_of(segment: Segment) -> State:
            within = slice(segment.offset, segment.offset + segment.stop - segment.start)
            return rest[segment.parameter] | {
                entry: flat[within] for entry, flat in elements[segment.parameter].items()
            }

        if any(rest.values()) or any(elements.values()):
            self.give_state(state_of)

    def set_options(self, index: int, changed: Mapping[str, Any]) -> None:
        """index: the template's group."""
        if index in self._groups:
            self._twin.param_groups[self._groups.index(index)].update(copy.deepcopy(dict(changed)))

    def _split(self, part: ShardPart) -> list[ShardPart]:
        self.update.forget(part)
        return split(part, self._shard, self._twin)


PASS_OVER = (
    "An optimizer that keeps tensors in lists beside its groups has there all parameters of the model, and those that "
    "are updated elsewhere have no values and no gradient: pass over each whose grad is None, or keep what it has of "
    "each in optimizer.state[parameter]"
)


class _StepUpdate:
    """The update by the optimizer's own `step`, whatever it is."""

    def __init__(self, optimizer: torch.optim.Optimizer, strangers: Sequence[Tensor]) -> None:
        """strangers: parameters that the optimizer may refer to and does not update, the user's own."""
        self._optimizer = optimizer
        self._is_torchs = is_elementwise(optimizer) and not has_hooks(optimizer)
        self._strangers = strangers
        self._values: list[tuple[Tensor, Tensor]] = []
        self._attributes: dict[str, Any] = {}

    def step(self, parts: Sequence[ShardPart], scale: float | Tensor, found_inf: Tensor | None = None) -> None:
        self.confirm()
        if found_inf is None:
            self._step(parts, scale)
            return
        vars(self._optimizer)["found_inf"] = found_inf  # where torch's GradScaler puts it
        self._step(parts, scale)
        del vars(self._optimizer)["found_inf"]

    def speculate(self, parts: Sequence[ShardPart], backup: Tensor, *, squares: bool) -> float:
        self._values = [(part.flat_values, backup[part.range]) for part in parts]
        for values, copies in self._values:
            copies.copy_(values)
        self._attributes = self._copied_attributes()
        self._step(parts, 1.0)
        return sum(sum_of_squares(part.flat_gradient) for part in parts) if squares else 0.0

    def confirm(self) -> None:
        self._values, self._attributes = [], {}

    def undo(self) -> None:
        for values, copies in self._values:
            values.copy_(copies)
        vars(self._optimizer).update(self._attributes)
        self.confirm()

    def forget(self, part: ShardPart) -> None:
        """Nothing is kept by part."""

    def _step(self, parts: Sequence[ShardPart], scale: float | Tensor) -> None:
        if not parts and self._is_torchs:  # one of the user's counts its steps, with gradients or without
            return
        for part in parts:
            gradient = _scaled(part.gradient, scale)  # the user's may keep it, or change it
            part.parameter.grad = gradient.clone() if gradient is part.gradient and not self._is_torchs else gradient
        # with gradients, as in a training loop: each optimizer turns it off itself
        with torch.enable_grad(), within(step_place(self._optimizer)):
            try:
                self._optimizer.step()
            except Exception as error:  # whatever the user's raises
                if any(parameter.is_meta for group in self._optimizer.param_groups for parameter in group["params"]):
                    error.add_note(PASS_OVER)
                raise
        for part in parts:
            part.parameter.grad = None
            part.come_home()

    def _copied_attributes(self) -> dict[str, Any]:
        """All that a step may change: state, counters in the groups, another optimizer inside this one."""
        own = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return copy.deepcopy(vars(self._optimizer), {id(each): each for each in [*own, *self._strangers]})


def _scaled(gradient: Tensor, scale: float | Tensor) -> Tensor:
    """The same bits whether the scale is a number or a device's own: torch multiplies bfloat16 with a number in
    float32, but with a tensor in bfloat16."""
    if not isinstance(scale, Tensor):
        return gradient if scale == 1.0 else torch.mul(gradient, scale)
    wide = torch.float32 if gradient.itemsize < 4 else gradient.dtype
    return torch.mul(gradient.to(wide), scale.to(wide)).to(gradient.dtype)


def _all_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [copy.deepcopy(options(group)) for group in optimizer.param_groups]


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other
