"""What stages hand to one another, over others too: cut so, a model ends with the bits of the whole one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from weft.plan.course import Course
from weft.plan.division import Part
from weft.plan.inspection import Inspection, UnitFacts, ValueFacts
from weft.plan.itinerary import Iteration
from weft.plan.plan import Plan, Role, SlotValue
from weft.transport.memory.directory import Directory
from weft.workers.compute.backward.own_gradients import OwnGradients
from weft.workers.compute.measured import Measured
from weft.workers.compute.stage import Stage, Tensors
from weft.workers.compute.stage_parcels import StageParcels
from weft.workers.compute.stage_tasks import StageTasks
from weft.workers.compute.weights import Weights
from weft.workers.devices.device import Device
from weft.workers.devices.host import HostDevice
from weft.workers.devices.stand_in import StandIn
from weft.workers.memory.parcels import ParcelRing
from weft.workload.workload import WorkloadError

MICROBATCHES, SIZE, WIDTH = 3, 4, 37
Batch = tuple[torch.Tensor, torch.Tensor, int]  # inputs, targets, the microbatch's number
Run = Callable[[Tensors, Batch], Sequence[torch.Tensor | None]]


class Skipping(nn.Module):
    """Three stages. The last one reads what the first has made beside what the second makes of it, and a mask; for
    some microbatches it leaves one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 6 for _ in range(3)])

    def first(self, received: Tensors, batch: Batch) -> list[torch.Tensor | None]:
        h = torch.tanh(batch[0] @ self.weights[0])
        return [h, batch[0] > 0]

    def second(self, received: Tensors, batch: Batch) -> list[torch.Tensor | None]:
        (h,) = received
        assert h is not None
        return [torch.sin(h @ self.weights[1]) * h + h.exp()]

    def last(self, received: Tensors, batch: Batch) -> list[torch.Tensor | None]:
        h, mask, g = received
        assert h is not None
        assert mask is not None
        assert g is not None
        y = g @ self.weights[2] if batch[2] != 1 else batch[0]
        y = y + torch.where(mask, h, h * h) if batch[2] != 2 else y
        return [(y - batch[1]).square().mean()]

    def forward(self, batch: Batch) -> torch.Tensor:
        h, mask = self.first([], batch)
        (g,) = self.second([h], batch)
        (loss,) = self.last([h, mask, g], batch)
        assert loss is not None
        return loss


class Piece(Stage):
    """A stage that is a function."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._saved: dict[int, tuple[Tensors, Tensors]] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._saved)

    def span(self) -> str:
        return "between here and there"

    def maker(self) -> str:
        return "its maker"

    def train(self, training: bool) -> None: ...

    def parameters(self) -> list[nn.Parameter]:
        return []

    def forward(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Tensors:
        leaves = [None if x is None else x.detach().requires_grad_(x.is_floating_point()) for x in received]
        self._saved[microbatch] = leaves, self._run(leaves, batch)
        return self._saved[microbatch][1]

    def lose(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Mapping[str, torch.Tensor]:
        (loss,) = self.forward(microbatch, step, received, batch)
        assert loss is not None
        return {"loss": loss, "three": torch.tensor(3.0)}

    def evaluate(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Tensors:
        with torch.no_grad():
            return self._run(received, batch)

    def measure(self, microbatch: int, step: int, received: Tensors, batch: Any) -> Mapping[str, torch.Tensor]:
        (loss,) = self.evaluate(microbatch, step, received, batch)
        assert loss is not None
        return {"loss": loss}

    def measures(self) -> list[str]:
        return ["loss"]

    def check_sent(self, sent: Tensors, places: Sequence[SlotValue], size: int) -> None: ...

    def take(self, microbatch: int) -> tuple[Tensors, Tensors]:
        return self._saved.pop(microbatch)

    def drop(self, microbatch: int) -> None:
        self._saved.pop(microbatch, None)


def data_of(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SIZE, WIDTH, generator=generator), torch.randn(SIZE, WIDTH, generator=generator), number


@pytest.fixture
def skipping_plan(
    plan_of: Callable[..., Plan],
    inspection_of: Callable[..., Inspection],
    unit_of: Callable[..., UnitFacts],
    value_of: Callable[..., ValueFacts],
) -> Plan:
    shapes = {"shapes": {SIZE: (SIZE, WIDTH)}}
    mask = value_of(0, 2, name="mask", dtype="bool", itemsize=1, differentiable=False, **shapes)
    values = (value_of(0, 1, 2, **shapes), mask, value_of(1, 2, **shapes))
    inspection = inspection_of([unit_of(number) for number in range(3)], values=values, num_train=24, num_validation=12)
    settings = {"schedule": "gpipe", "microbatches": MICROBATCHES, "batch_size": MICROBATCHES * SIZE}
    return plan_of(inspection, stages=3, **settings)


def tasks_of(
    pieces: Sequence[Run], plan: Plan, directory: Directory, device: Device, own: OwnGradients | None = None
) -> list[StageTasks]:
    """own: of the first stage."""
    course = Course(plan)
    rings = [(ring, ParcelRing(directory, ring, MICROBATCHES, device)) for ring in plan.rings if ring.crosses]
    return [
        StageTasks(
            Piece(run),
            replica=0,
            is_last=number == 2,
            course=course,
            weights=Weights(directory, weighs=False, num_microbatches=MICROBATCHES, depth=1),
            parcels=StageParcels(rings, number),
            read_batch=lambda iteration, microbatch, part: data_of(microbatch),
            gradients=own if number == 0 else None,
            before_evaluation=lambda: None,
            device=device,
            skips_nonfinite=False,
            samples_of=lambda iteration, part: [],
        )
        for number, run in enumerate(pieces)
    ]


def test_a_stage_knows_by_name_what_it_receives_and_sends(skipping_plan: Plan, directory: Directory) -> None:
    rings = [(ring, ParcelRing(directory, ring, 1, HostDevice())) for ring in skipping_plan.rings if ring.crosses]
    parcels = [StageParcels(rings, stage) for stage in range(3)]
    assert [each.received for each in parcels] == [(), ("0",), ("0", "mask", "1")]
    assert [[place.name for place in each.sent] for each in parcels] == [["0", "mask"], ["1"], []]
    assert [each.returned for each in parcels] == [(), (0,), (0, 2)]


@pytest.mark.parametrize("device", [HostDevice, StandIn])
def test_values_that_jump_stages_and_their_gradients_are_those_of_the_whole_model(
    skipping_plan: Plan, directory: Directory, device: Callable[[], Device]
) -> None:
    whole, cut = Skipping(), Skipping()
    stages = tasks_of([cut.first, cut.second, cut.last], skipping_plan, directory, device())
    measured = [Measured() for _ in stages]
    for index in range(2):
        iteration = Course(skipping_plan).iteration(index)
        for microbatch in range(MICROBATCHES):
            (whole(data_of(microbatch)) / MICROBATCHES).backward()
            for stage, numbers in zip(stages, measured, strict=True):
                stage.forward(iteration, microbatch, numbers)
        for microbatch in range(MICROBATCHES):
            for stage in reversed(stages):
                stage.backward(iteration, microbatch)
    for one, other in zip(whole.weights, cut.weights, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def _viewed(rows: torch.Tensor, microbatch: int) -> torch.Tensor:
    return rows.unsqueeze(0).view(SIZE, WIDTH)


def _looked_up(rows: torch.Tensor, microbatch: int) -> torch.Tensor:
    return nn.functional.embedding(torch.arange(SIZE), rows, sparse=True)


def _viewed_late(rows: torch.Tensor, microbatch: int) -> torch.Tensor:
    return _viewed(rows, microbatch) if microbatch else torch.ones_like(rows)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("made", [_viewed, _looked_up, _viewed_late])
def test_a_gradient_that_autograd_leaves_in_a_slot_is_kept_before_others_write_there(
    skipping_plan: Plan, directory: Directory, made: Callable[[torch.Tensor, int], torch.Tensor], is_split: bool
) -> None:
    """A module that returned its parameter in another shape, and an embedding with sparse gradients, had the numbers of
    other microbatches in them; the job came to other weights, and said nothing."""
    whole, cut = Skipping(), Skipping()
    rows = [nn.Parameter(torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(1))) for _ in range(2)]
    runs: list[Run] = [
        lambda received, batch, own=own: [made(own, batch[2]), batch[0] > 0]  # type: ignore[misc]
        for own in rows
    ]
    own = OwnGradients(rows[1:])
    stages = tasks_of([runs[1], cut.second, cut.last], skipping_plan, directory, HostDevice(), own)
    others = [
        (ring, ParcelRing(directory, ring, MICROBATCHES, HostDevice()))
        for ring in skipping_plan.rings
        if ring.role is Role.GRADIENT and 0 in ring.stages
    ]
    iteration, measured = Course(skipping_plan).iteration(0), Measured()
    for microbatch in range(MICROBATCHES):
        batch = data_of(microbatch)
        h, mask = runs[0]([], batch)
        (loss,) = whole.last([h, mask, *whole.second([h], batch)], batch)
        assert loss is not None
        (loss / MICROBATCHES).backward()
        for stage in stages:
            stage.forward(iteration, microbatch, measured)
    for microbatch in range(MICROBATCHES):
        for stage in reversed(stages):
            if is_split:
                stage.backward_input(iteration, microbatch)
                stage.backward_weight(iteration, microbatch)
            else:
                stage.backward(iteration, microbatch)
        for ring, slots in others:
            slots.write(0, microbatch, [torch.full((SIZE, WIDTH), torch.nan) for _ in ring.values])
    expected, found = (each.grad for each in rows)
    assert expected is not None
    assert found is not None
    assert torch.equal(expected.to_dense(), found.to_dense())


def test_what_the_last_stage_reports_beside_the_loss_is_averaged_as_it_is(
    skipping_plan: Plan, directory: Directory
) -> None:
    cut, measured = Skipping(), Measured()
    iteration = Course(skipping_plan).iteration(0)
    for stage in (stages := tasks_of([cut.first, cut.second, cut.last], skipping_plan, directory, HostDevice())):
        for microbatch in range(MICROBATCHES):
            stage.forward(iteration, microbatch, measured)
    del stages
    assert measured.of(0).means["three"] == pytest.approx(3.0)
    assert measured.of(0).means["loss"] > 0


def test_a_gradient_that_nobody_made_is_none_all_the_way_down(skipping_plan: Plan, directory: Directory) -> None:
    """So a parameter that had none in the whole model has none."""
    cut = Skipping()

    def alone(received: Tensors, batch: Batch) -> list[torch.Tensor | None]:
        return [(cut.weights[2] - batch[1].mean()).square().mean()]

    stages = tasks_of([cut.first, cut.second, alone], skipping_plan, directory, HostDevice())
    iteration, measured = Course(skipping_plan).iteration(0), Measured()
    for stage in stages:
        stage.forward(iteration, 0, measured)
    for stage in reversed(stages):
        stage.backward(iteration, 0)
    assert [weight.grad is None for weight in cut.weights] == [True, True, False]


def test_a_value_of_too_many_dimensions_is_refused_with_its_maker_and_a_remedy(
    skipping_plan: Plan, directory: Directory
) -> None:
    def large(received: Tensors, batch: Batch) -> list[torch.Tensor | None]:
        return [torch.zeros(2, WIDTH), torch.zeros((1,) * 65, dtype=torch.bool)]

    stages = tasks_of(
        [large, lambda received, batch: [], lambda received, batch: []], skipping_plan, directory, StandIn()
    )
    text = (
        r"its maker passes on, for a microbatch of 4 samples, \((1, )+1\) bool, which has 65 dimensions, of 64 at "
        r"most between two stages; reshape it, or leave this place out of strategy\.split"
    )
    with pytest.raises(WorkloadError, match=text):
        stages[0].forward(Course(skipping_plan).iteration(0), 0, Measured())


def test_in_validation_values_come_over_and_no_gradients_are_asked_for(
    skipping_plan: Plan, directory: Directory
) -> None:
    whole, cut, measured = Skipping(), Skipping(), Measured()
    stages = tasks_of([cut.first, cut.second, cut.last], skipping_plan, directory, HostDevice())
    iteration = Iteration(index=0, training=False, epoch=0, step=0, start=0, size=MICROBATCHES * SIZE, learns=False)
    assert Course(skipping_plan).part(iteration, 0, 0) == Part(0, 0, SIZE)
    for stage in stages:
        for microbatch in range(MICROBATCHES):
            stage.forward(iteration, microbatch, measured)
    with torch.no_grad():
        expected = sum(float(whole(data_of(microbatch))) for microbatch in range(MICROBATCHES)) / MICROBATCHES
    assert measured.of(0).means["loss"] == pytest.approx(expected)
    assert all(weight.grad is None for weight in cut.weights)
