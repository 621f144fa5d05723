"""Cut steps, with recordings and placeholders: any model in as many stages as it has places, and the plain numbers."""

from __future__ import annotations

import gc
import runpy
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.workload.cutting.calls import SeededCalls
from weft.workload.cutting.cut_step import CutStep, Sent
from weft.workload.cutting.placeholder import PlaceholderError
from weft.workload.cutting.recorded import Recorded
from weft.workload.cutting.recording import StepRecording
from weft.workload.cutting.skipped import SkippedCalls
from weft.workload.randomness import seed_unit
from weft.workload.workload import WorkloadError

MODELS = runpy.run_path(str(Path(__file__).resolve().parents[2] / "any_models.py"))


def seed(number: int) -> None:
    seed_unit(3, 0, 0, number)


def recorded(model: nn.Module, step: Callable[..., Any], batch: Any) -> Recorded:
    return StepRecording(model).run(step, batch, seed)


def stages_of(model: nn.Module, found: Recorded, cuts: list[int]) -> list[tuple[CutStep, list[Any], list[Any]]]:
    bounds, stages = [0, *cuts, len(found.units)], []
    skipped = SkippedCalls(found.returned, redraws=found.redraws)
    for first, last in pairwise(bounds):
        own = range(first, last)
        came = [each for each in found.values if each.maker < first and not set(own).isdisjoint(each.readers)]
        sent = [each for each in found.values if each.maker in own and each.readers[-1] >= last]
        step = CutStep(
            model,
            begins=found.border(first) if first else None,
            ends=found.border(last) if last < len(found.units) else None,
            own=frozenset[str]().union(*found.uses[first:last]),
            receives=[each.name for each in came],
            sends=[each.name for each in sent],
            skipped=skipped,
        )
        stages.append((step, came, sent))
    return stages


def run_cut(model: nn.Module, step: Callable[..., Any], batch: Any, found: Recorded, cuts: list[int]) -> Any:
    """What the last stage returns."""
    return run_stages(stages_of(model, found, cuts), step, batch)


def run_stages(
    stages: list[tuple[CutStep, list[Any], list[Any]]],
    step: Callable[..., Any],
    batch: Any,
    seed: Callable[[int], None] = seed,
) -> Any:
    made: dict[str, torch.Tensor | None] = {}
    for cut, came, sent in stages:
        with cut.installed():
            given = [made[each.name] for each in came]
            result = cut.run(step, batch, [None if each is None else each.detach() for each in given], seed)
        if isinstance(result, Sent):
            made.update(zip((each.name for each in sent), result, strict=True))
    return result


def loss_of(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result["loss"] if isinstance(result, dict) else result
    return loss


@pytest.mark.slow
@pytest.mark.pairs(3, name=MODELS["NAMES"])
def test_any_model_gives_its_own_loss_wherever_it_is_cut(name: str) -> None:
    torch.manual_seed(0)
    model, user_step, data = MODELS["parts"](name)
    batch = data(3)

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return user_step(model, {key: tensor.clone() for key, tensor in batch.items()})  # it may write to them

    trained = recorded(model, step, batch)
    with torch.no_grad():
        model.eval()  # batch norm would go on from what the recording has left
        with SeededCalls(model).installed() as numbers, numbers.running(seed):
            whole = loss_of(step(model, batch))
        found = trained.merged(recorded(model, step, batch), "Workload.step")
        cuts = [unit for unit in range(1, len(found.units)) if unit not in found.problems]
        assert len(cuts) >= 2
        for some in (cuts, cuts[::2], cuts[1::2]):
            assert torch.equal(loss_of(run_cut(model, step, batch, found, some)), whole), some


class Loose(nn.Module):
    """Its second block gets what was made of the first one's output, and its last one that, too."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))
        self.own = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self, x)


def summed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = model(x).sum()
    return total


def problems_of(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> dict[int, str]:
    model = Loose(forward)
    return recorded(model, summed, torch.randn(2, 4)).problems


def is_cut_everywhere(model: nn.Module, step: Callable[..., Any] = summed) -> Recorded:
    """In as many stages as it has units, with the loss of the whole step."""
    batch = torch.randn(2, 4)
    found = recorded(model, step, batch)
    assert found.problems == {}
    assert torch.equal(run_cut(model, step, batch, found, [*range(1, len(found.units))]), found.result)
    return found


def test_a_loose_result_that_is_used_two_stages_later_crosses_by_its_operation_and_line() -> None:
    """It was refused: sums of losses that blocks return, skips that are scaled, what is clamped."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        twice = model.one(x) * 2
        return model.three(model.two(x)) + twice

    found = is_cut_everywhere(Loose(forward))
    (loose,) = [value for value in found.values if value.readers == (2,) and value.maker == 0]
    assert loose.name.startswith("~one mul ")
    assert f"{Path(__file__).name}:" in loose.name


class Noticing(nn.Linear):
    """As modules of torch that compute in another way while somebody looks at their operations."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (2 if torch.overrides.has_torch_function((input,)) else 1)


def test_a_module_computes_as_it_does_alone_where_loose_results_are_looked_at() -> None:
    """An encoder layer left its fused kernel in validation, in a stage that loose results come to."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        twice = model.one(x) * 2
        return model.three(model.two(x)) + twice

    model = Loose(forward)
    model.one, model.two, model.three = (Noticing(4, 4) for _ in range(3))
    batch = torch.randn(2, 4)
    found = recorded(model, summed, batch)
    whole = summed(model, batch)
    assert torch.equal(found.result, whole)
    for cuts in ([1], [2], [1, 2]):
        assert torch.equal(run_cut(model, summed, batch, found, cuts), whole)


def test_loose_results_of_one_line_that_runs_again_and_again_are_told_apart() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        found = [x * number for number in range(3)]
        total = found[2] - found[1]
        x = model.two(x)
        total += x
        return model.three(x) * total + found[1]

    found = is_cut_everywhere(Loose(forward))
    assert [value.readers for value in found.values if "#1" in value.name] == [(2,)]


def test_a_loose_result_of_parameters_alone_is_made_where_it_is_needed() -> None:
    """A scale that a step makes at its beginning and uses at its end let no model be cut."""

    class Scaled(Loose):
        def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
            super().__init__(forward)
            self.scale = nn.Parameter(torch.ones(()))

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        scale = (model.scale * 0.5).exp()
        return model.three(model.two(model.one(x))) * scale

    found = is_cut_everywhere(Scaled(forward))
    assert ["scale" in uses for uses in found.uses] == [False, False, True]
    assert [value.name for value in found.values] == ["one:0", "two:0"]


def test_what_a_step_returns_of_an_earlier_stage_comes_to_the_last() -> None:
    def step(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = model.one(x)
        half = first.mean() / 2
        return {"loss": model.three(model.two(first)).sum(), "half": half, "first": first}

    model, batch = Loose(summed), torch.randn(2, 4)
    found = recorded(model, step, batch)
    result = run_cut(model, step, batch, found, [1, 2])
    assert all(torch.equal(value, found.result[name]) for name, value in result.items())


def test_what_is_drawn_for_the_batch_behind_a_dropout_is_the_same_in_every_stage() -> None:
    """Who has no numbers of what is dropped out drew nothing for it, and other numbers after it."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(model.one(x), 0.5)
        mask = torch.rand(4)
        return model.three(model.two(x) * mask) * mask

    is_cut_everywhere(Loose(forward))


class Writing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


def twins(model: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = model(x), model(2 * x)
    loss: torch.Tensor = (first * second).sum()
    return loss


@pytest.mark.parametrize(
    "step", [twins, lambda model, x: twins(model, x) if torch.is_grad_enabled() else summed(model, x)]
)
def test_a_network_for_two_inputs_is_cut_as_for_one(step: Callable[..., Any]) -> None:
    """Only what was called once could begin a stage. What a later stage's block writes to is not the stage's own."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        x = x + model.two(x.tanh())
        y = x.exp()
        return model.three(y) + y

    model = Loose(forward)
    model.three = Writing(4, 4)
    batch = torch.randn(2, 4)
    found = recorded(model, step, batch)
    assert (found.units, found.repeated, found.late) == (("one", "two", "three"), (), ("one@1", "two@1", "three@1"))
    assert torch.equal(run_cut(model, step, batch, found, [1, 2]), found.result)
    with torch.no_grad():
        merged = found.merged(recorded(model, step, batch), "Workload.step")
        whole = recorded(model, step, batch).result
        for cuts in ([1], [2], [1, 2]):
            assert torch.equal(run_cut(model, step, batch, merged, cuts), whole)


def test_what_validation_alone_calls_for_two_inputs_is_not_cut() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.three(model.two(model.one(x)))

    model, batch = Loose(forward), torch.randn(2, 4)
    found = recorded(model, summed, batch).merged(recorded(model, twins, batch), "Workload.validate")
    assert found.problems.keys() == {1, 2}


def test_a_module_that_needs_in_its_second_call_what_later_ones_have_made_is_in_each_unit_that_calls_it() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = model.two(model.one(x))
        return model.three(x)

    found = is_cut_everywhere(Loose(forward))
    assert (found.units, found.repeated, found.late) == (("one", "two", "three"), ("one",), ("two@1",))


class Skipping(nn.Module):
    """A block that is left out at random, inside of its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(()) < 0.5 else x + self.inner(x)


def test_a_block_that_gives_back_what_it_got_at_random_has_a_name_of_its_own_for_it() -> None:
    """Where it did so as the step was tried, later stages got what came before it ever after."""
    model = nn.ModuleList([nn.Linear(4, 4), *(Skipping() for _ in range(4)), nn.Linear(4, 4)])
    batch = torch.randn(2, 4)
    found = StepRecording(model).run(_one_by_one, batch, partial(seed_unit, 3, 0, 0))
    stages, kinds = stages_of(model, found, [1, 2, 3, 4, 5]), set()
    for number in range(12):
        keyed = partial(seed_unit, 3, number, 0)
        whole = StepRecording(model).run(_one_by_one, batch, keyed).result
        assert torch.equal(run_stages(stages, _one_by_one, batch, keyed), whole)
        kinds.add(whole.item())
    assert len(kinds) > 4


def test_a_number_that_is_asked_for_is_refused_for_every_later_stage() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        if x.sum().item() > 1e9:
            x = x * 2
        return model.three(model.two(x))

    problems = problems_of(forward)
    assert problems.keys() == {1, 2}
    assert problems[1].startswith(".item() at ")
    assert "needs the numbers of the result of sum, and every stage runs that line" in problems[1]


def test_a_module_with_a_backward_hook_is_skipped_as_any_other() -> None:
    """torch looks at the node of what such a module gets and returns."""
    model = Loose(lambda own, x: own.three(own.two(own.one(x))))
    model.two.register_full_backward_hook(lambda module, given, came: None)
    is_cut_everywhere(model)


def _packed(own: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([1, 3])
    rows = nn.utils.rnn.pack_padded_sequence(own.one(x[:, None].repeat(1, 3, 1)), lengths, True, False)
    rows = rows._replace(data=own.two(rows.data))
    padded, _ = nn.utils.rnn.pad_packed_sequence(rows, True)
    return own.three(padded)


def test_sequences_are_packed_by_the_lengths_of_a_batch_where_their_numbers_are_not() -> None:
    is_cut_everywhere(Loose(_packed))


def test_shapes_of_what_another_stage_has_may_be_asked_for() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        x = x.reshape(-1, x.shape[-1]) if x.dim() > 1 and x.requires_grad else x
        return model.three(model.two(x[: len(x)]))

    assert problems_of(forward) == {}


def test_what_depends_on_the_batch_alone_does_not_cross() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).to(x.dtype).cumsum(0)
        y = model.one(x) * mask
        y = model.two(y) * mask
        return model.three(y) * mask

    model = Loose(forward)
    found = recorded(model, summed, torch.randn(2, 4))
    assert found.problems == {}
    assert [value.name for value in found.values] == [">two:0", ">three:0"]


class DrawingLinear(nn.Linear):
    """Draws whether it has the numbers of what it gets, or not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.rand(())


def test_what_is_drawn_behind_a_skipped_call_does_not_depend_on_what_that_has_drawn() -> None:
    """The first run computes what the call returns, and the next ones know it."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(2, 4) > 0.5  # behind the first call
        return model.three(model.two(x) * kept)

    model = Loose(lambda model, x: forward(model, model.one(x)))
    model.one = DrawingLinear(4, 4)
    batch = torch.randn(2, 4)
    found = recorded(model, summed, batch)
    stages = stages_of(model, found, [1, 2])
    for _ in range(3):
        assert torch.equal(run_stages(stages, summed, batch), found.result)


@pytest.mark.parametrize("between", [nn.ReLU(), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Identity(), nn.Flatten(0)])
def test_layers_without_parameters_before_a_stage_are_run_once_for_a_shape(between: nn.Module) -> None:
    """What is drawn behind them, for the batch, is drawn all the same; and what they make of the batch is made."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = between(x.clone()).reshape(x.shape)
        before = between(model.one(x)).reshape(x.shape)
        return model.three(model.two(before * torch.rand(len(x), 1)))

    model = Loose(forward)
    model.between = between
    stages: Any = None
    for size in (2, 3, 2, 2):
        batch = torch.randn(size, 4)
        found = recorded(model, summed, batch)
        stages = stages or stages_of(model, found, [1, 2])
        assert torch.equal(run_stages(stages, summed, batch), found.result)


def test_a_value_that_jumps_over_a_stage_has_its_maker_and_all_readers() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        return model.three(model.two(x)) + x

    model = Loose(forward)
    found = recorded(model, summed, torch.randn(2, 4))
    assert {value.name: (value.maker, value.readers) for value in found.values} == {
        "one:0": (0, (1, 2)),
        "two:0": (1, (2,)),
    }


def test_a_parameter_that_is_used_loosely_is_in_every_unit_that_reads_it() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.two(model.one(x))
        return torch.nn.functional.linear(x, model.one.weight)

    model = Loose(forward)
    found = recorded(model, summed, torch.randn(2, 4))
    assert [sorted(uses) for uses in found.uses] == [
        ["one.bias", "one.weight"],
        ["one.weight", "two.bias", "two.weight"],
    ]


def test_a_stage_computes_what_it_has_and_nothing_else() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.three(model.two(model.one(x)))

    model, calls = Loose(forward), []
    batch = torch.randn(2, 4)
    found = recorded(model, summed, batch)
    for layer in (model.one, model.two, model.three):
        layer.register_forward_hook(lambda layer, args, output: calls.append(type(output).__name__))
    ((middle, came, _),) = stages_of(model, found, [1, 2])[1:2]
    with middle.installed():
        for _ in range(2):
            middle.run(summed, batch, [came[0].tensor.detach()], seed)
    assert calls == ["Placeholder", "Tensor"] * 2


def test_batches_of_other_shapes_go_through_the_same_stage() -> None:
    model, step, data = MODELS["parts"]("pixels")
    model.eval()
    with torch.no_grad():  # torch's encoder layers compute otherwise with gradients
        stages = stages_of(model, recorded(model, step, data(3)), [2, 4])
        for count in (3, 1, 3, 2):
            batch = data(count)
            with SeededCalls(model).installed() as numbers, numbers.running(seed):
                whole = loss_of(step(model, batch))
            assert torch.equal(loss_of(run_stages(stages, step, batch)), whole)


def test_what_a_skipped_call_gives_back_of_a_batch_is_of_that_batch() -> None:
    """Blocks that hand a mask on gave later stages the one of the first microbatch."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(x) * mask, mask

    def step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x, mask = batch["x"], batch["mask"]
        for block in model:
            x, mask = block(x, mask)
        return x.sum()

    model = nn.ModuleList(Masked() for _ in range(3))
    batches = [{"x": torch.randn(2, 4), "mask": torch.full((2, 1), float(number))} for number in range(3)]
    found = recorded(model, step, batches[0])
    stages = stages_of(model, found, [1, 2])
    for batch in batches:
        assert torch.equal(run_stages(stages, step, batch), recorded(model, step, batch).result)


class Asking(nn.Module):
    """Which only numbers go through."""

    def __init__(self, shortens: bool) -> None:
        super().__init__()
        self.inner, self.shortens = nn.Linear(4, 4), shortens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        x = x * 2 if x.sum().item() > 0 else x
        return x[: len(x) // 2 + 1].clone() if self.shortens else x


def test_a_call_that_asks_for_numbers_is_skipped_in_shapes_that_no_run_has_had_where_it_keeps_them() -> None:
    model = nn.ModuleList([Asking(False), nn.Linear(4, 4), nn.Linear(4, 4)])
    found = recorded(model, _one_by_one, torch.ones(3, 4))
    for count in (3, 7, 1):
        batch = torch.randn(count, 4)
        whole = recorded(model, _one_by_one, batch).result
        assert torch.equal(run_cut(model, _one_by_one, batch, found, [1, 2]), whole)


def test_one_that_does_not_keep_them_is_told_with_its_name_and_the_shapes() -> None:
    model = nn.ModuleList([Asking(True), nn.Linear(4, 4), nn.Linear(4, 4)])
    found = recorded(model, _one_by_one, torch.ones(3, 4))
    run_cut(model, _one_by_one, torch.ones(3, 4), found, [1, 2])
    text = (
        r"^0 \(Asking\) asks for numbers that this stage does not have, and no batch that was tried before the "
        r"training gave it shapes as here \(\(5, 4\)\); pad all batches to one length in Workload\.collate, or cut"
    )
    with pytest.raises(WorkloadError, match=text):
        run_cut(model, _one_by_one, torch.ones(5, 4), found, [1, 2])


def _one_by_one(model: Any, x: torch.Tensor) -> torch.Tensor:
    for module in model:
        x = module(x)
    return x.sum()


def test_an_operation_of_a_stage_on_what_it_has_not_is_told_with_its_line() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        if x.sum() > 1e9:
            x = x * 2
        return model.three(model.two(x))

    model = Loose(forward)
    batch = torch.randn(2, 4)
    found = recorded(model, summed, batch)
    with pytest.raises(
        PlaceholderError, match=rf"if, or bool\(\), at .*{Path(__file__).name}:\d+ needs the numbers of the result"
    ):
        run_cut(model, summed, batch, found, [1])


def test_a_stage_that_is_installed_for_good_has_its_own_parameters_alone() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.three(model.two(model.one(x)))

    model = Loose(forward)
    batch = torch.randn(2, 4)
    found = recorded(model, summed, batch)
    middle, came, sends = stages_of(model, found, [1, 2])[1]
    given = came[0].tensor.detach()
    gone, own = weakref.ref(model.one.weight), model.two.weight
    del found, came, sends
    middle.install()
    gc.collect()
    assert gone() is None
    assert model.two.weight is own
    with torch.no_grad():
        (sent,) = middle.run(summed, batch, [given], seed)
        assert torch.equal(sent, torch.nn.functional.linear(given, own, model.two.bias))


class Auxiliary(nn.Module):
    """Its second head is called in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        more = self.head(x) if self.training else x
        return self.last(self.two(x)) + more


def recorded_in_both(model: nn.Module) -> Recorded:
    batch = torch.randn(2, 4)
    found = recorded(model, summed, batch)
    model.eval()
    return found.merged(recorded(model, summed, batch), "Workload.step")


def test_a_stage_may_begin_where_training_and_validation_make_the_same_call_whatever_else_one_of_them_calls() -> None:
    found = recorded_in_both(Auxiliary())
    assert found.units == ("one", "head", "two", "last")
    assert found.problems.keys() == {1}
    assert found.problems[1].startswith("validation (Workload.step) calls other modules, or in another order; ")
    assert {value.name: (value.maker, value.readers) for value in found.values} == {
        "one:0": (0, (1, 2, 3)),
        "head:0": (1, (3,)),
        "two:0": (2, (3,)),
    }


def test_validation_that_generates_is_told_of_and_not_modules_that_training_calls_once() -> None:
    """They were to be called once, and no way out was told."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    batch = torch.randn(2, 4)
    generated = recorded(model, lambda model, batch: summed(model, model(batch)), batch)
    found = recorded(model, summed, batch).merged(generated, "Workload.validate")
    assert "1" in generated.repeated
    assert found.units == ("0", "1", "2")
    assert found.repeated == ()
    assert found.problems.keys() == {1, 2}
    assert found.problems[1].endswith("or do it in Workload.on_epoch, which finds the whole model")


def test_modules_in_another_order_in_validation_leave_no_cut() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        parts = (model.one, model.two, model.three) if model.training else (model.one, model.three, model.two)
        for part in parts:
            x = part(x)
        return x

    assert recorded_in_both(Loose(forward)).problems.keys() == {1, 2}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, bias: torch.Tensor) -> torch.Tensor:
        made = self.linear(x) + bias
        return made.tanh() if mask is None else made * mask


def masked(model: nn.Module, batch: dict[str, torch.Tensor], *, by_name: bool) -> torch.Tensor:
    """A mask that hides nothing is None, as transformers have it; a block is given what was made of those before."""
    mask = None if bool(batch["mask"].all()) else batch["mask"]
    x, bias = batch["x"], torch.zeros(())
    for block in model.children():
        x = block(x=x, mask=mask, bias=bias) if by_name else block(x, mask, bias)
        bias = 2 * x + bias
    total: torch.Tensor = x.sum()
    return total


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("hides", [[False, True], [True, False]], ids=["recorded without", "recorded with"])
def test_an_argument_has_its_name_whether_one_before_it_is_a_tensor_or_none(by_name: bool, hides: list[bool]) -> None:
    """A microbatch without padding failed: its biases were looked for among the masks' places (MPNet)."""
    model, step = nn.ModuleList(Masked() for _ in range(3)), partial(masked, by_name=by_name)
    batches = []
    for is_hiding in hides:
        mask = torch.ones(2, 4)
        mask[0, 2:] = 0.0 if is_hiding else 1.0
        batches.append({"x": torch.randn(2, 4), "mask": mask})
    found = recorded(model, step, batches[0])
    assert found.problems == {}
    for batch in batches:
        assert torch.equal(run_cut(model, step, batch, found, [1, 2]), step(model, batch))


def flow(calls: list[str]) -> Loose:
    """A model that calls its modules one after another: those named by what is in the list when it runs."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        for name in calls[0].split():
            x = getattr(model, name)(x)
        return x

    return Loose(forward)


def run_of_flow(usual: str, other: str) -> Any:
    """A step that was recorded with some calls, by their names, and is run in two stages with others."""
    calls = [usual]
    model, batch = flow(calls), torch.randn(2, 4)
    found = recorded(model, summed, batch)
    calls[0] = other
    return run_cut(model, summed, batch, found, [len(found.units) - 1])


@pytest.mark.parametrize("other", ["one three", "two three", "three"])
def test_modules_may_be_left_out_if_what_the_next_gets_is_what_they_would_have_got(other: str) -> None:
    """Layers that are left out at random: a stage begins with whichever of its modules is called."""
    calls = ["one two three"]
    model, batch = flow(calls), torch.randn(2, 4)
    found = recorded(model, summed, batch)
    calls[0] = other
    whole = recorded(model, summed, batch).result
    for cuts in ([1], [2], [1, 2]):
        assert torch.equal(run_cut(model, summed, batch, found, cuts), whole)


@pytest.mark.parametrize(
    ("usual", "other", "told"),
    [
        ("one two", "one", "the step has ended without a call of two, with which a stage begins"),
        ("one two", "one three two", "three (Linear) is called in the stage from the beginning of the step to two"),
        ("one two", "one two one", "one (Linear) is called in the stage from two to the end of the step"),
        ("one two three", "one two one three", "before three other modules were called"),
    ],
)
def test_other_calls_than_the_cut_was_tried_with_are_told_with_the_module(usual: str, other: str, told: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        run_of_flow(usual, other)
    assert told in str(caught.value)
    assert str(caught.value).endswith("inside one module or, by strategy.split, inside one stage")


def test_a_tensor_that_is_assigned_the_data_of_another_stage_gets_it_with_what_comes() -> None:
    """It was a real one without memory, and whoever read it ended the process."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        given = torch.zeros_like(x)
        given.data = model.one(x).data
        return model.three(model.two(given + 1))

    model, batch = Loose(forward), torch.randn(2, 4)
    found = recorded(model, summed, batch)
    with torch.no_grad():
        assert torch.equal(run_cut(model, summed, batch, found, [1]), summed(model, batch))


@pytest.mark.parametrize("through_memory", [False, True])
def test_a_parameter_that_gets_the_numbers_of_another_stage_is_told_with_the_line(through_memory: bool) -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = model.one(x)
        if through_memory:
            model.two.bias.data.copy_(x.detach().mean(0))
        else:
            model.two.bias.data = x.detach().mean(0)
        return model.three(model.two(x))

    model, batch = Loose(forward), torch.randn(2, 4)
    found = recorded(model, summed, batch)
    before = model.two.bias.detach().clone()
    with pytest.raises(PlaceholderError, match=rf"at .*{Path(__file__).name}:\d+ writes to what the model keeps"):
        run_cut(model, summed, batch, found, [1])
    assert torch.equal(model.two.bias, before)


@pytest.mark.parametrize(
    "which", [lambda mask: mask, lambda mask: (mask, slice(1)), lambda mask: (slice(None), mask[0])]
)
def test_rows_are_taken_by_a_mask_of_the_batch_which_every_stage_has(which: Callable[[torch.Tensor], Any]) -> None:
    """How many there are is another number in each batch."""

    def forward(model: Any, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, mask = given
        x = model.two(model.one(x)[which(mask)].flatten()[:, None].expand(-1, 4))
        assert x.shape[0] == torch.empty(2, 3, 4)[which(mask)].numel()
        return model.three(x)

    model = Loose(forward)
    batches = [(torch.randn(2, 3, 4), torch.tensor(rows).bool()) for rows in ([[1, 1, 0]] * 2, [[1, 0, 0]] * 2)]
    with torch.no_grad():
        for cut in ([1], [2]):
            stages = stages_of(model, recorded(model, summed, batches[0]), cut)
            for batch in (*batches, *batches):
                assert torch.equal(run_stages(stages, summed, batch), summed(model, batch))


def test_a_nested_tensor_of_torchs_encoder_is_told_with_what_leaves_it_out() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padding = torch.zeros(2, 3, dtype=torch.bool)
            padding[1, 2] = True
            output: torch.Tensor = self.encoder(self.one(x), src_key_padding_mask=padding)
            return output

    with torch.no_grad():
        found = recorded(Padded().eval(), summed, torch.randn(2, 3, 4))
    assert "leaves it out with enable_nested_tensor=False" in found.problems[found.units.index("encoder.layers.0")]
