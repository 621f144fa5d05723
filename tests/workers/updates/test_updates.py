"""When an update stands: clipping, skipping, and updates that begin before the norm is known, or never know it."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from weft.plan.buckets import Bucket
from weft.plan.itinerary import Iteration
from weft.transport.memory.directory import Directory
from weft.workers.compute.measured import Measured
from weft.workers.devices.device import Accelerator, Device
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workers.memory.replica_memory import ReplicaMemory
from weft.workers.updates import sharded_optimizer
from weft.workers.updates.digests import Digests
from weft.workers.updates.norm import DeviceNorm, Norm
from weft.workers.updates.owner import Owner, missing_parameters
from weft.workers.updates.updates import Updates, group_of, make_shard, step_scheduler
from weft.workload.faults import StateCorrupted
from weft.workload.optimizer import make_optimizer
from weft.workload.workload import Workload, make_scheduler

HOLDER = (0, 0)
CLIP_NORM = 1.0
SMALL, LARGE = 0.01, 3.0  # of each element: well below and well above the norm
Gradients = Sequence[torch.Tensor | None]


class Stand:
    """One owner of all buckets of a model, as its worker has it. device: which has them; by default the host."""

    def __init__(
        self,
        planned: Any,
        directory: Directory,
        workload: Workload,
        *,
        speculative: bool,
        device: Device,
        digests: bool = False,
    ) -> None:
        strategy = planned.spec.strategy
        self.memory: BucketMemory = planned.memory(directory)
        self.course = planned.course
        self.parameters = list(workload.model.parameters())
        ReplicaMemory(
            self.memory,
            self.course,
            HOLDER,
            self.parameters,
            is_private=False,
            is_device=False,
            writes=True,
            device=device,
        )
        self.measured = Measured()
        self.done: list[tuple[int, int]] = []
        self.speculative = speculative
        bounded = strategy.clip_norm is not None or strategy.skip_nonfinite
        kind = functools.partial(DeviceNorm, device=device) if isinstance(device, Accelerator) else Norm
        norm = kind(self.memory, self.course, strategy.clip_norm, skips_nonfinite=strategy.skip_nonfinite)
        template = make_optimizer(workload.optimizer, self.parameters)
        assert template is not None
        groups = group_of(template, self.parameters)
        memory = self.memory
        self.updates = Updates(
            workload,
            template,
            self.parameters,
            memory.buckets,
            {
                b.index: make_shard(b, b.range_of(0), memory.parameters(b), memory.sum(b), groups)
                for b in memory.buckets
            },
            norm=norm if bounded else None,
            speculative=speculative,
            missing=missing_parameters(memory, self.course),
            done=self._note,
            device=device,
            reports=True,
            digests=Digests([name for name, _ in workload.model.named_parameters()]) if digests else None,
        )
        self._owner = Owner(0, memory, self.course, {}, self.updates, squares=bounded, device=device)
        self._device = device
        self._step = 0

    def _note(self, bucket: Bucket, iteration: Iteration) -> None:
        self.done.append((iteration.step, bucket.index))

    def step(self, gradients: Gradients) -> dict[str, float]:
        """SYNC of each bucket, then its UPDATE: at once if that is speculative, and otherwise once all are summed."""
        iteration = self.course.iteration(self._step)
        self._step += 1
        for bucket in self.memory.buckets:
            self._write(bucket, gradients, iteration)
            self._owner.sync(bucket.index, iteration)
            if self.speculative:
                self._owner.update(bucket.index, iteration, self.measured)
        if self.speculative:
            self._owner.validate(iteration, self.measured)
        else:
            for bucket in self.memory.buckets:
                self._owner.update(bucket.index, iteration, self.measured)
        if isinstance(self._device, Accelerator):
            assert not self.measured.take(), "nobody knows yet"
            for act in self._device.take_acts():
                act()
        (fragment,) = self.measured.take()
        facts: Any = fragment["facts"]
        return dict(facts)

    def _write(self, bucket: Bucket, gradients: Gradients, iteration: Iteration) -> None:
        flat = self.memory.gradient(HOLDER, bucket, iteration.step).zero_()
        absent = []
        for place in bucket.places:
            index, start = place.parameter, place.offset
            gradient = gradients[index]
            if gradient is None:
                absent.append(index)
            else:
                flat[start : start + place.num_elements] = gradient.view(-1)
        if absent:
            self.memory.mark_missing(HOLDER, bucket, absent, iteration.index)

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]


class Plain:
    """The plain loop on a copy of the model."""

    def __init__(self, workload: Workload, clip_norm: float | None) -> None:
        self.parameters = list(copy.deepcopy(workload.model).parameters())
        optimizer = make_optimizer(workload.optimizer, self.parameters)
        assert optimizer is not None
        self._optimizer = optimizer
        self._scheduler = workload.scheduler(optimizer) if workload.scheduler else None
        self._clip_norm = clip_norm

    def step(self, gradients: Gradients) -> tuple[float, float]:
        """(learning rate, norm) of the step."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        rate = self._optimizer.param_groups[0]["lr"]
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self._clip_norm or math.inf)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return rate, float(norm)


def gradients_of(parameters: Sequence[torch.Tensor], scale: float, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(parameter.shape, generator=generator) * scale for parameter in parameters]


def with_one(gradients: list[torch.Tensor], value: float) -> list[torch.Tensor]:
    gradients[0].view(-1)[2] = value
    return gradients


@pytest.fixture
def stand_of(planned: Any, workload_of: Any) -> Callable[..., Stand]:
    """Each call has a directory of its own: it is another job."""

    def build(
        *,
        speculative: bool = False,
        device: Device | None = None,
        changes: dict[str, Any] | None = None,
        digests: bool = False,
        **strategy: Any,
    ) -> Stand:
        workload = workload_of(**changes or {})
        plan = planned(workload, **{"clip_norm": CLIP_NORM, "steps": 12} | strategy)
        device = device or HostDevice()
        directory = plan.new_directory()
        return Stand(plan, directory, workload, speculative=speculative, device=device, digests=digests)

    return build


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_updates_are_the_plain_loops_and_tell_its_rate_and_norm(
    stand_of: Callable[..., Stand], workload_of: Any
) -> None:
    changes = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
    stand, plain = stand_of(changes=changes), Plain(workload_of(**changes), CLIP_NORM)
    for step, scale in enumerate((SMALL, LARGE, SMALL)):
        gradients = gradients_of(stand.parameters, scale, seed=step)
        facts = stand.step(gradients)
        rate, norm = plain.step(gradients)
        assert facts == {"lr": rate, "grad_norm": pytest.approx(norm, rel=1e-6)}
        for ours, theirs in zip(stand.values(), plain.parameters, strict=True):
            torch.testing.assert_close(ours, theirs.data, rtol=1e-5, atol=1e-7)
    assert stand.done == [(step, bucket) for step in range(3) for bucket in range(4)]


def test_nothing_bounds_the_updates_of_a_job_that_neither_clips_nor_skips(
    stand_of: Callable[..., Stand], workload_of: Any
) -> None:
    stand, plain = stand_of(clip_norm=None, staleness=1), Plain(workload_of(), None)
    for step, scale in enumerate((SMALL, LARGE)):
        gradients = gradients_of(stand.parameters, scale, seed=step)
        assert stand.step(gradients) == {"lr": 0.1}
        plain.step(gradients)
        assert same(stand.values(), plain.parameters)


@pytest.mark.parametrize("speculative", [False, True], ids=["waiting", "speculative"])
def test_a_skipped_step_changes_nothing_but_the_scheduler(stand_of: Callable[..., Stand], speculative: bool) -> None:
    changes = {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
    stand = stand_of(speculative=speculative, skip_nonfinite=True, changes=changes)
    twin = stand_of(speculative=speculative, skip_nonfinite=True, changes=changes)
    for each in (stand, twin):
        each.step(gradients_of(stand.parameters, SMALL))
    before = stand.values()
    facts = stand.step(with_one(gradients_of(stand.parameters, SMALL), math.nan))
    assert same(stand.values(), before)
    assert (facts["lr"], facts["skipped"], math.isnan(facts["grad_norm"])) == (0.05, 1.0, True)
    assert stand.done[-4:] == [(1, bucket) for bucket in range(4)], "the version is made all the same"
    assert stand.step(gradients_of(stand.parameters, SMALL)) == {"lr": 0.025, "grad_norm": pytest.approx(0.05, abs=0.1)}
    assert not same(stand.values(), before)


def test_a_speculative_update_ends_as_one_that_waits(stand_of: Callable[..., Stand]) -> None:
    """Whether it stood, was clipped, was skipped, or was left to VALIDATE since the one before did not stand."""
    waiting, speculative = (stand_of(speculative=value, skip_nonfinite=True) for value in (False, True))
    course = [SMALL, SMALL, LARGE, LARGE, SMALL, SMALL, math.inf, SMALL, LARGE, math.nan, LARGE, SMALL]
    for step, scale in enumerate(course):
        gradients = gradients_of(waiting.parameters, scale if math.isfinite(scale) else SMALL, seed=step)
        if not math.isfinite(scale):
            gradients = with_one(gradients, scale)
        one, other = waiting.step(gradients), speculative.step(gradients)
        assert str(one) == str(other)  # nan is no number that is equal to another
        assert same(waiting.values(), speculative.values()), f"step {step}"
    assert waiting.done == speculative.done


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
}


@pytest.mark.parametrize("speculative", [False, True], ids=["in UPDATE", "in VALIDATE"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "adam in tiles"])
def test_a_device_whose_host_knows_no_norm_ends_as_the_host_that_knows(
    stand_of: Callable[..., Stand], monkeypatch: pytest.MonkeyPatch, optimizer: str, speculative: bool
) -> None:
    """To the bit, even if the first step is one to skip, with which the state begins. Tiles are a stand-in's alone."""
    name = optimizer.removesuffix(" in tiles")
    if name == optimizer:
        monkeypatch.setattr(sharded_optimizer, "can_tile", lambda optimizer: False)
    settings: dict[str, Any] = {"skip_nonfinite": True, "changes": {"optimizer": OPTIMIZERS[name]}}
    host = stand_of(**settings)
    device = stand_of(device=StandIn(), speculative=speculative, **settings)
    for step, scale in enumerate([math.nan, SMALL, LARGE, SMALL, math.inf, math.nan, LARGE, SMALL]):
        gradients: list[Any] = gradients_of(host.parameters, scale if math.isfinite(scale) else SMALL, seed=step)
        if not math.isfinite(scale):
            gradients = with_one(gradients, scale)
        if step % 3 == 2:
            gradients[1] = None
        one, other = host.step(gradients), device.step(gradients)
        assert str(one) == str(other)
        assert ("skipped" in one) is not math.isfinite(scale)
        assert same(host.values(), device.values()), f"step {step}"
    assert host.done == device.done


@pytest.mark.parametrize("speculative", [False, True], ids=["waiting", "speculative"])
@pytest.mark.parametrize("bucket_mib", [1e-6, 1.0], ids=["bucket for each", "one bucket"])
@pytest.mark.parametrize("scale", [SMALL, LARGE])
def test_a_parameter_without_a_gradient_is_left_alone(
    stand_of: Callable[..., Stand], workload_of: Any, speculative: bool, bucket_mib: float, scale: float
) -> None:
    """Adam's momentum would move it on: torch passes over parameters whose grad is None."""
    stand = stand_of(speculative=speculative, bucket_mib=bucket_mib)
    plain = Plain(workload_of(), CLIP_NORM)
    for step, absent in enumerate(([], [1], [1, 2], [])):
        gradients: list[Any] = list(gradients_of(stand.parameters, scale, seed=step))
        before = stand.values()
        for index in absent:
            gradients[index] = None
        stand.step(gradients)
        plain.step(gradients)
        assert all(torch.equal(stand.values()[index], before[index]) for index in absent)
        for ours, theirs in zip(stand.values(), plain.parameters, strict=True):
            torch.testing.assert_close(ours, theirs.data, rtol=1e-5, atol=1e-7)


# --- what an update leaves, and the next one finds

COURSE = [SMALL, SMALL, LARGE, LARGE, SMALL, SMALL, math.nan, SMALL, SMALL]


@pytest.mark.parametrize("speculative", [False, True], ids=["waiting", "speculative"])
def test_digests_change_nothing_and_find_nothing_where_nothing_has_changed(
    stand_of: Callable[..., Stand], speculative: bool
) -> None:
    changes = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.1)}
    with_them, without = (
        stand_of(speculative=speculative, skip_nonfinite=True, changes=changes, digests=value)
        for value in (True, False)
    )
    for step, scale in enumerate(COURSE):
        gradients = gradients_of(without.parameters, scale if math.isfinite(scale) else SMALL, seed=step)
        if not math.isfinite(scale):
            gradients = with_one(gradients, scale)
        assert str(with_them.step(gradients)) == str(without.step(gradients))
        assert same(with_them.values(), without.values())
        with_them.updates.check(with_them.course.iteration(step))


@pytest.mark.parametrize("speculative", [False, True], ids=["waiting", "speculative"])
@pytest.mark.parametrize("step", range(1, len(COURSE)))
def test_a_bit_that_has_changed_is_found_before_the_next_update(
    stand_of: Callable[..., Stand], speculative: bool, step: int
) -> None:
    """Also where the update before was clipped, skipped or left to VALIDATE."""
    stand = stand_of(speculative=speculative, skip_nonfinite=True, digests=True)
    for before, scale in enumerate(COURSE[:step]):
        stand.step(with_one(gradients_of(stand.parameters, 1.0, seed=before), scale))
    parameter = stand.parameters[2]
    parameter.data.view(torch.int32).view(-1)[1] ^= 1 << 9
    values = stand.values()
    with pytest.raises(StateCorrupted, match=r"bits of the values of \S+ have changed since their last update"):
        stand.updates.check(stand.course.iteration(step - 1))
    with pytest.raises(StateCorrupted):
        stand.step(gradients_of(stand.parameters, SMALL, seed=step))
    assert torch.equal(stand.values()[2], values[2]), "it was not used"


def test_a_step_of_a_scheduler_has_no_module_forget_what_it_has_warned_of() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = make_scheduler(lambda each: LambdaLR(each, lambda step: 1 / (step + 1)), optimizer)
    assert scheduler is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("theirs", stacklevel=1)
            step_scheduler(scheduler)
    assert [str(each.message) for each in told] == ["theirs"]
    assert optimizer.param_groups[0]["lr"] == 0.125
