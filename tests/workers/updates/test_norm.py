"""The norm of the whole gradient: what it says about an update, on the host and on a device that nobody waits for."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.plan.course import Course
from weft.plan.tables import Adjustment
from weft.transport.memory.directory import Directory
from weft.workers.devices.stand_in import StandIn
from weft.workers.memory.bucket_memory import BucketMemory
from weft.workers.updates.norm import CLIP_EPSILON, Bound, DeviceNorm, Norm

CLIP_NORM = 1.0
ROUNDED = (0.1785, 0.76, 0.7927)  # torch's own root of each is the number beside the nearest, where MKL computes it
SQUARES = (0.0, 1e-30, 0.49, 0.998, 1.0, 1.7, 3e11, 1e300, *ROUNDED, math.inf, math.nan)
_ATTEMPT = runpy.run_path(str(Path(__file__).parents[1] / "lanes" / "test_attempt.py"))
planned_workload, two_way_source = _ATTEMPT["planned_workload"], _ATTEMPT["two_way_source"]


class Stand:
    """The sums of squares of a job, to be written by hand, and both kinds of norm."""

    def __init__(self, planned: Any, directory: Directory, clip_norm: float | None, *, skips: bool) -> None:
        self.memory: BucketMemory = planned.memory(directory)
        self.course: Course = planned.course
        self.on_host = Norm(self.memory, self.course, clip_norm, skips_nonfinite=skips)
        self.on_device = DeviceNorm(self.memory, self.course, clip_norm, skips_nonfinite=skips, device=StandIn())

    def write(self, squares: float, step: int = 0) -> None:
        """In two parts."""
        self.memory.norms(step).zero_()
        self.memory.norms(step)[0, 0] = squares / 2
        self.memory.norms(step)[1, 0] = squares / 2

    def host(self, squares: float) -> Bound:
        self.write(squares)
        return self.on_host.bound(self.course.iteration(0))

    def device(self, squares: float, step: int = 0) -> Bound:
        self.write(squares, step)
        return self.on_device.bound(self.course.iteration(step))


@pytest.fixture
def stand_of(planned: Any, directory: Directory, workload_of: Any) -> Callable[..., Stand]:
    def build(clip_norm: float | None = CLIP_NORM, *, skips: bool = False, **strategy: Any) -> Stand:
        plan = planned(workload_of(), **{"clip_norm": 1.0, "steps": len(SQUARES)} | strategy)
        return Stand(plan, plan.new_directory(), clip_norm, skips=skips)

    return build


def test_a_gradient_is_clipped_as_torch_does_it(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of()
    for norm in (0.0, 0.5, 0.999, 1.0, 1.1, 20.0):
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameter.grad = torch.full((1,), norm, dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([parameter], CLIP_NORM)
        bound = stand.host(norm**2)
        assert bound.norm == pytest.approx(norm)
        assert norm * bound.scale == pytest.approx(float(parameter.grad), rel=1e-12)
    assert CLIP_EPSILON == 1e-6


def test_a_norm_that_is_no_number_is_told_and_stays_one(stand_of: Callable[..., Stand]) -> None:
    """As in torch: all parameters are nan from then on, which is what the user must see."""
    told = stand_of().host(math.nan)
    assert isinstance(told.norm, float)
    assert isinstance(told.scale, float)
    assert math.isnan(told.norm)
    assert math.isnan(told.scale)
    assert not told.skips
    assert stand_of().host(math.inf) == Bound(math.inf, 0.0), "finite elements are scaled to nothing"


@pytest.mark.parametrize("squares", [math.nan, math.inf])
@pytest.mark.parametrize("clip_norm", [None, CLIP_NORM])
def test_where_that_is_asked_for_an_update_without_a_finite_norm_is_skipped(
    stand_of: Callable[..., Stand], squares: float, clip_norm: float | None
) -> None:
    stand = stand_of(clip_norm, skips=True)
    assert stand.host(squares).skips
    bound = stand.host(4.0)
    assert (bound.scale, bound.skips) == (pytest.approx(1.0 if clip_norm is None else 0.5), False)


@pytest.mark.parametrize("clip_norm", [None, CLIP_NORM, 0.3])
@pytest.mark.parametrize("skips", [False, True])
def test_a_device_comes_to_the_same_bits_as_its_host(
    stand_of: Callable[..., Stand], clip_norm: float | None, skips: bool
) -> None:
    stand = stand_of(clip_norm, skips=skips)
    for step, squares in enumerate(SQUARES):
        host, device = stand.host(squares), stand.device(squares, step)
        assert isinstance(device.norm, torch.Tensor)
        assert str(float(device.norm)) == str(host.norm)  # nan is no number that is equal to another
        assert str(float(device.scale)) == str(host.scale)
        assert device.skips is False, "the host does not know"
        if skips:
            assert device.found_inf is not None
            assert (device.found_inf.dtype, float(device.found_inf)) == (torch.float32, float(host.skips))
        else:
            assert device.found_inf is None


def test_a_device_finds_one_bound_for_an_iteration(stand_of: Callable[..., Stand]) -> None:
    stand = stand_of()
    bound = stand.device(0.25)
    assert stand.on_device.bound(stand.course.iteration(0)) is bound
    assert float(stand.device(9.0, step=1).norm or 0.0) == 3.0


def test_sums_of_a_way_that_a_bucket_does_not_go_are_left_out(planned: Any, tmp_path: Path) -> None:
    """They are of an earlier step, in which it did."""
    (tmp_path / "job.py").write_text(two_way_source("adam"))
    strategy = {"replicas": [{"device": "gpu"}], "update": "balanced", "clip_norm": 1.0}
    plan = planned(planned_workload(tmp_path), steps=5, directory=str(tmp_path), **strategy)
    stand = Stand(plan, plan.new_directory(), CLIP_NORM, skips=False)
    either = [bucket for bucket in stand.memory.buckets if bucket.device_ranges]
    assert len(either) > 1
    for index, local in enumerate((set(), {either[0].index}, {bucket.index for bucket in either})):
        stand.course.adjust(index, Adjustment(local=local))
        stand.memory.norms(index).fill_(1.0)
        iteration, squares = stand.course.iteration(index), 0
        for bucket in stand.memory.buckets:
            squares += stand.memory.num_owners - (len(bucket.ranges) if bucket.index in local else bucket in either)
        for norm in (stand.on_host, stand.on_device):
            told = norm.bound(iteration).norm
            assert told is not None
            assert float(told) == pytest.approx(math.sqrt(squares))
        assert stand.memory.norms(index).eq(1.0).all(), "others read them too"
