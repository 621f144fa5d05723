"""Stages of units are transparent: cut anywhere, recomputed or not, they end with the bits of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from weft.plan.plan import SlotValue
from weft.transport.memory.arena import Arena, Layout
from weft.workers.compute.backward.hand_back import HandBack
from weft.workers.compute.forward_buffers import LOOKS, ForwardBuffers
from weft.workers.compute.model_part import UnitPart
from weft.workers.compute.pairs import DataPair
from weft.workers.compute.unit_stage import UnitStage
from weft.workers.compute.unit_state import keep_state, move_state
from weft.workers.devices.host import HostDevice
from weft.workload.randomness import seed_unit
from weft.workload.units import Unit, named_state
from weft.workload.workload import WorkloadError

SEED = 11
FUNCTIONS = {"loss": nn.functional.mse_loss}
MICROBATCHES = 3
STEPS = 2


def dense() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Dropout(0.5),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Dropout(0.3),
        nn.BatchNorm1d(8, momentum=None),
        nn.Linear(8, 4),
    )


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(8, 4)
    )


def repeated() -> nn.Sequential:
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh(), norm, nn.Linear(6, 4))


def embedded() -> nn.Sequential:
    class Indices(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 10).abs().long() % 7

    return nn.Sequential(Indices(), nn.Embedding(7, 3), nn.Flatten(), nn.Dropout(0.2), nn.Linear(18, 4))


class Statistic(nn.Module):
    """Scales by a mean of what it has seen, which it keeps in a way that tells nobody of the change."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.keep = keep
        self.register_buffer("mean", torch.zeros(6), persistent=keep != "out of sight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = 0.7 * self.mean + 0.3 * x.detach().abs().mean(0)
        if self.keep == "in place":
            self.mean.mul_(0).add_(now)
        elif self.keep == "out of sight":
            self.mean.data.copy_(now)
        else:
            self.mean = now
        return x * self.mean


def normalised() -> nn.Sequential:
    """Forward reads what it changes: the vectors of spectral norms, a statistic that is the scale."""
    old = nn.utils.spectral_norm(nn.Linear(6, 6))
    new = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))
    return nn.Sequential(Statistic("another tensor"), old, nn.Tanh(), Statistic("another tensor"), new)


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Statistic("in place"), nn.Linear(6, 4))


def out_of_sight() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Statistic("out of sight"), nn.Linear(6, 4))


def spectral() -> nn.Sequential:
    """Complex numbers go from unit to unit, and one of them has complex parameters."""

    class Fourier(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x)

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).conj()

    class Back(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(torch.fft.ifft(x)).flatten(1)

    return nn.Sequential(nn.Linear(6, 6), Fourier(), Filter(), Back(), nn.Linear(12, 4))


MODELS = [dense, convolutional, repeated, embedded, normalised, spectral]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def batch(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 4, generator=generator)


def build(make: Callable[[], nn.Sequential]) -> nn.Sequential:
    torch.manual_seed(3)
    return make()


def train_whole(model: nn.Sequential) -> None:
    """The plain loop, with the random numbers of each unit keyed as the stages key them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            x, target = batch(step, microbatch)
            for index, module in enumerate(model):
                seed_unit(SEED, step, microbatch, index)
                x = module(x)
            (nn.functional.mse_loss(x, target) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def stages_of(model: nn.Sequential, cuts: list[int], *, recompute: bool) -> list[UnitStage]:
    bounds = [0, *cuts, len(model)]
    units = [Unit(index, f"{index}.", module) for index, module in enumerate(model)]
    return [
        UnitStage(units[a:b], seed=SEED, recompute=recompute, device=HostDevice(), functions=FUNCTIONS)
        for a, b in pairwise(bounds)
    ]


NOTHING = DataPair(None, None)  # the data of a stage between the first and the last


def forward(stage: UnitStage, microbatch: int, x: torch.Tensor) -> torch.Tensor:
    """Of a first stage."""
    (y,) = stage.forward(microbatch, 0, [], DataPair(x, None))
    assert y is not None
    return y


def again(stage: UnitStage, microbatch: int) -> torch.Tensor:
    """What the forward has made, with its graph."""
    (y,) = stage.take(microbatch)[1]
    assert y is not None
    return y


def train_stages(stages: list[UnitStage]) -> None:
    """GPipe by hand: all forwards, through slots that are copied like a worker's, then all backwards."""
    parameters = [UnitPart(stage.units).parameters() for stage in stages]
    optimizers = [torch.optim.SGD(own, lr=0.1, momentum=0.9) if own else None for own in parameters]
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            x, target = batch(step, microbatch)
            received: list[torch.Tensor] = []
            for stage in stages[:-1]:
                sent = stage.forward(microbatch, step, received, DataPair(x, None))
                received = [y.detach().clone() for y in sent if y is not None]
            stages[-1].lose(microbatch, step, received, DataPair(x, target))
        for microbatch in range(MICROBATCHES):
            gradient = None
            for stage in reversed(stages):
                leaves, (y,) = stage.take(microbatch)
                assert y is not None
                if stage is stages[-1]:
                    (y / MICROBATCHES).backward()
                elif y.requires_grad and gradient is not None:
                    y.backward(gradient)
                gradient = leaves[0].grad if leaves and leaves[0] is not None else None
        for optimizer in optimizers:
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("make", MODELS)
def test_stages_end_with_the_bits_of_the_whole_model(make: Callable[[], nn.Sequential], recompute: bool) -> None:
    whole = build(make)
    train_whole(whole)
    for cuts in ([], *([cut] for cut in range(1, len(whole))), [1, 2], [2, len(whole) - 1]):
        if make is repeated and any(1 < cut <= 3 for cut in cuts):
            continue  # the planner cuts nothing that is shared
        model = build(make)
        train_stages(stages_of(model, cuts, recompute=recompute))
        assert_same_bits(model, whole)


def test_training_is_not_the_same_for_another_seed() -> None:
    """What keeps the test above honest: dropout does draw."""
    models = [build(dense), build(dense)]
    for model, seed in zip(models, (SEED, SEED + 1), strict=True):
        train_stages(
            [
                UnitStage(
                    [Unit(i, f"{i}.", m) for i, m in enumerate(model)],
                    seed=seed,
                    recompute=False,
                    device=HostDevice(),
                    functions=FUNCTIONS,
                )
            ]
        )
    assert not torch.equal(models[0][0].weight, models[1][0].weight)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_running_statistics_count_each_microbatch_once(recompute: bool) -> None:
    model = build(dense)
    train_stages(stages_of(model, [3], recompute=recompute))
    assert model[2].num_batches_tracked == model[6].num_batches_tracked == STEPS * MICROBATCHES


@pytest.mark.parametrize("make", [in_place, out_of_sight])
def test_recomputed_a_backward_finds_the_buffers_of_its_own_forward(make: Callable[[], nn.Sequential]) -> None:
    whole, model = build(make), build(make)
    train_whole(whole)
    train_stages(stages_of(model, [2], recompute=True))
    assert_same_bits(model, whole)


def test_a_buffer_that_a_backward_needs_and_a_later_forward_changes_in_place_is_an_error_without_recompute() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train_stages(stages_of(build(in_place), [2], recompute=False))


def test_recompute_keeps_of_each_microbatch_only_the_buffers_that_forward_changes() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.table

    changing = nn.BatchNorm1d(6)
    buffers = ForwardBuffers([nn.Sequential(Table(), changing)], can_compare=True)
    for _ in range(2):
        buffers.begin()
        changing(torch.randn(5, 6))
        kept = buffers.end().buffers
        assert [name for (_, name), _ in kept] == ["running_mean", "running_var", "num_batches_tracked"]


def test_views_of_one_memory_are_that_when_a_forward_runs_again() -> None:
    """Each was a copy by itself then, and what was written to one was not seen in the other."""
    module, memory = nn.Module(), torch.arange(4.0)
    module.register_buffer("first", memory[:3])
    module.register_buffer("second", memory[1:])
    buffers = ForwardBuffers([module], can_compare=True)
    buffers.begin()
    module.first.add_(10.0)
    began = buffers.end()
    with buffers.as_they_were(began):
        assert (module.first.tolist(), module.second.tolist()) == ([0.0, 1.0, 2.0], [1.0, 2.0, 3.0])
        module.first.add_(20.0)
        assert module.second.tolist() == [21.0, 22.0, 3.0]
    assert memory.tolist() == [10.0, 11.0, 12.0, 3.0]


def test_a_number_that_a_forward_counts_is_what_it_was_when_that_runs_again() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.scale, self.name = 0, 1.0, "counted"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.scale /= 2
            return x * self.scale

    counted = Counted()
    buffers, x = ForwardBuffers([nn.Sequential(counted, nn.Tanh())], can_compare=True), torch.ones(1)
    buffers.begin()
    assert buffers.forgetting(lambda: counted(x)) == 0.5
    began = buffers.end()
    counted(x)  # of another microbatch
    with buffers.as_they_were(began):
        assert counted(x) == 0.5
    assert (counted.calls, counted.scale) == (2, 0.25)
    buffers.begin()
    assert buffers.end().numbers == []


@pytest.mark.parametrize("can_compare", [False, True], ids=["a device", "the host"])
def test_a_buffer_that_forward_changes_out_of_autograds_sight_is_found(can_compare: bool) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("fixed", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.data.lerp_(x.mean(0), 0.5)
            return x - self.mean

    mean = Mean()
    buffers = ForwardBuffers([mean], can_compare=can_compare)
    for _ in range(LOOKS + 2):
        before = mean.mean.clone()
        buffers.begin()
        mean(torch.randn(5, 6))
        ((_, name), kept), *others = buffers.end().buffers
        assert name == "mean"
        assert kept is not None
        assert torch.equal(kept, before)
        assert not others


def test_on_a_device_batch_norms_are_known_to_change_whenever_they_begin() -> None:
    """Behind the first few forwards nothing is compared, and nothing else tells of batch norm's running mean."""
    norm, spectral = nn.BatchNorm1d(6), nn.utils.spectral_norm(nn.Linear(6, 6))
    buffers = ForwardBuffers([norm, spectral, nn.LayerNorm(6)], can_compare=False)
    for _ in range(LOOKS):
        buffers.begin()
        spectral.eval()(norm.eval()(torch.randn(5, 6)))
        buffers.end()
    norm.train(), spectral.train()
    for _ in range(3):
        buffers.begin()
        spectral(norm(torch.randn(5, 6)))
        names = [name for (_, name), _ in buffers.end().buffers]
        assert names == ["running_mean", "running_var", "num_batches_tracked", "weight_u", "weight_v"]


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
def test_a_scripted_module_counts_each_microbatch_once_under_recompute() -> None:
    """Its buffers are no dict, only like one."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x * self.calls

    module = torch.jit.script(Counting())
    stage = UnitStage([Unit(0, "0.", module)], seed=SEED, recompute=True, device=HostDevice(), functions=FUNCTIONS)
    x, _ = batch(0, 0)
    first = [forward(stage, microbatch, x) for microbatch in range(2)]
    assert all(torch.equal(again(stage, microbatch), first[microbatch]) for microbatch in range(2))
    assert module.calls == 2


def test_a_loss_that_is_a_module_counts_each_microbatch_once_under_recompute() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (y - target).sum() * self.calls

    loss, model = Counting(), build(dense)
    units = [Unit(index, f"{index}.", module) for index, module in enumerate(model)]
    stage = UnitStage(units, seed=SEED, recompute=True, device=HostDevice(), functions={"loss": loss})
    first = [stage.lose(microbatch, 0, [], DataPair(*batch(0, microbatch)))["loss"] for microbatch in range(2)]
    assert first == [again(stage, microbatch) for microbatch in range(2)]
    assert loss.calls == 2


def test_recompute_keeps_no_graph_between_forward_and_backward() -> None:
    model = build(dense)
    kept, recomputed = (stages_of(copy.deepcopy(model), [], recompute=value)[0] for value in (False, True))
    x, _ = batch(0, 0)
    assert forward(kept, 0, x).requires_grad
    assert not forward(recomputed, 0, x).requires_grad
    assert again(recomputed, 0).requires_grad


def test_a_microbatch_is_taken_once() -> None:
    stage = stages_of(build(dense), [], recompute=False)[0]
    forward(stage, 1, batch(0, 1)[0])
    stage.take(1)
    with pytest.raises(KeyError):
        stage.take(1)


def test_evaluation_keeps_nothing_and_changes_nothing() -> None:
    model = build(dense)
    before = copy.deepcopy(model)
    stage = stages_of(model, [], recompute=False)[0]
    stage.train(False)
    x, _ = batch(0, 0)
    (y,) = stage.evaluate(0, 0, [], DataPair(x, None))
    assert y is not None
    assert torch.equal(y, before.eval()(x))
    assert not y.requires_grad
    assert_same_bits(model, before)
    with pytest.raises(KeyError):
        stage.take(0)


def test_the_input_is_read_in_place_and_left_as_it_was() -> None:
    model = build(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)))
    stage = stages_of(model, [1], recompute=False)[1]
    slot, _ = batch(0, 0)
    before = slot.clone()
    stage.forward(0, 0, [slot], NOTHING)
    (leaf,) = stage.take(0)[0]
    assert leaf is not None
    assert leaf.data_ptr() == slot.data_ptr()
    assert torch.equal(slot, before)
    assert not slot.requires_grad


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_stage_that_begins_with_a_unit_that_works_in_place_leaves_its_slot_alone(recompute: bool) -> None:
    """autograd refuses to change a leaf, and the slot is needed again: such a stage works on a copy."""
    units = [Unit(1, "1.", nn.ReLU(inplace=True)), Unit(2, "2.", nn.Linear(6, 4))]
    stage = UnitStage(
        units, seed=SEED, recompute=recompute, device=HostDevice(), functions=FUNCTIONS, copies_input=True
    )
    slot, _ = batch(0, 0)
    before = slot.clone()
    stage.forward(0, 0, [slot], NOTHING)
    (leaf,), (y,) = stage.take(0)
    assert leaf is not None
    assert y is not None
    y.sum().backward()
    assert torch.equal(slot, before)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad != 0, before > 0)


def test_only_stages_behind_the_first_ask_for_the_gradient_of_their_input() -> None:
    """The first stage's input is data: its gradient would be a matrix product that the plain loop does not compute."""
    first, second = stages_of(build(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))), [1], recompute=False)
    x = torch.randn(5, 6)
    forward(first, 0, x)
    assert first.take(0)[0] == []
    second.forward(0, 0, [x], NOTHING)
    (leaf,) = second.take(0)[0]
    assert leaf is not None
    assert leaf.requires_grad
    assert not x.requires_grad


def test_parameters_that_are_shared_are_told_once() -> None:
    stage = stages_of(build(repeated), [], recompute=False)[0]
    assert len(UnitPart(stage.units).parameters()) == 6


def test_a_parameter_whose_data_are_assigned_comes_home() -> None:
    """What is saved, and what others read, is there and not where the assignment has left it."""
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in (("a", 3), ("b", 5), ("none", 0))}
    layout = Layout.of(list(parameters.items()))
    arena = Arena(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)
    homes = move_state(list(parameters.items()), arena)
    parameters["a"].data = parameters["a"].data + 1.0
    parameters["b"].data.add_(2.0)
    homes.bring_back()
    assert [arena[name].tolist() for name in "ab"] == [[1.0] * 3, [2.0] * 5]
    parameters["a"].data.add_(1.0)
    assert arena["a"].tolist() == [2.0] * 3, "it is there again"
    parameters["b"].data = torch.zeros(4)
    with pytest.raises(WorkloadError, match=r"the parameter 'b' of Workload.model has become \(4,\).* give it in"):
        homes.bring_back()


@pytest.mark.parametrize("make", MODELS)
def test_state_that_was_moved_is_the_state_that_is_trained(make: Callable[[], nn.Sequential]) -> None:
    """A peer that maps the arena reads the trained weights under the names of the user's own state dict."""
    whole = build(make)
    train_whole(whole)
    model = build(make)
    units = [Unit(index, f"{index}.", module) for index, module in enumerate(model)]
    layout = Layout.of(named_state(units))
    arena = Arena(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)
    move_state([(name, each) for name, each in named_state(units) if isinstance(each, nn.Parameter)], arena)
    publish = keep_state(UnitPart(units), list(arena.items()), arena, HostDevice())
    train_stages(
        [
            UnitStage(units[:2], seed=SEED, recompute=True, device=HostDevice(), functions=FUNCTIONS),
            UnitStage(units[2:], seed=SEED, recompute=True, device=HostDevice(), functions=FUNCTIONS),
        ]
        if make is not repeated
        else [UnitStage(units, seed=SEED, recompute=True, device=HostDevice(), functions=FUNCTIONS)]
    )
    publish()
    expected = whole.state_dict()
    assert arena.items().keys() == expected.keys()
    for name, tensor in arena.items().items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype == expected[name].dtype


@pytest.mark.parametrize("at_once", [True, False])
def test_the_gradient_that_goes_back_has_the_strides_that_autograd_gave_it(at_once: bool) -> None:
    """`x.grad` has x's: a sum's gradient, one number expanded, became a full tensor, which sums to other last bits."""
    x = torch.randn(3, 4, requires_grad=True)
    came: list[torch.Tensor | None] = []
    hand_back = HandBack(x, came.append, at_once=at_once)
    x.sum().backward()
    hand_back.finish(x)
    (gradient,) = came
    assert gradient is not None
    assert gradient.stride() == (0, 0)
    assert torch.equal(gradient, torch.ones(3, 4))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_stage_that_does_not_depend_on_its_input_hands_back_nothing_and_one_that_reads_it_twice_the_sum(
    at_once: bool,
) -> None:
    """In the whole model, too, nothing comes to what is before it: zeros would let an optimizer's decay run."""
    came: list[torch.Tensor | None] = []
    ignored, x = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    HandBack(ignored, came.append, at_once=at_once).finish(ignored)
    HandBack(None, came.append, at_once=at_once).finish(None)
    assert came == [None, None]
    hand_back = HandBack(x, came.append, at_once=at_once)
    (x.sum() + (2 * x).sum()).backward()
    hand_back.finish(x)
    assert came[2] is not None
    assert came[2].tolist() == [[3.0] * 4] * 3


@pytest.mark.parametrize("at_once", [True, False])
def test_the_gradient_that_a_later_stage_has_made_of_a_value_begins_the_sum(at_once: bool) -> None:
    """As in the whole model, where what comes last in forward comes first in backward; handed back once."""
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    whole = values[0].clone().requires_grad_()
    (whole.exp().sum() + whole.sin().sum() + (whole * values[1]).sum()).backward()
    x = values[0].clone().requires_grad_()
    came: list[torch.Tensor | None] = []
    hand_back = HandBack(x, came.append, at_once=at_once)
    torch.autograd.backward([x.exp().sum() + x.sin().sum(), x], [torch.tensor(1.0), values[1]])
    hand_back.finish(x)
    (gradient,) = came
    assert gradient is not None
    assert whole.grad is not None
    assert torch.equal(gradient, whole.grad)


def test_a_buffer_that_training_has_given_another_shape_is_refused_by_name() -> None:
    """It was broadcast into its place, and saved so."""
    units = [Unit(0, "0.", nn.BatchNorm1d(6))]
    layout = Layout.of(named_state(units))
    arena = Arena(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)
    publish = keep_state(UnitPart(units), list(arena.items()), arena, HostDevice())
    units[0].module.running_mean = torch.ones(1)
    with pytest.raises(WorkloadError, match=r"'0.running_mean' .* has become \(1,\) float32, where \(6,\) float32 was"):
        publish()


def test_what_a_stage_sends_is_what_was_planned_where_that_is_known() -> None:
    """A value that fits its place may be another one all the same: broadcast, it once trained to another loss."""
    (stage,) = stages_of(build(dense), [], recompute=False)
    shapes = {4: (4, 3), 8: (8, 3)}
    place = SlotValue(name="7", dtype="float32", shapes=shapes, offset=0, num_bytes=128, stages=(1,))
    for size in (4, 6, 8):
        stage.check_sent([torch.zeros(size, 3)], [place], size)
    planned = (
        r"unit 7 \(Linear\) passes on, for a microbatch of 6 samples, .*, where \(6, 3\) float32 was planned; .* pad"
    )
    for wrong in (torch.zeros(1, 3), torch.zeros(6, 3, dtype=torch.float64), torch.zeros(6, 3).to_sparse()):
        with pytest.raises(WorkloadError, match=planned):
            stage.check_sent([wrong], [place], 6)
    stage.check_sent([torch.zeros(2, 9)], [place], 9)  # of a size that was not inspected anything plain
    with pytest.raises(WorkloadError, match="where a plain tensor was planned"):
        stage.check_sent([torch.zeros(9, 3).to_sparse()], [place], 9)


def test_what_is_measured_may_be_a_number() -> None:
    functions = FUNCTIONS | {"hits": lambda output, target: (output > target).float().mean().item()}
    model, (x, target) = dense().eval(), batch(0, 0)
    units = [Unit(index, f"{index}.", module) for index, module in enumerate(model)]
    stage = UnitStage(units, seed=SEED, recompute=False, device=HostDevice(), functions=functions)
    measured = stage.measure(0, 0, [], DataPair(x, target))
    with torch.no_grad():
        output = model(x)
    assert float(measured["hits"]) == (output > target).float().mean().item()
    assert torch.equal(measured["loss"], nn.functional.mse_loss(output, target))
