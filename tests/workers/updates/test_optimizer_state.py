from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.workers.updates.optimizer_state import flat_parts, flat_twin, joined_state
from weft.workers.updates.sharded_optimizer import Segment, Shard, ShardedOptimizer, is_elementwise
from weft.workload.optimizer import make_optimizer

Factory = Callable[[Any], torch.optim.Optimizer]
Own: Any = runpy.run_path(str(Path(__file__).parents[2] / "own_optimizer.py"))["Own"]


class TrustRatio(torch.optim.Optimizer):
    """As in LAMB: a step as long as the parameter, so that a parameter in pieces would go elsewhere.

    Its constructor takes what no other takes; it counts steps in the group and in itself, and lists its parameters.
    """

    def __init__(self, given: Any, name: str, lr: float) -> None:
        super().__init__(given, {"lr": lr, "steps": 0})
        self.name = name
        self.num_steps = 0
        self.listed = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            group["steps"] += 1
        for parameter in self.listed:
            if parameter.grad is not None:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.mul_(0.9).add_(parameter.grad)
                if average.dim() == 2:
                    average = torch.outer(average.sum(1), average.sum(0))  # needs the shape
                lr = self.param_groups[0]["lr"] / self.param_groups[0]["steps"] / self.num_steps
                parameter.sub_(average * (lr * parameter.norm() / average.norm()))


class Averaged(torch.optim.Optimizer):
    """Another optimizer within, as in Lookahead."""

    def __init__(self, given: Any) -> None:
        self.inner = torch.optim.AdamW(given, lr=0.1)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                parameter.copy_(slow.lerp_(parameter, 0.5))


HOWS = ("assigns .data", "keeps gradients", "changes gradients", "assigns .data of gradients", "keeps tensors by place")
OWN: dict[str, Factory] = {
    **{how: partial(Own, how=how) for how in HOWS},
    "an optimizer of the user": lambda given: TrustRatio(given, name="mine", lr=0.1),
    "one around another": Averaged,
    "a subclass of AdamW": lambda given: type("Own", (torch.optim.AdamW,), {})(given, lr=0.1),
    "Adafactor": lambda given: torch.optim.Adafactor(given, lr=0.1),
}


def some_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 7), (5,), (32, 32), (64, 33)]
    dense = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return [*dense, nn.Parameter(torch.linspace(0, 1, 24).view(6, 4).t())]


def shard_of(parameters: Sequence[nn.Parameter]) -> tuple[Shard, list[Tensor], list[Tensor]]:
    """With every parameter on a multiple of 64 bytes; the views of values and gradients in it, in their shapes."""
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // 16) * 16
    segments = tuple(Segment(i, 0, start, start + parameters[i].numel(), 0) for i, start in enumerate(starts))
    shard = Shard(torch.zeros(end), torch.zeros(end), segments)
    values, gradients = (
        [flat[start:].as_strided(p.shape, p.stride()) for p, start in zip(parameters, starts, strict=True)]
        for flat in (shard.values, shard.gradient)
    )
    for view, parameter in zip(values, parameters, strict=True):
        view.copy_(parameter.detach())
    return shard, values, gradients


@pytest.mark.parametrize("name", OWN)
def test_an_optimizer_that_is_not_elementwise_sees_whole_parameters_in_their_shape(name: str) -> None:
    real, given = some_parameters(), some_parameters()
    optimizer, template = make_optimizer(OWN[name], real), make_optimizer(OWN[name], given)
    assert optimizer is not None
    assert template is not None
    assert not is_elementwise(template)
    shard, values, gradients = shard_of(given)
    ours = ShardedOptimizer(template, {3: shard}, parameters=given, speculative=True)
    for scale in (1.0, 0.5, 1.0, 0.25):
        shard.gradient.normal_(generator=torch.Generator().manual_seed(int(8 * scale)))
        before = [view.clone() for view in values]
        ours.speculate(3)
        if scale != 1.0:
            ours.undo(3)
            assert all(map(torch.equal, values, before))
            ours.step(3, scale=scale)
        for parameter, gradient in zip(real, gradients, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient).mul_(scale)
        optimizer.step()
        ours.read_hyperparameters()  # nothing has changed: the counts of steps in the groups stay
        assert all(torch.equal(view, parameter.detach()) for view, parameter in zip(values, real, strict=True))


def test_what_is_kept_by_place_is_found_there_in_each_bucket() -> None:
    """Two groups, whose parameters lie in two buckets each. The twin's groups had its own parameters alone, and found
    what was kept of the first ones."""
    real, given = some_parameters(), some_parameters()

    def build(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [*parameters[:2]]}, {"params": [*parameters[2:]]}]
        return Own(groups, how="keeps tensors by place")

    optimizer, template = build(real), build(given)
    halves = [(0, 3), (1, 2, 4)]
    shards, views = {}, dict[int, tuple[Tensor, Tensor]]()
    for bucket, numbers in enumerate(halves):
        shard, values, gradients = shard_of([given[number] for number in numbers])
        segments = [replace(each, parameter=numbers[each.parameter]) for each in shard.segments]
        segments = [replace(each, group=int(each.parameter >= 2)) for each in segments]
        shards[bucket] = replace(shard, segments=tuple(segments))
        views |= dict(zip(numbers, zip(values, gradients, strict=True), strict=True))
    ours = ShardedOptimizer(template, shards, parameters=given, speculative=False)
    for step in range(3):
        for number, (_, gradient) in views.items():
            gradient.normal_(generator=torch.Generator().manual_seed(10 * step + number))
            real[number].grad = torch.empty_like(real[number]).copy_(gradient)
        optimizer.step()
        for bucket in shards:
            ours.step(bucket)
        assert all(torch.equal(views[number][0], parameter.detach()) for number, parameter in enumerate(real))


class Lookahead(torch.optim.Optimizer):
    """As many have it: it goes back to a slow copy of each parameter, whether that has a gradient or not."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.slow = [[each.detach().clone() for each in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> None:
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for parameter, copy in zip(group["params"], slow, strict=True):
                parameter.data.copy_(copy.lerp_(parameter.data, 0.5))


def test_who_writes_to_parameters_that_are_updated_elsewhere_is_told_to_pass_over_them() -> None:
    given = some_parameters()
    shard, _, _ = shard_of(given[:2])
    ours = ShardedOptimizer(Lookahead(given), {0: shard}, parameters=given, speculative=False)
    with pytest.raises(RuntimeError, match="meta") as raised:
        ours.step(0)
    note, place = raised.value.__notes__
    assert "Lookahead" in place
    assert "pass over each whose grad is None" in note


def test_a_parameter_without_a_gradient_is_left_alone_by_an_optimizer_of_the_user() -> None:
    given = some_parameters()
    shard, values, _ = shard_of(given)
    ours = ShardedOptimizer(OWN["an optimizer of the user"](given), {0: shard}, parameters=given, speculative=False)
    shard.gradient.fill_(1.0)
    ours.step(0, touched=lambda index: index != 2)
    changed = [not torch.equal(view, parameter.detach()) for view, parameter in zip(values, given, strict=True)]
    assert changed == [True, True, False, True, True]


def test_an_optimizer_of_the_user_steps_where_no_parameter_of_a_bucket_has_a_gradient() -> None:
    given = some_parameters()
    shard, values, _ = shard_of(given)
    counted: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            counted.append(1)
            return super().step(closure)

    ours = ShardedOptimizer(Counting(given, lr=0.1), {0: shard}, parameters=given, speculative=False)
    ours.step(0, touched=lambda index: False)
    assert counted == [1]
    assert all(torch.equal(view, parameter.detach()) for view, parameter in zip(values, given, strict=True))


def test_a_parameter_in_pieces_is_refused_where_the_optimizer_needs_it_whole() -> None:
    given = [nn.Parameter(torch.zeros(64))]
    template = TrustRatio(given, name="mine", lr=0.1)
    shard = Shard(torch.zeros(32), torch.zeros(32), (Segment(0, 0, 0, 32, 0),))
    with pytest.raises(ValueError, match="must not be cut"):
        ShardedOptimizer(template, {0: shard}, parameters=given, speculative=False)


def test_parameters_that_fill_their_vectors_are_one_tensor() -> None:
    sizes = [64, 32, 5, 64, 48, 32]
    starts = [0, 64, 96, 112, 176, 224]
    segments = tuple(Segment(i, 0, starts[i], starts[i] + sizes[i], 0) for i in range(len(sizes)))
    shard = Shard(torch.zeros(256), torch.zeros(256), segments)
    indices = [[segment.parameter for segment in part.segments] for part in flat_parts(shard)]
    assert indices == [[0, 1, 2], [3, 4], [5]]


@pytest.mark.parametrize("fused", [False, True])
def test_state_is_where_the_parameters_are_and_the_count_of_steps_where_the_kernel_reads_it(fused: bool) -> None:
    """Meta tensors stand for a device: a fused kernel of CUDA counts steps there, torch's loops on the host."""
    given = [nn.Parameter(torch.zeros(size, device="meta")) for size in (64, 32)]
    template = torch.optim.Adagrad(given, initial_accumulator_value=0.1)
    template.param_groups[0]["fused"] = fused
    flat = torch.zeros(96, device="meta")
    (part,) = flat_parts(Shard(flat, flat.clone(), (Segment(0, 0, 0, 64, 0), Segment(1, 0, 64, 96, 0))))
    twin = flat_twin(template, [part], given)
    moved = [{"step": torch.tensor(3.0), "sum": torch.ones(size)} for size in (64, 32)]
    for state in (twin.state[part.parameter], joined_state(part, moved, twin.param_groups[0])):
        assert state["sum"].is_meta
        assert state["sum"].shape == (96,)
        assert state["step"].is_meta is fused
