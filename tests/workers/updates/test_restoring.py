"""Training that goes on from what was held is training that was never broken off: the same bits of values, of state
and of learning rates, in the same division of the parameters or in another one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from weft.plan.itinerary import Iteration
from weft.transport.memory.directory import Directory
from weft.workers.compute.measured import Measured
from weft.workers.devices.host import HostDevice
from weft.workers.snapshots.held import VALUES, Held
from weft.workers.snapshots.place import SnapshotPlaces, read_place
from weft.workers.snapshots.saved import Saved
from weft.workers.updates import sharded_optimizer
from weft.workers.updates.digests import Digests
from weft.workers.updates.norm import Bound
from weft.workers.updates.sharded_optimizer import is_elementwise
from weft.workers.updates.stage_update import StageUpdate
from weft.workers.updates.tiled_adam import TiledAdam
from weft.workers.updates.updates import Updates, group_of, hold_scheduler_and_kinds, make_shard, restore_template
from weft.workload.optimizer import make_optimizer
from weft.workload.workload import Workload, WorkloadError

STEPS = 3  # before what is held, and as many after it
SHAPES = [(), (5,), (3, 4), (40, 7), (1,), (64, 33), (70,)]
SPARSELY = {2: {1, 2}, 4: {1}}  # step -> the parameters that have no gradient in it
LATE, NEVER = 3, 4  # the one that has its first gradient after the hold, and the one that has none at all
ALIGNMENT_BYTES = 128

Factory = Callable[[Any], torch.optim.Optimizer]
Gradients = Sequence[Tensor | None]


class PerTensor(torch.optim.Optimizer):
    """Keeps what is no tensor of elements: sums over rows, numbers, a list; and counts steps in the group, if it is
    to. key: under which it keeps what is one."""

    def __init__(self, given: Any, lr: float = 0.1, *, counts: bool = False, key: object = "average") -> None:
        super().__init__(given, {"lr": lr, "steps": int(counts)})
        self._key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] += bool(group["steps"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group["lr"] / (1 + group["steps"]))

    def _step(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            rows = torch.zeros(parameter.shape[:1])
            state.update({"rows": rows, "count": 0, "norms": [], self._key: torch.zeros_like(parameter)})
        state["count"] += 1
        state["norms"].append(float(gradient.norm()))
        state["rows"] += gradient.reshape(*parameter.shape[:1], -1).sum(-1) if parameter.dim() else gradient
        state[self._key].lerp_(gradient, 0.1)
        parameter.sub_(state[self._key] * (lr * state["count"] / (1 + sum(state["norms"]) + state["rows"].norm())))


def factory(cls: Callable[..., torch.optim.Optimizer], **settings: Any) -> Factory:
    """Vectors and numbers in a group of their own, with a learning rate of their own."""

    def build(given: Any) -> torch.optim.Optimizer:
        groups = [[each for each in given if (each.dim() > 1) is many] for many in (True, False)]
        told = [{"params": group, "lr": rate} for group, rate in zip(groups, (0.1, 0.03), strict=True) if group]
        return cls(told, **settings)

    return build


ELEMENTWISE: dict[str, Factory] = {
    "Adam": factory(torch.optim.Adam, weight_decay=0.1),
    "Adam with amsgrad": factory(torch.optim.Adam, amsgrad=True),
    "Adam in the plain loop": factory(torch.optim.Adam, fused=False),
    "Adam with foreach": factory(torch.optim.Adam, foreach=True),
    "AdamW": factory(torch.optim.AdamW),
    "SGD": factory(torch.optim.SGD),
    "SGD with momentum": factory(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "SGD with dampening": factory(torch.optim.SGD, momentum=0.9, dampening=0.1),
    "Adagrad": factory(torch.optim.Adagrad, initial_accumulator_value=0.5, lr_decay=0.1),
    "Adagrad in the plain loop": factory(torch.optim.Adagrad, fused=False),
    "RMSprop": factory(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adadelta": factory(torch.optim.Adadelta),
    "Adamax": factory(torch.optim.Adamax),
    "NAdam": factory(torch.optim.NAdam),
    "RAdam": factory(torch.optim.RAdam),
    "Rprop": factory(torch.optim.Rprop),
    "ASGD": factory(torch.optim.ASGD, t0=2),
}
OTHERS: dict[str, Factory] = {
    "Adafactor": factory(torch.optim.Adafactor),
    "one that keeps much of each tensor": factory(PerTensor),
    "one that keeps elements under a pair": factory(PerTensor, key=("average", 1)),
    "one that keeps elements under a number": factory(PerTensor, key=0),
    "one that keeps elements under a path": factory(PerTensor, key="average/first"),
    "one that keeps elements under nothing": factory(PerTensor, key=""),
}
OPTIMIZERS = ELEMENTWISE | OTHERS

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "OneCycleLR": lambda each: lr_scheduler.OneCycleLR(each, max_lr=0.2, total_steps=20),  # changes the betas too
    "MultiStepLR": lambda each: lr_scheduler.MultiStepLR(each, [1, 4], gamma=0.5),  # of the rate before
    "LambdaLR": lambda each: lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda each: lr_scheduler.SequentialLR(
        each,
        [lr_scheduler.LinearLR(each, total_iters=2), lr_scheduler.ExponentialLR(each, 0.9)],
        milestones=[2],
    ),
    "CosineAnnealingWarmRestarts": lambda each: lr_scheduler.CosineAnnealingWarmRestarts(each, T_0=4),
    "ReduceLROnPlateau": lambda each: lr_scheduler.ReduceLROnPlateau(each, factor=0.5, patience=0, threshold=1e3),
    "CyclicLR": lambda each: lr_scheduler.CyclicLR(each, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
}


def a_model(*, channels_last: bool = False, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Module()
    for number, shape in enumerate(SHAPES):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator)))
    image = torch.randn(2, 3, 4, 4, generator=generator)
    if channels_last:
        image = image.to(memory_format=torch.channels_last)
    model.register_parameter("image", nn.Parameter(image))
    return model


def gradients_of(step: int, given: Sequence[Tensor]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    every = [torch.randn(each.shape, generator=generator) for each in given]
    absent = SPARSELY.get(step, set()) | {NEVER} | ({LATE} if step < STEPS else set())
    return [None if number in absent else each for number, each in enumerate(every)]


def iteration_of(step: int) -> Iteration:
    return Iteration(index=step, training=True, epoch=0, step=step, start=0, size=1)


def measured_before(iteration: Iteration) -> float | None:
    """Of a validation behind every second step; schedulers that take none are not stepped with it."""
    return 1.0 if iteration.step % 2 == 0 else None


class Whole:
    """A stage that owns its state."""

    def __init__(self, workload: Workload) -> None:
        self.given = dict(workload.model.named_parameters())
        names = {id(each): name for name, each in self.given.items()}
        self.update = StageUpdate(
            workload, list(self.given.values()), names, reports=True, value=measured_before, digests=Digests()
        )
        self.rates: list[float] = []

    def step(self, step: int, gradients: Gradients) -> None:
        for parameter, gradient in zip(self.given.values(), gradients, strict=True):
            parameter.grad = None if gradient is None else torch.empty_like(parameter).copy_(gradient)
        measured = Measured()
        self.update.run(iteration_of(step), measured)
        self.rates.append(rate_of(measured))

    def values(self) -> dict[str, Tensor]:
        return {name: each.detach() for name, each in self.given.items()}

    def hold(self, step: int) -> list[Held]:
        held = Held()
        self.update.hold(held)
        return [held]

    def restore(self, saved: Saved, first: int) -> None:
        self.update.restore(saved)


class Given:
    """A norm that is what the test says."""

    def __init__(self, scale: float, *, skips: bool = False) -> None:
        self._bound = Bound(1.0, scale, skips)

    def bound(self, iteration: Iteration) -> Bound:
        return self._bound

    def skips(self, norm: float) -> bool:
        return False


class Owners:
    """Parameters in flat buckets of which each owner updates a range, in place; as `BucketUpdates` has them."""

    def __init__(self, workload: Workload, *, buckets: int = 1, owners: int = 1, speculative: bool = False) -> None:
        self.given = dict(workload.model.named_parameters())
        self._parameters = list(self.given.values())
        self._flat: dict[str, tuple[Tensor, Tensor]] = {}
        self._missing: frozenset[int] = frozenset()
        template = make_optimizer(workload.optimizer, self._parameters)
        assert template is not None
        self._cuttable = is_elementwise(template)
        each = -(-len(self.given) // buckets)
        trained = [number for number, parameter in enumerate(self._parameters) if parameter.requires_grad]
        self._buckets = [self._bucket(index, trained[index * each : (index + 1) * each]) for index in range(buckets)]
        self.norm = Given(1.0)
        self._speculative = speculative
        self.owners = [self._owner(workload, number, owners) for number in range(owners)]
        self.rates: list[float] = []

    def _bucket(self, index: int, members: Iterable[int]) -> Any:
        places, end = [], 0
        for number in members:
            size = self._parameters[number].numel()
            places.append(SimpleNamespace(parameter=number, offset=end, num_elements=size))
            end += -(-size * 4 // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // 4
        values, gradient = torch.zeros(end), torch.zeros(end)
        for place in places:
            name, like = list(self.given)[place.parameter], self._parameters[place.parameter]
            here = slice(place.offset, place.offset + place.num_elements)
            views = [flat[here].as_strided(like.shape, like.stride()) for flat in (values, gradient)]
            views[0].copy_(like.detach())
            self._flat[name] = views[0], views[1]
        return SimpleNamespace(index=index, places=places, size=end, values=values, gradient=gradient)

    def _bounds(self, bucket: Any, number: int, owners: int) -> tuple[int, int]:
        """At multiples of the alignment; at the beginning of a parameter, where none may be cut."""
        starts = [place.offset for place in bucket.places]
        cuts = [0]
        for k in range(1, owners):
            near = bucket.size * k // owners // 32 * 32
            cuts.append(near if self._cuttable else max([start for start in starts if start <= near], default=0))
        return list(pairwise([*cuts, bucket.size]))[number]

    def _owner(self, workload: Workload, number: int, owners: int) -> Updates:
        template = make_optimizer(workload.optimizer, self._parameters)
        assert template is not None
        groups = group_of(template, self._parameters)
        shards = {
            each.index: make_shard(each, self._bounds(each, number, owners), each.values, each.gradient, groups)
            for each in self._buckets
        }
        return Updates(
            workload,
            template,
            self._parameters,
            self._buckets,
            shards,
            norm=SimpleNamespace(bound=lambda it: self.norm.bound(it), skips=lambda norm: False),  # type: ignore[arg-type]
            speculative=self._speculative,
            missing=lambda bucket, iteration: self._missing,
            done=lambda bucket, iteration: None,
            value=measured_before,
            device=HostDevice(),
            reports=True,
            digests=Digests(list(self.given)),  # which find nothing, whatever the optimizer
            outside=set(range(len(self._parameters))) - {place.parameter for b in self._buckets for place in b.places},
        )

    def step(self, step: int, gradients: Gradients) -> None:
        self._missing = frozenset(number for number, each in enumerate(gradients) if each is None)
        for (name, (_, place)), gradient in zip(self._flat.items(), self._of_trained(gradients), strict=True):
            assert name in self.given
            place.zero_() if gradient is None else place.copy_(gradient)
        measured = Measured()
        for owner in self.owners:
            for bucket in self._buckets:
                owner.update(bucket, iteration_of(step), measured)
            if self._speculative:
                owner.validate(iteration_of(step), measured)
        self.rates.append(rate_of(measured))

    def _of_trained(self, gradients: Gradients) -> list[Tensor | None]:
        return [each for each, one in zip(gradients, self._parameters, strict=True) if one.requires_grad]

    def values(self) -> dict[str, Tensor]:
        return {name: values for name, (values, _) in self._flat.items()}

    def hold(self, step: int) -> list[Held]:
        helds = []
        for owner in self.owners:
            helds.append(Held())
            owner.hold(helds[-1], list(self.given), iteration_of(step))
        return helds

    def restore(self, saved: Saved, first: int) -> None:
        for owner in self.owners:
            owner.restore(saved, list(self.given), iteration_of(first))


Trainer = Whole | Owners
LAYOUTS: dict[str, Callable[[Workload], Trainer]] = {
    "whole": Whole,
    "one owner": functools.partial(Owners, buckets=1, owners=1),
    "three owners of two buckets": functools.partial(Owners, buckets=2, owners=3),
    "two owners that speculate": functools.partial(Owners, buckets=3, owners=2, speculative=True),
}


def rate_of(measured: Measured) -> float:
    return float(measured.take()[0]["facts"]["lr"])


@pytest.fixture
def saved_of(directory: Directory) -> Callable[[Trainer, int], Saved]:
    """What a trainer holds after a step, through shared memory as SNAPSHOT takes it."""

    def through_memory(trainer: Trainer, step: int) -> Saved:
        helds = trainer.hold(step)
        for number, held in enumerate(helds):
            SnapshotPlaces(directory, f"owner-{number}", HostDevice()).write(0, step, held)
        return Saved(read_place(directory, 0, f"owner-{number}", step) for number in range(len(helds)))

    return through_memory


@pytest.fixture
def workload_with(workload_of: Callable[..., Workload]) -> Callable[..., Workload]:
    """Each has a model of its own, whose parameters are as those of any other of its seed."""

    def workload(build: Factory, *, channels_last: bool = False, seed: int = 0, **changes: Any) -> Workload:
        return workload_of(a_model(channels_last=channels_last, seed=seed), optimizer=build, **changes)

    return workload


def train(trainer: Trainer, first: int, last: int) -> None:
    given = list(trainer.given.values())
    for step in range(first, last):
        trainer.step(step, gradients_of(step, given))


def go_on(trainer: Trainer, saved: Saved, first: int = STEPS) -> None:
    """The parameters first, as ModelParts puts them back."""
    for name, place in trainer.values().items():
        values = saved.values(name, trainer.given[name])
        assert values is not None
        place.copy_(values)
    trainer.restore(saved, first)


def memory_of(trainer: Trainer, step: int) -> dict[str, dict[str, Any]]:
    """All that is kept of each parameter, in the same form whoever keeps it; `fused` says how, not what."""
    saved, found = Saved(trainer.hold(step)), {}
    for name, like in trainer.given.items():
        kept = {**saved.rest(name), **saved.elements(name, like)}
        how = (saved.options(name) or {}).items()
        found[name] = {entry: flattened(value) for entry, value in kept.items()}
        found[name] |= {f"option {entry}": flattened(value) for entry, value in how if entry != "fused"}
    found["scheduler"] = saved.scheduler or {}
    return found


def flattened(value: Any) -> Any:
    return value.reshape(-1).tolist() if isinstance(value, Tensor) else value


def assert_same(ours: Trainer, expected: Trainer, step: int = 2 * STEPS) -> None:
    for name, values in expected.values().items():
        assert torch.equal(ours.values()[name], values), f"{name} {tuple(values.shape)}"
    one, other = memory_of(ours, step), memory_of(expected, step)
    for name in other:
        assert one[name] == other[name], name
    assert ours.rates[-STEPS:] == expected.rates[-STEPS:]


@pytest.fixture(autouse=True)
def no_warnings_of_schedulers() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The epoch parameter in `scheduler.step\(\)`")  # in SequentialLR
        yield


def assert_goes_on(
    saved_of: Callable[[Trainer, int], Saved], begun: Trainer, unbroken: Trainer, again: Trainer
) -> None:
    """`again`, that goes on from what `begun` has come to, is at the end where `unbroken` is."""
    train(unbroken, 0, 2 * STEPS)
    train(begun, 0, STEPS)
    go_on(again, saved_of(begun, STEPS - 1))
    train(again, STEPS, 2 * STEPS)
    assert_same(again, unbroken)


# --- every optimizer, into every layout


@pytest.mark.pairs(name=OPTIMIZERS, before=LAYOUTS, after=LAYOUTS, channels_last=(False, True))
def test_training_goes_on_as_if_it_had_never_been_broken_off(
    workload_with: Callable[..., Workload],
    saved_of: Callable[[Trainer, int], Saved],
    name: str,
    before: str,
    after: str,
    channels_last: bool,
) -> None:
    build = functools.partial(workload_with, OPTIMIZERS[name], channels_last=channels_last)
    begun, unbroken = LAYOUTS[before](build()), LAYOUTS[after](build())
    again = LAYOUTS[after](build(seed=1))
    assert_goes_on(saved_of, begun, unbroken, again)


def every_gradient_of(step: int, given: Sequence[Tensor]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(each.shape, generator=generator) for each in given]


@pytest.mark.pairs(before=LAYOUTS, after=LAYOUTS)
def test_an_optimizer_that_counts_its_steps_in_the_group_goes_on_counting(
    workload_with: Callable[..., Workload],
    saved_of: Callable[[Trainer, int], Saved],
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
) -> None:
    monkeypatch.setitem(globals(), "gradients_of", every_gradient_of)
    build = functools.partial(workload_with, factory(PerTensor, counts=True))
    begun, unbroken, again = LAYOUTS[before](build()), LAYOUTS[after](build()), LAYOUTS[after](build(seed=1))
    assert_goes_on(saved_of, begun, unbroken, again)


@pytest.mark.pairs(name=("Adam", "Adamax", "SGD with momentum"), layout=LAYOUTS)
def test_a_learning_rate_in_a_tensor_goes_on(
    workload_with: Callable[..., Workload], saved_of: Callable[[Trainer, int], Saved], name: str, layout: str
) -> None:
    """Owners of one worker took the same tensor of what was saved, and each scheduler changed it for all of them."""

    def build(given: Any) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[name](given)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        return optimizer

    given = functools.partial(workload_with, build, scheduler=SCHEDULERS["MultiStepLR"])
    begun, unbroken, again = LAYOUTS[layout](given()), LAYOUTS[layout](given()), LAYOUTS[layout](given(seed=1))
    assert_goes_on(saved_of, begun, unbroken, again)


# --- schedulers


@pytest.mark.pairs(scheduler=SCHEDULERS, name=("Adam", "SGD with momentum"), before=LAYOUTS, after=LAYOUTS)
def test_learning_rates_go_on_where_they_were(
    workload_with: Callable[..., Workload],
    saved_of: Callable[[Trainer, int], Saved],
    scheduler: str,
    name: str,
    before: str,
    after: str,
) -> None:
    build = functools.partial(workload_with, OPTIMIZERS[name], scheduler=SCHEDULERS[scheduler])
    begun, unbroken, again = LAYOUTS[before](build()), LAYOUTS[after](build()), LAYOUTS[after](build(seed=1))
    assert_goes_on(saved_of, begun, unbroken, again)


class Remembers(lr_scheduler.LRScheduler):
    """Adds to a list in place, and decides by it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen = [1.0]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.seen.append(self.seen[-1] * 0.9)
        return [0.1 * self.seen[-1] / len(self.seen) for _ in self.optimizer.param_groups]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scheduler_that_changes_its_state_in_place_is_not_everybodys(
    workload_with: Callable[..., Workload], saved_of: Callable[[Trainer, int], Saved], layout: str
) -> None:
    """The schedulers of a worker's owners went on with one list, to which each of them added."""
    build = functools.partial(workload_with, OPTIMIZERS["SGD"], scheduler=Remembers)
    begun, unbroken, again = (LAYOUTS[layout](build()) for _ in range(3))
    assert_goes_on(saved_of, begun, unbroken, again)


def frozen_first(given: Any) -> torch.optim.Optimizer:
    """The learning rate that is told is that of the first group, of which nothing is trained."""
    frozen, trained = ([each for each in given if each.requires_grad is value] for value in (False, True))
    return torch.optim.SGD([{"params": frozen, "lr": 0.7}, {"params": trained, "lr": 0.1}])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rate_of_a_group_of_frozen_parameters_goes_on_too(
    workload_of: Callable[..., Workload], saved_of: Callable[[Trainer, int], Saved], layout: str
) -> None:
    def build() -> Trainer:
        model = a_model()
        for name in ("p3", "image"):
            model.get_parameter(name).requires_grad_(False)
        return LAYOUTS[layout](workload_of(model, optimizer=frozen_first, scheduler=SCHEDULERS["MultiStepLR"]))

    begun, unbroken, again = build(), build(), build()
    train(unbroken, 0, 2 * STEPS)
    train(begun, 0, STEPS)
    go_on(again, saved_of(begun, STEPS - 1))
    train(again, STEPS, 2 * STEPS)
    assert again.rates == unbroken.rates[STEPS:]
    assert_same(again, unbroken)


# --- what holding does to training: nothing


@pytest.mark.pairs(name=OPTIMIZERS, layout=LAYOUTS)
def test_training_that_is_held_after_every_step_is_the_same(
    workload_with: Callable[..., Workload], saved_of: Callable[[Trainer, int], Saved], name: str, layout: str
) -> None:
    build = functools.partial(workload_with, OPTIMIZERS[name], scheduler=SCHEDULERS["OneCycleLR"])
    if "betas" not in OPTIMIZERS[name](list(a_model().parameters())).defaults:
        build = functools.partial(workload_with, OPTIMIZERS[name], scheduler=SCHEDULERS["LambdaLR"])
    held, plain = LAYOUTS[layout](build()), LAYOUTS[layout](build())
    for step in range(2 * STEPS):
        for each in (held, plain):
            train(each, step, step + 1)
        saved_of(held, step)
    assert_same(held, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_held_before_the_first_step_begins_training_as_it_would(
    workload_with: Callable[..., Workload], saved_of: Callable[[Trainer, int], Saved], layout: str
) -> None:
    """Nothing is kept yet but what a constructor has made: a step may have been skipped."""
    build = functools.partial(workload_with, OPTIMIZERS["Adagrad"])
    begun, unbroken, again = LAYOUTS[layout](build()), LAYOUTS[layout](build()), LAYOUTS[layout](build(seed=1))
    train(unbroken, 0, STEPS)
    go_on(again, saved_of(begun, 0), first=0)
    train(again, 0, STEPS)
    assert_same(again, unbroken)


def test_a_hold_changes_with_nothing_that_comes_after_it(
    workload_with: Callable[..., Workload], saved_of: Callable[[Trainer, int], Saved]
) -> None:
    begun = Owners(workload_with(OPTIMIZERS["Adam"]), owners=2, speculative=True)
    train(begun, 0, STEPS)
    saved = saved_of(begun, STEPS - 1)
    before = {name: saved.elements(name, like) for name, like in begun.given.items()}
    steps = {name: float(saved.rest(name).get("step", -1)) for name in begun.given}
    train(begun, STEPS, 2 * STEPS)
    for name, like in begun.given.items():
        for entry, value in saved.elements(name, like).items():
            assert torch.equal(value, before[name][entry])
        assert float(saved.rest(name).get("step", -1)) == steps[name]


# --- speculation


@pytest.mark.parametrize("name", ["Adam", "Adam with amsgrad", "SGD with momentum", "Adam in the plain loop"])
@pytest.mark.parametrize("tiles", [True, False], ids=["by tiles", "by the optimizer's step"])
def test_a_speculation_that_stood_was_undone_or_was_skipped_is_held_as_it_ended(
    workload_with: Callable[..., Workload],
    saved_of: Callable[[Trainer, int], Saved],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    tiles: bool,
) -> None:
    """Each of the three before what is held, and each as the first step after it."""
    if not tiles:
        monkeypatch.setattr(sharded_optimizer, "can_tile", lambda optimizer: False)
    course = [Given(1.0), Given(0.5), Given(1.0, skips=True), Given(1.0), Given(1.0), Given(0.25), Given(1.0)]
    build = functools.partial(workload_with, OPTIMIZERS[name], scheduler=SCHEDULERS["MultiStepLR"])

    def run(trainer: Owners, first: int, last: int) -> None:
        for step in range(first, last):
            trainer.norm = course[step]
            train(trainer, step, step + 1)

    def owners(seed: int = 0) -> Owners:
        return Owners(build(seed=seed), buckets=2, owners=2, speculative=True)

    assert isinstance(owners().owners[0]._optimizer._buckets[0].update, TiledAdam) is (
        tiles and name in ("Adam", "Adam with amsgrad")
    )
    unbroken = owners()
    run(unbroken, 0, len(course))
    for stop in range(1, len(course)):
        begun, again = owners(), owners(seed=1)
        run(begun, 0, stop)
        go_on(again, saved_of(begun, stop - 1), first=stop)
        run(again, stop, len(course))
        again.rates = [0.0] * STEPS + again.rates
        unbroken_rates = unbroken.rates[stop:]
        assert again.rates[STEPS:] == unbroken_rates
        again.rates = unbroken.rates
        assert_same(again, unbroken)


def test_what_a_speculation_has_begun_and_a_skip_has_undone_is_held_as_nothing_done(
    workload_with: Callable[..., Workload], saved_of: Callable[[Trainer, int], Saved]
) -> None:
    """The first step of all is skipped: the averages are there, and zeros."""
    workload = workload_with(OPTIMIZERS["Adam"])
    begun = Owners(workload, owners=2, speculative=True)
    begun.norm = Given(1.0, skips=True)
    train(begun, 0, 1)
    saved = saved_of(begun, 0)
    for name, like in begun.given.items():
        values = saved.values(name, like)
        assert values is not None
        assert torch.equal(values, like.detach())
        assert all(not each.any() for each in saved.elements(name, like).values())
        assert float(saved.rest(name).get("step", 0.0)) == 0.0


# --- what is held of whom


def test_owners_of_other_ranges_hold_each_element_once(workload_with: Callable[..., Workload]) -> None:
    begun = Owners(workload_with(OPTIMIZERS["Adam"]), buckets=2, owners=3)
    train(begun, 0, 1)
    counts: dict[tuple[str, str], int] = {}
    for held in begun.hold(0):
        for piece in held.pieces:
            for extent in piece.extents:
                key = extent.parameter, piece.entry
                counts[key] = counts.get(key, 0) + extent.stop - extent.start
    sizes = {name: each.numel() for name, each in begun.given.items()}
    assert {name: counts[name, VALUES] for name in sizes} == sizes
    assert counts["p5", "exp_avg"] == sizes["p5"]
    assert ("p4", "exp_avg") in counts or not counts.get(("p4", "exp_avg"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_steps_are_computed_is_for_the_machine_that_computes_them(
    workload_with: Callable[..., Workload], saved_of: Callable[[Trainer, int], Saved], layout: str
) -> None:
    """What was held where torch's fused kernels compute goes on where they do not."""
    begun = LAYOUTS[layout](workload_with(factory(torch.optim.Adam)))
    again = LAYOUTS[layout](workload_with(factory(torch.optim.Adam, fused=False), seed=1))
    train(begun, 0, STEPS)
    go_on(again, saved_of(begun, STEPS - 1))
    train(again, STEPS, 2 * STEPS)
    options = Saved(again.hold(2 * STEPS - 1)).options("p5")
    assert options is not None
    assert options["fused"] is False


KINDS: list[Factory] = [
    torch.optim.SGD,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.Adagrad,
    torch.optim.Adafactor,
]


ALIKE: list[Factory] = [torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam, torch.optim.Adamax]  # by their keys


def held_with(optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Saved:
    """As it is held now."""
    held = Held()
    hold_scheduler_and_kinds(held, optimizer, scheduler)
    held.options = saved_with(optimizer, scheduler).plain()["options"]
    return Saved([held])


def saved_with(optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Saved:
    """As older releases have saved it."""
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    return Saved([Held(options={"weight": group}, scheduler=scheduler and scheduler.state_dict())])


@pytest.mark.parametrize("then", KINDS)
def test_an_optimizer_of_another_kind_than_the_saved_one_is_refused(then: Factory) -> None:
    """Some went on without what they keep, others failed in torch with a KeyError."""
    given = [nn.Parameter(torch.zeros(3))]
    for now in KINDS:
        refuses = pytest.raises(WorkloadError, match="give the one of then") if now is not then else nullcontext()
        with refuses:
            restore_template(now(given), None, saved_with(then(given)), [["weight"]])


@pytest.mark.parametrize("then", [*KINDS, *ALIKE])
def test_an_optimizer_that_keeps_the_same_by_name_is_of_another_kind_all_the_same(then: Factory) -> None:
    """AdamW went on as Adam, by the options that were saved."""
    given = [nn.Parameter(torch.zeros(3))]
    for now in [*KINDS, *ALIKE]:
        told = f"gives {type(now(given)).__name__}, and {type(then(given)).__name__} was saved"
        with pytest.raises(WorkloadError, match=told) if now is not then else nullcontext():
            restore_template(now(given), None, held_with(then(given)), [["weight"]])


@pytest.mark.parametrize("then", [None, "CosineAnnealingLR", "ExponentialLR"])
@pytest.mark.parametrize("now", [None, "CosineAnnealingLR", "ExponentialLR"])
def test_a_job_goes_on_with_the_kind_of_scheduler_that_it_had(then: str | None, now: str | None) -> None:
    arguments = {"CosineAnnealingLR": {"T_max": 3}, "ExponentialLR": {"gamma": 0.5}}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))])

    def scheduler(name: str | None) -> Any:
        return None if name is None else getattr(lr_scheduler, name)(optimizer, **arguments[name])

    told = f"Workload.scheduler gives {now or 'none'}, and {then or 'none'} was saved; give the one of then"
    with pytest.raises(WorkloadError, match=told) if now != then else nullcontext():
        restore_template(optimizer, scheduler(now), held_with(optimizer, scheduler(then)), [["weight"]])


def test_a_scheduler_of_another_kind_than_an_older_release_has_saved_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
    saved = saved_with(optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=3))
    told = "gives ReduceLROnPlateau, and another kind was saved, which had T_max, base_lrs, eta_min and"
    with pytest.raises(WorkloadError, match=told):
        restore_template(optimizer, lr_scheduler.ReduceLROnPlateau(optimizer), saved, [["weight"]])
    restore_template(optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=5), saved, [["weight"]])
