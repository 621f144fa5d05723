from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.workers.updates import sharded_optimizer
from weft.workers.updates.sharded_optimizer import Segment, Shard, ShardedOptimizer
from weft.workers.updates.tiled_adam import TiledAdam
from weft.workload.optimizer import can_skip_on_device, make_optimizer
from weft.workload.workload import make_scheduler

ELEMENTWISE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    "Adam with amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "Adam that maximizes": (torch.optim.Adam, {"lr": 0.1, "maximize": True}),
    "Adam in the plain loop": (torch.optim.Adam, {"lr": 0.1, "fused": False}),
    "Adam with foreach": (torch.optim.Adam, {"lr": 0.1, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD with Nesterov's momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "Adagrad in the plain loop": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5, "fused": False}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 2}),
}
SHAPES = [(40, 7), (5,), (32, 32), (32,), (3, 100), (1,), (64, 33), (700, 500)]
ALIGNMENT_BYTES, VECTORS_BYTES = 64, 128

Factory = Callable[[Any], torch.optim.Optimizer]
Touched = Callable[[int], bool]


def real_parameters(
    dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def factory(cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> Factory:
    return lambda given: cls(given, **settings)


def two_groups(cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> Factory:
    """Vectors without decay, the others with it: interleaved in memory, as in most models."""

    def build(given: Any) -> torch.optim.Optimizer:
        matrices = [each for each in given if each.dim() > 1]
        vectors = [each for each in given if each.dim() == 1]
        return cls([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], **settings)

    return build


class Owners:
    """Parameters in flat buckets, each cut into one range per owner; `parameters` are views of them, as in a model."""

    def __init__(
        self, build: Factory, given: list[nn.Parameter], *, owners: int = 1, buckets: int = 1, speculative: bool = False
    ) -> None:
        self.given = given
        template = make_optimizer(build, given)
        assert template is not None
        self.template = template
        self.views: list[tuple[Tensor, Tensor]] = []
        shards: list[dict[int, Shard]] = [{} for _ in range(owners)]
        per_bucket = -(-len(given) // buckets)
        for bucket in range(buckets):
            members = range(bucket * per_bucket, min((bucket + 1) * per_bucket, len(given)))
            for mine, shard in zip(shards, self._shards(members, owners), strict=True):
                mine[bucket] = shard
        self.optimizers = [
            ShardedOptimizer(template, mine, parameters=given, speculative=speculative) for mine in shards
        ]
        self.num_buckets = buckets

    def step(
        self, touched: Touched | None = None, scale: float | Tensor = 1.0, found_inf: Tensor | None = None
    ) -> None:
        for owner, bucket in self._each():
            owner.step(bucket, touched=touched, scale=scale, found_inf=found_inf)

    def speculate(self, touched: Touched | None = None) -> float:
        return sum(owner.speculate(bucket, touched=touched) for owner, bucket in self._each())

    def undo(self) -> None:
        for owner, bucket in self._each():
            owner.undo(bucket)

    def confirm(self) -> None:
        for owner, bucket in self._each():
            owner.confirm(bucket)

    def sum_of_squares(self) -> float:
        return sum(owner.sum_of_squares(bucket) for owner, bucket in self._each())

    def read_hyperparameters(self) -> None:
        for owner in self.optimizers:
            owner.read_hyperparameters()

    def values(self) -> list[Tensor]:
        return [values for values, _ in self.views]

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for (_, place), gradient in zip(self.views, gradients, strict=True):
            place.zero_() if gradient is None else place.copy_(gradient)

    def _each(self) -> list[tuple[ShardedOptimizer, int]]:
        return [(owner, bucket) for owner in self.optimizers for bucket in range(self.num_buckets)]

    def _shards(self, members: range, owners: int) -> list[Shard]:
        itemsize = self.given[0].element_size()
        starts, end = [], 0
        for index in members:
            starts.append(end)
            end += -(-self.given[index].numel() * itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // itemsize
        values, gradient = (torch.zeros(end, dtype=self.given[0].dtype) for _ in range(2))
        for index, start in zip(members, starts, strict=True):
            parameter, places = self.given[index], slice(start, start + self.given[index].numel())
            view = values[places].as_strided(parameter.shape, parameter.stride())
            view.copy_(parameter.detach())
            self.views.append((view, gradient[places].as_strided(parameter.shape, parameter.stride())))
        cuts = [0, *(self._cut(end * k // owners, starts, VECTORS_BYTES // itemsize) for k in range(1, owners)), end]
        return [
            Shard(values[a:b], gradient[a:b], tuple(self._segments(members, starts, a, b))) for a, b in pairwise(cuts)
        ]

    def _cut(self, near: int, starts: list[int], unit: int) -> int:
        begin = max(start for start in starts if start <= near)
        return begin + (near - begin) // unit * unit

    def _segments(self, members: range, starts: list[int], a: int, b: int) -> list[Segment]:
        found = []
        for index, start in zip(members, starts, strict=True):
            first, last = max(start, a), min(start + self.given[index].numel(), b)
            if first < last:
                found.append(Segment(index, self._group(index), first - a, last - a, first - start))
        return found

    def _group(self, index: int) -> int:
        return next(
            number
            for number, group in enumerate(self.template.param_groups)
            if any(each is self.given[index] for each in group["params"])
        )


def some_gradients(seed: int, given: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each.shape, generator=generator).to(each.dtype) for each in given]


def step_real(optimizer: torch.optim.Optimizer, given: list[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(given, gradients, strict=True):
        # In the parameter's strides, as autograd makes it.
        parameter.grad = None if gradient is None else torch.empty_like(parameter).copy_(gradient)
    optimizer.step()


def assert_same_bits(ours: Sequence[Tensor], real: Sequence[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(ours, real, strict=True)):
        assert torch.equal(one, other.detach()), f"parameter {index} {tuple(other.shape)}"


@pytest.mark.pairs(name=ELEMENTWISE, dtype=(torch.float32, torch.float64, torch.bfloat16))
def test_owners_of_ranges_compute_the_bits_that_the_users_optimizer_computes(name: str, dtype: torch.dtype) -> None:
    cls, settings = ELEMENTWISE[name]
    real = real_parameters(dtype)
    optimizer = make_optimizer(factory(cls, **settings), real)
    ours = Owners(factory(cls, **settings), real_parameters(dtype), owners=3, buckets=2)
    assert optimizer is not None
    for seed in range(5):
        gradients = some_gradients(seed, real)
        step_real(optimizer, real, gradients)
        ours.set_gradients(gradients)
        ours.step()
        assert_same_bits(ours.values(), real)


@pytest.mark.parametrize("name", [name for name in ELEMENTWISE if name != "Rprop"])  # which knows no weight decay
def test_groups_that_lie_interleaved_keep_their_own_options(name: str) -> None:
    cls, settings = ELEMENTWISE[name]
    settings = {key: value for key, value in settings.items() if key != "weight_decay"}
    real = real_parameters()
    optimizer = make_optimizer(two_groups(cls, **settings), real)
    ours = Owners(two_groups(cls, **settings), real_parameters(), owners=2)
    assert optimizer is not None
    for seed in range(3):
        gradients = some_gradients(seed, real)
        step_real(optimizer, real, gradients)
        ours.set_gradients(gradients)
        ours.step()
    assert_same_bits(ours.values(), real)


@pytest.mark.pairs(name=ELEMENTWISE, speculative=(False, True))
def test_a_parameter_without_a_gradient_is_left_alone_and_counts_its_own_steps(name: str, speculative: bool) -> None:
    cls, settings = ELEMENTWISE[name]
    real = real_parameters()
    optimizer = make_optimizer(factory(cls, **settings), real)
    ours = Owners(factory(cls, **settings), real_parameters(), owners=2, buckets=2, speculative=True)
    assert optimizer is not None
    for seed, missing in enumerate([set(), {2, 3}, {2}, set(), set(range(len(real))), {7}, set()]):
        gradients = [None if i in missing else each for i, each in enumerate(some_gradients(seed, real))]
        step_real(optimizer, real, gradients)
        ours.set_gradients(gradients)

        def touched(index: int, missing: set[int] = missing) -> bool:
            return index not in missing

        if speculative:
            ours.speculate(touched=touched)
            ours.undo()
        ours.step(touched=touched)
        assert_same_bits(ours.values(), real)


@pytest.mark.pairs(name=ELEMENTWISE, dtype=(torch.float32, torch.bfloat16))
def test_a_speculation_undone_and_done_again_scaled_is_a_clipped_step(name: str, dtype: torch.dtype) -> None:
    cls, settings = ELEMENTWISE[name]
    real = real_parameters(dtype)
    optimizer = make_optimizer(factory(cls, **settings), real)
    ours = Owners(factory(cls, **settings), real_parameters(dtype), owners=2, buckets=2, speculative=True)
    assert optimizer is not None
    for seed in range(6):
        scale = 1.0 if seed in (1, 4) else float(torch.rand((), generator=torch.Generator().manual_seed(seed)))
        gradients = some_gradients(seed, real)
        ours.set_gradients(gradients)
        ours.speculate()
        if scale != 1.0:
            ours.undo()
            assert_same_bits(ours.values(), real)
            ours.step(scale=scale)
        elif seed == 1:
            ours.confirm()
            ours.undo()  # nothing is left to undo
        for gradient in gradients:
            gradient.mul_(torch.tensor(scale))  # as clip_grad_norm_ does
        step_real(optimizer, real, gradients)
        assert_same_bits(ours.values(), real)


@pytest.mark.parametrize("name", ["AdamW", "Adam with foreach", "SGD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_devices_own_scale_makes_the_bits_that_a_number_makes(name: str, dtype: torch.dtype) -> None:
    """Of bfloat16 too, with which torch would round the scale first."""
    cls, settings = ELEMENTWISE[name]
    known, unknown = (Owners(factory(cls, **settings), real_parameters(dtype), owners=2) for _ in range(2))
    for seed, scale in enumerate((0.2360679774997897, 1.0, 1e-9, 0.0)):
        for each in (known, unknown):
            each.set_gradients(some_gradients(seed, each.given))
        known.step(scale=scale)
        unknown.step(scale=torch.tensor([scale], dtype=torch.float64)[0])
        assert_same_bits(unknown.values(), known.values())


FUSED = ["Adam", "Adam with amsgrad", "Adam that maximizes", "AdamW", "SGD", "SGD with momentum", "Adagrad"]


@pytest.mark.parametrize("name", FUSED)
def test_a_step_that_a_device_leaves_out_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither values nor state, even if it is the first one; the steps after it are those of one that never saw it."""
    monkeypatch.setattr(sharded_optimizer, "can_tile", lambda optimizer: False)
    cls, settings = ELEMENTWISE[name]
    plain, ours = (Owners(factory(cls, **settings), real_parameters(), owners=2, buckets=2) for _ in range(2))
    assert can_skip_on_device(ours.template)
    for seed, skips in enumerate([True, False, False, True, True, False]):
        gradients = some_gradients(seed, ours.given)
        before = [value.clone() for value in ours.values()]
        ours.set_gradients([gradient * torch.nan if skips else gradient for gradient in gradients])
        ours.step(scale=torch.tensor(0.5, dtype=torch.float64), found_inf=torch.tensor(float(skips)))
        if skips:
            assert_same_bits(ours.values(), before)
        else:
            plain.set_gradients(gradients)
            plain.step(scale=0.5)
        assert_same_bits(ours.values(), plain.values())


def test_the_gradient_is_left_as_it_is() -> None:
    ours = Owners(factory(torch.optim.AdamW), real_parameters())
    gradients = some_gradients(0, ours.given)
    ours.set_gradients(gradients)
    ours.step(scale=0.5)
    assert_same_bits([gradient for _, gradient in ours.views], gradients)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_sums_of_squares_make_the_norm_that_clipping_needs(cls: Any, dtype: torch.dtype) -> None:
    ours = Owners(factory(cls), real_parameters(dtype), owners=3, buckets=2, speculative=True)
    gradients = some_gradients(0, ours.given)
    ours.set_gradients(gradients)
    expected = float(nn.utils.get_total_norm([gradient.double() for gradient in gradients]))
    before = ours.sum_of_squares()
    along = ours.speculate()
    assert before**0.5 == pytest.approx(expected, rel=1e-5)
    assert along**0.5 == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows_in_the_sum_and_is_undone(bad: float) -> None:
    ours = Owners(factory(torch.optim.AdamW), real_parameters(), speculative=True)
    gradients = some_gradients(0, ours.given)
    gradients[2][0, 0] = bad
    ours.set_gradients(gradients)
    assert not torch.isfinite(torch.tensor(ours.speculate()))
    ours.undo()
    assert_same_bits(ours.values(), ours.given)


@pytest.mark.parametrize("settings", [{}, {"fused": False}], ids=str)
def test_a_scheduler_on_the_template_is_followed(settings: dict[str, Any]) -> None:
    real = real_parameters()
    optimizer = make_optimizer(two_groups(torch.optim.AdamW, **settings), real)
    ours = Owners(two_groups(torch.optim.AdamW, **settings), real_parameters(), owners=2)
    assert optimizer is not None
    schedulers = [make_scheduler(one_cycle, each) for each in (optimizer, ours.template)]
    ours.read_hyperparameters()  # a scheduler sets the first lr as it is made
    for seed in range(8):
        gradients = some_gradients(seed, real)
        step_real(optimizer, real, gradients)
        ours.set_gradients(gradients)
        ours.step()
        for scheduler in schedulers:
            assert scheduler is not None
            scheduler.step()
        ours.read_hyperparameters()
    assert_same_bits(ours.values(), real)


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=20)  # changes the betas too


def test_a_learning_rate_in_a_tensor_that_changes_in_place_is_followed() -> None:
    build = factory(torch.optim.SGD, lr=torch.tensor(0.1))
    ours = Owners(build, real_parameters())
    ours.template.param_groups[0]["lr"].fill_(0.0)
    ours.set_gradients(some_gradients(0, ours.given))
    ours.read_hyperparameters()
    ours.step()
    assert_same_bits(ours.values(), ours.given)


def test_the_template_is_never_stepped_nor_given_state() -> None:
    given = real_parameters()
    ours = Owners(factory(torch.optim.AdamW), given)
    ours.set_gradients(some_gradients(0, given))
    ours.step()
    assert not ours.template.state
    assert_same_bits(given, real_parameters())


def test_the_users_hooks_around_a_step_are_called() -> None:
    calls = []

    def build(given: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(given)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        return optimizer

    ours = Owners(build, real_parameters())
    ours.step()
    assert calls == ["before", "after"]


def test_adam_goes_by_tiles_where_its_kernel_is_fused_and_nowhere_else() -> None:
    def kind(build: Factory) -> bool:
        ours = Owners(build, real_parameters())
        return isinstance(ours.optimizers[0]._buckets[0].update, TiledAdam)

    assert kind(factory(torch.optim.AdamW))
    assert not kind(factory(torch.optim.AdamW, foreach=True))
    assert not kind(factory(torch.optim.SGD))
